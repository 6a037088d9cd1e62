"""salt/diagnose.py: the numbers by hand and against their sources, the words, what cannot be diagnosed."""
import pytest
import torch

from salt.advantages import group_advantages, reweight, scope_blocks
from salt.diagnose import COLUMNS, diagnose, in_words, report, within_group_cosine
from salt.geometry import update_deviation


def batch(shared: float, dimension: int = 400, seed: int = 0):
    """Eight groups of eight: K and a; `shared` is the size of what a group has in common."""
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator, "dtype": torch.float64}
    features = torch.randn(8, 8, dimension, **draw) + shared * torch.randn(8, 1, dimension, **draw)
    a = group_advantages((torch.rand(8, 8, generator=generator) < 0.5).double()).flatten()
    features = features.flatten(0, 1)
    return features @ features.T / 64, a


def test_cosine_by_hand():
    # Groups {(1, 0), (3, 4)} and {(0, 2), 0}: cosine 3 / 5 in the first, no pair with features in the second.
    features = torch.tensor([[1.0, 0.0], [3.0, 4.0], [0.0, 2.0], [0.0, 0.0]])
    assert within_group_cosine(features @ features.T, 2) == pytest.approx(0.6)
    assert within_group_cosine(torch.zeros(4, 4), 2) == 0


def test_numbers_are_those_of_salt_itself():
    gram, a = batch(0.7)
    found, new = diagnose(gram, a, 8), reweight(gram, a, scope_blocks("mini-batch", 64, 8))
    assert found["alpha"] == pytest.approx(new.alpha.item()) and found["rank_share"] == new.rank.item() / 64
    assert found["n_eff"] == pytest.approx(new.n_eff.item())
    assert found["d_a"] == pytest.approx(update_deviation(gram, a, new.coefficients, new.basis)["d_a"])
    assert found["kept"] == pytest.approx((new.main.square().sum() / a.square().sum()).item())
    assert found["signal"] == 1


def test_group_scope_averages_over_groups_with_a_signal():
    gram, a = batch(0.7)
    a = a.clone()
    a[8:] = 0                                                                        # only the first group has one
    alone = diagnose(gram[:8, :8], a[:8], 8)
    found = diagnose(gram, a, 8, scope="group")
    assert found["signal"] == 1 / 8
    assert {k: found[k] for k in COLUMNS if k != "cosine"} == pytest.approx(
        {k: alone[k] for k in COLUMNS if k != "cosine"})


def test_groups_without_a_signal_can_stay_out_of_k():
    gram, a = batch(0.7)
    a = a.clone()
    a[8:32] = 0
    rest = [*range(8), *range(32, 64)]
    assert {k: v for k, v in diagnose(gram, a, 8, signal_only=True).items() if k not in ("cosine", "signal")} == (
        pytest.approx({k: v for k, v in diagnose(gram[rest][:, rest], a[rest], 8).items()
                       if k not in ("cosine", "signal")}))
    assert diagnose(gram, a, 8, signal_only=True)["kept"] != pytest.approx(diagnose(gram, a, 8)["kept"], rel=1e-3)


def test_shared_components_lower_n_eff_and_its_prediction_is_the_cosine():
    for shared in (0.0, 1.0, 3.0):
        found = diagnose(*batch(shared), 8)
        assert found["cosine"] == pytest.approx(shared ** 2 / (1 + shared ** 2), abs=0.05)
        assert found["n_eff"] == pytest.approx(1 - found["cosine"], abs=0.15)


def test_words_follow_the_numbers():
    words = [" ".join(in_words(diagnose(*batch(*point), 8))) for point in ((0.0, 400), (3.0, 400))]
    assert "much the same" in words[0]
    assert "Updates cancel" in words[1] and "more slowly" in words[1]
    nothing_cancels = {"finite": 1.0, "signal": 1.0, "n_eff": 2.7, "alpha": 0.0, "kept": 0.5, "rank_share": 0.1}
    assert "Nothing cancels (n_eff 2.70): alpha_t is 0.00" in in_words(nothing_cancels)[0]
    here_and_there = in_words(nothing_cancels | {"alpha": 0.01})[0]                       # means over blocks
    assert here_and_there.startswith("Updates cancel in some blocks, not on average (n_eff 2.70)")


def test_report_shows_the_asked_scope_first():
    gram, a = batch(0.5)
    text = report(gram, a, 8, scope="group")
    assert text.index("scope group") < text.index("scope mini-batch")
    assert all(label in text for label in COLUMNS.values()) and "64 responses in groups of 8; 100%" in text
    assert "scope 16" in report(gram, a, 8, scope=16, generator=torch.Generator().manual_seed(0))


def test_what_cannot_be_diagnosed_is_said():
    gram, a = batch(0.5)
    assert "nothing to reweight" in report(gram, 0 * a, 8)
    assert "not finite" in report(gram * torch.nan, a, 8)
