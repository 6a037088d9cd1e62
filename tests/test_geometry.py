"""Eq. 4–15, 38–53, 58–61 and App. B: hand-computed numbers, definitions with explicit vectors, hostile input."""
import math
import re

import pytest
import torch
from torch import Tensor

from salt import geometry
from salt.advantages import group_advantages
from salt.geometry import (dominant_rank, dominant_subspace, effective_sample_size, group_geometry, head_gradient_norm,
                           one_thread, participation_ratio, positive_cosine, residual_diagnostic, update_deviation)
from salt.loss import policy_loss

# Three features in the plane, s1 = (1, 0), s2 = (1, 1), s3 = (0, 2), and a fourth, s4 = (2, 0).
PLANE = torch.tensor([[1., 1., 0., 2.], [0., 1., 2., 0.]], dtype=torch.float64)
THREE, FOUR = PLANE[:, :3], PLANE


def gram_of(features: Tensor) -> Tensor:
    """Eq. 4. features: (D, m)."""
    return features.T @ features / features.shape[1]


def random_features(seed: int, dimension: int, m: int, shared: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randn(dimension, m, generator=generator, dtype=torch.float64)
    return columns + shared * torch.randn(dimension, 1, generator=generator, dtype=torch.float64)


def random_vector(seed: int, m: int) -> Tensor:
    return torch.randn(m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# The definitions with the vectors themselves, as the paper writes them.

def explicit_ratio(features: Tensor) -> float:
    eigenvalues = torch.linalg.svdvals(features).square() / features.shape[1]
    return (eigenvalues.sum() ** 2 / eigenvalues.square().sum()).item()


def explicit_n_eff(updates: list[Tensor]) -> float:
    return (sum(updates).square().sum() / sum(u.square().sum() for u in updates)).item()


def explicit_cosine(features: Tensor) -> float:
    columns = list(features.T)
    pairs = [(g @ h / (g.norm() * h.norm())).clamp_min(0).item()
             for i, g in enumerate(columns) for h in columns[i + 1:]]
    return sum(pairs) / len(pairs)


# Eq. 5–7

def test_participation_ratio_by_hand():
    # SᵀS = [[1, 1, 0], [1, 2, 2], [0, 2, 4]]: trace 7, squared norm 1 + 4 + 16 + 2 (1 + 0 + 4) = 31
    assert participation_ratio(gram_of(THREE)) == pytest.approx(49 / 31, rel=1e-14)


def test_effective_sample_size_by_hand():
    # s1 − s2 + s3 = (0, 1), so 1 over 1 + 2 + 4
    assert effective_sample_size(gram_of(THREE), torch.tensor([1., -1., 1.])) == pytest.approx(1 / 7, rel=1e-14)


def test_positive_cosine_by_hand():
    # cosines 1/√2, 0, 1/√2 over three pairs; with −s3 the last one is negative and counts 0
    assert positive_cosine(gram_of(THREE)) == pytest.approx(math.sqrt(2) / 3, rel=1e-14)
    flipped = THREE * torch.tensor([1., 1., -1.])
    assert positive_cosine(gram_of(flipped)) == pytest.approx(1 / (3 * math.sqrt(2)), rel=1e-14)


def test_statistics_against_the_definitions_with_explicit_vectors():
    for seed in range(30):
        dimension, m = 2 + seed % 7, 2 + seed % 11
        features, c = random_features(seed, dimension, m, shared=seed % 3), random_vector(seed + 1000, m)
        gram = gram_of(features)
        assert participation_ratio(gram) == pytest.approx(explicit_ratio(features), rel=1e-12)
        updates = [weight * g for weight, g in zip(c, features.T)]
        assert effective_sample_size(gram, c) == pytest.approx(explicit_n_eff(updates), rel=1e-11, abs=1e-13)
        assert positive_cosine(gram) == pytest.approx(explicit_cosine(features), rel=1e-12, abs=1e-14)


def test_bounds_of_the_statistics():
    for seed in range(30):
        m = 2 + seed % 9
        gram, c = gram_of(random_features(seed, 5, m)), random_vector(seed, m)
        assert 1 - 1e-12 <= participation_ratio(gram) <= min(m, 5) + 1e-12
        assert 0 <= effective_sample_size(gram, c) <= m * (1 + 1e-12)
        assert 0 <= positive_cosine(gram) <= 1 + 1e-12


def test_scale_and_permutation_change_nothing():
    for seed in range(20):
        gram, c = gram_of(random_features(seed, 6, 12, shared=1.0)), random_vector(seed, 12)
        order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
        for other, weights in ((gram * 1e-20, c * 1e5), (gram * 3e20, -c), (gram[order][:, order], c[order])):
            assert participation_ratio(other) == pytest.approx(participation_ratio(gram), rel=1e-12)
            assert effective_sample_size(other, weights) == pytest.approx(effective_sample_size(gram, c), rel=1e-10)
            assert positive_cosine(other) == pytest.approx(positive_cosine(gram), rel=1e-12)
            # EQUATIONS 19: a permutation of the samples changes neither PR nor k_t
            assert dominant_rank(other) == dominant_rank(gram)


def test_duplicated_rollouts():
    gram = gram_of(random_features(0, 6, 1).expand(6, 8))
    assert participation_ratio(gram) == pytest.approx(1, rel=1e-14) and dominant_rank(gram) == 1
    assert positive_cosine(gram) == pytest.approx(1, rel=1e-14)
    assert effective_sample_size(gram, torch.ones(8)) == pytest.approx(8, rel=1e-14)
    assert effective_sample_size(gram, torch.tensor([1., -1.] * 4)) == pytest.approx(0, abs=1e-15)
    # Every response twice: K is [[K, K], [K, K]] / 2, the spectrum gains zeros only.
    features = random_features(1, 6, 5)
    assert participation_ratio(gram_of(features.repeat(1, 2))) == pytest.approx(explicit_ratio(features), rel=1e-12)


def test_effective_sample_size_of_a_float32_gram_is_never_negative():
    """c ⟂ u makes cᵀKc = 0 for K = u uᵀ, and float32 rounds K to one that is not positive semidefinite."""
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        u, c = torch.rand(16, generator=generator) + 0.5, torch.randn(16, generator=generator)
        c = c - (c @ u) / (u @ u) * u
        assert effective_sample_size(torch.outer(u, u), c) >= 0


def test_nothing_at_all():
    zero, one = torch.zeros(3, 3), torch.tensor([[2.]])
    assert participation_ratio(zero) == positive_cosine(zero) == effective_sample_size(zero, torch.ones(3)) == 0
    assert effective_sample_size(torch.eye(3), torch.zeros(3)) == 0
    assert dominant_rank(zero) == 1
    assert participation_ratio(one) == 1 and positive_cosine(one) == 0 and dominant_rank(one) == 1
    assert effective_sample_size(one, torch.tensor([-3.])) == 1
    # An empty response has feature 0 and cosine 0 with everything: of 3 pairs one is left, that of s1 and s2.
    features = torch.cat([THREE[:, :2], torch.zeros(2, 1, dtype=torch.float64)], dim=1)
    assert positive_cosine(gram_of(features)) == pytest.approx(1 / (3 * math.sqrt(2)), rel=1e-14)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gram_that_is_not_finite_does_not_pass_for_an_empty_one(bad):
    """0/0 is 0; NaN is not 0/0, and a metric that says 0 would hide it."""
    gram = torch.eye(4)
    gram[0, 1] = gram[1, 0] = bad
    gram[2, 2] = bad
    assert not math.isfinite(participation_ratio(gram))
    assert not math.isfinite(effective_sample_size(gram, torch.ones(4)))
    with pytest.raises((ValueError, OverflowError)):
        dominant_rank(gram)


# Eq. 13–15

def test_rank_rounds_half_up():
    # Σλ = 6 + 4 · 1 = 10 and Σλ² = 36 + 4 = 40, so PR = 2.5 exactly: ⌊3.0⌋ = 3, where Python's round gives 2
    gram = torch.diag(torch.tensor([6., 1., 1., 1., 1.]))
    assert participation_ratio(gram) == 2.5 and round(2.5) == 2
    assert dominant_rank(gram) == 3
    # PR = 49/31 = 1.58 rounds to 2; App. G.1's floor would give 1
    assert dominant_rank(gram_of(THREE)) == 2


def test_rank_scale_and_limits():
    gram = torch.diag(torch.tensor([6., 1., 1., 1., 1.]))
    assert dominant_rank(gram, scale=0.5) == 1                      # ⌊1.25 + 0.5⌋
    assert dominant_rank(gram, scale=2.0) == 5
    assert dominant_rank(gram, scale=100.0) == 5                    # never above m
    assert dominant_rank(gram, scale=0.0) == 1                      # never below 1
    assert [dominant_rank(gram, maximum=top) for top in (0, 1, 2, 3, 64)] == [1, 1, 2, 3, 3]
    assert dominant_rank(torch.eye(7)) == 7


def test_subspace_holds_the_largest_eigenvalues():
    for seed in range(20):
        m, rank = 12, 1 + seed % 12
        gram = gram_of(random_features(seed, 30, m))
        basis = dominant_subspace(gram, rank)
        assert basis.shape == (m, rank) and basis.dtype == torch.float64
        assert torch.allclose(basis.T @ basis, torch.eye(rank, dtype=torch.float64), atol=1e-13)
        largest = torch.linalg.svdvals(gram)[:rank]
        assert torch.allclose(gram @ basis, basis * largest, atol=1e-12)


def test_subspace_by_hand():
    # [[2, 1], [1, 2]] has eigenvalues 3 and 1 with eigenvectors (1, 1)/√2 and (1, −1)/√2
    basis = dominant_subspace(torch.tensor([[2., 1.], [1., 2.]]), 1)
    assert torch.allclose(basis, torch.full((2, 1), math.sqrt(0.5), dtype=torch.float64), atol=1e-15)


def test_subspace_sign_is_fixed():
    for seed in range(20):
        gram = gram_of(random_features(seed, 9, 9))
        basis = dominant_subspace(gram, 9)
        assert (basis.gather(0, basis.abs().argmax(0, keepdim=True)) > 0).all()
        # Orders of the samples give the same vectors, rearranged: the sign does not come from the solver.
        order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
        assert torch.allclose(dominant_subspace(gram[order][:, order], 9), basis[order], atol=1e-9)
        assert torch.equal(dominant_subspace(gram, 9), basis)


def test_projector_is_permutation_equivariant():
    for seed in range(10):
        gram = gram_of(random_features(seed, 8, 10))
        order = torch.randperm(10, generator=torch.Generator().manual_seed(seed))
        basis, permuted = dominant_subspace(gram, 4), dominant_subspace(gram[order][:, order], 4)
        assert torch.allclose(permuted @ permuted.T, (basis @ basis.T)[order][:, order], atol=1e-10)


def test_degenerate_eigenvalues_still_give_an_orthonormal_basis():
    """λ_k = λ_{k+1}: which vectors is arbitrary (and documented so), that they are orthonormal is not."""
    for gram in (torch.eye(6), torch.zeros(6, 6), torch.ones(6, 6), torch.block_diag(*[torch.ones(2, 2)] * 3)):
        basis = dominant_subspace(gram, 2)
        assert torch.allclose(basis.T @ basis, torch.eye(2, dtype=torch.float64), atol=1e-13)
        assert torch.equal(basis, dominant_subspace(gram.clone(), 2))
    # Duplicates of two responses, rank 2: the subspace is that of the indicators, however degenerate the rest is.
    basis = dominant_subspace(torch.block_diag(torch.ones(3, 3), 2 * torch.ones(3, 3)), 2)
    expected = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)).double() / 3
    assert torch.allclose(basis @ basis.T, expected, atol=1e-13)


def test_main_channel_is_the_truncated_gradient():
    """EQUATIONS 8: S P_k a = U_k U_kᵀ S a, with U from the singular value decomposition of the features."""
    for seed in range(20):
        features, a = random_features(seed, 20, 12), random_vector(seed, 12)
        rank = 1 + seed % 11
        basis = dominant_subspace(gram_of(features), rank)
        left = torch.linalg.svd(features, full_matrices=False).U[:, :rank]
        truncated = left @ (left.T @ (features @ a))
        assert torch.allclose(features @ (basis @ (basis.T @ a)), truncated, atol=1e-11)


# Eq. 38–53

def test_group_geometry_by_hand():
    # groups {s1, s2} and {s3, s4}; SᵀS = [[1,1,0,2], [1,2,2,2], [0,2,4,0], [2,2,0,4]]; a = (1, −1, 2, −1)
    found = group_geometry(gram_of(FOUR), torch.tensor([1., -1., 2., -1.]), 2)
    root = math.sqrt(0.5)
    expected = {
        "r_in": (root + 0) / 2,                        # cos(s1, s2) = 1/√2, cos(s3, s4) = 0
        "r_total": (3 * root + 1) / 6,                 # pairs 12, 23, 24: 1/√2; pair 14: 1; pairs 13, 34: 0
        "pr_in": (9 / 7 + 2) / 2,                      # 3² / (1 + 4 + 2 · 1), 8² / (16 + 16)
        "pr_total": 121 / 63,                          # 11² / (1 + 4 + 16 + 16 + 2 (1 + 0 + 4 + 4 + 4 + 0))
        "n_eff_in": (1 / 3 + 1) / 2,                   # ‖(0, −1)‖² / (1 + 2), ‖(−2, 4)‖² / (16 + 4)
        "n_eff_in_signal": (1 / 3 + 1) / 2,
        "n_eff_total": 13 / 23,                        # ‖(−2, 3)‖² / (1 + 2 + 16 + 4)
        "n_eff_out": 13 / 21,                          # ū = (0, −½), (−1, 2): ‖(−1, 1.5)‖² / (¼ + 5)
    }
    assert found == pytest.approx(expected, rel=1e-13)


def test_a_group_without_signal_counts_zero_and_is_also_left_out():
    found = group_geometry(gram_of(FOUR), torch.tensor([0., 0., 2., -1.]), 2)
    assert found["n_eff_in"] == pytest.approx(0.5) and found["n_eff_in_signal"] == pytest.approx(1)
    nothing = group_geometry(gram_of(FOUR), torch.zeros(4), 2)
    assert nothing["n_eff_in"] == nothing["n_eff_in_signal"] == nothing["n_eff_total"] == nothing["n_eff_out"] == 0


def test_group_geometry_against_explicit_vectors():
    for seed in range(15):
        prompts, size = 1 + seed % 4, 2 + seed % 3
        features, a = random_features(seed, 7, prompts * size, shared=1.0), random_vector(seed, prompts * size)
        found = group_geometry(gram_of(features), a, size)
        groups = features.split(size, dim=1)
        updates = [weight * g for weight, g in zip(a, features.T)]
        per_group = [updates[i:i + size] for i in range(0, len(updates), size)]
        expected = {
            "r_in": sum(map(explicit_cosine, groups)) / prompts, "r_total": explicit_cosine(features),
            "pr_in": sum(map(explicit_ratio, groups)) / prompts, "pr_total": explicit_ratio(features),
            "n_eff_in": sum(map(explicit_n_eff, per_group)) / prompts, "n_eff_total": explicit_n_eff(updates),
            "n_eff_in_signal": sum(map(explicit_n_eff, per_group)) / prompts,
            "n_eff_out": explicit_n_eff([sum(group) / size for group in per_group]),
        }
        assert found == pytest.approx(expected, rel=1e-10, abs=1e-12)


# App. B, Eq. 8–11

def test_residual_diagnostic_by_hand():
    # mean of s1, s2, s3 = (2/3, 1): E_sh = 3 (4/9 + 1) = 13/3, E_tot = 1 + 2 + 4, E_δ = 8/3; a = (1, 0, −1):
    # g = (s1 − s3) / 3 = (1, −2) / 3; ‖a‖ √E_δ / G = √2 √(8/3) / 3; √(E_δ / G) = √(8/9)
    found = residual_diagnostic(gram_of(THREE), torch.tensor([1., 0., -1.]), 3)
    expected = {"e_total": 7, "e_shared": 13 / 3, "e_residual": 8 / 3, "rho": 8 / 21, "update_norm": math.sqrt(5) / 3,
                "bound_signed": math.sqrt(16 / 3) / 3, "bound": math.sqrt(8) / 3, "identity_error": 0}
    assert {name: value.tolist() for name, value in found.items()} == {
        name: [pytest.approx(value, rel=1e-13, abs=1e-16)] for name, value in expected.items()}


def test_identity_error_notices_advantages_that_are_not_centred():
    # a = (1, 0, 0): mean(a) · mean(s) = (1/3) ‖(2/3, 1)‖ = √13 / 9, over ‖a‖ √7 / 3
    found = residual_diagnostic(gram_of(THREE), torch.tensor([1., 0., 0.]), 3)
    assert found["identity_error"].item() == pytest.approx(math.sqrt(13) / (3 * math.sqrt(7)), rel=1e-13)


def test_residual_diagnostic_against_explicit_vectors():
    for seed in range(15):
        prompts, size = 1 + seed % 4, 2 + seed % 5
        features = random_features(seed, 6, prompts * size, shared=2.0)
        a = group_advantages(random_vector(seed, prompts * size).view(prompts, size), ddof=seed % 2).flatten()
        found = residual_diagnostic(gram_of(features), a, size)
        assert all(value.shape == (prompts,) for value in found.values())
        for b, (group, weights) in enumerate(zip(features.split(size, dim=1), a.split(size))):
            mean = group.mean(1, keepdim=True)
            delta = group - mean
            assert found["e_total"][b] == pytest.approx(group.square().sum().item(), rel=1e-11)
            assert found["e_shared"][b] == pytest.approx(size * mean.square().sum().item(), rel=1e-11)
            assert found["e_residual"][b] == pytest.approx(delta.square().sum().item(), rel=1e-11)
            assert found["rho"][b] == pytest.approx((delta.square().sum() / group.square().sum()).item(), rel=1e-11)
            update = (group @ weights / size).norm().item()
            assert found["update_norm"][b] == pytest.approx(update, rel=1e-10)
            assert (delta @ weights / size).norm().item() == pytest.approx(update, rel=1e-10)             # Eq. 10
            assert update <= found["bound_signed"][b] * (1 + 1e-12) and found["identity_error"][b] < 1e-14
            assert found["bound_signed"][b] <= found["bound"][b] * (1 + 1e-12)                            # Eq. 11


def test_residual_diagnostic_of_duplicates_and_of_nothing():
    gram = gram_of(random_features(3, 5, 1).expand(5, 4))
    found = residual_diagnostic(gram, torch.tensor([1., -1., 1., -1.]), 4)
    scale = found["e_total"].sqrt()
    assert (found["update_norm"] <= 1e-7 * scale).all() and (found["rho"] <= 1e-15).all()
    empty = residual_diagnostic(torch.zeros(4, 4), torch.tensor([1., -1., 0., 0.]), 2)
    assert all((value == 0).all() for value in empty.values())


def test_independent_scores_leave_a_residual_share_of_one_minus_one_over_g():
    """EQUATIONS 7: E[E_δ] / E[E_tot] = 1 − 1/G for independent zero-mean scores, whatever their dimension."""
    for size, dimension in ((2, 1), (4, 3), (16, 50)):
        features = random_features(size, dimension, 20 * size)
        for seed in range(1, 20):
            features = torch.cat([features, random_features(100 + seed, dimension, 20 * size)], dim=1)
        found = residual_diagnostic(gram_of(features), torch.zeros(400 * size), size)
        ratio = (found["e_residual"].sum() / found["e_total"].sum()).item()
        assert ratio == pytest.approx(1 - 1 / size, abs=0.03)


# Eq. 58–61

def test_update_deviation_by_hand():
    # P_k keeps sample 1. a = (1, −1, 0), c = (1, −1, −1): c − a = (0, 0, −1), so D_a = 1/√2; S(c − a) = −s3, norm 2,
    # S a = s1 − s2 = (0, −1): D_g = 2. S c = (0, −3): n_eff = 9 / (1 + 2 + 4). S P⊥c = −s2 − s3 = (−1, −3),
    # S P⊥a = −s2, each over m = 3: √10 / 3 and √2 / 3
    basis = torch.tensor([[1.], [0.], [0.]], dtype=torch.float64)
    found = update_deviation(gram_of(THREE), torch.tensor([1., -1., 0.]), torch.tensor([1., -1., -1.]), basis)
    expected = {"d_a": math.sqrt(0.5), "d_g": 2, "n_eff": 9 / 7, "u_perp": math.sqrt(10) / 3,
                "u_perp_gain": math.sqrt(5)}
    assert found == pytest.approx(expected, rel=1e-13)


def test_update_deviation_against_explicit_vectors():
    for seed in range(10):
        features, a, c = random_features(seed, 9, 8), random_vector(seed, 8), random_vector(seed + 50, 8)
        basis = dominant_subspace(gram_of(features), 3)
        outside = torch.eye(8, dtype=torch.float64) - basis @ basis.T
        found = update_deviation(gram_of(features), a, c, basis)

        def size(v: Tensor) -> float:
            return (features @ v / 8).norm().item()
        expected = {"d_a": ((c - a).norm() / a.norm()).item(), "d_g": size(c - a) / size(a),
                    "n_eff": explicit_n_eff([weight * g for weight, g in zip(c, features.T)]),
                    "u_perp": size(outside @ c), "u_perp_gain": size(outside @ c) / size(outside @ a)}
        assert found == pytest.approx(expected, rel=1e-10)


def test_update_deviation_of_nothing():
    gram, a, empty = gram_of(THREE), torch.tensor([1., -1., 0.]), torch.zeros(3, 0, dtype=torch.float64)
    same = update_deviation(gram, a, a, empty)
    assert same["d_a"] == same["d_g"] == 0 and same["u_perp_gain"] == pytest.approx(1)
    zero = update_deviation(gram, torch.zeros(3), torch.zeros(3), empty)
    assert all(value == 0 for value in zero.values())


def test_update_deviation_takes_a_basis_of_any_floating_type():
    gram, a, basis = gram_of(THREE), torch.tensor([1., -1., 0.]), torch.tensor([[1.], [0.], [0.]])
    assert update_deviation(gram, a, 2 * a, basis) == pytest.approx(update_deviation(gram, a, 2 * a, basis.double()))


# EQUATIONS 18

def test_head_gradient_norm_by_hand():
    # mean features, sequence-mean: ‖Σ c_i s_i‖ / m with c = (1, −1, 1): ‖(0, 1)‖ / 3, whatever the lengths
    gram, c, lengths = gram_of(THREE), torch.tensor([1., -1., 1.]), torch.tensor([2, 1, 3])
    assert head_gradient_norm(gram, c, lengths) == pytest.approx(1 / 3, rel=1e-14)
    # token-mean: ‖Σ c_i T_i s_i‖ / N = ‖2 s1 − s2 + 3 s3‖ / 6 = ‖(1, 5)‖ / 6
    assert head_gradient_norm(gram, c, lengths, aggregation="token-mean") == pytest.approx(math.sqrt(26) / 6, rel=1e-14)
    # summed features: ‖Σ c_i s_i / T_i‖ / m = ‖s1/2 − s2 + s3/3‖ / 3 = ‖(−1/2, −1/3)‖ / 3
    summed = head_gradient_norm(gram, c, lengths, length_norm="sum")
    assert summed == pytest.approx(math.sqrt(1 / 4 + 1 / 9) / 3, rel=1e-14)
    # and ‖Σ c_i s_i‖ / N
    both = head_gradient_norm(gram, c, lengths, aggregation="token-mean", length_norm="sum")
    assert both == pytest.approx(1 / 6, rel=1e-14)


@pytest.mark.parametrize("aggregation", ["sequence-mean", "token-mean"])
@pytest.mark.parametrize("length_norm", ["mean", "sum"])
def test_head_gradient_norm_is_that_of_the_loss(aggregation, length_norm):
    """One LM head, ragged lengths, an empty response, temperature 0.6: autograd through `policy_loss` is the judge."""
    generator = torch.Generator().manual_seed(0)
    lengths, width, vocabulary, temperature = torch.tensor([3, 5, 0, 1, 4]), 6, 11, 0.6
    m, longest = len(lengths), int(lengths.max())
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64).requires_grad_()
    hidden = torch.randn(m, longest, width, generator=generator, dtype=torch.float64)
    tokens = torch.randint(vocabulary, (m, longest), generator=generator)
    mask = torch.arange(longest) < lengths.unsqueeze(1)
    logits = hidden @ weight.T / temperature
    logprobs = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)                          # (m, T)
    features = []
    for i in range(m):
        total = logprobs[i][mask[i]].sum() / (lengths[i].clamp_min(1) if length_norm == "mean" else 1)
        features.append(torch.autograd.grad(total, weight, retain_graph=True)[0].flatten())
    gram = gram_of(torch.stack(features, dim=1))
    c = random_vector(1, m)
    loss, _ = policy_loss(logprobs, logprobs.detach(), c, mask, aggregation=aggregation)
    expected = torch.autograd.grad(loss, weight)[0].norm().item()
    found = head_gradient_norm(gram, c, lengths, aggregation=aggregation, length_norm=length_norm)
    assert found == pytest.approx(expected, rel=1e-13)


def test_head_gradient_norm_refuses_names_it_does_not_know():
    gram, c, lengths = gram_of(THREE), torch.ones(3), torch.ones(3)
    with pytest.raises(ValueError):
        head_gradient_norm(gram, c, lengths, aggregation="token_mean")
    with pytest.raises(ValueError):
        head_gradient_norm(gram, c, lengths, length_norm="none")


# Types, shapes, threads

@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_any_floating_type_is_computed_in_float64(dtype):
    gram = gram_of(random_features(0, 5, 6)).to(dtype).requires_grad_()
    a = random_vector(0, 6).to(dtype).requires_grad_()
    gram64, a64 = gram.detach().double(), a.detach().double()
    assert participation_ratio(gram) == participation_ratio(gram64)
    assert effective_sample_size(gram, a) == effective_sample_size(gram64, a64)
    assert positive_cosine(gram) == positive_cosine(gram64)
    assert torch.equal(dominant_subspace(gram, 3), dominant_subspace(gram64, 3))
    assert group_geometry(gram, a, 2) == group_geometry(gram64, a64, 2)
    found, wanted = residual_diagnostic(gram, a, 3), residual_diagnostic(gram64, a64, 3)
    assert all(torch.equal(found[name], wanted[name]) and not found[name].requires_grad for name in wanted)


def test_a_gram_that_is_not_contiguous_gives_the_same():
    gram, a = gram_of(random_features(0, 5, 12)), random_vector(0, 12)
    view, strided = gram[::2, ::2], a[::2]
    assert group_geometry(view, strided, 3) == group_geometry(view.contiguous(), strided.contiguous(), 3)
    found = residual_diagnostic(view, strided, 2)
    assert torch.equal(found["rho"], residual_diagnostic(view.contiguous(), strided.contiguous(), 2)["rho"])


def test_inputs_are_left_alone():
    gram, a = gram_of(random_features(0, 5, 6)), random_vector(0, 6)
    copies = gram.clone(), a.clone()
    basis = dominant_subspace(gram, 2)
    group_geometry(gram, a, 2), residual_diagnostic(gram, a, 2), update_deviation(gram, a, a, basis)
    assert torch.equal(gram, copies[0]) and torch.equal(a, copies[1])


BAD_CALLS = {
    "PR of a vector": lambda: participation_ratio(torch.ones(3)),
    "PR of a rectangle": lambda: participation_ratio(torch.ones(3, 4)),
    "r of a batch": lambda: positive_cosine(torch.ones(2, 3, 3)),
    "n_eff, too few coefficients": lambda: effective_sample_size(torch.eye(3), torch.ones(2)),
    "n_eff, a column": lambda: effective_sample_size(torch.eye(3), torch.ones(3, 1)),
    "rank of a rectangle": lambda: dominant_rank(torch.ones(3, 4)),
    "rank 0": lambda: dominant_subspace(torch.eye(3), 0),
    "rank above m": lambda: dominant_subspace(torch.eye(3), 4),
    "groups that do not divide": lambda: group_geometry(torch.eye(4), torch.ones(4), 3),
    "groups of 0": lambda: group_geometry(torch.eye(4), torch.ones(4), 0),
    "advantages of another batch": lambda: group_geometry(torch.eye(4), torch.ones(6), 2),
    "residual groups that do not divide": lambda: residual_diagnostic(torch.eye(4), torch.ones(4), 3),
    "residual groups of 0": lambda: residual_diagnostic(torch.eye(4), torch.ones(4), 0),
    "deviation, coefficients": lambda: update_deviation(torch.eye(3), torch.ones(3), torch.ones(4), torch.ones(3, 1)),
    "deviation, basis": lambda: update_deviation(torch.eye(3), torch.ones(3), torch.ones(3), torch.ones(4, 1).double()),
    "lengths": lambda: head_gradient_norm(torch.eye(3), torch.ones(3), torch.ones(2)),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_shapes_that_do_not_agree_are_a_value_error(name):
    with pytest.raises(ValueError) as error:
        BAD_CALLS[name]()
    assert "\n" not in str(error.value)


def mkl_thread_count() -> int:
    return int(re.search(r"mkl_get_max_threads\(\) : (\d+)", torch.__config__.parallel_info())[1])


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_one_thread_restores_the_count_of_this_build(three_threads):
    mkl = torch.backends.mkl.is_available()
    with one_thread():
        assert (mkl_thread_count() if mkl else torch.get_num_threads()) == 1
        assert not mkl or torch.get_num_threads() == 3                 # MKL's own switch leaves torch's count alone
    with pytest.raises(KeyError), one_thread():
        raise KeyError
    dominant_subspace(torch.eye(3), 1)
    assert torch.get_num_threads() == 3 and (not mkl or mkl_thread_count() == 3)


def test_one_thread_restores_the_count_without_mkl(three_threads, monkeypatch):
    monkeypatch.setattr(geometry, "mkl_threads", lambda: None)
    with one_thread():
        assert torch.get_num_threads() == 1
    with pytest.raises(KeyError), one_thread():
        raise KeyError
    assert torch.get_num_threads() == 3
