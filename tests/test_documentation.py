"""What the comments and the README say exists: equations, algorithm lines, functions, files, commands and flags."""
import ast
import io
import re
import shlex
import subprocess
import sys
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
MODULES = sorted((ROOT / "salt").glob("*.py"))
SOURCES = MODULES + sorted((ROOT / "toy").rglob("*.py")) + sorted(ROOT.glob("*.py"))
TEXTS = [path for pattern in ("*.py", "*.md", "*.txt", "*.toml", ".ci/*", "salt/**/*", "toy/**/*.py", "tests/**/*.py")
         for path in sorted(ROOT.glob(pattern)) if path.is_file() and "__pycache__" not in path.parts]
EQUATIONS, ALGORITHM_LINES = range(1, 72), range(1, 10)       # the paper's numbering: 71 equations, 9 \STATE lines
CORE = {2, 3, 5, 6, 7, 8, 10, 11, 13, 14, 15, 16, 17, 18, 19, 68, 69, 70}      # each must be tagged on a line of code

NUMBERS = r"\d+(?:\s?[–-]\s?\d+)?(?:(?:,| and|, and)\s\d+(?:\s?[–-]\s?\d+)?)*"
EQUATION_TAG = re.compile(rf"\bEqs?\.\s+({NUMBERS})")
EQUATION_IN_PROSE = re.compile(r"\bEqs?\.\s+(\d+(?:\s?[–-]\s?\d+)?)")     # no list: "the error of Eq. 10, 0 when …"
ALGORITHM_TAG = re.compile(rf"\bAlg\. 1, l\.\s?({NUMBERS})")
ANY_TAG = re.compile(r"\bEqs?\b\.?|\bAlg\.")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def numbers_in(text: str) -> set[int]:
    """'16, 18' -> {16, 18}; '38–40' -> {38, 39, 40}. A range that runs backwards is an error."""
    found = set()
    for part in re.findall(r"\d+(?:\s?[–-]\s?\d+)?", text):
        first, *last = map(int, re.findall(r"\d+", part))
        assert not last or first < last[0], f"the range {part} runs backwards"
        found.update(range(first, (last or [first])[0] + 1))
    return found


def comments_of(path: Path) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


def docstrings_of(path: Path) -> list[str]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [text for node in nodes if isinstance(node, kinds) and (text := ast.get_docstring(node))]


# The tags

@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_every_tag_names_an_equation_and_a_line_that_exist(path):
    for texts, pattern in ((comments_of(path), EQUATION_TAG), (docstrings_of(path), EQUATION_IN_PROSE)):
        for text in texts:
            for tag in pattern.findall(text):
                assert numbers_in(tag) <= set(EQUATIONS), f"{relative(path)}: Eq. {tag}"
            for tag in ALGORITHM_TAG.findall(text):
                assert numbers_in(tag) <= set(ALGORITHM_LINES), f"{relative(path)}: Alg. 1, l.{tag}"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_every_tag_in_a_comment_has_the_form_that_is_checked(path):
    """'# Eq.16' or '# Alg. 1 line 7' would slip through the test above."""
    for comment in comments_of(path):
        rest = ALGORITHM_TAG.sub("", EQUATION_TAG.sub("", comment))
        assert not ANY_TAG.search(rest), f"{relative(path)}: {comment}"


def test_the_central_equations_are_tagged_on_lines_of_code():
    tagged = set()
    for path in MODULES:
        for comment in comments_of(path):
            for tag in EQUATION_TAG.findall(comment):
                tagged |= numbers_in(tag)
    assert not CORE - tagged, f"no line of salt/ carries a tag for Eq. {sorted(CORE - tagged)}"


def test_the_tag_reader_reads_what_is_in_use():
    assert numbers_in(EQUATION_TAG.search("# (B,)  Eq. 37, 50").group(1)) == {37, 50}
    assert numbers_in(EQUATION_TAG.search("# Eq. 39–41; Alg. 1, l.5").group(1)) == {39, 40, 41}
    assert numbers_in(ALGORITHM_TAG.search("# Eq. 14; Alg. 1, l.6–7").group(1)) == {6, 7}
    assert numbers_in(EQUATION_TAG.search("(Eq. 3, 65, 66, 69).").group(1)) == {3, 65, 66, 69}
    with pytest.raises(AssertionError):
        numbers_in("41–39")


# The module headers

@pytest.mark.parametrize("path", [path for path in MODULES if path.name != "__init__.py"], ids=relative)
def test_every_module_says_where_it_departs_from_the_paper(path):
    header = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert header, f"{relative(path)} has no docstring"
    found = re.search(r"^Departures from the paper(: \S.*|:?\n+((?: *\S.*\n?)+))", header, re.MULTILINE)
    assert found, f"{relative(path)}: no paragraph 'Departures from the paper'"
    if listed := found.group(2):
        items = [int(number) for number in re.findall(r"^ *(\d+)\. \S", listed, re.MULTILINE)]
        assert items and items == list(range(1, len(items) + 1)), f"{relative(path)}: departures numbered {items}"


def test_the_package_is_empty():
    """Reward workers import salt.reward through it and must start without torch."""
    assert (ROOT / "salt" / "__init__.py").read_text().strip() == ""


@pytest.mark.parametrize("path", TEXTS, ids=relative)
def test_no_path_of_one_machine(path):
    folders = "work|tmp|root|home"
    found = re.search(rf"(?:^|[\s\"'`(=:])/(?:{folders})/\S*", path.read_text(encoding="utf-8", errors="replace"))
    assert not found, f"{relative(path)} names {found.group().strip()}"


# The README. Read inside the tests, so that a missing file is a failure and not an error at collection.

def readme() -> str:
    assert README.is_file(), "README.md is missing"
    return README.read_text(encoding="utf-8")


def code_blocks() -> list[str]:
    return [body for _, body in re.findall(r"^```([^\n]*)\n(.*?)^```", readme(), re.MULTILINE | re.DOTALL)]


def code_spans() -> list[str]:
    prose = re.sub(r"^```.*?^```", "", readme(), flags=re.MULTILINE | re.DOTALL)
    return [span.strip() for span in re.findall(r"`([^`\n]+)`", prose)]


def commands_in(text: str) -> list[list[str]]:
    """Shell lines as words: continuation lines joined, comments and prompts dropped, `a && b` in two."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        try:
            words = list(shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars="|;&()<>"))
        except ValueError:                                    # a lone quote: prose or program output, not a command
            continue
        command: list[str] = []
        for word in words + ["&&"]:
            if word and set(word) <= set("|;&()<>"):
                found.append(command)
                command = []
            else:
                command.append(word)
    return [command for command in found if command]


def programs_in(commands: list[list[str]]) -> list[tuple[str, list[str]]]:
    """The program of ours on each line and what follows it: `torchrun --nproc_per_node 2 train.py --salt` too."""
    found = []
    for words in commands:
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):                     # OMP_NUM_THREADS=1 python …
            words = words[1:]
        if not words or words[0] not in ("python", "torchrun", "accelerate") or "pytest" in words:
            continue
        program = next((i for i, word in enumerate(words) if re.fullmatch(r"[\w./-]+\.py", word)), None)
        if program is not None:
            found.append((words[program].removeprefix("./"), words[program + 1:]))
    return found


def readme_programs() -> list[tuple[str, list[str]]]:
    return programs_in(commands_in("\n".join(code_blocks() + code_spans())))


def helps(calls: list[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """`python PROGRAM [SUBCOMMAND] --help` of each, side by side: starting one takes seconds of imports."""
    running = {call: subprocess.Popen([sys.executable, *call, "--help"], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                                      stderr=subprocess.PIPE) for call in dict.fromkeys(calls)}
    found = {}
    for call, process in running.items():
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, f"python {' '.join(call)} --help failed: {err.strip()[-500:]}"
        found[call] = out
    return found


def help_call(program: str, arguments: list[str]) -> tuple[str, ...]:
    """With the sub-command when the line has one: its flags are not in the program's own help."""
    return (program, arguments[0]) if arguments and re.fullmatch(r"[a-z][a-z-]*", arguments[0]) else (program,)


@cache
def readme_helps() -> dict[tuple[str, ...], str]:
    return helps([help_call(program, arguments) for program, arguments in readme_programs()
                  if (ROOT / program).is_file()])


def accepts(help_text: str, flag: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", help_text) is not None


def flags_of(arguments: list[str]) -> list[str]:
    return [word.split("=")[0] for word in arguments if re.match(r"--[a-z]", word)]


def test_the_readme_exists_and_names_its_two_commands():
    assert "pip install -r requirements.txt && python train.py --salt" in readme()
    assert "pip install -r requirements.txt && python -m pytest" in readme()
    assert (ROOT / "requirements.txt").is_file()


def test_every_program_in_the_readme_exists():
    programs = [program for program, _ in readme_programs()]
    assert "train.py" in programs
    assert not [program for program in programs if not (ROOT / program).is_file()]


def test_every_flag_of_a_command_in_the_readme_is_accepted():
    checked = 0
    for program, arguments in readme_programs():
        for flag in flags_of(arguments):
            assert accepts(readme_helps().get(help_call(program, arguments), ""), flag), f"{program} knows no {flag}"
            checked += 1
    assert checked, "the README shows no command with a flag"


def test_every_flag_named_in_passing_belongs_to_some_program():
    known = "\n".join(readme_helps().values())
    for span in code_spans():
        if span.startswith("--"):
            for flag in flags_of(span.split()):
                assert accepts(known, flag), f"no program in the README knows {flag}"


def names_in(path: Path) -> set[str]:
    """Functions, classes, their methods ('Class.method'), and names assigned at the top."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def readme_targets() -> list[tuple[str, str]]:
    target = re.compile(r"([\w./-]+\.py):([\w.]+)(?:\(\))?")
    return [match.groups() for span in code_spans() if (match := target.fullmatch(span))]


def test_every_target_of_the_equation_table_exists():
    assert readme_targets(), "the README's equation table names no `salt/file.py:function`"
    for file, name in readme_targets():
        assert (ROOT / file).is_file(), f"the README names {file}, which does not exist"
        assert name in names_in(ROOT / file), f"{file} has no {name}"


def test_the_tables_of_the_study_are_those_that_its_report_wrote():
    """The README quotes toy/results/study/study.md row by row, so that no number in it is older than the results."""
    study = (ROOT / "toy" / "results" / "study" / "study.md").read_text(encoding="utf-8").splitlines()
    part = README.read_text(encoding="utf-8").partition("### The study")[2].partition("### Cost")[0]
    quoted = [line for line in part.splitlines() if line.startswith("|")]
    assert len(quoted) > 40 and [line for line in quoted if line not in study] == []


def test_the_equation_table_covers_the_method():
    """A row that starts with the equation's number: '| 16 | …' or '| Eq. 4–7 | …'."""
    rows = re.findall(rf"^\|\s*\**(?:Eqs?\.\s*)?({NUMBERS})\**\s*\|.*`[\w/]+\.py:\w+`", readme(), re.MULTILINE)
    covered = set().union(*map(numbers_in, rows)) if rows else set()
    assert covered <= set(EQUATIONS)
    assert not {2, 3, *range(4, 20)} - covered, f"not in the table: {sorted({2, 3, *range(4, 20)} - covered)}"


def readme_paths() -> set[str]:
    """Files and folders of the project: links, and words of code that begin with one of its folders or end like one."""
    links = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", readme())]
    links += re.findall(r"<img[^>]+src=\"([^\"]+)\"", readme())
    words = [word.split(":")[0] for text in code_spans() + code_blocks()
             for word in re.split(r"[\s,;=()\[\]'\"`]+", text)]
    ours = re.compile(r"(?:salt|toy|tests|\.ci|shared)/[\w./-]*|[\w.-]+\.(?:py|txt|toml|md|yaml|yml)|LICENSE")
    return {path.rstrip(".") for path in words if ours.fullmatch(path.rstrip("."))} | {
        path for path in links if path and not re.match(r"[a-z]+:", path)}


def exists(path: str) -> bool:
    """At its place; a bare file name also in salt/, toy/ or tests/."""
    places = [ROOT] + ([ROOT / "salt", ROOT / "toy", ROOT / "tests"] if "/" not in path else [])
    return any((place / path).exists() for place in places)


def test_every_path_in_the_readme_exists():
    paths = readme_paths()
    assert "requirements.txt" in paths
    assert not [path for path in sorted(paths) if not exists(path)]


def test_the_readme_reader_reads_commands():
    """The checks above are only as good as this: a few lines as a README writes them."""
    text = ("$ FOO=1 python train.py --salt  # a comment\n"
            "torchrun --nproc_per_node 2 train.py --model x \\\n    --seed=3\n"
            "pip install -r requirements.txt && python toy/study.py redundancy --quick\n"
            "python -m pytest tests/test_loss.py -q\npython -c 'print(1)'\nsalt/loss.py\nstep 12  it's 0.5 s\n")
    assert programs_in(commands_in(text)) == [
        ("train.py", ["--salt"]), ("train.py", ["--model", "x", "--seed=3"]),
        ("toy/study.py", ["redundancy", "--quick"])]
    assert flags_of(["--model", "x", "--seed=3", "-q", "--"]) == ["--model", "--seed"]
    assert help_call("toy/study.py", ["redundancy", "--quick"]) == ("toy/study.py", "redundancy")
    assert help_call("eval.py", ["--model"]) == ("eval.py",)
    assert accepts("usage: x [--salt-scope S] [--seed N]", "--seed") and not accepts("[--salt-scope S]", "--salt")


# ---- nothing that is committed names the machine it was written on

MACHINE_PATH = re.compile(rb"(?<![\w.])/(?:tmp|work|root|home|Users|opt|mnt|var/folders)/[\w.+-]+")


def test_no_file_names_a_path_of_the_machine_it_was_written_on():
    """Results above all: a benchmark records its own command line."""
    files = [path for folder in ("salt", "toy", "tests", ".ci") for path in (ROOT / folder).rglob("*")]
    files = [path for path in (*files, *ROOT.glob("*.*")) if path.is_file() and "__pycache__" not in path.parts]
    assert any(path.suffix == ".json" for path in files)
    found = {str(path.relative_to(ROOT)): hits for path in files if (hits := MACHINE_PATH.findall(path.read_bytes()))}
    assert not found


def test_a_machine_path_is_seen():
    assert MACHINE_PATH.search(b'"--python", "' + b"/".join([b"", b"tmp", b"env", b"bin"]) + b'"')
    assert not MACHINE_PATH.search(b"an empty `/tmp` in memory, ../shared/data, runs/NAME")
