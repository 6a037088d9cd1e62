"""`pip install .` in an environment that holds torch and nothing else, and the README's example in it."""
import ast
import re
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE = ("advantages", "geometry", "proxy")
TORCH_ONLY = (*CORE, "distributed", "errors", "hooks")
HOOKS = ("trl_hook", "verl_hook")


def example() -> str:
    """The first block of Python after the marker in the README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- example: tests/test_install.py -->\n+```python\n(.+?)```", text, re.DOTALL)
    assert found, "README.md has no block marked '<!-- example: tests/test_install.py -->'"
    return found[1]


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A new environment's Python: torch as pinned, then this project. -P and cwd keep the source tree out of sight."""
    folder = tmp_path_factory.mktemp("torch-only")
    venv.create(folder / "venv", with_pip=True)
    torch = next(line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("torch=="))

    def run(*arguments, failing=False) -> str:
        done = subprocess.run([folder / "venv" / "bin" / "python", "-P", *arguments], cwd=folder, capture_output=True,
                              text=True, timeout=600)
        assert failing == bool(done.returncode), done.stderr[-3000:]
        return done.stderr if failing else done.stdout

    run("-m", "pip", "install", "--quiet", torch)
    before = run("-m", "pip", "list", "--format=freeze").splitlines()
    run("-m", "pip", "install", "--quiet", str(ROOT))
    after = run("-m", "pip", "list", "--format=freeze").splitlines()
    run.added = sorted(set(after) - set(before))
    return run


@pytest.mark.slow
def test_nothing_comes_along(python):
    assert python.added == ["salt-rlvr==0.1.0"]
    files = python("-c", "from importlib.metadata import files\n"
                   "print(*(f for f in files('salt-rlvr') if f.parts[0] == 'salt' and f.suffix != '.pyc'), sep='\\n')")
    names = {"__init__.py", "py.typed", *(f"{name}.py" for name in TORCH_ONLY + HOOKS)}
    assert set(files.split()) == {f"salt/{name}" for name in names}


@pytest.mark.slow
def test_importing_needs_torch_alone(python):
    """The installed files are the ones that are loaded, and nothing of the training run's comes with them."""
    imports = "".join(f"import salt.{name}\n" for name in TORCH_ONLY)
    files, others = python("-c", f"import sys\n{imports}loaded = dict(sys.modules)\n"
                           "print(*(module.__file__ for name, module in loaded.items() if name.startswith('salt.')))\n"
                           "print(*{'numpy', 'transformers', 'trl', 'verl', 'toy'} & loaded.keys())").splitlines()
    assert len(files.split()) == len(TORCH_ONLY) and all("site-packages" in file for file in files.split())
    assert others == ""


@pytest.mark.slow
def test_a_hook_without_its_trainer_says_what_to_install(python):
    for name in HOOKS:
        package = name.removesuffix("_hook")
        last = python("-c", f"import salt.{name}", failing=True).splitlines()[-1]
        assert f"made for {package}" in last and f"found none: pip install '{package}==" in last


@pytest.mark.slow
def test_the_readme_example_runs(python):
    printed = python("-c", example())
    coefficients = [float(number) for number in re.findall(r"-?\d+\.\d+", printed)]
    assert len(coefficients) == 8 and len(set(coefficients)) > 2


def test_the_readme_example_is_fifteen_lines_of_the_core():
    lines = [line for line in example().splitlines() if line.strip()]
    imports = {node.module for node in ast.walk(ast.parse(example())) if isinstance(node, ast.ImportFrom)}
    assert len(lines) <= 15 and imports <= {f"salt.{name}" for name in CORE}


def test_the_core_is_typed():
    """Every public function of the core has types on all arguments and on its result, and a docstring."""
    for name in CORE:
        for node in ast.parse((ROOT / "salt" / f"{name}.py").read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                untyped = [argument.arg for argument in arguments if argument.annotation is None]
                assert node.returns is not None and not untyped, f"salt/{name}.py:{node.name}: {untyped}"
