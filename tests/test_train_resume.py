"""A run that is killed and resumed writes the same lines and the same weights as one that was left alone."""
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train
from salt import checkpoint
from salt.errors import UserError
from salt.metrics import RunDirectory
from training import ROOT, SMALL, Reward, lines, resume, run

GRPO = "--limit 8 --epochs 4 --steps 7 --save-every 2 --salt rand-proj --eval-every 3 --eval-limit 2 --eval-samples 2"
DAPO = ("--algo dapo --gen-batch 7 --limit 12 --epochs 40 --lr 1e-4 --steps 5 --save-every 2 --salt entropy-alpha "
        "--salt-scope 4")


@pytest.fixture(autouse=True)
def without_figures(monkeypatch):
    """curves.png takes three quarters of so short a run."""
    monkeypatch.setattr(RunDirectory, "draw", lambda run_directory: None)


@pytest.fixture(scope="module")
def undisturbed(tiny_folder, tmp_path_factory) -> dict[str, Path]:
    """Two runs that nothing happens to: two epochs and more of GRPO, and DAPO, which draws as often as it must."""
    found = {}
    for name, flags in (("grpo", GRPO), ("dapo", DAPO)):
        found[name] = tmp_path_factory.mktemp("undisturbed") / name
        run(tiny_folder, found[name], *flags.split())
    assert lines(found["grpo"])[-1]["epoch"] == 3 and lines(found["dapo"])[-1]["epoch"] >= 1
    return found


def kill(folder: Path, output: Path, flags: str, moment: str) -> None:
    """The same run in a process of its own, which gets SIGKILL at `moment` (tests/training.py)."""
    started = subprocess.run([sys.executable, ROOT / "tests" / "training.py", moment, "--model", folder, *SMALL, *flags,
                              "--output", output], cwd=ROOT, capture_output=True, text=True, timeout=300,
                             env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())})
    assert started.returncode == -signal.SIGKILL or moment.startswith("seconds"), started.stderr


def same(output: Path, expected: Path) -> bool:
    weights = [(path / "final" / "model.safetensors").read_bytes() for path in (output, expected)]
    return lines(output) == lines(expected) and weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm, moment", [
    ("grpo", "created:1"), ("grpo", "logged:2"), ("grpo", "logged:5"), ("grpo", "saving:1"), ("grpo", "saving:3"),
    ("grpo", "saved:2"), ("grpo", "seconds:0.7"), ("grpo", "seconds:1.9"), ("grpo", "seconds:3.1"),
    ("dapo", "logged:4"), ("dapo", "saving:2"), ("dapo", "saved:1"), ("dapo", "seconds:1.3")])
def test_killed_and_resumed(undisturbed, tiny_folder, tmp_path, capfd, algorithm, moment):
    output = tmp_path / algorithm
    kill(tiny_folder, output, {"grpo": GRPO, "dapo": DAPO}[algorithm].split(), moment)
    half_written = list((output / "checkpoints").glob("*.tmp"))
    assert bool(half_written) or not moment.startswith("saving")
    capfd.readouterr()
    resume(output)
    assert same(output, undisturbed[algorithm])
    said = capfd.readouterr().err
    assert all(path.name in said and "not finished" in said for path in half_written)
    assert not list((output / "checkpoints").glob("*.tmp")) and len(checkpoint.steps(output / "checkpoints")) == 2


@pytest.mark.slow
def test_killed_twice_and_with_a_line_cut_in_half(undisturbed, tiny_folder, tmp_path):
    output = tmp_path / "grpo"
    kill(tiny_folder, output, GRPO.split(), "logged:4")
    with (output / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    again = subprocess.run([sys.executable, ROOT / "tests" / "training.py", "logged:2", "--resume", output], cwd=ROOT,
                           capture_output=True, text=True, timeout=300)
    assert again.returncode == -signal.SIGKILL, again.stderr
    resume(output)
    assert same(output, undisturbed["grpo"])


def test_the_two_undisturbed_runs_repeat_themselves(undisturbed, tiny_folder, tmp_path):
    """What the comparisons rest on; and another seed gives other lines."""
    run(tiny_folder, tmp_path / "again", *DAPO.split())
    assert same(tmp_path / "again", undisturbed["dapo"])
    run(tiny_folder, tmp_path / "other", *DAPO.split(), "--seed", "1")
    assert lines(tmp_path / "other") != lines(undisturbed["dapo"])


def copied(undisturbed, tmp_path, name="grpo") -> Path:
    shutil.copytree(undisturbed[name], tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("algorithm, file", [("grpo", "state.pt"), ("dapo", "weights/__0_0.distcp")])
def test_going_back_to_the_checkpoint_before_the_last(undisturbed, tmp_path, algorithm, file, capsys):
    """The newest checkpoint is damaged: it is named, and the one before it leads to the same end."""
    output = copied(undisturbed, tmp_path, algorithm)
    newest = checkpoint.steps(output / "checkpoints")[-1]
    (newest / file).write_bytes((newest / file).read_bytes()[:1000])
    resume(output)
    assert same(output, undisturbed[algorithm])
    assert newest.name in capsys.readouterr().err


def test_without_any_checkpoint_it_starts_again_and_says_so(undisturbed, tmp_path, capsys):
    output = copied(undisturbed, tmp_path)
    shutil.rmtree(output / "checkpoints")
    resume(output)
    assert same(output, undisturbed["grpo"])
    assert "starting from the beginning" in capsys.readouterr().out


def test_resuming_a_finished_run_changes_nothing(undisturbed, tmp_path):
    output = copied(undisturbed, tmp_path)
    before = (output / "metrics.jsonl").read_bytes()
    resume(output)
    assert same(output, undisturbed["grpo"]) and (output / "metrics.jsonl").read_bytes() == before


def test_more_steps_go_on_as_if_they_had_been_asked_for_at_once(tiny_folder, tmp_path):
    run(tiny_folder, tmp_path / "short", "--steps", "2")
    run(tiny_folder, tmp_path / "long", "--steps", "4")
    resume(tmp_path / "short", "--steps", "4")
    assert same(tmp_path / "short", tmp_path / "long")
    resume(tmp_path / "short")                                  # the flag is not remembered; nothing is lost either
    assert same(tmp_path / "short", tmp_path / "long")


def test_sigterm_saves_at_the_next_step_boundary_and_ends_well(undisturbed, tiny_folder, tmp_path, monkeypatch, capsys):
    """A cluster's preemption in step 3: no checkpoint is due then. The exit status is 0, and --resume goes on."""
    taken = train.group_advantages
    calls = iter(range(1, 100))
    monkeypatch.setattr(train, "group_advantages", lambda rewards: (
        os.kill(os.getpid(), signal.SIGTERM) if next(calls) == 3 else None, taken(rewards))[1])
    run(tiny_folder, tmp_path / "grpo", *GRPO.split())
    assert "stopped by SIGTERM" in capsys.readouterr().out
    assert checkpoint.steps(tmp_path / "grpo" / "checkpoints")[-1].name == "step-000003"
    assert not (tmp_path / "grpo" / "final").exists() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    monkeypatch.setattr(train, "group_advantages", taken)
    resume(tmp_path / "grpo")
    assert same(tmp_path / "grpo", undisturbed["grpo"])


def test_flags_that_repeat_the_configuration_are_welcome(undisturbed, tmp_path):
    resume(copied(undisturbed, tmp_path, "dapo"), "--salt-scope", "4", "--seed", "0", "--salt", "entropy-alpha",
           "--no-rank-below-full")


@pytest.mark.parametrize("flags, named", [(["--lr", "1e-4"], "lr"), (["--salt"], "salt"), (["--seed", "1"], "seed"),
                                          (["--micro-batch", "4"], "micro_batch"),
                                          (["--rank-below-full"], "rank_below_full")])
def test_a_changed_flag_is_refused(undisturbed, tmp_path, flags, named):
    output = copied(undisturbed, tmp_path)
    with pytest.raises(UserError, match=f"another configuration: {named} is"):
        resume(output, *flags)
    assert lines(output) == lines(undisturbed["grpo"])


def test_a_checkpoint_of_another_configuration_is_refused(undisturbed, tmp_path):
    output = copied(undisturbed, tmp_path)
    config = (output / "config.json").read_text()
    (output / "config.json").write_text(config.replace('"lr": 0.001', '"lr": 0.002'))
    with pytest.raises(UserError, match="checkpoint is of another configuration: lr is 0.001 in it, 0.002 here"):
        resume(output)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match="not a run directory"):
            resume(folder)


@pytest.mark.parametrize("content", [b"[]", b"null", b"{", b"\xff\xfe", b'{"batch_size": "64"}', b'{"surprise": 1}',
                                     b""])
def test_a_broken_configuration_is_refused(undisturbed, tmp_path, content):
    output = copied(undisturbed, tmp_path)
    (output / "config.json").write_bytes(content)
    with pytest.raises(UserError, match="config.json"):
        resume(output)


def test_a_value_of_another_type_is_refused(undisturbed, tmp_path):
    output = copied(undisturbed, tmp_path)
    config = (output / "config.json").read_text()
    (output / "config.json").write_text(config.replace('"lr": 0.001', '"lr": "0.001"'))
    with pytest.raises(UserError, match="config.json: lr is '0.001'"):
        resume(output)


def test_a_broken_line_in_the_middle_of_the_log_is_refused(undisturbed, tmp_path):
    output = copied(undisturbed, tmp_path)
    text = (output / "metrics.jsonl").read_text()
    (output / "metrics.jsonl").write_text("no JSON\n" + text)
    with pytest.raises(UserError, match="metrics.jsonl"):
        resume(output)


def test_an_existing_run_is_not_written_over(undisturbed, tiny_folder, tmp_path):
    output = copied(undisturbed, tmp_path)
    with pytest.raises(UserError, match="already holds something"):
        train.main(["--model", str(tiny_folder), *SMALL, "--output", str(output)], pool=Reward())
    assert same(output, undisturbed["grpo"])
