"""Save and resume, atomically: a run that is killed at any moment goes on as if it had not been.

A checkpoint is one folder `step-000020/state.pt`. It is written under a temporary name, synced to the disk and renamed,
so a folder without `.tmp` in its name is whole; the last two are kept. What it holds: weights, optimizer, step, the
position in the stream of prompts, the groups that dynamic sampling left over, the range of the entropy so far. No state
of a random number generator: every draw of step t is seeded by (seed, purpose, t), so there is none to carry.

Departures from the paper: none (the paper does not speak of resuming).
"""
import os
import pickle
import shutil
import sys
from pathlib import Path

import torch

from salt.errors import UserError

KEPT = 2


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save(folder: Path, step: int, state: dict) -> Path:
    """Write `state` as the checkpoint of `step` below `folder`, then drop all but the last two.

    UserError when the disk refuses; the older checkpoints are then untouched.
    """
    final = folder / f"step-{step:06d}"
    temporary = folder / f"{final.name}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        torch.save(state, temporary / "state.pt")
        _sync(temporary / "state.pt")
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        _sync(folder)
    except (OSError, RuntimeError) as error:            # torch.save turns a full disk into a RuntimeError
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"cannot write the checkpoint {final}: {error}; the older ones are intact") from error
    for old in steps(folder)[:-KEPT]:
        shutil.rmtree(old)
    return final


def steps(folder: Path) -> list[Path]:
    """The whole checkpoints below `folder`, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.suffix != ".tmp")


def latest(folder: Path) -> dict | None:
    """The newest checkpoint that can be read, None when there is none. Half-written ones are named and passed over."""
    for path in folder.glob("step-*.tmp"):
        print(f"ignoring {path}: it was not finished", file=sys.stderr)
    for path in reversed(steps(folder)):
        try:
            return torch.load(path / "state.pt", map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            print(f"ignoring {path}: it cannot be read ({type(error).__name__})", file=sys.stderr)
    return None


def check(state: dict, config: dict, may_change: tuple[str, ...]) -> None:
    """UserError unless the checkpoint was written by a run of this configuration."""
    for key, value in config.items():
        if key not in may_change and state["config"].get(key) != value:
            raise UserError(f"the checkpoint is of another configuration: {key} is {state['config'].get(key)!r} in it, "
                            f"{value!r} here")
