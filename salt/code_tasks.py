r"""Rows of MBPP, HumanEval and HumanEval+ as a question and its sealed tests, for `code_reward` (salt/reward.py).

The gold of a programming problem is an object in JSON:

    before   source    goes in front of the response's program: the prompt that the program completes
    after    source    executed behind it, by the program's process: set-up that needs the program's classes
    tests    source    stays in the judge's process; defines judge(call), where call(text) is the value that the
                       program's process finds for an expression, and which raises unless every test passes

So an assert is taken apart: `assert f([1]) == 2` becomes `assert call("f([1])") == 2`. What stands outside the calls,
the expected value above all, never reaches the program.

Departures from the paper
    1. MBPP shows the first assert of each problem, the others are held back; the paper, which
       trains DeepSeek-7B on MBPP, does not say what it shows.
    2. HumanEval+ as released by its authors holds inputs only: expected values come from the reference solution, and
       floats compare as in evalplus (1e-6 absolute, 1e-7 relative). The hub's copy brings tests of its own.
"""
import ast
import json
import warnings
from typing import Any

from salt.errors import UserError

# The tests that HumanEval+ leaves to its evaluator. {check} compares one value with the reference's.
PLUS_TESTS = """
import copy, functools

INPUTS = {inputs!r}
reference = {name}

@functools.cache
def expected(index):
    return reference(*copy.deepcopy(INPUTS[index]))

def same(found, wanted, tolerance):
    if isinstance(wanted, float) and isinstance(found, (int, float)):
        return found == wanted or abs(found - wanted) <= (tolerance or 1e-6) + 1e-7 * abs(wanted)
    if isinstance(wanted, (list, tuple)) and type(found) is type(wanted) and len(found) == len(wanted):
        return all(same(*pair, tolerance) for pair in zip(found, wanted))
    return found == wanted

def check(candidate):
    for index, values in enumerate(INPUTS):
        found = candidate(*values)
        assert {check}
"""
SAME = "same(found, expected(index), {atol!r})"
ROOT_OF_POLYNOMIAL = "abs(poly(*values, found)) <= {atol!r}"     # HumanEval/32: any root will do


JUDGE = """
def judge(call):
    candidate = lambda *values: call(f"{name}(*{{values!r}})")
"""


def gold(before: str, after: str, tests: str) -> str:
    return json.dumps({"before": before, "after": after, "tests": tests})


def humaneval(row: dict) -> tuple[str, Any]:
    """(question, gold) of a row of HumanEval or of either form of HumanEval+."""
    prompt, name = row["prompt"], row["entry_point"]
    judge = JUDGE.format(name=name)
    if "plus_input" in row:
        check = (ROOT_OF_POLYNOMIAL if name == "find_zero" else SAME).format(atol=row["atol"])
        inputs = row["base_input"] + row["plus_input"]
        tests = prompt + row["canonical_solution"] + PLUS_TESTS.format(inputs=inputs, name=name, check=check) + judge
    else:
        tests = f"{prompt}\n{row['test']}\n{judge}    globals()[{name!r}] = candidate\n"      # HumanEval/33 calls it so
    tests += "    check(candidate)\n"
    return f"Complete this function:\n\n```python\n{prompt.strip()}\n```", gold(prompt, "", tests)


class _Calls(ast.NodeTransformer):
    """f(...) becomes call("f(...)") where f is one of the names."""

    def __init__(self, names: set[str]):
        self.names, self.found = names, 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id in self.names:
            self.found += 1
            return ast.Call(ast.Name("call"), [ast.Constant(ast.unparse(node))], [])
        return self.generic_visit(node)


def mbpp(row: dict) -> tuple[str, Any]:
    """(question, gold) of a row of MBPP. The functions under test are those that the reference solution defines."""
    tests = row["test_list"]
    try:
        with warnings.catch_warnings(action="ignore"):                  # of escapes in the strings of the solutions
            solution, asserts = ast.parse(row["code"]).body, ast.parse("\n".join(tests)).body
    except (SyntaxError, TypeError, ValueError) as error:
        raise UserError(f"{row.where}: code and test_list must be Python ({error})") from error
    calls = _Calls({node.name for node in solution if isinstance(node, ast.FunctionDef)})
    judge = ast.parse("def judge(call): pass")
    imports = [node for node in solution if isinstance(node, ast.Import | ast.ImportFrom)]      # 596 needs its sys
    judge.body[0].body = imports + [calls.visit(node) for node in asserts]
    if not asserts or calls.found < len(asserts):
        raise UserError(f"{row.where}: every test of test_list must call a function that the code defines")
    question = f"{row['text'].strip()}\n\nThe program must pass this test, and others:\n\n```python\n{tests[0]}\n```"
    return question, gold("", row["test_setup_code"], ast.unparse(judge))
