r"""Data sets: where their rows come from, what is asked and what the verifier compares with.

    name      question             gold                         kind
    arith, arith-hard: toy/arithmetic.py, the sum               math
    gsm8k     question             after "#### ", no commas     math
    math500   problem              answer                       math
    math      problem              last box of the solution     math
    dapo-math prompt[0].content    reward_model.ground_truth    math
    aime24    problem              answer                       math
    aime25    question             answer                       math
    gpqa      Question + options   the right option's letter    choice
    mbpp, humaneval, humanevalplus: see salt/code_tasks.py      code
    a file    prompt | question | problem, answer               math

Rows come from files under a data folder (`DIR/<name>/<split>.jsonl`, `.jsonl.gz`, `.parquet` or `.csv`; the columns are
those of the hub's files), from a named file (an "instruction" column replaces the default one), or from the Hugging
Face hub and its cache. A split is named by its role, "train" or "test", whatever the hub calls it. GPQA's authors ask
that its text stays out of sight: no message here quotes a question.

Glossary
    paper    name       shape       equation
    q        Problem    –           1        what a prompt is made of
    B        n          prompts     2        of one batch: PromptStream.take(n)

Departures from the paper
    1. Rows whose gold math-verify cannot read are skipped, counted and named; the paper does not mention them.
    2. GPQA's options are shuffled by a seed made of the question; the instruction asks for the letter.
    3. DAPO-Math-17k repeats every row about a hundred times and asks for "Answer: $Answer": each question is taken
       once, without that wrapper (our instruction asks for the box); questions whose golds disagree are dropped. How
       many of its problems are in MATH-500, on which the paper tests, is reported; they are not taken out.
"""
import csv
import gzip
import hashlib
import json
import random
import re
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator

from salt import code_tasks
from salt.errors import UserError

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
CHOICE_INSTRUCTION = "Please reason step by step, and put the letter of your answer within \\boxed{}."
CODE_INSTRUCTION = "Please reason step by step, and put the whole program in one ```python block."
DAPO_WRAPPER = ("Solve the following math problem step by step. The last line of your response should be of the form "
                "Answer: $Answer (without quotes) where $Answer is the answer to the problem.",
                'Remember to put your answer on its own line after "Answer:".')
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".csv")
NAMED = 12                            # ids that a message lists; 11 of MATH-train's golds cannot be parsed
ARITH_SIZES = {"train": 2048, "test": 256}
ARITH_DIGITS = {"arith": (2, 3, 4), "arith-hard": (4, 5, 6)}            # of the longer number: levels of difficulty


@dataclass(frozen=True)
class Problem:
    """One question with its gold answer; `kind` says which verdict compares them ("math", "choice", "code")."""
    id: str
    question: str
    answer: str
    kind: str
    instruction: str


class Row(dict):
    """A row that knows where it stands; asking for a field it lacks is a UserError."""

    def __init__(self, values: dict, where: str):
        super().__init__(values)
        self.where = where

    def __missing__(self, field: str):
        raise UserError(f"{self.where}: no field {field!r} (the row has {', '.join(map(str, self)) or 'none'})")

    def first(self, *fields: str) -> Any:
        """The first of the fields that the row has."""
        return self[next((field for field in fields if field in self), fields[0])]


def _asked(row: Row) -> str:
    return row.first("question", "problem", "prompt")


def _plain(row: Row) -> tuple[str, Any]:
    return _asked(row), row["answer"]


def _gsm8k(row: Row) -> tuple[str, Any]:
    return _asked(row), str(row["answer"]).rpartition("#### ")[2].replace(",", "")


def _last_box(row: Row) -> tuple[str, Any]:
    from salt.reward import extract_answer
    return _asked(row), extract_answer(str(row["solution"]))


def _dapo(row: Row) -> tuple[str, Any]:
    """One user turn, in a wrapper that asks for another form of the answer than ours."""
    try:
        question, gold = row["prompt"][0]["content"], row["reward_model"]["ground_truth"]
        before, after = DAPO_WRAPPER
        return question.strip().removeprefix(before).removesuffix(after), gold
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise UserError(f"{row.where}: prompt must be a list with one message whose content is a text, reward_model an "
                        "object with a ground_truth") from error


def _gpqa(row: Row) -> tuple[str, Any]:
    """The question with its four options; the seed of their order is the item itself, so every run asks the same."""
    right = str(row["Correct Answer"]).strip()
    options = [right] + [str(row[f"Incorrect Answer {i}"]).strip() for i in (1, 2, 3)]
    random.Random(stable_seed("gpqa", row["Question"])).shuffle(options)
    listed = "\n".join(f"({letter}) {option}" for letter, option in zip("ABCD", options))
    return f"{str(row['Question']).strip()}\n\n{listed}", "ABCD"[options.index(right)]


@dataclass(frozen=True)
class Source:
    """A data set: hub id, the files of each split there (patterns, the default first), a row's question and gold."""
    hub: str
    files: dict[str, str]
    read: Callable[[Row], tuple[str, Any]] = _plain
    kind: str = "math"
    gated: bool = False
    repeated: bool = False            # the file holds questions many times, some with golds that disagree
    overlaps: str | None = None       # a test set that shares problems with it
    release: str = ""                 # the file as its authors released it, taken from a data folder too
    task_ids: dict[str, range] | None = None                          # of each split, where a file holds several
    seconds: float = 5.0              # of CPU time that a verdict may take,
    memory: int = 512 << 20           # and bytes


SOURCES = {
    "gsm8k": Source("openai/gsm8k", {"test": "main/test-*.parquet", "train": "main/train-*.parquet"}, _gsm8k),
    "math500": Source("HuggingFaceH4/MATH-500", {"test": "test.jsonl"}),
    "math": Source("DigitalLearningGmbH/MATH-lighteval",
                   {"test": "data/test-*.parquet", "train": "data/train-*.parquet"}, _last_box),
    "dapo-math": Source("BytedTsinghua-SIA/DAPO-Math-17k", {"train": "data/*.parquet"}, _dapo, repeated=True,
                        overlaps="math500"),
    "aime24": Source("HuggingFaceH4/aime_2024", {"test": "data/train-*.parquet"}),
    "aime25": Source("opencompass/AIME2025", {"test": "aime2025-I*.jsonl"}),
    "gpqa": Source("Idavidrein/gpqa", {"test": "gpqa_diamond.csv"}, _gpqa, kind="choice", gated=True),
    "mbpp": Source("google-research-datasets/mbpp", {"test": "full/test-*.parquet", "train": "full/train-*.parquet"},
                   code_tasks.mbpp, kind="code", release="mbpp.jsonl",
                   task_ids={"test": range(11, 511), "train": range(601, 975)}),
    "humaneval": Source("openai/openai_humaneval", {"test": "openai_humaneval/test-*.parquet"}, code_tasks.humaneval,
                        kind="code", release="HumanEval.jsonl.gz"),
    "humanevalplus": Source("evalplus/humanevalplus", {"test": "data/test-*.parquet"}, code_tasks.humaneval,
                            kind="code", release="HumanEvalPlus.jsonl.gz", seconds=30.0, memory=2 << 30),
}
NAMES = (*ARITH_DIGITS, *SOURCES)
INSTRUCTIONS = {"math": INSTRUCTION, "choice": CHOICE_INSTRUCTION, "code": CODE_INSTRUCTION}


def load_problems(name: str, *, split: str | None = None, data_dir: str | Path | None = None, limit: int | None = None,
                  seed: int = 0) -> list[Problem]:
    """The problems of a registered data set or of a local file, in their order; `limit` takes the first of them.

    split: "train" or "test" (default: test where there is one). data_dir: folder of local copies; without it the hub
    and its cache. seed: the sums of arith's training split. Raises UserError naming file, line and field; rows whose
    gold does not parse are skipped and named on stderr.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit {limit} of {name}: at least 1")
    if name in ARITH_DIGITS:
        return _arith(name, split or "test", seed)[:limit]
    if name in SOURCES:
        source = SOURCES[name]
        split = split or next(iter(source.files))
        if split not in source.files:
            raise UserError(f"{name} has no split {split!r}: it has {', '.join(source.files)}")
        files = _local_files(name, split, data_dir) if data_dir is not None else _hub_files(name, split)
    elif name.endswith(SUFFIXES):
        source, files, name = Source("", {}), [Path(name)], Path(name).name
    else:
        raise UserError(f"unknown data set {name!r}: one of {', '.join(NAMES)}, or a file ({', '.join(SUFFIXES)})")
    where = ", ".join(map(str, files))
    rows = (row for file in files for row in read_rows(file))
    if source.task_ids:
        rows = (row for row in rows if row["task_id"] in source.task_ids[split])
    found = (_problem(row, source, name, number) for number, row in enumerate(rows))
    found = _distinct(found, where) if source.repeated else list(found)
    _refuse_duplicates(found, where)
    kept = _with_gold(found, limit, where)
    if source.overlaps:
        _report_overlap(kept, name, source.overlaps, data_dir)
    return kept


def _arith(name: str, split: str, seed: int) -> list[Problem]:
    if split not in ARITH_SIZES:
        raise UserError(f"{name} has no split {split!r}: it has {', '.join(ARITH_SIZES)}")
    from toy.arithmetic import problems, question
    sums = problems(split, ARITH_SIZES[split], seed if split == "train" else 0,      # every run is tested alike
                    ARITH_DIGITS[name])
    return [Problem(f"{name}/{a}+{b}", question(a, b), str(a + b), "math", "") for a, b in sums]


def _local_files(name: str, split: str, data_dir: str | Path) -> list[Path]:
    folder = Path(data_dir) / name
    own = [path for suffix in SUFFIXES if (path := folder / f"{split}{suffix}").is_file()]
    release = folder / SOURCES[name].release
    files = (own[:1] or sorted(folder.glob(SOURCES[name].files[split]))                # else a copy of the hub's files
             or ([release] if release.is_file() else []))
    if not files:
        raise UserError(f"no {split} split of {name}: looked for {folder / split}.jsonl (.parquet, …); "
                        f"put it there, or leave out --data-dir to take it from the hub")
    return files


def _hub_files(name: str, split: str) -> list[Path]:
    """A snapshot's files of one split: downloaded, or from the cache when the hub cannot be reached."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError
    from huggingface_hub.utils import disable_progress_bars
    source = SOURCES[name]
    pattern = source.files[split]
    disable_progress_bars()
    try:
        folder = Path(snapshot_download(source.hub, repo_type="dataset", allow_patterns=[pattern]))
        files, cause = sorted(folder.glob(pattern)), f"the snapshot holds no {pattern}"
    except GatedRepoError:
        files, cause = [], "access denied"
    except OSError as error:                       # every error of the hub's client is one, and so is a full disk
        files, cause = [], str(error).strip().splitlines()[0]
    if files:
        return files
    cached = Path(constants.HF_HUB_CACHE) / f"datasets--{source.hub.replace('/', '--')}"
    terms = (f" {name} is gated: accept its terms at https://huggingface.co/datasets/{source.hub} and log in (`hf auth "
             f"login`, or set HF_TOKEN).") if source.gated else ""
    raise UserError(f"cannot get {name} from the hub ({source.hub}: {cause}); looked for {cached} (HF_HOME)."
                    f"{terms} Or put {name}/{split}{Path(pattern).suffix} in a folder and pass --data-dir FOLDER")


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a .jsonl, .jsonl.gz, .parquet or .csv file, each with its place. Raises UserError."""
    reader = {".parquet": _parquet_rows, ".csv": _csv_rows}.get(path.suffix, _json_rows)
    empty = True
    try:
        for row in reader(path):
            empty = False
            yield row
    except FileNotFoundError as error:
        raise UserError(f"no data file {path}") from error
    except (OSError, EOFError, zlib.error, csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if empty:
        raise UserError(f"{path} holds no rows")


def _json_rows(path: Path) -> Iterator[Row]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}, line {number}: not JSON ({error})") from error
            if not isinstance(values, dict):
                raise UserError(f"{path}, line {number}: a JSON object with fields is expected")
            yield Row(values, f"{path}, line {number}")


def _csv_rows(path: Path) -> Iterator[Row]:
    with open(path, encoding="utf-8", newline="") as lines:
        for number, values in enumerate(csv.DictReader(lines), 1):
            yield Row({field: value for field, value in values.items() if isinstance(field, str) and value is not None},
                      f"{path}, row {number}")


def _parquet_rows(path: Path) -> Iterator[Row]:
    """In batches: DAPO-Math-17k's 1.8 million rows would take gigabytes at once."""
    import pyarrow.parquet
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = (values for batch in file.iter_batches() for values in batch.to_pylist())
            for number, values in enumerate(rows, 1):
                yield Row(values, f"{path}, row {number}")
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path} is not a parquet file: {error}") from error


def _problem(row: Row, source: Source, name: str, number: int) -> Problem:
    question, gold = source.read(row)
    if not isinstance(question, str) or not question.strip():
        raise UserError(f"{row.where}: the question must be a text that is not empty, not {type(question).__name__}")
    if isinstance(gold, float) and gold.is_integer():                     # some copies store integers as floats
        gold = int(gold)
    own = next((row[field] for field in ("id", "unique_id", "Record ID", "task_id") if field in row), number)
    instruction = row.get("instruction", INSTRUCTIONS[source.kind])
    if not isinstance(instruction, str):
        raise UserError(f"{row.where}: the field 'instruction' must be a text, not {type(instruction).__name__}")
    answer = "" if gold is None else str(gold).strip()
    return Problem(f"{name}/{own}", question.strip(), answer, source.kind, instruction)


def _distinct(problems: Iterator[Problem], where: str) -> list[Problem]:
    """Each question once, where it stands first; those whose golds disagree are dropped. Both are counted on stderr."""
    first, golds, rows = {}, {}, 0
    for rows, problem in enumerate(problems, 1):
        question = " ".join(problem.question.split())                       # copies differ in white space
        first.setdefault(question, problem)
        golds.setdefault(question, set()).add(problem.answer)
    kept = [problem for question, problem in first.items() if len(golds[question]) == 1]
    print(f"{where}: {len(first)} different questions in {rows} rows; dropped {len(first) - len(kept)} whose gold "
          f"answers disagree", file=sys.stderr)
    return kept


def _report_overlap(problems: list[Problem], name: str, test_set: str, data_dir: str | Path | None) -> None:
    """How many of the problems a test set holds too, up to punctuation and markup; or why that cannot be known."""
    bare = lambda problem: re.sub(r"[\W_]", "", problem.question).lower()
    try:
        tested = {bare(problem) for problem in load_problems(test_set, split="test", data_dir=data_dir)}
    except UserError as error:
        print(f"{name}: how many of its problems {test_set} holds was not checked: {error}", file=sys.stderr)
        return
    both = {problem.id: bare(problem) for problem in problems if bare(problem) in tested}
    print(f"{name}: {len(set(both.values()))} problems of {test_set} are among its {len(problems)}: {_some([*both])}",
          file=sys.stderr)


def _some(ids: list[str]) -> str:
    return (", ".join(ids[:NAMED]) + (", …" if len(ids) > NAMED else "")) or "none"


def _refuse_duplicates(problems: list[Problem], where: str) -> None:
    seen = set()
    for problem in problems:
        if problem.id in seen:
            raise UserError(f"{where}: the id {problem.id!r} occurs twice; ids must differ")
        seen.add(problem.id)


def _with_gold(problems: list[Problem], limit: int | None, where: str) -> list[Problem]:
    """The first `limit` problems whose gold the verifier can read; the others among them are named on stderr."""
    from salt.reward import gold_parses
    kept, skipped = [], []
    for problem in problems:
        if len(kept) == limit:
            break
        good = problem.kind != "math" or gold_parses(problem.answer)
        (kept if good else skipped).append(problem)
    if not kept and not skipped:
        raise UserError(f"{where}: no problem is left to take")
    if skipped:
        named = _some([problem.id for problem in skipped])
        if not kept:
            raise UserError(f"{where}: none of the {len(skipped)} gold answers can be parsed ({named})")
        print(f"{where}: skipped {len(skipped)} row(s) whose gold answer cannot be parsed: {named}", file=sys.stderr)
    return kept


def stable_seed(*parts) -> int:
    """A seed of 63 bits made of anything with a stable repr: the same on every machine and in every process."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


class PromptStream:
    """The order of the prompts in training: a fresh permutation per epoch, decided by (seed, epoch) alone.

    So it does not depend on the number of processes or on how many prompts are taken at a time, and two integers
    restore it exactly.
    """

    def __init__(self, problems: list[Problem], seed: int):
        if not problems:
            raise ValueError("PromptStream: no problems")
        self.problems, self.seed = problems, seed
        self._enter(0, 0)

    def _enter(self, epoch: int, position: int) -> None:
        self.epoch, self.position = epoch, position
        self.order = list(range(len(self.problems)))
        random.Random(stable_seed("prompts", self.seed, epoch)).shuffle(self.order)

    def take(self, n: int) -> list[Problem]:
        """The next n problems, across the end of an epoch where there is one."""
        taken = []
        while len(taken) < n:
            if self.position == len(self.order):
                self._enter(self.epoch + 1, 0)
            part = self.order[self.position:self.position + n - len(taken)]
            taken += [self.problems[index] for index in part]
            self.position += len(part)
        return taken

    @property
    def taken(self) -> int:
        """Prompts taken since the start of the first epoch."""
        return self.epoch * len(self.problems) + self.position

    def state(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load(self, state: dict[str, int]) -> None:
        """Continue where `state` was taken. Raises UserError if it cannot come from this data set."""
        epoch, position = state["epoch"], state["position"]
        if epoch < 0 or not 0 <= position <= len(self.problems):
            raise UserError(f"data position {position} of epoch {epoch} does not fit {len(self.problems)} problems: "
                            f"the checkpoint belongs to another data set")
        self._enter(epoch, position)
