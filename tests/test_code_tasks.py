"""MBPP, HumanEval and HumanEval+: how rows become questions and sealed tests, every reference solution, wrong rows."""
import gzip
import json

import pytest

from salt import code_tasks
from salt.data import CODE_INSTRUCTION, SOURCES, load_problems, read_rows
from salt.errors import UserError
from salt.reward import RewardPool, code_reward

MBPP = {"task_id": 601, "text": "Write a function to add.\r\n", "code": "def add(a, b):\r\n  return a + b",
        "test_list": ["assert add(1, 2) == 3", "assert add(-1, 1)==0 ", "assert add('a','b')=='ab'"],
        "test_setup_code": "", "challenge_test_list": []}
HUMANEVAL = {"task_id": "HumanEval/0", "entry_point": "double",
             "canonical_solution": "    return [2 * x for x in xs]\n",
             "prompt": 'from typing import List\n\n\ndef double(xs: List[float]) -> List[float]:\n    """ Doubles.\n'
                       '    >>> double([1])\n    [2]\n    """\n',
             "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate([]) == []\n"
                     "    assert candidate([1, float('inf')]) == [2, float('inf')]\n"}
PLUS = HUMANEVAL | {"base_input": [[[]]], "plus_input": [[[1.0, 0.1]], [[10.0 ** 9]]], "atol": 0,
                    "test": "def check(candidate):\n    assert False, 'the base tests are not those of HumanEval+'"}


def fenced(program: str) -> str:
    return f"<think>So:</think>\n```python\n{program}\n```"


def write(folder, name, rows, file="test.jsonl"):
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / file).write_text("".join(json.dumps(row) + "\n" for row in rows))


def verdict(problem, program: str) -> float:
    return code_reward(fenced(program), problem.answer)


# ------------------------------------------------------------------------------------------------------------ the rows


def test_mbpp_shows_one_assert_and_holds_the_others_back(tmp_path):
    write(tmp_path, "mbpp", [MBPP], "train.jsonl")
    problem, = load_problems("mbpp", split="train", data_dir=tmp_path)
    assert (problem.id, problem.kind, problem.instruction) == ("mbpp/601", "code", CODE_INSTRUCTION)
    assert problem.question.startswith("Write a function to add.\n") and "assert add(1, 2) == 3" in problem.question
    assert "add(-1" not in problem.question and "'ab'" not in problem.question
    assert verdict(problem, MBPP["code"]) == 1.0
    assert verdict(problem, "def add(a, b): return 3") == 0.0
    assert verdict(problem, "def add(a, b): return abs(a) + b if a == 1 else 0") == 0.0        # all but the last assert


def test_expected_values_stay_with_the_judge():
    tests = json.loads(code_tasks.mbpp(MBPP)[1])["tests"]
    names, asked = {}, []
    exec(tests, names)
    with pytest.raises(AssertionError):
        names["judge"](lambda text: asked.append(text) or 3 * (text == "add(1, 2)") - (text == "add(-1, 1)"))
    assert asked == ["add(1, 2)", "add(-1, 1)"]


def test_set_up_code_runs_behind_the_program_whose_classes_it_needs():
    row = MBPP | {"code": "class Node:\r\n  def __init__(self, x): self.x = x\r\ndef value(node): return node.x",
                  "test_setup_code": "root = Node(3)\r\nroot.x += 1", "test_list": ["assert int(value(root)) == 4"]}
    gold = code_tasks.mbpp(row)[1]
    assert code_reward(fenced(row["code"]), gold) == 1.0
    assert code_reward(fenced("def value(node): return 4"), gold) == 0.0                       # no Node


def test_a_function_may_have_the_name_of_a_builtin():
    row = MBPP | {"code": "def sum(a, b): return a - b",
                  "test_list": ["assert sum(5, 3) == 2", "assert abs(sum(1, 2)) == 1"]}
    gold = code_tasks.mbpp(row)[1]
    assert code_reward(fenced(row["code"]), gold) == 1.0
    assert code_reward(fenced("def sum(a, b): return a + b"), gold) == 0.0


def test_humaneval_takes_completions_and_whole_programs(tmp_path):
    write(tmp_path, "humaneval", [HUMANEVAL])
    problem, = load_problems("humaneval", data_dir=tmp_path)
    assert problem.id == "humaneval/HumanEval/0" and HUMANEVAL["prompt"].strip() in problem.question
    assert verdict(problem, HUMANEVAL["canonical_solution"]) == 1.0
    assert verdict(problem, HUMANEVAL["prompt"] + HUMANEVAL["canonical_solution"]) == 1.0
    assert verdict(problem, "def double(xs: List[float]):\n  return [x + x for x in xs]") == 1.0  # the prompt's imports
    assert verdict(problem, "def double(xs): return xs") == 0.0
    assert verdict(problem, "def other(xs): return xs") == 0.0
    assert code_reward("no code", problem.answer) == code_reward(fenced(""), problem.answer) == 0.0


@pytest.mark.parametrize("program, expected", [
    ("    return [2 * x for x in xs]", 1.0),
    ("    return [2 * x + 1e-7 * (x == 1) for x in xs]", 1.0),     # within 1e-6 of 2
    ("    return [2 * x + 1e-5 * (x == 1) for x in xs]", 0.0),
    ("    return [2 * x * (1 + 0.5e-7) for x in xs]", 1.0),        # relative to 2e9: 1e-7 is allowed
    ("    return [2 * x * (1 + 2e-7) for x in xs]", 0.0),
    ("    return tuple(2 * x for x in xs)", 0.0),
    ("    return [2 * x for x in xs] if len(xs) else [0]", 0.0),
    ("    return [2 * x for x in xs][:1]", 0.0),
])
def test_humanevalplus_as_released_compares_with_the_reference(program, expected):
    question, gold = code_tasks.humaneval(PLUS)
    assert PLUS["canonical_solution"].strip() not in question
    assert code_reward(fenced(program), gold) == expected


def test_humanevalplus_from_the_hub_brings_tests_that_need_numpy():
    test = ("import numpy as np\n\n\ndef check(candidate):\n    inputs, results = [[[1.0, 2.0]]], [[2.0, 4.0]]\n"
            "    for inp, exp in zip(inputs, results):\n        assert np.allclose(candidate(*inp), exp)\n")
    gold = code_tasks.humaneval(HUMANEVAL | {"test": test})[1]
    with RewardPool("code", workers=1) as pool:
        programs = [HUMANEVAL["canonical_solution"], "    return xs", HUMANEVAL["canonical_solution"]]
        assert pool.score(list(map(fenced, programs)), [gold] * 3) == [1.0, 0.0, 1.0]
        assert pool.restarts == 0


def test_the_root_of_a_polynomial_may_be_any():
    row = PLUS | {"entry_point": "find_zero", "base_input": [[[-4, 0, 1]]], "plus_input": [], "atol": 1e-4,
                  "prompt": "def poly(xs, x):\n    return sum(c * x ** i for i, c in enumerate(xs))\n\n\n"
                            'def find_zero(xs):\n    """ A root. """\n',
                  "canonical_solution": "    return 2.0\n"}
    gold = code_tasks.humaneval(row)[1]
    assert [code_reward(fenced(f"    return {x}"), gold) for x in ("2", "-2.0", "2.1", "None")] == [1, 1, 0, 0]


def test_splits_of_the_released_mbpp_follow_its_task_ids(tmp_path):
    write(tmp_path, "mbpp", [MBPP | {"task_id": i} for i in (10, 11, 510, 511, 600, 601, 974)], "mbpp.jsonl")
    for split, ids in [("test", ["mbpp/11", "mbpp/510"]), ("train", ["mbpp/601", "mbpp/974"])]:
        assert [problem.id for problem in load_problems("mbpp", split=split, data_dir=tmp_path)] == ids


@pytest.mark.parametrize("change, said", [
    ({"test_list": []}, "every test of test_list must call"),
    ({"test_list": ["assert add(1, 2) == 3", "assert 1 == 1"]}, "every test of test_list must call"),
    ({"test_list": ["assert add(1, 2 == 3"]}, "must be Python"),
    ({"test_list": None}, "must be Python"),
    ({"code": "def add(a, b) return"}, "must be Python"),
    ({"code": "x = 1"}, "every test of test_list must call"),
])
def test_wrong_rows_are_named(tmp_path, change, said):
    write(tmp_path, "mbpp", [MBPP, MBPP | {"task_id": 602} | change], "train.jsonl")
    with pytest.raises(UserError, match=f"train.jsonl, line 2: .*{said}"):
        load_problems("mbpp", split="train", data_dir=tmp_path)


@pytest.mark.parametrize("field", ["prompt", "entry_point", "test"])
def test_missing_fields_are_named(tmp_path, field):
    write(tmp_path, "humaneval", [{name: value for name, value in HUMANEVAL.items() if name != field}])
    with pytest.raises(UserError, match=f"line 1: no field '{field}'"):
        load_problems("humaneval", data_dir=tmp_path)


# -------------------------------------------------------------------------------------------------- reference solutions


def references(path, reader, solution) -> tuple[list[str], list[str], list[str]]:
    """(ids, responses, golds) of every row of a released file."""
    rows = list(read_rows(path))
    responses, golds = [fenced(solution(row)) for row in rows], [reader(row)[1] for row in rows]
    return [str(row["task_id"]) for row in rows], responses, golds


def failures(name, ids, responses, golds) -> list[str]:
    with RewardPool("code", workers=2, timeout=SOURCES[name].seconds, memory=SOURCES[name].memory) as pool:
        verdicts = pool.score(responses, golds)
        assert pool.restarts == 0
    return [name for name, verdict in zip(ids, verdicts) if verdict != 1.0]


@pytest.mark.slow
def test_every_reference_solution_of_mbpp_passes(shared_data):
    found = references(shared_data / "mbpp" / "mbpp.jsonl", code_tasks.mbpp, lambda row: row["code"])
    assert len(found[0]) == 974
    assert failures("mbpp", *found) == []


@pytest.mark.slow
@pytest.mark.parametrize("name, file", [("humaneval", "HumanEval.jsonl.gz"),
                                        ("humanevalplus", "HumanEvalPlus.jsonl.gz")])
def test_every_reference_solution_of_humaneval_passes(shared_data, name, file):
    found = references(shared_data / name / file, code_tasks.humaneval, lambda row: row["canonical_solution"])
    assert len(found[0]) == 164
    assert failures(name, *found) == []


def test_the_released_files_load_by_name(shared_data):
    sizes = {(name, split): len(load_problems(name, split=split, data_dir=shared_data))
             for name, split in [("mbpp", "train"), ("mbpp", "test"), ("humaneval", "test"), ("humanevalplus", "test")]}
    assert sizes == {("mbpp", "train"): 374, ("mbpp", "test"): 500, ("humaneval", "test"): 164,
                     ("humanevalplus", "test"): 164}


def test_compressed_files_read_alike(tmp_path):
    write(tmp_path / "plain", "humaneval", [HUMANEVAL])
    (tmp_path / "packed" / "humaneval").mkdir(parents=True)
    with gzip.open(tmp_path / "packed" / "humaneval" / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps(HUMANEVAL) + "\n")
    plain, packed = (load_problems("humaneval", data_dir=tmp_path / form) for form in ("plain", "packed"))
    assert plain == packed
