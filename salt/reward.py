r"""Verifiable rewards: verdicts on answers, choice letters and programs, and a pool of workers that gives them.

A verdict is 1.0 or 0.0 (the r_i of Eq. 2; the -1 of DAPO's wrong answers is train.py's business).

- `math_reward` takes the last balanced `\boxed{...}` after `</think>` (of the whole text where no `</think>` occurs:
  the chat template opens the tag in the prompt, so completions carry the closing one only, and models without
  reasoning carry none). Where boxes nest, the last to open counts: the innermost. No box, or an answer longer than
  MAX_ANSWER characters, is 0. White space, full stops and commas at the end of gold and answer are dropped; then the
  same text is right, two integers are compared as such, and everything else goes to math-verify.
- `choice_reward` takes the last letter A-J that is announced as the answer, after `</think>` as above: alone in a box
  or in front of the option's text (`\boxed{C}`, `\boxed{\text{(C) 10 m/s}}`), or after "answer is" or "answer:"
  ("Answer: (C)", "the answer is option C."). A box that names several options in parentheses is none.
- `code_reward` takes the last complete block between lines of three backticks, after `</think>` as above: the last that
  defines something, if any does. The program runs in a process of its own (salt/sandbox.py); the data set's tests,
  which are trusted, run here and ask it for values. Any failed request is 0, even if a test swallows its exception.
- `RewardPool` runs them in worker processes, because math-verify can be sent into hours of work or gigabytes of
  memory by a short answer (`9^{9^{9^9}}`). A worker is this file run as a program: no torch, one thread, and limits set
  by the kernel: CPU seconds per answer (not wall time: verdicts must not depend on how busy the machine is) and address
  space. It ends at the end of its input, so none outlives a killed parent by more than one answer's limit.

An answer that exhausts its CPU limit scores 0. An answer whose worker dies in another way is tried once more in a fresh
worker, so that a worker killed from outside changes no verdict, then scores 0. The rest of the batch is unaffected.

Called directly, `math_reward` and the tests (not the program) of `code_reward` have no limits: for text you trust.

Departures from the paper:
1. The paper names math-verify and no more; extraction, limits and the fast path above are ours. The authors' released
   code also accepts the last number anywhere in the response; that fallback is left out.
"""
import contextlib
import functools
import json
import logging
import mmap
import os
import queue
import re
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Callable, Sequence

from salt.errors import UserError
from salt.sandbox import Sandbox, must_be_weak

MAX_ANSWER = 1000   # characters; the longest gold of MATH-500 has 53
MAX_PROGRAM = 100_000   # characters
CHUNK = 8           # answers per message to a worker
RETIRED = 77        # exit status of a worker that asks to be replaced
START_LIMIT = 120   # seconds within which a worker must be ready

BRACE = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)   # an escaped brace or backslash is one token and no brace
END_OF_ANSWER = re.compile(r"(?<!\\)[.,\s]+\Z")           # but `\,` is a space of LaTeX
FENCE = re.compile(r"^[ \t]*```.*$\n?", re.MULTILINE)
DEFINITION = re.compile(r"^[ \t]*(?:async\s+)?(?:def|class)\s|^\w+\s*=\s*lambda\b", re.MULTILINE)
INTEGER = re.compile(r"[+-]?(?:[0-9]+|[1-9][0-9]{0,2}(?:,[0-9]{3})+)")

# Every repetition before a letter is bounded, or a megabyte of asterisks would take quadratic time.
FONT = r"(?:\\(?:text|textbf|textrm|textit|mathrm|mathbf|mathit|mathsf|boldsymbol)\s{0,9}\{\s{0,9}){0,9}"
LETTER_IN_BOX = re.compile(rf"[\s$*]{{0,9}}{FONT}\(?([A-J])(?:\)?[\s}}.$*]*\Z|[).:](?!.*\([A-J]\)))", re.DOTALL)
LETTER_IN_TEXT = re.compile(rf"\b(?i:answer)[\s*]{{0,9}}(?::|(?i:is)\b:?)[\s*$:]{{0,9}}(?:(?i:option|choice)\s{{1,9}})?"
                            rf"[*$]{{0,9}}{FONT}\(?([A-J])(?![\w'’])")


def _conclusion(response: str) -> str:
    """The text after the last `</think>`, or all of it."""
    return response.rpartition("</think>")[2]


def _boxes(text: str) -> list[tuple[int, int]]:
    r"""Where the content of each balanced `\boxed{...}` begins and ends. One pass: linear in hostile text too."""
    boxes, opened = [], []   # opened: for each open brace, where its box's content begins, or None
    for token in BRACE.finditer(text, max(text.find("\\boxed"), 0)):
        if token[0] == "}":
            begin = opened.pop() if opened else None
            if begin is not None:
                boxes.append((begin, token.start()))
        elif token[0] == "{" or token[0].startswith("\\boxed"):
            opened.append(None if token[0] == "{" else token.end())
    return boxes


def extract_answer(response: str) -> str | None:
    r"""Content of the last balanced `\boxed{...}` after `</think>`, or None."""
    text = _conclusion(response)
    begin, end = max(_boxes(text), default=(None, None))
    return None if begin is None else text[begin:end]


def extract_choice(response: str) -> str | None:
    """The last letter that the response announces as its answer, or None."""
    text = _conclusion(response)
    found = list(LETTER_IN_TEXT.finditer(text))
    found += [LETTER_IN_BOX.match(text, begin, end) for begin, end in _boxes(text) if end - begin <= MAX_ANSWER]
    return max(((match.start(1), match[1]) for match in found if match), default=(0, None))[1]


@functools.cache
def _math_verify():
    """math-verify, imported on first use: only workers and `gold_parses` need it."""
    import math_verify
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)   # it warns that its own (SIGALRM) time limit is off
    return math_verify


def _trim(text: str) -> str:
    return END_OF_ANSWER.sub("", text.strip())


@functools.lru_cache(maxsize=8192)
def _parse_gold(gold: str) -> list:
    return _math_verify().parse(f"\\boxed{{{gold}}}", parsing_timeout=None)


@functools.lru_cache(maxsize=8192)   # the rollouts of one prompt often end in the same answer
def _equivalent(gold: str, answer: str) -> bool:
    if gold == answer:
        return gold != ""
    if INTEGER.fullmatch(gold) and INTEGER.fullmatch(answer):
        return int(gold.replace(",", "")) == int(answer.replace(",", ""))
    verifier = _math_verify()
    from sympy.core.random import seed
    seed(0)   # sympy tests identities at random points: the same ones for every worker and every order of answers
    config = verifier.LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
    prediction = verifier.parse(f"\\boxed{{{answer}}}", [config], parsing_timeout=None)
    return verifier.verify(_parse_gold(gold), prediction, timeout_seconds=None)   # gold first: it is asymmetric


def math_reward(response: str, gold: str) -> float:
    """1.0 if the response's boxed answer is equivalent to `gold` (LaTeX or plain), else 0.0. Without limits: see above.

    Raises ImportError without math-verify."""
    answer = extract_answer(response)
    if answer is None or len(answer) > MAX_ANSWER:
        return 0.0
    return float(_equivalent(_trim(gold), _trim(answer)))


def gold_parses(gold: str) -> bool:
    """Whether math-verify reads `gold` as mathematics. A row whose gold it does not read can hardly be answered right.

    Takes up to 4 ms unless the gold is an integer; without limits. Raises ImportError without math-verify."""
    gold = _trim(gold)
    return bool(INTEGER.fullmatch(gold)) or any(not isinstance(value, str) for value in _parse_gold(gold))


def choice_reward(response: str, letter: str) -> float:
    """1.0 if the last letter announced as the answer is `letter` (A-J, either case, with or without parentheses)."""
    return float(extract_choice(response) == letter.strip(" ().").upper())


def extract_code(response: str) -> str | None:
    """The program of a response: the last complete fenced block that defines something, else the last one, or None."""
    blocks = FENCE.split(_conclusion(response))[1:-1:2]
    return next(filter(DEFINITION.search, reversed(blocks)), blocks[-1] if blocks else None)


@functools.lru_cache(maxsize=256)
def _judge_of(tests: str) -> Callable:
    """The function `judge` that the tests define. Kept: HumanEval+ computes its expected values once."""
    names = {"__name__": "tests"}
    exec(compile(tests, "tests", "exec", optimize=0), names)      # optimize=0: asserts count, whatever PYTHONOPTIMIZE
    return names["judge"]


def code_reward(response: str, problem: str, *, seconds: float = 5.0, weak: bool = False) -> float:
    """1.0 if the response's program passes every test of `problem` (a gold of salt/code_tasks.py), else 0.0.

    seconds: of CPU time for the program. weak: without isolation, see salt/sandbox.py. The tests run in this process,
    without limits. Raises UserError if the program cannot be isolated here and `weak` is not set."""
    program = extract_code(response)
    if program is None or len(program) > MAX_PROGRAM:
        return 0.0
    task = json.loads(problem)
    with Sandbox(seconds=seconds, weak=weak) as sandbox:
        try:
            sandbox.run(task["before"] + "\n" + program, task["after"])
            _judge_of(task["tests"])(sandbox.call)
        except MemoryError:    # perhaps earlier answers' leftovers: the pool tries again in a fresh worker
            raise
        except Exception:      # a test may raise anything when it meets a wrong value, and that is a verdict
            return 0.0
    return float(not sandbox.failed)


REWARDS = {"math": math_reward, "choice": choice_reward, "code": code_reward}


class _Worker:
    """One worker process and the parent's end of its pipes."""

    def __init__(self, kind: str, timeout: float, memory: int, weak: bool):
        root = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self.wall_limit = 4 * timeout + 5   # a second line: only a worker that stands still escapes the CPU limit
        self.overdue = False
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "salt.reward", kind, str(timeout), str(memory), str(int(weak))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1",
                 "PYTHONHASHSEED": "0"})                                     # sympy's order of terms follows hashes
        self.received = b""
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)

    def read_line(self, limit: float) -> str | None:
        """The next line, or None: the worker has ended, or has been killed after `limit` seconds without one."""
        deadline = time.monotonic() + limit
        while b"\n" not in self.received:
            if not self.selector.select(max(deadline - time.monotonic(), 0)):
                self.overdue = True
                self.process.kill()
                return None
            part = self.process.stdout.read(65536)
            if not part:
                return None
            self.received += part
        line, self.received = self.received.split(b"\n", 1)
        return line.decode()

    def ready(self) -> "_Worker":
        """Wait until it has imported what it needs; a UserError if it cannot."""
        line = self.read_line(START_LIMIT)
        if line != "ready":
            self.stop()
            by_hand = "python -m salt.reward " + " ".join(self.process.args[4:])
            raise UserError(f"reward workers cannot start: {line or f'exit status {self.process.returncode}'}; "
                            f"run pip install -r requirements.txt, then {by_hand} to see the cause")
        return self

    def judge(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Verdicts on (response, gold) pairs; fewer than pairs if the worker ended on the way."""
        try:
            message = memoryview(json.dumps(pairs).encode() + b"\n")
            while message:
                message = message[self.process.stdin.write(message):]
        except BrokenPipeError:
            pass   # what it answered before it ended is still in the other pipe
        verdicts = []
        while len(verdicts) < len(pairs) and (line := self.read_line(self.wall_limit)) is not None:
            verdicts.append(float(line))
        return verdicts

    def stop(self) -> int:
        """End the process, free its pipes, return its exit status (negative: the signal that ended it)."""
        self.process.stdin.close()
        try:
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.selector.close()
        self.process.stdout.close()
        return self.process.wait()


class RewardPool:
    """Verdicts by worker processes, in the order of the input, independent of the number of workers.

    kind: a key of REWARDS; workers: processes; timeout: CPU seconds per answer, for a program and again for its tests;
    memory: bytes of address space each; allow_weak_sandbox: judge programs even where they cannot be isolated.
    Counters since the start: `restarts`, workers replaced for whatever reason; `timeouts`, answers beyond the limit.
    Raises ValueError on a bad argument, UserError if workers cannot start or isolate programs. Use as a context manager
    or close()."""

    def __init__(self, kind: str, workers: int = 2, timeout: float = 5.0, memory: int = 512 << 20, *,
                 allow_weak_sandbox: bool = False):
        if kind not in REWARDS or workers < 1 or timeout <= 0:
            raise ValueError(f"RewardPool needs a kind ({', '.join(REWARDS)}), workers >= 1 and timeout > 0, "
                             f"got {kind!r}, {workers} and {timeout}")
        self.restarts = self.timeouts = 0
        self._arguments = kind, timeout, memory, kind == "code" and must_be_weak(allow_weak_sandbox)
        self._counting = threading.Lock()
        self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()   # None: a place whose worker has ended
        started = [_Worker(*self._arguments) for _ in range(workers)]
        for worker in started:   # they import side by side; if one cannot, the others end with their pipes
            self._idle.put(worker.ready())
        self._threads = ThreadPoolExecutor(workers, "reward")
        self._collector = ThreadPoolExecutor(1, "reward-collector")

    def submit(self, responses: Sequence[str], golds: Sequence[str]) -> Future[list[float]]:
        """Like `score`, but returns at once; the future's result() is the list of verdicts."""
        pairs = list(zip(responses, golds, strict=True))
        if not all(isinstance(text, str) for pair in pairs for text in pair):
            raise TypeError("RewardPool: responses and golds must be strings")
        parts = [self._threads.submit(self._judge, pairs[i:i + CHUNK]) for i in range(0, len(pairs), CHUNK)]
        return self._collector.submit(lambda: [verdict for part in parts for verdict in part.result()])

    def score(self, responses: Sequence[str], golds: Sequence[str]) -> list[float]:
        """One verdict, 0.0 or 1.0, per response."""
        return self.submit(responses, golds).result()

    def _restart(self) -> _Worker:
        """A fresh worker. One that is killed from outside while it starts must not end the run: three attempts."""
        for _ in range(2):
            with contextlib.suppress(UserError):
                return _Worker(*self._arguments).ready()
        return _Worker(*self._arguments).ready()

    def _judge(self, pairs: list[tuple[str, str]]) -> list[float]:
        """Verdicts on one chunk, through as many workers as it takes."""
        verdicts, retried = [], None   # retried: index of the answer that is having its second chance
        worker = self._idle.get()
        try:
            while len(verdicts) < len(pairs):
                if worker is None:
                    worker = self._restart()
                verdicts += worker.judge(pairs[len(verdicts):])
                if len(verdicts) == len(pairs):
                    break
                ended, worker = worker, None
                status = ended.stop()
                timed_out = ended.overdue or status == -signal.SIGPROF
                with self._counting:
                    self.restarts += 1
                    self.timeouts += timed_out
                if timed_out or (status != RETIRED and retried == len(verdicts)):
                    verdicts.append(0.0)
                elif status != RETIRED:
                    retried = len(verdicts)
            return verdicts
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Drop the chunks that have not begun, wait for those that have, end the workers. Calling it twice is fine."""
        self._threads.shutdown(cancel_futures=True)
        self._collector.shutdown()
        while not self._idle.empty():
            if (worker := self._idle.get()) is not None:
                worker.stop()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _serve(kind: str, timeout: float, memory: int, weak: bool) -> None:
    """A worker's life: read lists of pairs, one per line; write one verdict per line."""
    verdicts = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)                                     # whatever a library prints stays out of the verdicts
    signal.signal(signal.SIGINT, signal.SIG_IGN)      # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGPROF, signal.SIG_DFL)     # the CPU timer ends the process: no handler to be swallowed
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform != "darwin":                      # macOS refuses it; the CPU limit alone holds there
        resource.setrlimit(resource.RLIMIT_AS, (memory, resource.getrlimit(resource.RLIMIT_AS)[1]))
    judge = functools.partial(REWARDS[kind], **({"seconds": timeout, "weak": weak} if kind == "code" else {}))
    try:
        judge("\\boxed{1/2}", "C")   # imports and tables before the first limit runs
    except ImportError as error:
        print(error, file=verdicts)
        return
    print("ready", file=verdicts)
    for line in sys.stdin.buffer:
        for response, gold in json.loads(line):
            signal.setitimer(signal.ITIMER_PROF, timeout)
            verdict = judge(response, gold)
            signal.setitimer(signal.ITIMER_PROF, 0)
            print(verdict, file=verdicts)
            try:
                mmap.mmap(-1, memory // 2).close()   # is half of the room left?
            except OSError:
                sys.exit(RETIRED)   # one answer's leftovers must not decide the next one's verdict


if __name__ == "__main__":
    _serve(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), bool(int(sys.argv[4])))
