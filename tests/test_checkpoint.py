"""Checkpoints are whole or absent."""
import pytest
import torch

from salt import checkpoint
from salt.errors import UserError

CONFIG = {"lr": 1.0, "steps": 5}


def trained(seed: int = 0):
    """A small layer and its optimizer after one step."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(20, 25)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(3, 20)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def save(folder, step: int, seed: int = 0):
    model, optimizer = trained(seed)
    checkpoint.save(folder, step, model, optimizer, {"config": CONFIG, "step": step})
    return model, optimizer


def load(folder):
    model, optimizer = trained(seed=99)
    optimizer.zero_grad()
    return checkpoint.load(folder, model, optimizer, CONFIG, ("steps",)), model, optimizer


def equal(found, expected) -> bool:
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(equal(found[key], expected[key]) for key in expected)
    return found == expected


def test_the_last_two_are_kept_and_the_newest_is_read_bit_for_bit(tmp_path):
    for step in (10, 20, 30):
        expected = save(tmp_path, step, seed=step)
    assert [path.name for path in checkpoint.steps(tmp_path)] == ["step-000020", "step-000030"]
    state, *found = load(tmp_path)
    assert state["step"] == 30
    for mine, theirs in zip(found, expected):
        assert equal(mine.state_dict(), theirs.state_dict())


def test_a_half_written_one_is_named_and_ignored(tmp_path, capsys):
    save(tmp_path, 10)
    (tmp_path / "step-000020.tmp").mkdir()
    (tmp_path / "step-000020.tmp" / "state.pt").write_bytes(b"half")
    assert load(tmp_path)[0]["step"] == 10
    assert "step-000020.tmp" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["state.pt", "weights/.metadata", "weights/__0_0.distcp"])
@pytest.mark.parametrize("keep", [0, 1, 100, -1, None])
def test_a_file_cut_at_any_byte_or_lost_falls_back_to_the_one_before(tmp_path, capsys, file, keep):
    expected = save(tmp_path, 10, seed=10)
    save(tmp_path, 20, seed=20)
    broken = tmp_path / "step-000020" / file
    if keep is None:
        broken.unlink()
    else:
        broken.write_bytes(broken.read_bytes()[:keep])
    state, *found = load(tmp_path)
    assert state["step"] == 10 and all(equal(a.state_dict(), b.state_dict()) for a, b in zip(found, expected))
    assert "step-000020" in capsys.readouterr().err


def test_no_checkpoint_is_none(tmp_path):
    assert load(tmp_path / "absent")[0] is None


def test_a_refused_write_leaves_the_old_ones(tmp_path):
    """A file stands where the folder should go: what a read-only or full disk looks like from here."""
    save(tmp_path, 10)
    (tmp_path / "step-000020.tmp").write_text("in the way")
    with pytest.raises(UserError, match="step-000020"):
        save(tmp_path, 20)
    (tmp_path / "step-000020.tmp").unlink()
    assert load(tmp_path)[0]["step"] == 10


def test_a_full_disk_leaves_the_old_ones(tmp_path, monkeypatch):
    """The disk fills while the weights are written; the message is one line of a readable length."""
    save(tmp_path, 10)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(UserError, match="No space left") as refused:
            save(tmp_path, 20)
    assert len(str(refused.value)) < 400 and not list(tmp_path.glob("*.tmp"))
    assert load(tmp_path)[0]["step"] == 10


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 10, seed=1)
    expected, _ = save(tmp_path, 10, seed=2)
    assert equal(load(tmp_path)[1].state_dict(), expected.state_dict())


def test_another_configuration_is_refused_before_anything_is_changed(tmp_path):
    checkpoint.check({"config": CONFIG}, CONFIG | {"steps": 9}, ("steps",))
    save(tmp_path, 10)
    model, optimizer = trained(seed=99)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match="lr is 1.0"):
        checkpoint.load(tmp_path, model, optimizer, CONFIG | {"lr": 2.0}, ("steps",))
    assert equal(model.state_dict(), before)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    save(tmp_path, 10)
    for model, told in ((torch.nn.Linear(20, 24), r"weight is \(25, 20\) in it, \(24, 20\) here"),
                        (torch.nn.Sequential(torch.nn.Linear(20, 25)), "0.weight is not in it")):
        with pytest.raises(UserError, match=f"another model: {told}"):
            checkpoint.load(tmp_path, model, torch.optim.AdamW(model.parameters()), CONFIG, ())
