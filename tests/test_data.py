"""Data sets: every way a row can be wrong, the real files, and the order of prompts in training."""
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from salt.data import (CHOICE_INSTRUCTION, DAPO_WRAPPER, INSTRUCTION, NAMES, SOURCES, Problem, PromptStream,
                       load_problems, read_rows, stable_seed)
from salt.errors import UserError
from salt.reward import RewardPool, gold_parses

ROOT = Path(__file__).resolve().parents[1]


def python(code, **environment):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT,
                          env=os.environ | environment)


def write_lines(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def good(number, **extra):
    return {"question": f"What is {number} + 1?", "answer": str(number + 1)} | extra


# ------------------------------------------------------------------------------------------------------------ the table


def test_gsm8k_gold_is_behind_the_hashes_without_commas(tmp_path):
    write_lines(tmp_path / "gsm8k" / "train.jsonl",
                {"question": "How much?", "answer": "5 * 14,000 = 70,000\n#### 70,000"})
    problem, = load_problems("gsm8k", split="train", data_dir=tmp_path)
    assert problem == Problem("gsm8k/0", "How much?", "70000", "math", INSTRUCTION)


def test_math_gold_is_the_last_box_of_the_solution(tmp_path):
    write_lines(tmp_path / "math" / "train.jsonl",
                {"problem": "p", "solution": r"first \boxed{1}, so \boxed{\frac{1}{2}}."})
    assert load_problems("math", split="train", data_dir=tmp_path)[0].answer == r"\frac{1}{2}"


def test_math_golds_that_cannot_be_parsed_are_all_named(tmp_path, capsys):
    """MATH-train has 11 of them: two empty boxes among them, and solutions without a box are possible."""
    solutions = [r"so \boxed{}", "no box", r"\boxed{\text{}}"] * 4
    write_lines(tmp_path / "math" / "train.jsonl", *({"problem": f"p{i}", "solution": text, "level": "Level 5",
                                                      "type": "Algebra"} for i, text in enumerate(solutions[:11])),
                {"problem": "p", "solution": r"\boxed{12^{1/7}}"})
    problem, = load_problems("math", split="train", data_dir=tmp_path)
    assert (problem.id, problem.answer) == ("math/11", "12^{1/7}")
    err = capsys.readouterr().err
    assert "skipped 11 row(s)" in err and all(f"math/{i}" in err for i in range(11))


def dapo_row(question, gold, wrap=True):
    text = "\n\n".join([DAPO_WRAPPER[0], question, DAPO_WRAPPER[1]]) if wrap else question
    return {"data_source": "math_dapo", "prompt": [{"content": text, "role": "user"}], "ability": "MATH",
            "reward_model": {"ground_truth": gold, "style": "rule"}, "extra_info": {"index": "0b1a"}}


def test_dapo_rows_are_unwrapped_taken_once_and_dropped_where_golds_disagree(tmp_path, capsys):
    rows = [dapo_row("What is\n1 + 1?", "2"), dapo_row("What is 2 + 2?", "4"), dapo_row("What is 3 + 3?", "6"),
            dapo_row("What is 3 + 3?", "9"), dapo_row("Bare?", "-7", wrap=False)]
    write_lines(tmp_path / "dapo-math" / "train.jsonl", *rows * 3, dapo_row("What is  1 + 1?", "2"))
    write_lines(tmp_path / "math500" / "test.jsonl", {"problem": "What is 2 + 2?", "answer": "4", "unique_id": "a"},
                {"problem": "Another?", "answer": "4", "unique_id": "b"})
    problems = load_problems("dapo-math", split="train", data_dir=tmp_path)
    assert problems == [Problem("dapo-math/0", "What is\n1 + 1?", "2", "math", INSTRUCTION),
                        Problem("dapo-math/1", "What is 2 + 2?", "4", "math", INSTRUCTION),
                        Problem("dapo-math/4", "Bare?", "-7", "math", INSTRUCTION)]
    counted, overlap = capsys.readouterr().err.splitlines()
    assert counted.endswith("4 different questions in 16 rows; dropped 1 whose gold answers disagree")
    assert overlap == "dapo-math: 1 problems of math500 are among its 3: dapo-math/1"


def test_dapo_without_math500_at_hand_says_that_the_overlap_is_unknown(tmp_path, capsys):
    write_lines(tmp_path / "dapo-math" / "train.jsonl", dapo_row("What is 1 + 1?", "2"))
    assert len(load_problems("dapo-math", split="train", data_dir=tmp_path)) == 1
    err = capsys.readouterr().err
    assert "math500 holds was not checked: no test split of math500: looked for" in err and err.count("\n") == 2


@pytest.mark.parametrize("row", [{"prompt": "text", "reward_model": {"ground_truth": "1"}},
                                 {"prompt": [], "reward_model": {"ground_truth": "1"}},
                                 {"prompt": [{"role": "user"}], "reward_model": {"ground_truth": "1"}},
                                 {"prompt": [{"content": None}], "reward_model": {"ground_truth": "1"}},
                                 {"prompt": [{"content": "q"}], "reward_model": {}},
                                 {"prompt": [{"content": "q"}], "reward_model": None}])
def test_dapo_rows_of_another_shape_are_refused_by_line(tmp_path, row):
    path = write_lines(tmp_path / "dapo-math" / "train.jsonl", dapo_row("q", "1"), row)
    with pytest.raises(UserError, match=f"{path}, line 2: prompt must be a list with one message"):
        load_problems("dapo-math", split="train", data_dir=tmp_path)


@pytest.mark.slow
def test_real_dapo_rows(shared_data, tmp_path, capsys):
    """A copy with 17,917 bare rows. Its README counts 17,290 different texts; white space makes some of them differ."""
    (tmp_path / "dapo-math").mkdir()
    (tmp_path / "dapo-math" / "train.parquet").symlink_to(shared_data / "dapo" / "dapo_math_17k.parquet")
    (tmp_path / "math500").symlink_to(shared_data / "math500")
    problems = load_problems("dapo-math", split="train", data_dir=tmp_path)
    counted, overlap = capsys.readouterr().err.splitlines()
    assert counted.endswith("17188 different questions in 17917 rows; dropped 12 whose gold answers disagree")
    assert len(problems) == 17176 and all(gold_parses(problem.answer) for problem in problems[::50])
    assert overlap.startswith("dapo-math: 7 problems of math500 are among its 17176: dapo-math/")


def gpqa_row(question="Which?", **extra):
    wrong = {f"Incorrect Answer {i}": f"wrong {i}" for i in (1, 2, 3)}
    return {"Question": question, "Correct Answer": "right "} | wrong | extra


def test_gpqa_options_are_shuffled_by_the_item_alone(tmp_path):
    rows = [gpqa_row(f"Question {i}?", **{"Record ID": f"rec{i}"}) for i in range(40)]
    write_lines(tmp_path / "gpqa" / "test.jsonl", *rows)
    write_lines(tmp_path / "reversed" / "gpqa" / "test.jsonl", *reversed(rows))
    problems = load_problems("gpqa", data_dir=tmp_path)
    again = {problem.id: problem for problem in load_problems("gpqa", data_dir=tmp_path / "reversed", seed=7)}
    assert all(again[problem.id] == problem for problem in problems)
    for problem in problems:
        assert problem.kind == "choice" and problem.instruction == CHOICE_INSTRUCTION
        assert f"({problem.answer}) right" in problem.question.splitlines()
    assert {problem.answer for problem in problems} == set("ABCD")


def test_gpqa_from_the_hubs_csv(tmp_path):
    (tmp_path / "gpqa").mkdir()
    (tmp_path / "gpqa" / "gpqa_diamond.csv").write_text(
        "Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3,Record ID\n"
        '"Two\nlines, one comma?",a,b,c,d,rec1\n')
    problem, = load_problems("gpqa", data_dir=tmp_path)
    assert problem.id == "gpqa/rec1" and problem.question.startswith("Two\nlines, one comma?\n\n(A) ")


def test_several_hub_files_are_one_data_set(tmp_path):
    for part in ("I", "II"):
        write_lines(tmp_path / "aime25" / f"aime2025-{part}.jsonl", good(1), good(2))
    assert [problem.id for problem in load_problems("aime25", data_dir=tmp_path)] == [f"aime25/{i}" for i in range(4)]


def test_arith_splits_are_disjoint_and_the_test_split_is_one_for_all_seeds():
    train, other = load_problems("arith", split="train"), load_problems("arith", split="train", seed=1)
    test = load_problems("arith", seed=5)
    assert (len(train), len(test)) == (2048, 256) and train != other
    assert test == load_problems("arith", split="test", seed=0)
    assert not {p.question for p in train + other} & {p.question for p in test}
    a, b = test[0].question.rstrip("=").split("+")
    assert test[0].answer == str(int(a) + int(b)) and test[0].instruction == ""


@pytest.mark.parametrize("name, rows", [("gsm8k", 1319), ("math500", 500), ("aime24", 30), ("aime25", 30)])
def test_real_data_have_every_row_and_every_gold_parses(shared_data, capsys, name, rows):
    problems = load_problems(name, data_dir=shared_data)
    assert len(problems) == rows and len({problem.id for problem in problems}) == rows
    assert all(gold_parses(problem.answer) for problem in problems)
    assert capsys.readouterr().err == ""


def test_real_golds_are_right_and_the_degree_sign_counts_as_the_number(shared_data):
    problems = [p for name in ("aime24", "aime25") for p in load_problems(name, data_dir=shared_data)]
    golds = [problem.answer for problem in problems]
    assert "025" in golds and r"336^\circ" in golds
    with RewardPool("math", workers=1) as pool:
        plain = [rf"\boxed{{{int(gold.removesuffix('^' + chr(92) + 'circ'))}}}" for gold in golds]
        assert pool.score(plain, golds) == [1.0] * 60


def test_limit_takes_the_first(shared_data):
    assert load_problems("math500", data_dir=shared_data, limit=7) == load_problems("math500", data_dir=shared_data)[:7]


# ---------------------------------------------------------------------------------------------------------- local files


@pytest.mark.parametrize("field", ["prompt", "question", "problem"])
def test_local_jsonl_with_either_name_of_the_question(tmp_path, field):
    path = write_lines(tmp_path / "own.jsonl", {field: " 1 + 1? ", "answer": 2})
    assert load_problems(str(path)) == [Problem("own.jsonl/0", "1 + 1?", "2", "math", INSTRUCTION)]


def test_a_file_may_bring_its_own_instruction_and_ids(tmp_path):
    path = write_lines(tmp_path / "own.jsonl", good(1, id="x", instruction=""), good(2, instruction="Be brief."))
    first, second = load_problems(str(path))
    assert (first.id, first.instruction) == ("own.jsonl/x", "")
    assert (second.id, second.instruction) == ("own.jsonl/1", "Be brief.")


def test_formats_agree(tmp_path):
    import pyarrow
    from pyarrow import parquet
    rows = [good(i) for i in range(5)]
    text = write_lines(tmp_path / "own.jsonl", *rows).read_bytes()
    (tmp_path / "own.jsonl.gz").write_bytes(gzip.compress(text))
    (tmp_path / "own.csv").write_text("question,answer\n" + "".join(f"{r['question']},{r['answer']}\n" for r in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "own.parquet")
    expected = [(row["question"], row["answer"]) for row in rows]
    for suffix in ("jsonl", "jsonl.gz", "csv", "parquet"):
        problems = load_problems(str(tmp_path / f"own.{suffix}"))
        assert [(problem.question, problem.answer) for problem in problems] == expected, suffix


def test_golds_stored_as_floats_are_integers_again(tmp_path):
    path = write_lines(tmp_path / "own.jsonl", good(1, answer=70.0), good(2, answer=0.5))
    assert [problem.answer for problem in load_problems(str(path))] == ["70", "0.5"]


def test_unparsable_golds_are_counted_named_and_skipped(tmp_path, capsys):
    path = write_lines(tmp_path / "own.jsonl", good(1, id="a"), good(2, id="b", answer=""),
                       good(3, id="c", answer=None), good(4, id="d"))
    assert [problem.id for problem in load_problems(str(path))] == ["own.jsonl/a", "own.jsonl/d"]
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "skipped 2 row(s)" in err and "own.jsonl/b, own.jsonl/c" in err and str(path) in err


def test_blank_lines_are_no_rows(tmp_path):
    path = write_lines(tmp_path / "own.jsonl", "", good(1), "  ", good(2))
    assert len(load_problems(str(path))) == 2


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("rows, said", [
    (["{broken"], "line 1: not JSON"),
    ([good(1), "[1, 2]"], "line 2: a JSON object"),
    ([good(1), {"question": "q"}], "line 2: no field 'answer' (the row has question)"),
    ([{"answer": "1"}], "line 1: no field 'question'"),
    ([{}], "line 1: no field 'question' (the row has none)"),
    ([good(1), good(2, question="  ")], "line 2: the question must be a text that is not empty"),
    ([good(1, question=["a", "chat"])], "line 1: the question must be a text that is not empty, not list"),
    ([good(1, instruction=None)], "line 1: the field 'instruction' must be a text"),
    ([good(1, answer=""), good(2, answer=None)], "none of the 2 gold answers can be parsed (own.jsonl/0, own.jsonl/1)"),
    ([good(1, id=3), good(2, id=3)], "the id 'own.jsonl/3' occurs twice"),
    (["[" * 100_000], "line 1: not JSON"),
    ([], "holds no rows"),
    (["", " "], "holds no rows"),
])
def test_wrong_rows_are_named_by_file_line_and_field(tmp_path, rows, said):
    path = write_lines(tmp_path / "own.jsonl", *rows)
    with pytest.raises(UserError) as error:
        load_problems(str(path))
    assert said in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("name, content", [
    ("own.jsonl", b'{"question": "\xff\xfe"}\n'), ("own.parquet", b"not parquet"), ("own.parquet", b""),
    ("own.jsonl.gz", b"not gzip"), ("own.jsonl.gz", gzip.compress(b'{"question": "a"}\n' * 100)[:30])])
def test_unreadable_files(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        load_problems(str(tmp_path / name))


def test_missing_files_say_what_was_looked_for(tmp_path):
    with pytest.raises(UserError, match="no data file .*absent.jsonl"):
        load_problems(str(tmp_path / "absent.jsonl"))
    with pytest.raises(UserError, match="looked for .*gsm8k/test.jsonl"):
        load_problems("gsm8k", data_dir=tmp_path)
    with pytest.raises(UserError, match="cannot read"):
        list(read_rows(tmp_path))


def test_unknown_names_list_the_known_ones(tmp_path):
    with pytest.raises(UserError) as error:
        load_problems("gsm9k")
    assert all(name in str(error.value) for name in NAMES)
    for name, split in [("gsm8k", "validation"), ("math500", "train"), ("arith", "dev")]:
        with pytest.raises(UserError, match=f"{name} has no split '{split}'"):
            load_problems(name, split=split, data_dir=tmp_path)
    with pytest.raises(UserError, match="limit 0"):
        load_problems("arith", limit=0)


@pytest.mark.parametrize("name", SOURCES)
def test_without_network_one_line_says_where_it_looked(tmp_path, name):
    code = ("from salt.data import load_problems\nfrom salt.errors import run\n"
            f"run(lambda: len(load_problems({name!r})))")
    done = python(code, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path), HF_HUB_CACHE=str(tmp_path / "hub"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    expected = [SOURCES[name].hub, str(tmp_path), "--data-dir", f"{name}/{next(iter(SOURCES[name].files))}"]
    assert all(part in done.stderr for part in expected)
    assert ("gated" in done.stderr) == (name == "gpqa")


def test_the_hubs_cache_is_enough(tmp_path):
    commit = "0" * 40
    cached = tmp_path / "hub" / "datasets--HuggingFaceH4--MATH-500"
    write_lines(cached / "snapshots" / commit / "test.jsonl", {"problem": "p", "answer": "1", "unique_id": "u"})
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    done = python("from salt.data import load_problems; print(load_problems('math500')[0].id)",
                  HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path / "hub"))
    assert done.stdout == "math500/u\n", done.stderr


def test_neither_torch_nor_pyarrow_is_imported_for_json(shared_data):
    code = (f"import sys; from salt.data import load_problems; load_problems('gsm8k', data_dir={str(shared_data)!r}); "
            "print([name for name in ('torch', 'pyarrow', 'transformers') if name in sys.modules])")
    assert python(code).stdout == "[]\n"


# -------------------------------------------------------------------------------------------------------- order, seeds


def stream_of(size, seed=0):
    return PromptStream([Problem(str(i), "q", "1", "math", "") for i in range(size)], seed)


def test_every_epoch_is_another_permutation():
    stream = stream_of(10)
    first, second = ([int(problem.id) for problem in stream.take(10)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    assert stream_of(10).take(10) != stream_of(10, seed=1).take(10)


@pytest.mark.parametrize("sizes", [[1] * 23, [7, 7, 9], [23], [0, 3, 20], [4, 6, 13]])
def test_the_order_does_not_depend_on_how_many_are_taken_at_a_time(sizes):
    stream, whole = stream_of(5), stream_of(5)
    assert [p for size in sizes for p in stream.take(size)] == whole.take(23)
    assert stream.state() == whole.state() and stream.taken == 23       # 4 epochs of 5, and 3 of the fifth


@pytest.mark.parametrize("before", [0, 1, 4, 5, 6, 10, 12])
def test_state_restores_exactly_even_at_an_epochs_end(before):
    stream, other = stream_of(5, seed=3), stream_of(5, seed=3)
    stream.take(before)
    other.load(json.loads(json.dumps(stream.state())))
    assert other.take(11) == stream.take(11) and other.taken == stream.taken == before + 11


def test_a_state_of_another_data_set_is_refused():
    with pytest.raises(UserError, match="another data set"):
        stream_of(5).load({"epoch": 0, "position": 6})
    with pytest.raises(ValueError):
        PromptStream([], 0)


def test_stable_seed_is_the_same_everywhere():
    # printf "('rollout', 3)" | sha256sum: the first 8 bytes as a number, halved
    assert stable_seed("rollout", 3) == 6631127820874302315
    assert stable_seed("rollout", 3) != stable_seed("rollout", "3") != stable_seed("rollout3")
    assert all(0 <= stable_seed(i) < 2 ** 63 for i in range(200))


def test_a_file_in_which_no_problem_is_left_is_named(tmp_path):
    """MBPP's splits are ranges of its ids."""
    (tmp_path / "mbpp").mkdir()
    (tmp_path / "mbpp" / "train.jsonl").write_text('{"task_id": 5}\n')
    with pytest.raises(UserError, match="train.jsonl: no problem is left"):
        load_problems("mbpp", split="train", data_dir=tmp_path)
