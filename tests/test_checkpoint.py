"""Checkpoints are whole or absent."""
import pytest
import torch

from salt import checkpoint
from salt.errors import UserError


def test_the_last_two_are_kept_and_the_newest_is_read(tmp_path):
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, step, {"step": step, "x": torch.arange(step)})
    assert [path.name for path in checkpoint.steps(tmp_path)] == ["step-000020", "step-000030"]
    assert checkpoint.latest(tmp_path)["step"] == 30


def test_a_half_written_one_is_named_and_ignored(tmp_path, capsys):
    checkpoint.save(tmp_path, 10, {"step": 10})
    (tmp_path / "step-000020.tmp").mkdir()
    (tmp_path / "step-000020.tmp" / "state.pt").write_bytes(b"half")
    assert checkpoint.latest(tmp_path)["step"] == 10
    assert "step-000020.tmp" in capsys.readouterr().err


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_a_file_cut_at_any_byte_falls_back_to_the_one_before(tmp_path, capsys, keep):
    checkpoint.save(tmp_path, 10, {"step": 10, "x": torch.zeros(500)})
    checkpoint.save(tmp_path, 20, {"step": 20, "x": torch.zeros(500)})
    broken = tmp_path / "step-000020" / "state.pt"
    broken.write_bytes(broken.read_bytes()[:keep])
    assert checkpoint.latest(tmp_path)["step"] == 10
    assert "step-000020" in capsys.readouterr().err


def test_no_checkpoint_is_none(tmp_path):
    assert checkpoint.latest(tmp_path / "absent") is None


def test_a_refused_write_leaves_the_old_ones(tmp_path):
    """A file stands where the folder should go: what a read-only or full disk looks like from here."""
    checkpoint.save(tmp_path, 10, {"step": 10})
    (tmp_path / "step-000020.tmp").write_text("in the way")
    with pytest.raises(UserError, match="step-000020"):
        checkpoint.save(tmp_path, 20, {"step": 20})
    (tmp_path / "step-000020.tmp").unlink()
    assert checkpoint.latest(tmp_path)["step"] == 10


def test_saving_a_step_again_replaces_it(tmp_path):
    checkpoint.save(tmp_path, 10, {"step": 10, "value": 1})
    checkpoint.save(tmp_path, 10, {"step": 10, "value": 2})
    assert checkpoint.latest(tmp_path)["value"] == 2


def test_another_configuration_is_refused():
    state = {"config": {"lr": 1.0, "steps": 5}}
    checkpoint.check(state, {"lr": 1.0, "steps": 9}, ("steps",))
    with pytest.raises(UserError, match="lr is 1.0"):
        checkpoint.check(state, {"lr": 2.0, "steps": 5}, ("steps",))
