"""Short training runs for the tests: their flags, a reward of their own, and runs that kill themselves.

    python tests/training.py MOMENT [train.py's flags]      `MOMENT` as in `arm`: SIGKILL falls then
"""
import contextlib
import itertools
import json
import os
import signal
import sys
from concurrent.futures import Future
from pathlib import Path
from threading import Timer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import train
from salt import checkpoint
from salt.data import PromptStream
from salt.metrics import RunDirectory

SMALL = ("--batch-size 4 --mini-batch 2 --group-size 4 --max-prompt 16 --max-response 12 --limit 16 --epochs 50 "
         "--lr 1e-3 --steps 2 --eval-every 0").split()                      # two updates of 8 responses per step


class Reward:
    """Like RewardPool, in this process. The default is one that an untrained model earns about half of the time."""
    restarts = timeouts = 0

    def __init__(self, judge=lambda text: "7" in text):
        self.judge = judge

    def submit(self, texts: list[str], answers: list[str]) -> Future:
        assert len(texts) == len(answers)
        future = Future()
        future.set_result([float(self.judge(text)) for text in texts])
        return future


@contextlib.contextmanager
def prompts_noted(output: Path):
    """Every batch of problems that the stream hands out becomes a line of taken.jsonl in the run directory."""
    take = PromptStream.take

    def noted(stream, count: int):
        taken = take(stream, count)
        if os.environ.get("RANK", "0") == "0":
            with (output / "taken.jsonl").open("a") as file:
                file.write(json.dumps([problem.id for problem in taken]) + "\n")
        return taken

    PromptStream.take = noted
    try:
        yield
    finally:
        PromptStream.take = take


def run(model, output: Path, *flags: str, pool=None) -> list[dict]:
    """Train in this process -> the lines of metrics.jsonl. A later flag wins over one of SMALL."""
    with prompts_noted(output):
        train.main(["--model", str(model), *SMALL, "--output", str(output), *flags], pool=pool or Reward())
    return lines(output)


def resume(output: Path, *flags: str, pool=None) -> list[dict]:
    with prompts_noted(output):
        train.main(["--resume", str(output), *flags], pool=pool or Reward())
    return lines(output)


def lines(output: Path) -> list[dict]:
    """metrics.jsonl without what depends on the clock."""
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key != "system"} for record in records]


def after(owner, name: str, number: int, action) -> None:
    """Do `action` right after the `number`-th call of owner.name."""
    original, calls = getattr(owner, name), itertools.count(1)

    def wrapped(*arguments):
        result = original(*arguments)
        if next(calls) == number:
            action(*arguments)
        return result

    setattr(owner, name, wrapped)


def die(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(moment: str) -> None:
    """created:1, logged:N (line N is written), saving:N (checkpoint N is half on the disk), saved:N, seconds:S,
    "rank 1 in step:N" (before its update), never."""
    name, _, number = moment.partition(":")
    if name == "never":
        return
    if name == "rank 1 in step":
        if os.environ["RANK"] == "1":
            after(train, "group_advantages", int(number), die)
    elif name == "created":
        after(RunDirectory, "create", 1, die)
    elif name == "logged":
        after(RunDirectory, "log", int(number), die)
    elif name == "saving":                              # a checkpoint is synced twice: the file, then the folder
        def cut(path: Path) -> None:
            path.write_bytes(path.read_bytes()[:20_000])
            die()
        after(checkpoint, "_sync", 2 * int(number) - 1, cut)
    elif name == "saved":
        after(checkpoint, "save", int(number), die)
    else:
        after(RunDirectory, "create", 1, lambda *_: Timer(float(number), die).start())


if __name__ == "__main__":
    arm(sys.argv[1])
    flags = sys.argv[2:]
    with prompts_noted(Path(flags[flags.index("--resume" if "--resume" in flags else "--output") + 1])):
        train.main(flags, pool=Reward())
