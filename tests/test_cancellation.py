"""toy/cancellation.py and toy/bandit.py: the checks hold on hostile groups, and they can fail."""
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

from salt.advantages import group_advantages
from toy import cancellation
from toy.bandit import log_policy, make_bandit, sample, score_gradients
from toy.cancellation import Check, correlations, explicit_diagnostic, salt_row, scaling_row

ROOT = Path(__file__).resolve().parents[1]
EPSILON = 1e-12


def scores_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def binary_rewards(*shape: int, seed: int = 1) -> torch.Tensor:
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.4).double()


def checked(scores: torch.Tensor, advantages: torch.Tensor) -> Check:
    check = Check()
    check.add_vectors(scores, advantages)
    return check


def run_program(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess:
    start = [sys.executable, str(ROOT / "toy" / "cancellation.py")] if code is None else [sys.executable, "-c", code]
    return subprocess.run([*start, *arguments], capture_output=True, text=True, cwd=ROOT,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})


# ---------------------------------------------------------------------------- identity and bounds

def test_explicit_diagnostic_by_hand():
    # s = (3, 0), (1, 2); mean (2, 1); residuals ±(1, -1), E_tot = 9 + 5 = 14, E_delta = 2 + 2 = 4. a = (1, -1):
    # g = ((3, 0) - (1, 2)) / 2 = (1, -1), norm √2; first bound √2 · √4 / 2 = √2; last bound √(4 / 2) = √2.
    found = explicit_diagnostic(torch.tensor([[[3.0, 0.0], [1.0, 2.0]]], dtype=torch.float64),
                                torch.tensor([[1.0, -1.0]], dtype=torch.float64))
    assert found["e_total"].item() == 14 and found["e_residual"].item() == 4
    for name in ("update_norm", "bound_signed", "bound"):
        assert found[name].item() == pytest.approx(2 ** 0.5, rel=1e-15)
    assert found["identity_error"].item() == 0


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("scale", [1e-100, 1.0, 1e100])
@pytest.mark.parametrize("kind", ["plain", "one rollout", "constant rewards", "duplicates", "shared", "zero scores"])
def test_identity_and_bounds_hold_on_hostile_groups(kind, scale, ddof):
    size = 1 if kind == "one rollout" else 8
    scores, rewards = scores_of(40, size, 5), binary_rewards(40, size)
    if kind == "constant rewards":
        rewards = torch.full_like(rewards, 0.1)
    if kind == "duplicates":
        scores = scores[:, [0, 0, 0, 0, 1, 1, 1, 0]]
    if kind == "shared":
        scores = scores + 1e4 * scores_of(40, 1, 5, seed=7)
    if kind == "zero scores":
        scores = torch.zeros_like(scores)
    check = checked(scale * scores, group_advantages(rewards, ddof=ddof))
    assert check.passed and check.groups == 40 and check.violations == (0, 0)


def test_the_first_bound_is_tight_at_two_rollouts_and_the_last_with_the_population_deviation():
    rewards = torch.tensor([[0.0, 1.0]], dtype=torch.float64).expand(30, 2)
    population = checked(scores_of(30, 2, 5), group_advantages(rewards, ddof=0, eps=0.0))
    sample_std = checked(scores_of(30, 2, 5), group_advantages(rewards, ddof=1, eps=0.0))
    assert max(map(abs, population.slack)) < EPSILON                      # a = ±1: ‖a‖ = √G
    assert abs(sample_std.slack[0]) < EPSILON
    assert sample_std.slack[1] == pytest.approx(1 - 0.5 ** 0.5)           # a = ±1/√2: ‖a‖ = 1, not √2


def test_advantages_that_are_not_centred_fail_the_identity():
    advantages = group_advantages(binary_rewards(40, 8))
    assert checked(scores_of(40, 8, 5), advantages).passed
    off_centre = checked(scores_of(40, 8, 5), advantages + 1e-6)
    assert off_centre.error > 1e-8 and not off_centre.passed


def test_advantages_that_are_too_large_violate_the_last_bound_only():
    advantages = 10 * group_advantages(binary_rewards(40, 2))
    check = checked(scores_of(40, 2, 5), advantages)
    signal = int((advantages.abs().amax(1) > 0).sum())
    assert check.violations == (0, signal) and signal > 0 and not check.passed


def test_nan_does_not_pass():
    scores = scores_of(4, 8, 5)
    assert not checked(torch.cat([scores.log(), scores]), group_advantages(binary_rewards(8, 8))).passed


def test_sources_of_groups_cover_ten_thousand_and_every_awkward_case():
    groups = list(cancellation.random_groups(torch.Generator().manual_seed(0), 20))
    advantages = [a for _, a in groups]
    assert {scores.shape[1] for scores, _ in groups} == {1, 2, 3, 4, 8, 16, 32, 64}
    assert len(groups) * 252 >= 10_000
    assert any((a.abs().amax(1) == 0).any() and (a.abs().amax(1) > 0).any() for a in advantages)      # no signal
    assert any((scores.flatten(1).norm(dim=1) > 1e4).any() for scores, _ in groups)
    assert len(list(cancellation.bandit_groups(torch.Generator().manual_seed(0), 2))) * 280 >= 10_000


# ---------------------------------------------------------------------------- the bandit

def test_bandit_scores_are_the_gradient_of_the_log_policy():
    generator = torch.Generator().manual_seed(3)
    bandit = make_bandit(4, generator, responses=7, dimension=5, shared=0.8, spread=0.5)
    theta = scores_of(5, seed=4).requires_grad_()
    actions = sample(bandit, theta.detach(), 6, generator)
    found = score_gradients(bandit, theta.detach(), actions, 0.6)
    for prompt, rollout in itertools.product(range(4), range(6)):
        log_probability = log_policy(bandit, theta, 0.6)[prompt, actions[prompt, rollout]]
        expected, = torch.autograd.grad(log_probability, theta)
        assert torch.allclose(found[prompt, rollout], expected, rtol=0, atol=1e-14)


def test_bandit_never_draws_the_unreachable_response_and_its_shared_component_is_the_dial():
    generator = torch.Generator().manual_seed(5)
    bandit = make_bandit(3, generator, shared=1.5)
    theta = torch.zeros(32, dtype=torch.float64)
    policy = log_policy(bandit, theta).exp()
    assert torch.allclose(policy[:, -1], torch.full((3,), 0.5, dtype=torch.float64))
    assert (sample(bandit, theta, 2000, generator) < 64).all()
    every = torch.arange(64).expand(3, 64)
    scores, weights = score_gradients(bandit, theta, every), policy[:, :-1] * 2
    mean = torch.einsum("bn,bnd->bd", weights, scores)                    # the sampler's own expectation
    noise = torch.einsum("bn,bn->b", weights, (scores - mean.unsqueeze(1)).square().sum(-1))
    assert torch.allclose(mean.norm(dim=1), 1.5 * noise.sqrt(), rtol=1e-12)
    silent = make_bandit(3, generator)
    expectation = torch.einsum("bn,bnd->bd", log_policy(silent, theta).exp()[:, :-1] * 2,
                               score_gradients(silent, theta, every))
    assert expectation.norm() < 1e-14


# ---------------------------------------------------------------------------- the tables

def test_scaling_row_against_an_independent_computation():
    size, prompts = 3, 4
    vectors, rewards = scores_of(prompts * size, 6, seed=9).numpy(), numpy.array(
        [[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 1, 0]], dtype=float)
    a = numpy.zeros((prompts, size))
    for b in (0, 1, 3):
        a[b] = (rewards[b] - rewards[b].mean()) / rewards[b].std(ddof=1)
    row = scaling_row(size, torch.from_numpy(vectors @ vectors.T / len(vectors)), torch.from_numpy(a.flatten()))

    grouped = vectors.reshape(prompts, size, 6)
    ratios, cosines, effective, updates, bounds, residual, total, means = [], [], [], [], [], 0.0, 0.0, []
    for s, w in zip(grouped, a):
        spectrum = numpy.linalg.svd(s, compute_uv=False) ** 2
        ratios.append(spectrum.sum() ** 2 / (spectrum ** 2).sum())
        cosines.append(numpy.mean([max(0.0, x @ y / numpy.linalg.norm(x) / numpy.linalg.norm(y))
                                   for x, y in itertools.combinations(s, 2)]))
        delta = s - s.mean(0)
        residual, total = residual + (delta ** 2).sum(), total + (s ** 2).sum()
        means.append(w @ s / size)
        if w.any():
            effective.append(numpy.sum((w @ s) ** 2) / sum(x ** 2 * (y @ y) for x, y in zip(w, s)))
            updates.append(numpy.linalg.norm(w @ s) / size)
            bounds.append(((delta ** 2).sum() / size) ** 0.5)
    out = numpy.sum(numpy.sum(means, axis=0) ** 2) / numpy.sum(numpy.square(means))
    expected = {"G": 3, "B": 4, "signal": 0.75, "pr_in": numpy.mean(ratios), "r_in": numpy.mean(cosines),
                "n_eff_in": numpy.sum(effective) / 4, "n_eff_in_signal": numpy.mean(effective), "n_eff_out": out,
                "rho": residual / total, "shared": 1 - residual / total, "iid": 2 / 3,
                "update": numpy.mean(updates), "bound": numpy.mean(bounds),
                "pearson": numpy.corrcoef(updates, bounds)[0, 1],
                "largest": (vectors ** 2).sum(1).max() / (vectors ** 2).sum()}
    assert {key: row[key] for key in expected} == pytest.approx(expected, rel=1e-10)


def test_correlations():
    x = torch.tensor([1.0, 2.0, 3.0, 10.0], dtype=torch.float64)
    assert correlations(x, 2 * x + 1) == pytest.approx((1, 1))
    assert correlations(x, -x ** 3)[1] == pytest.approx(-1)
    # ranks with a tie: (1, 2.5, 2.5, 4) against (1, 2, 3, 4): covariance 4.5, variances 4.5 and 5 -> √(4.5 / 5)
    tied = torch.tensor([1.0, 2.0, 2.0, 10.0], dtype=torch.float64)
    assert correlations(tied, x)[1] == pytest.approx(0.9 ** 0.5)
    assert all(value != value for value in correlations(x[:2], x[:2]))


def test_prediction_is_exact_over_all_assignments_of_the_advantages():
    s, a = scores_of(4, 3), group_advantages(torch.tensor([[1.0, 0, 0, 0.5]], dtype=torch.float64))[0]
    gram = s @ s.T
    rows = [a[list(order)] for order in itertools.permutations(range(4))]
    numerator = sum((row @ gram @ row).item() for row in rows)
    denominator = sum((row.square() @ gram.diagonal()).item() for row in rows)
    kappa = ((gram.sum() - gram.trace()) / 12 / (gram.trace() / 4)).item()         # 12 ordered pairs, 4 norms
    assert numerator / denominator == pytest.approx(1 - kappa, rel=1e-12)


def test_salt_row_dial_prediction_and_what_salt_does():
    for cosine in (0.0, 0.5):
        row = salt_row(cosine, None, seed=0, draws=2)
        assert row["1-cos"] == pytest.approx(1 - cosine, abs=0.03)
        assert row["n_eff_grpo"] == pytest.approx(row["1-kappa"], abs=0.25)
        assert row["alpha"] >= 1 - row["n_eff_grpo"] - 1e-6                         # Eq. 17; the mean of max(0, ·)
    one, own = salt_row(0.8, None, seed=0, draws=2), salt_row(0.8, 1.0, seed=0, draws=2)
    assert one["n_eff"] < 1.3 * one["n_eff_grpo"] and one["back"] < 0.5             # P_k takes the shared direction out
    assert own["n_eff"] > 3 * own["n_eff_grpo"] and own["back"] > 0.8               # a' is no longer centred


# ---------------------------------------------------------------------------- the program

@pytest.mark.slow
def test_quick_run_writes_three_figures_and_a_verdict(tmp_path):
    done = run_program("--quick", "--output", str(tmp_path / "figures"))
    assert done.returncode == 0, done.stderr
    figures = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert figures == ["bottleneck.png", "rollout_scaling.png", "salt.png"]
    assert all((tmp_path / "figures" / name).read_bytes()[:4] == b"\x89PNG" for name in figures)
    assert "holds:" in done.stdout and "FAILS" not in done.stdout
    assert all(f"({part})" in done.stdout for part in "abc") and " nan" not in done.stdout
    assert max(map(len, done.stdout.replace(str(tmp_path), "").splitlines())) <= 125


@pytest.mark.slow
def test_uncentred_advantages_give_exit_status_1(tmp_path):
    sabotage = ("import sys; from toy import cancellation; from salt.errors import run\n"
                "centred = cancellation.group_advantages\n"
                "cancellation.group_advantages = lambda *a, **k: centred(*a, **k) + 0.1\n"
                "run(cancellation.main)")
    done = run_program("--quick", "--output", str(tmp_path), code=sabotage)
    assert done.returncode == 1, done.stderr
    assert "FAILS" in done.stdout and "(c) tiny language model" in done.stdout.split("FAILS")[1]


@pytest.mark.parametrize("arguments, complaint", [
    (["--output", "FILE"], "choose another --output"), (["--output", "FILE/below"], "choose another --output"),
    (["--fast"], "--fast"), (["--seed", "x"], "--seed"), (["--seed", "-1"], "--seed -1"),
    (["--seed", str(2 ** 70)], "--seed")])
def test_bad_input_is_one_line_and_status_2(tmp_path, arguments, complaint):
    (tmp_path / "file").write_text("kept")
    done = run_program(*(argument.replace("FILE", str(tmp_path / "file")) for argument in arguments))
    assert done.returncode == 2 and done.stdout == ""
    assert complaint in done.stderr and len(done.stderr.splitlines()) == 1
    assert (tmp_path / "file").read_text() == "kept"
