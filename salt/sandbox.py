"""Runs code that nobody vouches for, and asks it for values.

The parent never asks a program whether it is right: it sends expressions and compares the values itself. Expected
values and tests stay here. So a program can exit, print, forge replies, replace builtins or walk frames as it likes:
all it controls is its own answers. A value comes back as JSON, tagged with its type (salt/sandbox_child.py), and is
built anew from None, bool, int, float, complex, str, list, tuple, set, frozenset and dict: objects with an `__eq__` of
their own never arrive.

What holds a program, on Linux, as root or where unprivileged user namespaces are allowed:

- it sees no file but Python, without packages, and /usr, read-only, and an empty /tmp in memory that ends with it;
- no network, no process of anyone else, no privileges, standard streams on /dev/null, an empty environment;
- per process: CPU seconds, 1 GiB of memory, 16 MiB files, 64 open files; 64 processes; 2 * `seconds` + 1 of real time
  in all; replies of 32 MiB;
- its processes end with the sandbox, and the sandbox ends with the process that made it, however that ends.

`weak` leaves out the first two and, for root, the limit on processes: the program then runs in a temporary folder, as
you, and can read, write and send what you can.

Departures from the paper: none (the paper does not say how code is judged).
"""
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from salt.errors import UserError

CHILD = Path(__file__).with_name("sandbox_child.py")
MAX_REPLY = 32 << 20    # bytes; HumanEval+ asks for lists of a million numbers
START_LIMIT = 60        # seconds until the child has shut itself in
KINDS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict,
         "complex": lambda parts: complex(*parts), "int": lambda text: int(text, 16)}


class ProgramError(Exception):
    """The program did not give a value: it raised, ended, exhausted a limit or broke the protocol."""


def wall_limit(seconds: float) -> float:
    """Seconds of real time for `seconds` of CPU time. A second line: only a program that sleeps gets there."""
    return 2 * seconds + 1


def _built(value: Any) -> Any:
    """The value that `plain` of salt/sandbox_child.py has described."""
    if isinstance(value, list):
        return [_built(item) for item in value]
    if isinstance(value, dict):
        (kind, items), = value.items()
        return KINDS[kind](_built(items))
    return value


class Sandbox:
    """A process for one program. Use as a context manager.

    seconds: of CPU time, per process. Raises UserError if this machine cannot isolate it and `weak` is not set."""

    def __init__(self, *, seconds: float = 5.0, weak: bool = False):
        self.failed = False      # whether any request has, even if the tests caught the exception
        self.weak, self.left = weak, START_LIMIT
        self.folder = tempfile.TemporaryDirectory() if weak else None
        # -P -s and no environment are -I, except that PYTHONHASHSEED counts: the order of sets is the same every time
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-S", "-B", CHILD, str(seconds), "weak" if weak else "isolated"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            env={"PYTHONHASHSEED": "0"}, cwd=self.folder.name if weak else "/", start_new_session=True)
        try:
            self._answer(b"")
        except ProgramError as error:
            self.close()
            raise UserError(f"untrusted code cannot be isolated here ({error}): run as root or allow unprivileged user "
                            f"namespaces, or accept the risk with --allow-weak-sandbox") from error
        self.left = wall_limit(seconds)

    def run(self, *sources: str) -> None:
        """Execute the sources in one namespace. Raises ProgramError."""
        self._request(list(sources))

    def call(self, expression: str) -> Any:
        """The value of an expression in that namespace, in plain types. Raises ProgramError."""
        return self._request(expression)

    def _request(self, content: str | list[str]) -> Any:
        try:
            return self._answer(json.dumps(content).encode() + b"\n")
        except ProgramError:
            self.failed = True
            raise

    def _answer(self, request: bytes) -> Any:
        line = self._exchange(request)
        try:
            reply = json.loads(line)
            value, error = (None, str(reply["error"])) if "error" in reply else (_built(reply["value"]), None)
        except MemoryError:             # the judge's own limit; it decides what that means
            raise
        except Exception as fault:      # a forged reply can provoke any: not JSON, unhashable, too deep, too large
            raise ProgramError(f"malformed reply ({type(fault).__name__})") from fault
        if error is not None:
            raise ProgramError(error[:200])
        return value

    def _exchange(self, outgoing: bytes) -> bytes:
        """Send the request and read what comes back up to a newline; neither blocks, whatever the other side does."""
        requests, replies = self.process.stdin.fileno(), self.process.stdout.fileno()
        received = bytearray()
        while not received.endswith(b"\n"):
            began = time.monotonic()
            readable, writable, _ = select.select([replies], [requests] if outgoing else [], [], max(self.left, 0))
            self.left -= time.monotonic() - began
            if not readable and not writable:
                raise ProgramError("time limit")
            if writable:
                try:
                    outgoing = outgoing[os.write(requests, outgoing[:select.PIPE_BUF]):]
                except BrokenPipeError as error:
                    raise ProgramError("the process has ended") from error
            if readable:
                part = os.read(replies, 1 << 16)
                received += part
                if not part or len(received) > MAX_REPLY:
                    raise ProgramError("reply too long" if part else "the process has ended")
        return bytes(received)

    def close(self) -> None:
        """End every process and remove every file of the program."""
        if self.weak:
            os.killpg(self.process.pid, signal.SIGKILL)
        else:
            self.process.terminate()      # it ends the others, waits for them, then ends itself
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        if self.folder:
            self.folder.cleanup()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def must_be_weak(allowed: bool) -> bool:
    """Whether this machine cannot isolate programs. Then raises UserError, or says so on stderr where it is allowed."""
    try:
        Sandbox().close()
        return False
    except UserError as error:
        if not allowed:
            raise
        print(f"WARNING: untrusted code cannot be isolated here ({error.__cause__}): generated programs run as you, "
              "can read and write your files and reach the network", file=sys.stderr)
        return True
