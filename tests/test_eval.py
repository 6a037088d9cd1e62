"""Evaluation: samples and their order, the numbers by hand, the command line, interrupted runs, bad input."""
import csv
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import eval as evaluation
from salt.data import Problem
from salt.errors import UserError
from salt.evaluation import Samples, evaluate_problems, read_samples, summarise
from salt.reward import RewardPool

ROOT = Path(__file__).resolve().parents[1]


def command(*arguments, cwd=ROOT):
    return subprocess.run([sys.executable, str(ROOT / "eval.py"), *map(str, arguments)], capture_output=True, text=True,
                          cwd=cwd, env=os.environ | {"OMP_NUM_THREADS": "1"})


def error_of(*arguments):
    with pytest.raises(UserError) as error:
        evaluation.main(list(map(str, arguments)))
    assert "\n" not in str(error.value)
    return str(error.value)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def tiny_run(folder, output, *more):
    return ["--model", folder, "--tasks", "arith", "--limit", 6, "--n", 2, "--max-response", 48, "--batch", 4,
            "--output", output, *more]


# ---------------------------------------------------------------------------------------------------------- numbers


def row(problem, sample, correct, *, seed=0, finish="stop", answer="1", tokens=10):
    return {"id": problem, "sample": sample, "seed": seed, "correct": correct, "finish": finish, "answer": answer,
            "tokens": tokens}


def test_summary_by_hand():
    rows = [row("a", 0, 1), row("a", 1, 0, finish="length", answer=None, tokens=30),
            row("b", 0, 1), row("b", 1, 1), row("c", 0, 0), row("c", 1, 0, answer=None)]
    summary = summarise(rows, ks=(1, 2))
    # problems score 1/2, 1, 0: mean 1/2, sample variance ((0)^2 + (1/2)^2 + (1/2)^2) / 2 = 1/4, error sqrt(1/4 / 3)
    assert summary["avg"] == summary["pass@1"] == pytest.approx(0.5)
    assert summary["avg_se"] == pytest.approx(math.sqrt(1 / 12))
    # pass@2 of two samples: 1, 1, 0: mean 2/3, sample variance (1/9 + 1/9 + 4/9) / 2 = 1/3, error sqrt(1/3 / 3)
    assert summary["pass@2"] == pytest.approx(2 / 3) and summary["pass@2_se"] == pytest.approx(1 / 3)
    assert summary["truncated"] == pytest.approx(1 / 6) and summary["no_answer"] == pytest.approx(1 / 3)
    assert summary["tokens"] == pytest.approx(80 / 6)                                   # 5 * 10 + 30, over 6
    assert (summary["problems"], summary["samples"]) == (3, 6)


def test_summary_of_several_runs_clusters_by_problem_not_by_run():
    one = [row("a", 0, 1), row("b", 0, 0), row("c", 0, 0)]
    twice = one + [entry | {"seed": 1} for entry in one]
    # a second run with the very same verdicts adds no problem: mean and error stay
    for name in ("avg", "avg_se", "pass@1", "pass@1_se", "problems"):
        assert summarise(twice)[name] == pytest.approx(summarise(one)[name])
    with pytest.raises(ValueError):
        summarise(one, ks=(2,))


# ------------------------------------------------------------------------------------------------ evaluate_problems


@pytest.fixture(scope="module")
def tiny(tiny_folder):
    from salt import models
    from salt.rollout import TransformersSampler
    model, tokenizer = models.load(str(tiny_folder))
    with RewardPool("math", workers=1) as pool:
        yield TransformersSampler(model, tokenizer), tokenizer, pool


def sums(count):
    return [Problem(f"arith/{i}", f"{10 + i}+25=", str(35 + i), "math", "") for i in range(count)]


def draw(tiny, problems, **changes):
    sampler, tokenizer, pool = tiny
    settings = {"samples": 2, "temperature": 1.0, "max_tokens": 40, "seed": 3, "problems_per_call": 2} | changes
    return list(evaluate_problems(sampler, tokenizer, problems, pool, **settings))


def test_rows_are_one_per_problem_and_sample_in_order(tiny):
    problems = sums(5)
    rows = draw(tiny, problems)
    assert [(entry["id"], entry["sample"]) for entry in rows] == [(p.id, s) for p in problems for s in (0, 1)]
    for entry in rows:
        assert entry["finish"] == ("length" if entry["tokens"] == 40 else "stop")
        assert entry["correct"] == int(entry["answer"] == entry["gold"])     # digits only: equal texts, equal numbers
    assert len({entry["text"] for entry in rows}) > 5                        # the samples of one prompt differ


def test_samples_are_a_function_of_the_seed_and_leave_the_generator_alone(tiny):
    import torch
    problems = sums(4)
    state = torch.get_rng_state()
    first = draw(tiny, problems)
    assert torch.equal(torch.get_rng_state(), state)
    assert draw(tiny, problems) == first
    assert [entry["text"] for entry in draw(tiny, problems, seed=4)] != [entry["text"] for entry in first]


def test_recorded_rows_are_reused_whole_batches_and_parts(tiny):
    problems = sums(5)
    whole = draw(tiny, problems)
    for kept in (0, 1, 3, 4, 7, 10):
        marked = {(entry["id"], entry["sample"]): entry | {"from": "file"} for entry in whole[:kept]}
        again = draw(tiny, problems, recorded=marked)
        assert [entry.pop("from", None) for entry in again] == ["file"] * kept + [None] * (10 - kept)
        assert again == whole


def test_choice_problems_use_letters(tiny):
    sampler, tokenizer, _ = tiny
    problem = Problem("x", "1+2=", "C", "choice", "")
    with RewardPool("choice", workers=1) as pool:
        entry, = evaluate_problems(sampler, tokenizer, [problem], pool, samples=1, temperature=0, max_tokens=20, seed=0)
    assert entry["answer"] is None and entry["correct"] == 0


# ----------------------------------------------------------------------------------------------------- samples files


def test_a_file_cut_at_any_byte_loses_at_most_its_last_line(tmp_path):
    path = tmp_path / "samples.jsonl"
    rows = [{"id": "é\n", "sample": i, "text": "\u2028 {\"x\": 1}\n"} for i in range(3)]
    with open(path, "wb"):
        store = Samples(path, "k")
    for entry in rows:
        store.add(entry)
    store.close()
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        store = Samples(path, "k")
        assert len(store.recorded) == sum(end <= size for end in ends)
        for entry in rows:
            store.add(entry)
        store.close()
        assert path.read_bytes() == whole


def test_another_key_never_reuses_a_line(tmp_path):
    path = tmp_path / "samples.jsonl"
    store = Samples(path, "first")
    store.add({"id": "a", "sample": 0})
    store.close()
    store = Samples(path, "second")
    assert store.recorded == {}
    store.add({"id": "a", "sample": 0})
    store.close()
    assert [entry["key"] for entry in lines_of(path)] == ["first", "second"]


def test_a_broken_last_line_is_redone_and_a_broken_middle_line_is_named(tmp_path):
    path = tmp_path / "samples.jsonl"
    good = json.dumps({"key": "k", "id": "a", "sample": 0}) + "\n"
    for broken in ("{bad\n", "{bad", "17\n", "null\n", '{"key": "k"}\n', "\n", "\x00\x00\n"):
        path.write_text(good + broken)
        assert read_samples(path) == ([json.loads(good)], len(good))
        if broken.endswith("\n"):
            path.write_text(good + broken + good)
            with pytest.raises(UserError, match="samples.jsonl, line 2: broken"):
                read_samples(path)


def test_two_processes_do_not_write_one_file(tmp_path):
    store = Samples(tmp_path / "s.jsonl", "k")
    with pytest.raises(UserError, match="another process"):
        Samples(tmp_path / "s.jsonl", "k")
    store.close()
    Samples(tmp_path / "s.jsonl", "k").close()


# ----------------------------------------------------------------------------------------------------- command line


def test_output_files_agree_with_one_another_and_with_the_samples(tiny_folder, tmp_path, capsys):
    evaluation.main(list(map(str, tiny_run(tiny_folder, tmp_path, "--runs", 2, "--k", "1,2"))))
    out = capsys.readouterr().out
    results = json.loads((tmp_path / "results.json").read_text())
    entry = results["tasks"]["arith"]
    rows = [lines_of(tmp_path / "samples" / f"arith-seed{seed}.jsonl") for seed in (2025, 2026)]
    assert [len(run) for run in rows] == [12, 12] and rows[0] != rows[1]
    assert [record["seed"] for record in entry["runs"]] == [2025, 2026]
    for record, run in zip(entry["runs"], rows):
        assert record["avg"] == pytest.approx(sum(r["correct"] for r in run) / 12)
        assert {r["key"] for r in run} == {record["key"]}
        assert all(set(r) == {"key", "id", "sample", "seed", "prompt", "text", "tokens", "finish", "answer", "gold",
                              "correct"} for r in run)
    assert entry["all"]["avg"] == pytest.approx(sum(r["correct"] for run in rows for r in run) / 24)
    with open(tmp_path / "results.csv") as file:
        assert [(line["task"], line["run"], float(line["pass@2"])) for line in csv.DictReader(file)] == [
            ("arith", name, pytest.approx(numbers["pass@2"]))
            for name, numbers in zip(("all", "2025", "2026"), [entry["all"], *entry["runs"]])]
    shown = f"{100 * entry['all']['avg']:.1f} ±"
    assert shown in out and shown in (tmp_path / "results.md").read_text() and "avg@2" in out


@pytest.mark.slow
def test_a_second_start_draws_nothing_and_other_settings_draw_anew(tiny_folder, tmp_path):
    path = tmp_path / "samples" / "arith-seed2025.jsonl"
    start = list(map(str, tiny_run(tiny_folder, tmp_path)))
    evaluation.main(start)
    first, numbers = path.read_bytes(), (tmp_path / "results.json").read_bytes()
    evaluation.main(start)
    assert path.read_bytes() == first and (tmp_path / "results.json").read_bytes() == numbers
    for changed in (["--temperature", "0.9"], ["--max-response", "20"], ["--limit", "5"], ["--batch", "6"],
                    ["--n", "3"]):
        size = len(lines_of(path))
        evaluation.main([*start, *changed])
        keys = [entry["key"] for entry in lines_of(path)]
        assert len(keys) > size and not set(keys[size:]) & set(keys[:size])
    other = tmp_path / "model"
    shutil.copytree(tiny_folder, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 999.0}))
    size = len(lines_of(path))
    evaluation.main([*start, "--model", str(other)])
    assert len(lines_of(path)) == size + 12


def test_rescore_judges_again_and_draws_nothing(tiny_folder, tmp_path, capsys):
    evaluation.main(list(map(str, tiny_run(tiny_folder, tmp_path))))
    path, numbers = tmp_path / "samples" / "arith-seed2025.jsonl", (tmp_path / "results.json").read_text()
    judged = path.read_bytes()
    path.write_text("".join(json.dumps(entry | {"correct": 1, "answer": None}) + "\n" for entry in lines_of(path)))
    wrong = sum(entry["correct"] == 0 for entry in map(json.loads, judged.splitlines()))
    capsys.readouterr()
    evaluation.main(["--rescore", "--output", str(tmp_path)])
    assert path.read_bytes() == judged and (tmp_path / "results.json").read_text() == numbers
    assert f"{wrong} of 12 verdicts changed" in capsys.readouterr().err


def make_run(folder, model, **config):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model": "tiny", "dataset": "arith", "max_response": 33,
                                                    "temperature": 0.7, "seed": 0} | config))
    shutil.copytree(model, folder / "final")
    return folder


def test_without_arguments_the_newest_run_on_its_own_task(tiny_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("old", "new")):
        final = make_run(tmp_path / "runs" / name, tiny_folder) / "final"
        os.utime(final, (1e9 + age, 1e9 + age))
    (tmp_path / "runs" / "unfinished").mkdir()
    evaluation.main(["--limit", "2", "--n", "2"])
    results = json.loads((tmp_path / "runs" / "new" / "eval" / "results.json").read_text())
    assert list(results["tasks"]) == ["arith"] and results["tasks"]["arith"]["max_response"] == 33
    assert results["settings"]["temperature"] == 0.7 and not (tmp_path / "runs" / "old" / "eval").exists()
    assert "evaluating runs/new" in capsys.readouterr().err


def test_a_model_alone_takes_the_papers_protocol():
    args = evaluation.parse(["--model", "deepseek-1.5b"])
    evaluation.settle(args, {})
    assert args.tasks == ["aime24", "aime25", "gsm8k", "math500", "gpqa"]
    assert (args.n, args.k, args.temperature, args.max_response) == (8, [1, 8], 0.6, 8192)
    assert list(range(args.seed, args.seed + args.runs)) == [2025, 2026, 2027, 2028, 2029]


def test_comparison_by_hand(tmp_path, capsys):
    """Two runs per side on one problem each: d = 0.5 - 0, 1 - 0.5."""
    for side, scores in (("A", (0.5, 1.0)), ("B", (0.0, 0.5))):
        runs = [{"seed": seed, "file": "f", "key": "k", "avg": score} for seed, score in zip((1, 2), scores)]
        (tmp_path / side).mkdir()
        (tmp_path / side / "results.json").write_text(json.dumps({
            "settings": {"samples": 2, "temperature": 0.6, "k": [1]},
            "tasks": {"t": {"kind": "math", "max_response": 9, "problems": "p", "runs": runs, "all": {"avg": 0}}}}))
    evaluation.main(["--compare", str(tmp_path / "A"), str(tmp_path / "B"), "--output", str(tmp_path / "out")])
    line, = json.loads((tmp_path / "out" / "compare.json").read_text())
    # both differences are 0.5, so is every resample: no width
    assert (line["a"], line["b"], line["delta"], line["plus"], line["minus"]) == (0.75, 0.25, 0.5, 0, 0)
    assert line["over"] == "2 runs" and "+50.0" in capsys.readouterr().out
    assert (tmp_path / "out" / "compare.png").stat().st_size > 5000


def test_comparison_of_single_runs_pairs_problems(tiny_folder, tmp_path):
    for side in ("a", "b"):
        evaluation.main(list(map(str, tiny_run(tiny_folder, tmp_path / side))))
    path = tmp_path / "b" / "samples" / "arith-seed2025.jsonl"
    verdicts = [1, 1, 0, 1] + [0] * 8                                      # b scores 1, 1/2, 0, 0, 0, 0
    path.write_text("".join(json.dumps(e | {"correct": v}) + "\n" for e, v in zip(lines_of(path), verdicts)))
    path = tmp_path / "a" / "samples" / "arith-seed2025.jsonl"
    path.write_text("".join(json.dumps(e | {"correct": 0}) + "\n" for e in lines_of(path)))
    evaluation.main(["--compare", str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(tmp_path / "c")])
    lines = {line["metric"]: line for line in json.loads((tmp_path / "c" / "compare.json").read_text())}
    assert lines["avg"]["over"] == "6 problems" and lines["avg"]["delta"] == pytest.approx(-1.5 / 6)
    assert lines["pass@2"]["delta"] == pytest.approx(-2 / 6)
    assert lines["avg"]["plus"] > 0 and lines["avg"]["minus"] > 0


@pytest.mark.slow
def test_real_template_real_rows_and_a_silent_terminal(r1_folder, shared_data, tmp_path):
    from transformers import AutoTokenizer

    from salt.data import load_problems
    from salt.models import encode_prompt
    done = command("--model", r1_folder, "--tasks", "gsm8k", "--limit", 4, "--data-dir", shared_data, "--n", 2,
                   "--max-response", 16, "--output", tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    sampler, *table = done.stdout.splitlines()
    assert sampler.startswith("rollouts: transformers") and len(table) == 4, done.stdout
    rows = lines_of(tmp_path / "samples" / "gsm8k-seed2025.jsonl")
    assert len(rows) == 8 and {entry["tokens"] for entry in rows} == {16}
    tokenizer = AutoTokenizer.from_pretrained(r1_folder)
    problem = load_problems("gsm8k", data_dir=shared_data, limit=1)[0]
    ids = encode_prompt(tokenizer, problem.question, problem.instruction)
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids).endswith("within \\boxed{}.<｜Assistant｜><think>\n")


def test_programs_are_judged_and_rescored_by_the_tests_of_the_data_folder(r1_folder, tmp_path, capsys):
    row = {"task_id": "HumanEval/0", "entry_point": "one", "prompt": 'def one():\n    """ One. """\n',
           "test": "def check(candidate):\n    assert candidate() == 1\n"}
    data, out = tmp_path / "data" / "humaneval" / "test.jsonl", tmp_path / "out"
    data.parent.mkdir(parents=True)
    data.write_text(json.dumps(row) + "\n")
    where = ["--data-dir", str(data.parents[1]), "--output", str(out)]
    evaluation.main(["--model", str(r1_folder), "--tasks", "humaneval", "--n", "2", "--max-response", "8", *where])
    path = out / "samples" / "humaneval-seed2025.jsonl"
    first, second = lines_of(path)
    assert first["correct"] == second["correct"] == 0 and first["answer"] is None and len(first["gold"]) == 16
    written = "```python\n    return 1\n```"
    path.write_text(json.dumps(first) + "\n" + json.dumps(second | {"text": written}) + "\n")
    evaluation.main(["--rescore", *where])
    assert "1 of 2 verdicts changed" in capsys.readouterr().err
    assert [(entry["correct"], entry["answer"]) for entry in lines_of(path)] == [(0, None), (1, "    return 1\n")]
    assert json.loads((out / "results.json").read_text())["tasks"]["humaneval"]["all"]["avg"] == 0.5
    data.write_text(json.dumps(row | {"test": row["test"] + "    assert candidate() == 2\n"}) + "\n")
    assert "the tests of humaneval/HumanEval/0 are not those" in error_of("--rescore", *where)


def test_the_text_of_gpqa_reaches_no_file_and_no_terminal(r1_folder, tmp_path, capfd):
    words = {"Question": "quokka", "Correct Answer": "wombat", "Incorrect Answer 1": "numbat",
             "Incorrect Answer 2": "dibbler", "Incorrect Answer 3": "bilby", "Record ID": "rec0"}
    folder, out = tmp_path / "data" / "gpqa", tmp_path / "out"
    folder.mkdir(parents=True)
    (folder / "gpqa_diamond.csv").write_text(f"{','.join(words)}\n{','.join(words.values())}\n")
    evaluation.main(["--model", str(r1_folder), "--tasks", "gpqa", "--n", "2", "--max-response", "8",
                     "--data-dir", str(folder.parent), "--output", str(out)])
    entry, _ = lines_of(out / "samples" / "gpqa-seed2025.jsonl")
    assert entry["id"] == "gpqa/rec0" and entry["gold"] in "ABCD"
    assert (out / "samples" / ".gitignore").read_text() == "*\n"                 # a response may quote its question
    seen = "".join(capfd.readouterr()) + "".join(path.read_text() for path in out.rglob("*") if path.is_file())
    assert len(seen) > 1000 and not [word for word in list(words.values())[:5] if word in seen]


@pytest.mark.slow
def test_kill_at_twenty_random_moments_changes_nothing(tiny_folder, tmp_path):
    def start(output):
        arguments = tiny_run(tiny_folder, output, "--limit", 40, "--n", 4, "--batch", 8, "--max-response", 120)
        return [sys.executable, str(ROOT / "eval.py"), *map(str, arguments)]

    def numbers(output):
        results = json.loads((output / "results.json").read_text())
        results.pop("provenance")                                          # its argv names the folder
        return results, *((output / name).read_bytes() for name in ("results.csv", "results.md"))

    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    subprocess.run(start(tmp_path / "whole"), check=True, capture_output=True, env=environment)
    duration = time.monotonic() - began
    rng, path, killed, midway = random.Random(0), tmp_path / "cut" / "samples" / "arith-seed2025.jsonl", 0, 0
    written = lambda: len(path.read_bytes().splitlines()) if path.exists() else 0
    while killed < 20:
        process = subprocess.Popen(start(tmp_path / "cut"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                   env=environment)
        try:
            before = written()
            while killed % 2 and process.poll() is None and written() == before:       # every other time: as it writes
                time.sleep(0.001)
            process.wait(timeout=rng.uniform(0, 0.05) if killed % 2 else rng.uniform(0.3, 1) * duration)
            shutil.rmtree(tmp_path / "cut")                                # it was quicker: once more from the start
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed += 1
            midway += 0 < written() < 160
    subprocess.run(start(tmp_path / "cut"), check=True, capture_output=True, env=environment)
    assert midway >= 1          # hit while it was writing; how often depends on how the machine is loaded
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
    assert path.read_bytes() == (tmp_path / "whole" / "samples" / "arith-seed2025.jsonl").read_bytes()


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("arguments, said", [
    (["--bogus"], "unrecognized arguments: --bogus"),
    (["--n", "many"], "argument --n: a whole number of at least 1, not 'many'"),
    (["--k", "1,x"], "argument --k: a whole number of at least 1, not 'x'"),
    *([[flag, "0"], f"argument {flag}: a whole number of at least 1, not '0'"]
      for flag in ("--n", "--k", "--runs", "--limit", "--max-response", "--batch", "--workers")),
    (["--model", "no-such-model"], "unknown model 'no-such-model'"),
    (["--model", "org/name", "--k", "9"], "--k 9: pass@k needs k <= n, and n is 8"),
    (["--model", "org/name", "--temperature", "nan", "--n", "1"], "--temperature nan"),
    (["--model", "org/name", "--temperature", "-1"], "--temperature -1"),
    (["--model", "org/name", "--temperature", "0", "--n", "2"], "greedy"),
    (["--model", "org/name", "--tasks", "gsm9k"], "unknown data set 'gsm9k': one of arith, arith-hard, gsm8k"),
    (["--model", "org/name", "--tasks", "absent.jsonl"], "no data file absent.jsonl"),
    (["--model", "org/name", "--tasks", "gpqa", "--data-dir", "nowhere"], "looked for nowhere/gpqa/test"),
    (["--compare", "a", "b,c"], "as many evaluations on either side"),
    (["--compare", "nowhere", "nowhere"], "no finished evaluation in nowhere"),
    (["--rescore", "--output", "nowhere"], "no finished evaluation in nowhere"),
])
def test_bad_input_is_one_line(arguments, said):
    assert said in error_of(*arguments)


def test_mistakes_end_with_status_2_and_one_line(tmp_path):
    for arguments in (["--k", "9", "--model", "tiny"], ["--model", "tiny", "--bogus"], []):
        done = command(*arguments, cwd=tmp_path)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_model_folder_without_tokenizer(tiny_folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_folder / name, tmp_path)
    assert "holds no tokenizer" in error_of("--model", tmp_path, "--tasks", "arith")
    (tmp_path / "config.json").unlink()
    assert "holds no config.json" in error_of("--model", tmp_path, "--tasks", "arith")


def test_a_broken_samples_file_is_named_by_the_program(tiny_folder, tmp_path):
    start = tiny_run(tiny_folder, tmp_path)
    evaluation.main(list(map(str, start)))
    path = tmp_path / "samples" / "arith-seed2025.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])                                                  # the last line is drawn again
    evaluation.main(list(map(str, start)))
    assert path.read_bytes() == whole
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"{broken\n", *lines[4:]]))
    assert "arith-seed2025.jsonl, line 4: broken in the middle" in error_of(*start)


def test_gpqa_without_access_says_how_to_get_it(tmp_path):
    done = subprocess.run([sys.executable, str(ROOT / "eval.py"), "--model", "org/name", "--tasks", "gpqa"], text=True,
                          capture_output=True, cwd=tmp_path, env=os.environ | {
                              "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")})
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "accept its terms at https://huggingface.co/datasets/Idavidrein/gpqa" in done.stderr


def test_an_unfinished_run_says_how_to_go_on(tiny_folder, tmp_path):
    run = make_run(tmp_path / "run", tiny_folder)
    shutil.rmtree(run / "final")
    assert f"train.py --resume {run}" in error_of("--model", run)


def test_the_context_shortens_responses_and_refuses_prompts(tiny_folder, tmp_path, capsys):
    evaluation.main(list(map(str, tiny_run(tiny_folder, tmp_path, "--limit", 1, "--n", 1, "--max-response", 1000))))
    assert "arith: responses end after 246 tokens, not 1000" in capsys.readouterr().err      # 256 - len("1124+6383=")
    assert json.loads((tmp_path / "results.json").read_text())["tasks"]["arith"]["max_response"] == 246
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"question": "1" * 300 + "+1=", "answer": "2", "instruction": ""}) + "\n")
    said = error_of("--model", tiny_folder, "--tasks", long, "--output", tmp_path / "none")
    assert "the prompt of long.jsonl/0 has 303 tokens" in said and not (tmp_path / "none").exists()


def test_duplicate_ids_and_duplicate_file_names(tiny_folder, tmp_path):
    line = json.dumps({"id": 1, "question": "1+1=", "answer": "2"}) + "\n"
    (tmp_path / "x.jsonl").write_text(line * 2)
    assert "the id 'x.jsonl/1' occurs twice" in error_of("--model", tiny_folder, "--tasks", tmp_path / "x.jsonl")
    (tmp_path / "x.jsonl").write_text(line)
    (tmp_path / "sub").mkdir()
    shutil.copy(tmp_path / "x.jsonl", tmp_path / "sub")
    both = f"{tmp_path / 'x.jsonl'},{tmp_path / 'sub' / 'x.jsonl'}"
    assert "same name" in error_of("--model", tiny_folder, "--tasks", both)


@pytest.mark.parametrize("field, value", [("samples", 3), ("temperature", 1.0), ("max_response", 9), ("problems", "q"),
                                          ("seed", 5)])
def test_evaluations_that_differ_are_not_compared(tmp_path, field, value):
    made = {"samples": 2, "temperature": 0.6, "max_response": 8, "problems": "p", "seed": 1}
    for side, values in (("a", made), ("b", made | {field: value})):
        (tmp_path / side).mkdir()
        runs = [{"seed": values["seed"], "file": "f", "key": "k", "avg": 0.5}]
        entry = {"kind": "math", "runs": runs, "all": {"avg": 0.5}, "max_response": values["max_response"],
                 "problems": values["problems"]}
        settings = {"k": [1], "samples": values["samples"], "temperature": values["temperature"]}
        (tmp_path / side / "results.json").write_text(json.dumps({"settings": settings, "tasks": {"t": entry}}))
    said = error_of("--compare", tmp_path / "a", tmp_path / "b", "--output", tmp_path / "out")
    assert ("same seed" if field == "seed" else f"differ in {field}") in said and not (tmp_path / "out").exists()


def test_output_that_cannot_be_a_folder(tiny_folder, tmp_path):
    (tmp_path / "file").write_text("")
    assert "choose another --output" in error_of(*tiny_run(tiny_folder, tmp_path / "file"))
