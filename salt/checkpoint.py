"""Save and resume, atomically: a run that is killed at any moment goes on as if it had not been.

A checkpoint is one folder `step-000020/`: `weights/`, model and optimizer as torch.distributed.checkpoint writes them,
each process its own shards, and `state.pt`, all else: step, position in the stream of prompts, range of the entropy so
far. It is written under a temporary name, synced to the disk and renamed, so a folder without `.tmp` in its name is
whole; the last two are kept. Another number of processes may go on: weights are resharded as they are read, and nothing
in state.pt belongs to a process. No state of a random number generator: every draw of step t is seeded by (seed,
purpose, t), so there is none to carry. Several machines need a folder they all see.

Departures from the paper: none (the paper does not speak of resuming).
"""
import contextlib
import os
import pickle
import shutil
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from salt.distributed import compute_once, rank
from salt.errors import UserError

KEPT = 2
UNREADABLE = (OSError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError, dcp.api.CheckpointException)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))


@contextlib.contextmanager
def _quietly():
    """torch.distributed.checkpoint warns a single process that it is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict) -> Path:
    """Write the checkpoint of `step` below `folder`, then drop all but the last two. Every process calls this.

    state: plain values, the same on every process. UserError when the disk refuses; older checkpoints are untouched.
    """
    final = folder / f"step-{step:06d}"
    temporary = folder / f"{final.name}.tmp"

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def finish() -> None:
        torch.save(state, temporary / "state.pt")
        _sync(temporary / "state.pt")
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        _sync(folder)

    try:
        compute_once(begin)
        with _quietly():
            dcp.save(_weights(model, optimizer), checkpoint_id=temporary / "weights")
        compute_once(finish)
    except (OSError, RuntimeError, dcp.api.CheckpointException) as error:    # torch.save makes a RuntimeError of it
        compute_once(lambda: shutil.rmtree(temporary, ignore_errors=True))
        reasons = [failure for failure, _ in error.failures.values()] if hasattr(error, "failures") else [error]
        raise UserError(f"cannot write the checkpoint {final}: {reasons[0]}; the older ones are intact") from error
    compute_once(lambda: [shutil.rmtree(old) for old in steps(folder)[:-KEPT]])
    return final


def steps(folder: Path) -> list[Path]:
    """The whole checkpoints below `folder`, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.suffix != ".tmp")


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, config: dict,
         may_change: tuple[str, ...]) -> dict | None:
    """Put the newest checkpoint that can be read into model and optimizer; its state, or None when there is none.

    Half-written ones are named and passed over, and so are damaged ones. Every process calls this. UserError if it was
    written by a run of another configuration.
    """
    for path in compute_once(lambda: sorted(folder.glob("step-*.tmp"))):
        _say(f"ignoring {path}: it was not finished")
    for path in compute_once(lambda: steps(folder)[::-1]):
        try:
            state = compute_once(lambda: torch.load(path / "state.pt", map_location="cpu", weights_only=True))
            check(state, config, may_change)
            weights = _weights(model, optimizer)
            _check_shapes(path, weights["model"])
            with _quietly():
                dcp.load(weights, checkpoint_id=path / "weights")
        except UNREADABLE as error:
            _say(f"ignoring {path}: it cannot be read ({type(error).__name__})")
            continue
        set_state_dict(model, optimizer, model_state_dict=weights["model"], optim_state_dict=weights["optimizer"])
        return state
    return None


def _say(line: str) -> None:
    if rank() == 0:
        print(line, file=sys.stderr)


def _check_shapes(path: Path, weights: dict) -> None:
    """UserError unless the checkpoint holds each of these weights in its shape."""
    saved = dcp.FileSystemReader(path / "weights").read_metadata().state_dict_metadata
    for name, tensor in weights.items():
        shape = tuple(getattr(saved.get(f"model.{name}"), "size", ()))
        if shape != tuple(tensor.shape):
            raise UserError(f"{path} is of another model: {name} is {shape or 'not'} in it, {tuple(tensor.shape)} here")


def check(state: dict, config: dict, may_change: tuple[str, ...]) -> None:
    """UserError unless the checkpoint was written by a run of this configuration."""
    for key, value in config.items():
        if key not in may_change and state["config"].get(key) != value:
            raise UserError(f"the checkpoint is of another configuration: {key} is {state['config'].get(key)!r} in it, "
                            f"{value!r} here")
