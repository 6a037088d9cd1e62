"""A user's mistake is one line on stderr and exit status 2, never a traceback.

Departures from the paper: none (the paper does not speak of errors).
"""
import argparse
import os
import sys
from typing import Callable


class UserError(Exception):
    """A wrong flag, file, row, checkpoint or model. The message says what, where and what to do, in one line."""


class WrongFlag(UserError):
    """A command line that cannot be: every process of a run sees it alike."""


class Parser(argparse.ArgumentParser):
    """argparse, with a wrong flag said in one line and no guessing at abbreviated flags."""

    def __init__(self, **settings):
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str):
        raise WrongFlag(f"{message} ({self.prog} --help lists the flags)")


def run(main: Callable[[], int | None]) -> None:
    """Call a program's `main` and leave with its exit status; a UserError becomes one line and status 2.

    Of several processes each names itself, except for a wrong command line, which rank 0 alone tells.
    """
    rank = os.environ.get("RANK", "0")
    process = "" if rank == "0" else f"rank {rank}: "
    try:
        sys.exit(main() or 0)
    except UserError as error:
        if not (process and isinstance(error, WrongFlag)):
            print(f"error: {process}{' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
