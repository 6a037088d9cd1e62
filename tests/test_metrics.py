"""Samples, throughput and trackers: what a run hands on beside metrics.jsonl."""
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from salt.advantages import reweight
from salt.errors import UserError
from salt.metrics import RunDirectory, Tracker, check_tracker, command_line, geometry_metrics, sample_table, throughput

ROOT = Path(__file__).resolve().parents[1]
CONFIG = {"model": "tiny", "lr": 1e-4, "salt": None, "rank_below_full": False}


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path / "run", CONFIG)


def table(rewards, advantages, **given):
    m = len(rewards)
    return sample_table([f"p{i // 2}" for i in range(m)], [f"c{i}" for i in range(m)], torch.tensor(rewards),
                        torch.tensor(advantages), 2 * torch.tensor(advantages), 2, **given)


def test_samples_show_whole_groups_and_those_with_a_signal_first():
    rows = table([1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0], [0.0, 0.0, -0.5, 0.5, 0.0, 0.0, 0.5, -0.5], groups=3)
    assert [row["completion"] for row in rows] == ["c2", "c3", "c6", "c7", "c0", "c1"]
    assert rows[0] == {"prompt": "p1", "completion": "c2", "reward": 0.0, "advantage": -0.5, "coefficient": -1.0}
    assert len(table([1.0, 0.0], [0.5, -0.5], groups=3)) == 2


def test_samples_survive_any_text_and_are_forgotten_on_rewind(run):
    text = 'two\nlines, "quotes", \\boxed{½} and \u2028'
    for step in (3, 20):
        path = run.write_samples(step, [{"prompt": text, "completion": "", "reward": math.nan}])
    assert path.relative_to(run.path).as_posix() == "samples/step-000020.jsonl"
    line, = path.read_bytes().split(b"\n")[:-1]
    assert json.loads(line) == {"prompt": text, "completion": "", "reward": None}
    run.rewind(3)
    assert [p.name for p in (run.path / "samples").iterdir()] == ["step-000003.jsonl"]


def test_throughput_by_hand():
    # 1200 tokens in 4 s, of which 3 s sampling; 10 steps of 4 s are left
    assert throughput({"sample": 3.0, "update": 1.0, "total": 4.0}, 1200, 10) == {
        "tokens_per_second": 300.0, "sample_tokens_per_second": 400.0, "seconds_left": 40}
    assert throughput({"sample": 0.0, "total": 0.0}, 0, 0)["tokens_per_second"] == 0


# ------------------------------------------------------------------------------------------------------------- trackers


@pytest.mark.parametrize("name, said", [
    ("wandbb", "--tracker wandbb: one of .*tensorboard.*wandb"),
    ("comet_ml", "--tracker comet_ml needs its package: pip install comet-ml")])
def test_unknown_trackers_and_missing_packages_are_one_line(run, name, said):
    for refused in (lambda: check_tracker(name), lambda: Tracker(name, run.path, CONFIG)):
        with pytest.raises(UserError, match=said):
            refused()


CUSTOM = """
import os, sys, torch
from pathlib import Path
from accelerate.tracking import GeneralTracker, register_tracker_class
from salt.metrics import Tracker

class Notes(GeneralTracker):
    name, requires_logging_directory, tracker = "notes", True, None
    def __init__(self, run_name, logging_dir):
        super().__init__()
        self.path = Path(logging_dir) / run_name
    def start(self):
        if "fail" in sys.argv:
            raise OSError("no key\\nconfigured")
        self.path.write_text("")
    def _add(self, *what):
        self.path.write_text(self.path.read_text() + repr(what) + "\\n")
    def store_init_configuration(self, values): self._add("config", values)
    def log(self, values, step=None): self._add(step, values)
    def finish(self): self._add("finish")

register_tracker_class(Notes)
tracker = Tracker("notes", Path(sys.argv[1]), {"lr": 0.5, "salt": None, "scope": "group"})
tracker.log({"step": 7, "reward": 0.25, "alpha": float("nan"), "kl": None, "system": {"seconds": {"total": 2}}})
tracker.finish()
print(torch.distributed.is_initialized(), torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"]))
"""


def notes(tmp_path, *arguments):
    from os import environ
    return subprocess.run([sys.executable, "-c", CUSTOM, str(tmp_path), *arguments], capture_output=True, text=True,
                          cwd=ROOT, env=environ | {"OMP_NUM_THREADS": "1"})


@pytest.mark.slow
def test_a_tracker_gets_the_configuration_and_the_numbers_of_every_step(tmp_path):
    done = notes(tmp_path)
    assert done.stdout == "False True\n", done.stderr
    assert [eval(line) for line in (tmp_path / "notes").read_text().splitlines()] == [
        ("config", {"lr": 0.5, "salt": "None", "scope": "group"}),
        (7, {"step": 7, "reward": 0.25, "system/seconds/total": 2}), ("finish",)]


@pytest.mark.slow
def test_a_tracker_that_does_not_start_is_one_line(tmp_path):
    done = notes(tmp_path, "fail")
    assert done.returncode == 1
    assert done.stderr.strip().endswith("UserError: --tracker notes does not start: no key configured")


@pytest.mark.slow
def test_tensorboard_reads_back_what_was_logged(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    tracker = Tracker("tensorboard", run.path, CONFIG)
    for step in (1, 2):
        tracker.log({"step": step, "reward": step / 4, "alpha": None, "system": {"seconds": {"total": 2.0}}})
    tracker.finish()
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(1, 0.25), (2, 0.5)]
    assert set(events.Tags()["scalars"]) == {"step", "reward", "system/seconds/total"}


def test_the_recorded_command_line_names_no_folder_of_this_machine(tmp_path):
    asked = ["train.py", "--model", str(tmp_path / "model"), f"--output={tmp_path / 'run'}", "--data-dir", "../data",
             "--lr", "1e-4", "--regularizer=none"]
    assert command_line(asked) == ["train.py", "--model", "model", "--output=run", "--data-dir", "../data", "--lr",
                                   "1e-4", "--regularizer=none"]


def test_alpha_is_the_mean_over_blocks_with_a_signal():
    """Also where a block's updates cancel altogether: n_eff is 0 there as it is without a signal, but α is 1."""
    cancels, apart = torch.ones(2, 2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    gram, a = torch.block_diag(cancels, apart, apart), torch.tensor([0.7, -0.7, 0.7, -0.7, 0.0, 0.0])
    new = reweight(gram, a, list(torch.arange(6).split(2)))
    assert geometry_metrics(gram, a, 2, new.coefficients, new)["alpha"] == 0.5
