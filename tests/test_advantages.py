"""Eq. 2 and 16–18, every variant of App. F.3 against an independent derivation in numpy, scope, hostile input."""
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from salt.advantages import (VARIANTS, Reweighted, group_advantages, reweight, salt_advantages, scope_blocks,
                             with_signal)
from salt.geometry import effective_sample_size, participation_ratio

RANDOM = ("rand-proj", "permuted", "matched-rand-subspace")
OPTIONS = {"fixed-alpha": {"alpha": 0.3}, "entropy-alpha": {"entropy": 1.2, "entropy_range": (1.0, 1.5)}}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def options(variant: str, seed: int = 0) -> dict:
    return {**OPTIONS.get(variant, {}), **({"generator": seeded(seed)} if variant in RANDOM else {})}


def problem(seed: int, prompts: int = 3, size: int = 4, dimension: int = 40, shared: float = 1.0,
            dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Features (D, m), their Gram (m, m) and group-normalised advantages (m,)."""
    generator, m = seeded(seed), prompts * size
    features = torch.randn(dimension, m, generator=generator, dtype=torch.float64)
    features = features + shared * torch.randn(dimension, 1, generator=generator, dtype=torch.float64)
    features = features * torch.rand(m, generator=generator, dtype=torch.float64).mul(3).exp()       # uneven norms
    rewards = torch.randn(prompts, size, generator=generator, dtype=torch.float64)
    return features, (features.T @ features / m).to(dtype), group_advantages(rewards).flatten().to(dtype)


# Eq. 2

def test_group_advantages_by_hand():
    # rewards 1, 0, 0, 0: mean ¼, squared deviations 9/16 + 3/16 = ¾; sample std √(¾ / 3) = ½, population √(¾ / 4)
    rewards = torch.tensor([[1., 0., 0., 0.]], dtype=torch.float64)
    expected = torch.tensor([[1.5, -0.5, -0.5, -0.5]], dtype=torch.float64)
    assert torch.allclose(group_advantages(rewards, eps=0), expected, atol=1e-15)
    population = math.sqrt(3) / 4
    assert torch.allclose(group_advantages(rewards, eps=0, ddof=0), expected / 2 / population, atol=1e-15)
    # eps adds to the standard deviation: 0.75 / (0.5 + 0.25) = 1
    assert group_advantages(rewards, eps=0.25)[0, 0] == pytest.approx(1, rel=1e-15)
    assert group_advantages(rewards)[0, 0].item() == pytest.approx(0.75 / (0.5 + 1e-6), rel=1e-15)


def test_group_advantages_agree_with_numpy():
    for seed in range(10):
        rewards = torch.randn(5, 2 + seed, generator=seeded(seed), dtype=torch.float64)
        r = rewards.numpy()
        for ddof in (0, 1):
            expected = (r - r.mean(1, keepdims=True)) / (r.std(1, ddof=ddof, keepdims=True) + 1e-6)
            assert np.allclose(group_advantages(rewards, ddof=ddof).numpy(), expected, rtol=1e-12, atol=1e-14)


def test_equal_rewards_give_exactly_zero():
    rewards = torch.full((1, 8), 0.1)
    assert (rewards - rewards.mean(1, keepdim=True)).abs().max() > 0       # the trap: the mean of eight 0.1 is not 0.1
    assert torch.equal(group_advantages(rewards), torch.zeros(1, 8))


def test_one_flat_group_beside_others():
    found = group_advantages(torch.tensor([[0.1] * 4, [1., 0., 0., 0.], [-1.] * 4]))
    assert (found[0] == 0).all() and (found[2] == 0).all() and found[1, 0] == pytest.approx(1.5, rel=1e-5)


def test_group_of_one():
    for ddof in (0, 1):
        assert torch.equal(group_advantages(torch.tensor([[3.], [0.]]), ddof=ddof), torch.zeros(2, 1))


def test_group_advantages_are_centred_whatever_the_offset_and_scale():
    for seed in range(10):
        rewards = torch.rand(4, 8, generator=seeded(seed), dtype=torch.float64)
        found = group_advantages(rewards, eps=0)
        assert found.sum(1).abs().max() < 1e-13
        assert torch.allclose(found.square().sum(1), torch.full((4,), 7., dtype=torch.float64))     # G − 1 for ddof 1
        assert torch.allclose(group_advantages(3 * rewards - 7, eps=0), found, atol=1e-12)
        order = torch.randperm(8, generator=seeded(seed))
        assert torch.allclose(group_advantages(rewards[:, order], eps=0), found[:, order], atol=1e-13)


def test_types_of_group_advantages():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.bool):
        assert group_advantages(torch.tensor([[1, 0, 0, 1]]).to(dtype)).dtype == torch.float32
    assert group_advantages(torch.rand(1, 4).double()).dtype == torch.float64
    assert not group_advantages(torch.rand(1, 4, requires_grad=True)).requires_grad
    for bad in (torch.rand(4), torch.rand(2, 2, 2)):
        with pytest.raises(ValueError):
            group_advantages(bad)


def test_positive_part_of_binary_rewards():
    """EQUATIONS 15: [a]_+ minus its group mean is (1 − p) a, p the share of right answers."""
    for right in range(1, 8):
        rewards = torch.tensor([[1.] * right + [0.] * (8 - right)], dtype=torch.float64)
        a = group_advantages(rewards)
        positive = a.clamp_min(0)
        assert torch.allclose(positive - positive.mean(), (1 - right / 8) * a, atol=1e-15)


# The variants against an independent derivation: singular vectors of the features, numpy, the paper's words.

def expected_coefficients(features: Tensor, advantages: Tensor, variant: str, seed: int = 0) -> np.ndarray:
    f, a = features.numpy(), advantages.double().numpy()
    m = len(a)
    _, singular, right = np.linalg.svd(f, full_matrices=False)
    eigenvalues = singular ** 2 / m
    pr = eigenvalues.sum() ** 2 / (eigenvalues ** 2).sum()
    k = int(np.clip(np.floor(pr + 0.5), 1, m))
    updates = f * a
    n_eff = (updates.sum(1) ** 2).sum() / (updates ** 2).sum()
    alpha = max(0.0, 1 - n_eff)
    projector = right[:k].T @ right[:k]
    identity, positive = np.eye(m), np.where(a > 0, a, 0)

    def mixed(p: np.ndarray, weight: float) -> np.ndarray:
        return p @ a + weight * (identity - p) @ positive

    generator = seeded(seed)
    if variant in ("rand-proj", "matched-rand-subspace"):
        gaussian = torch.randn(m, k, dtype=torch.float64, generator=generator).numpy()
        random_projector = gaussian @ np.linalg.pinv(gaussian)             # onto the span of k random vectors
    if variant == "permuted":
        return mixed(projector, alpha)[torch.randperm(m, generator=generator).numpy()]
    if variant == "matched-rand-subspace":
        by_rank = np.empty(m)
        by_rank[np.argsort(mixed(random_projector, alpha))] = np.sort(mixed(projector, alpha))
        return by_rank
    return {
        "salt": lambda: mixed(projector, alpha),
        "only-main": lambda: projector @ a,
        "only-exp": lambda: alpha * (identity - projector) @ positive,
        "no-positive": lambda: projector @ a + alpha * (identity - projector) @ a,
        "no-proj": lambda: a + alpha * positive,
        "rand-proj": lambda: mixed(random_projector, alpha),
        "fixed-alpha": lambda: mixed(projector, 0.3),
        "pr-alpha": lambda: mixed(projector, min(max(pr / (m - 1), 0), 1)),
        "entropy-alpha": lambda: mixed(projector, (1.2 - 1.0) / (1.5 - 1.0)),
        "interpolated": lambda: projector @ a + (identity - projector) @ ((1 - alpha) * a + alpha * positive),
    }[variant]()


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_against_numpy(variant):
    alphas = []
    for seed in range(12):
        features, gram, a = problem(seed, prompts=2 + seed % 3, shared=seed % 4)
        found = salt_advantages(gram, a, variant, **options(variant, seed))
        expected = expected_coefficients(features, a, variant, seed)
        assert np.allclose(found.coefficients.numpy(), expected, rtol=1e-9, atol=1e-10)
        alphas.append(found.alpha)
    assert variant == "fixed-alpha" or variant == "entropy-alpha" or len(set(alphas)) > 1


def test_there_are_twelve_variants():
    assert list(VARIANTS) == ["salt", "only-main", "only-exp", "no-positive", "no-proj", "rand-proj", "fixed-alpha",
                              "pr-alpha", "entropy-alpha", "permuted", "matched-rand-subspace", "interpolated"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_coefficients_are_main_plus_alpha_exploration(variant, dtype):
    _, gram, a = problem(5, dtype=dtype)
    a.requires_grad_()
    found = salt_advantages(gram, a, variant, **options(variant))
    assert 0 < found.alpha < 1
    assert torch.equal(found.coefficients, found.main + found.alpha * found.exploration)                  # Eq. 18
    for vector in (found.coefficients, found.main, found.exploration):
        assert vector.shape == a.shape and vector.dtype == dtype and not vector.requires_grad
    assert found.basis.shape == (len(a), found.rank) and found.basis.dtype == torch.float64 and found.finite
    assert found.participation_ratio == participation_ratio(gram)
    assert found.n_eff == effective_sample_size(gram, a)
    assert found.rank == math.floor(found.participation_ratio + 0.5)


def test_salt_by_hand():
    # K = diag(4, 1, 1) / 3: PR = 6² / (16 + 1 + 1) = 2; a = (1, −1, 0): n_eff = (4 + 1) / (4 + 1) = 1, α = 0.
    # The second eigenvector is degenerate, so take K = diag(4, 2, 0): PR = 36 / 20 = 1.8, k = 2, P_k keeps 1 and 2.
    found = salt_advantages(torch.diag(torch.tensor([4., 2., 0.])), torch.tensor([1., -2., 1.]))
    assert found.rank == 2 and found.alpha == 0 and found.n_eff == 1
    assert torch.allclose(found.coefficients, torch.tensor([1., -2., 0.]))
    assert torch.allclose(found.exploration, torch.tensor([0., 0., 1.]))
    # Features e1, e1, e2/2: SᵀS = [[1, 1, 0], [1, 1, 0], [0, 0, ¼]], eigenvalues 2, ¼, 0; PR = (9/4)² / (4 + 1/16)
    # = 81/65, k = 1, P_k averages responses 1 and 2. a = (1, −½, −½): S a = (½, −¼), n_eff = (¼ + 1/16) /
    # (1 + ¼ + 1/16) = 5/21, α = 16/21. P_k a = (¼, ¼, 0); [a]_+ = (1, 0, 0), P_k^⊥ [a]_+ = (½, −½, 0).
    gram = torch.tensor([[1., 1., 0.], [1., 1., 0.], [0., 0., 0.25]], dtype=torch.float64) / 3
    found = salt_advantages(gram, torch.tensor([1., -0.5, -0.5], dtype=torch.float64))
    expected = torch.tensor([1 / 4 + 8 / 21, 1 / 4 - 8 / 21, 0], dtype=torch.float64)
    assert found.rank == 1 and found.alpha == pytest.approx(16 / 21, rel=1e-14)
    assert torch.allclose(found.coefficients, expected, atol=1e-14)


def test_alpha_zero_truncates_and_interpolated_does_not():
    """EQUATIONS 14: where nothing cancels, Eq. 18 leaves P_k a, and `interpolated` leaves a."""
    features, _, a = problem(1)
    features = features + 20 * torch.outer(features[:, 0], a)           # each response pulls where its advantage points
    gram = features.T @ features / len(a)
    salt, ours = salt_advantages(gram, a), salt_advantages(gram, a, "interpolated")
    assert salt.n_eff >= 1 and salt.alpha == ours.alpha == 0
    assert torch.allclose(salt.coefficients, salt.basis @ (salt.basis.T @ a), atol=1e-14)
    assert torch.allclose(ours.coefficients, a, atol=1e-14)
    assert (salt.coefficients - a).norm() > 0.01 * a.norm()
    # In the type of a training run it comes back bit by bit: the round trip is made in float64.
    single = salt_advantages(gram, a.float(), "interpolated")
    assert single.alpha == 0 and torch.equal(single.coefficients, a.float())


def test_alpha_one_makes_interpolated_salt():
    features, _, a = problem(2)
    features = features - torch.outer(features @ a, a) / (a @ a)                # S a = 0: everything cancels
    gram = features.T @ features / len(a)
    salt, ours = salt_advantages(gram, a), salt_advantages(gram, a, "interpolated")
    assert salt.alpha == pytest.approx(1, abs=1e-12)
    assert torch.allclose(salt.coefficients, ours.coefficients, atol=1e-12)


def test_alpha_stays_below_one_when_float32_makes_k_indefinite():
    """a ⟂ u and K = u uᵀ: aᵀKa is 0, and in float32 as often below it as above."""
    for seed in range(50):
        u, a = torch.rand(16, generator=seeded(seed)) + 0.5, torch.randn(16, generator=seeded(seed + 1000))
        found = salt_advantages(torch.outer(u, u), a - (a @ u) / (u @ u) * u)
        assert 0 <= found.alpha <= 1 and found.n_eff >= 0


def test_difficulty_weighting():
    """EQUATIONS 15: with the group indicators as dominant subspace, SALT's exploration channel is (1 − p_b) a."""
    # K = Π + 0.01 (I − Π), Π the projector on the indicators of 2 groups of 4: eigenvalues 1, 1 and 0.01 six times:
    # PR = 2.06² / 2.0006 = 2.12, k = 2. P_k a = 0. K_ii = ¼ + 0.01 · ¾ = 0.2575, aᵀKa = 0.01 ‖a‖²: n_eff = 0.0388
    indicators = torch.block_diag(torch.ones(4, 4), torch.ones(4, 4)).double() / 4
    gram = indicators + 0.01 * (torch.eye(8, dtype=torch.float64) - indicators)
    a = group_advantages(torch.tensor([[1., 0, 0, 0], [1., 1, 1, 0]], dtype=torch.float64))
    found = salt_advantages(gram, a.flatten())
    alpha = 1 - 0.01 / 0.2575
    assert found.rank == 2 and found.alpha == pytest.approx(alpha, rel=1e-12)
    expected = alpha * torch.tensor([[0.75], [0.25]], dtype=torch.float64) * a
    assert torch.allclose(found.coefficients, expected.flatten(), atol=1e-13)


def test_orthogonal_features_of_equal_norm_drop_nothing():
    """EQUATIONS 16, first half: K = c I, so k_t = m and P_k = I."""
    _, _, a = problem(0)
    found = salt_advantages(0.7 * torch.eye(len(a), dtype=torch.float64), a)
    assert found.rank == len(a) and torch.allclose(found.coefficients, a, atol=1e-14)


def test_orthogonal_features_of_uneven_norm_keep_the_largest():
    """EQUATIONS 16, second half. ‖g‖² = 1, 9, ¼, 4: PR = 14.25² / 98.0625 = 2.07, so responses 2 and 4 stay."""
    squared = torch.tensor([1., 9., 0.25, 4.], dtype=torch.float64)
    a = torch.tensor([1.5, -0.5, -0.5, -0.5], dtype=torch.float64)
    found = salt_advantages(torch.diag(squared), a)
    assert found.rank == 2
    assert torch.allclose(found.main, torch.tensor([0, -0.5, 0, -0.5], dtype=torch.float64), atol=1e-15)
    variation = squared.var(correction=0) / squared.mean() ** 2
    assert found.participation_ratio / 4 == pytest.approx((1 / (1 + variation)).item(), rel=1e-14)


def test_a_random_permutation_moves_the_coefficients_by_a_factor_of_root_two():
    """EQUATIONS 19: with centred a, E[D_a²] = 1 + ‖a'‖² / ‖a‖²: √2 for k_t near m, never the paper's 0.24."""
    features = torch.linalg.qr(torch.randn(80, 64, generator=seeded(0), dtype=torch.float64)).Q
    features = features * torch.linspace(0.8, 1.2, 64, dtype=torch.float64)
    gram = features.T @ features / 64
    a = group_advantages(torch.randn(8, 8, generator=seeded(1), dtype=torch.float64)).flatten()
    salt = salt_advantages(gram, a)
    assert salt.rank / 64 > 0.9
    distances = [(salt_advantages(gram, a, "permuted", generator=seeded(s)).coefficients - a).square().sum()
                 / a.square().sum() for s in range(300)]
    expected = 1 + (salt.coefficients.norm() / a.norm()).item() ** 2
    assert torch.stack(distances).mean().item() == pytest.approx(expected, rel=0.02)
    assert math.sqrt(expected) == pytest.approx(math.sqrt(2), rel=0.05)


def test_main_channel_is_the_truncated_gradient():
    """EQUATIONS 8: S a_main = U_k U_kᵀ S a."""
    features, gram, a = problem(7)
    found = salt_advantages(gram, a, "only-main")
    left = torch.linalg.svd(features, full_matrices=False).U[:, :found.rank]
    assert torch.allclose(features @ found.coefficients, left @ (left.T @ (features @ a)), atol=1e-9)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in RANDOM])
def test_variants_follow_a_permutation_and_ignore_the_scale_of_k(variant):
    for seed in range(6):
        _, gram, a = problem(seed)
        found = salt_advantages(gram, a, variant, **options(variant))
        order = torch.randperm(len(a), generator=seeded(seed))
        permuted = salt_advantages(gram[order][:, order], a[order], variant, **options(variant))
        assert torch.allclose(permuted.coefficients, found.coefficients[order], atol=1e-10)
        scaled = salt_advantages(gram * 1e-12, a, variant, **options(variant))
        assert torch.allclose(scaled.coefficients, found.coefficients, atol=1e-10)


# The random variants

@pytest.mark.parametrize("variant", ["permuted", "matched-rand-subspace"])
def test_matched_nulls_keep_the_coefficients(variant):
    for seed in range(10):
        _, gram, a = problem(seed, dtype=torch.float32)
        salt = salt_advantages(gram, a)
        null = salt_advantages(gram, a, variant, generator=seeded(seed))
        assert torch.equal(null.coefficients.sort().values, salt.coefficients.sort().values)
        assert not torch.equal(null.coefficients, salt.coefficients)
        assert (null.alpha, null.rank, null.n_eff) == (salt.alpha, salt.rank, salt.n_eff)


def test_random_projection_keeps_the_dimension_but_not_the_subspace():
    _, gram, a = problem(3)
    salt, found = salt_advantages(gram, a), salt_advantages(gram, a, "rand-proj", generator=seeded(0))
    assert found.rank == salt.rank and torch.equal(found.basis, salt.basis)     # diagnostics keep K's own subspace
    assert (found.main - salt.main).norm() > 0.1 * salt.main.norm()
    # On average a random k-dimensional subspace keeps k/m of ‖a‖².
    kept = [salt_advantages(gram, a, "rand-proj", generator=seeded(s)).main.square().sum() for s in range(400)]
    expected = salt.rank / len(a) * a.square().sum().item()
    assert torch.stack(kept).mean().item() == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("variant", RANDOM)
def test_random_variants_repeat_and_differ(variant):
    _, gram, a = problem(4)
    first, again, other = (salt_advantages(gram, a, variant, generator=seeded(s)).coefficients for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    moving = seeded(1)
    runs = [salt_advantages(gram, a, variant, generator=moving).coefficients for _ in range(2)]
    assert not torch.equal(*runs)


@pytest.mark.parametrize("variant", RANDOM)
def test_random_variants_need_a_generator(variant):
    _, gram, a = problem(4)
    with pytest.raises(ValueError, match="generator"):
        salt_advantages(gram, a, variant)


def test_the_global_random_state_is_left_alone():
    _, gram, a = problem(4)
    before = torch.get_rng_state()
    for variant in VARIANTS:
        salt_advantages(gram, a, variant, **options(variant))
    scope_blocks(4, 12, 4, generator=seeded(0))
    assert torch.equal(torch.get_rng_state(), before)


# Degenerate input

@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gram_that_is_not_finite_passes_the_advantages_through(variant, bad):
    _, gram, a = problem(0)
    gram[2, 3] = bad
    found = salt_advantages(gram, a, variant, **options(variant))
    assert torch.equal(found.coefficients, a) and torch.equal(found.main, a) and not found.exploration.any()
    assert not found.finite and found.rank == 0 and found.alpha == 0 and found.basis.shape == (len(a), 0)
    assert math.isnan(found.participation_ratio) and math.isnan(found.n_eff)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gram_of_zeros_passes_the_advantages_through(variant):
    _, _, a = problem(0)
    found = salt_advantages(torch.zeros(12, 12), a, variant, **options(variant))
    assert torch.equal(found.coefficients, a) and found.finite and found.rank == 0 and found.alpha == 0
    assert found.participation_ratio == 0 and found.n_eff == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_signal_stays_no_signal(variant):
    _, gram, _ = problem(0)
    found = salt_advantages(gram, torch.zeros(12), variant, **options(variant))
    assert not found.coefficients.any() and found.n_eff == 0 and found.finite and found.rank >= 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_single_response(variant):
    # k = m = 1, P_k = I, n_eff = 1: main = a, exploration = 0 (no-proj: exploration = [a]_+, but α = 0)
    found = salt_advantages(torch.tensor([[2.]]), torch.tensor([0.5]), variant, **options(variant))
    expected = {"only-exp": 0.0}.get(variant, 0.5)
    assert found.coefficients.tolist() == pytest.approx([expected], abs=1e-7) and found.rank == 1


def test_duplicated_responses_get_the_same_coefficient():
    features, _, _ = problem(0, prompts=2, size=4)
    features = features[:, [0, 0, 1, 1, 2, 2, 3, 3]]
    a = torch.tensor([1., 1., -1., -1., 0.5, 0.5, -0.5, -0.5], dtype=torch.float64)
    pairs = salt_advantages(features.T @ features / 8, a).coefficients.view(4, 2)
    assert torch.allclose(pairs[:, 0], pairs[:, 1], atol=1e-12)


def test_an_empty_response_outside_the_subspace_keeps_only_exploration():
    features, _, a = problem(0)
    features[:, 5] = 0
    a[5] = 1.0
    found = salt_advantages(features.T @ features / 12, a)
    assert found.main[5].item() == pytest.approx(0, abs=1e-12)
    assert found.coefficients[5].item() == pytest.approx(found.alpha, rel=1e-10)


def test_rank_deficient_features():
    features, gram, a = problem(3, dimension=2)
    found = salt_advantages(gram, a)
    assert 1 <= found.rank <= 2
    assert np.allclose(found.coefficients.numpy(), expected_coefficients(features, a, "salt"), atol=1e-10)


def test_signal_reaches_groups_without_signal():
    """EQUATIONS 9: P_k mixes responses across prompts, so a' is not 0 where a is."""
    _, gram, a = problem(0, shared=3.0)
    a[:4] = 0
    assert salt_advantages(gram, a).coefficients[:4].abs().max() > 1e-3


def test_half_precision_and_float32_grams():
    _, gram, a = problem(6)
    wanted = salt_advantages(gram, a).coefficients
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        found = salt_advantages(gram.to(dtype), a.float())
        assert found.coefficients.dtype == torch.float32
        assert (found.coefficients - wanted).norm() < tolerance * wanted.norm()


def test_integer_advantages_are_not_truncated():
    gram = torch.tensor([[2., 1., 0.], [1., 2., 1.], [0., 1., 2.]])
    try:
        found = salt_advantages(gram, torch.tensor([1, -1, 0]))
    except (TypeError, ValueError):
        return
    assert torch.allclose(found.main.float(), salt_advantages(gram, torch.tensor([1., -1., 0.])).main)


# The options

def test_rank_options():
    _, gram, a = problem(0, prompts=4, dimension=200, shared=0.0)
    rank = salt_advantages(gram, a).rank
    ratio = participation_ratio(gram)
    assert rank > 4
    assert salt_advantages(gram, a, rank_scale=0.5).rank == math.floor(0.5 * ratio + 0.5)
    assert salt_advantages(gram, a, rank_max=3).rank == 3
    assert salt_advantages(gram, a, rank_max=64).rank == rank
    assert salt_advantages(gram, a, rank_max=0).rank == 1
    identity = torch.eye(16, dtype=torch.float64)
    assert salt_advantages(identity, a).rank == 16
    assert salt_advantages(identity, a, below_full=True).rank == 15
    assert salt_advantages(identity, a, below_full=True, rank_max=64).rank == 15
    assert salt_advantages(identity, a, below_full=True, rank_max=7).rank == 7
    assert salt_advantages(torch.eye(1), torch.ones(1), below_full=True).rank == 1


def test_fixed_alpha():
    _, gram, a = problem(0)
    salt = salt_advantages(gram, a)
    for alpha in (0, 0.25, 1.0):
        found = salt_advantages(gram, a, "fixed-alpha", alpha=alpha)
        assert found.alpha == alpha and torch.equal(found.coefficients, salt.main + alpha * salt.exploration)
    for bad in (None, -0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="alpha"):
            salt_advantages(gram, a, "fixed-alpha", alpha=bad)


@pytest.mark.parametrize("entropy, low_high, expected", [
    (1.25, (1.0, 2.0), 0.25), (0.5, (1.0, 2.0), 0.0), (3.0, (1.0, 2.0), 1.0), (1.0, (1.0, 1.0), 0.0)])
def test_entropy_alpha(entropy, low_high, expected):
    _, gram, a = problem(0)
    assert salt_advantages(gram, a, "entropy-alpha", entropy=entropy, entropy_range=low_high).alpha == expected


def test_pr_alpha_is_clipped():
    a = problem(0)[2]
    # K = I: PR / (m − 1) = 12 / 11
    assert salt_advantages(torch.eye(12, dtype=torch.float64), a, "pr-alpha").alpha == 1
    _, gram, _ = problem(0)
    found = salt_advantages(gram, a, "pr-alpha")
    assert found.alpha == pytest.approx(found.participation_ratio / 11, rel=1e-15)


BAD_CALLS = {
    "a variant that does not exist": lambda k, a: salt_advantages(k, a, "salty"),
    "a Gram of another batch": lambda k, a: salt_advantages(k[:8, :8], a),
    "a Gram that is not square": lambda k, a: salt_advantages(k[:8], a),
    "advantages by group": lambda k, a: salt_advantages(k, a.view(3, 4)),
    "no entropy": lambda k, a: salt_advantages(k, a, "entropy-alpha", entropy_range=(0, 1)),
    "no entropy range": lambda k, a: salt_advantages(k, a, "entropy-alpha", entropy=1.0),
    "blocks that overlap": lambda k, a: reweight(k, a, [torch.arange(12), torch.arange(2)]),
    "blocks that leave some out": lambda k, a: reweight(k, a, [torch.arange(11)]),
    "blocks outside the batch": lambda k, a: reweight(k, a, [torch.arange(1, 13)]),
    "no blocks": lambda k, a: reweight(k, a, []),
    "a larger Gram than blocks": lambda k, a: reweight(torch.block_diag(k, k), a, [torch.arange(12)]),
    "a scope that does not exist": lambda k, a: scope_blocks("batch", 12, 4),
    "a scope as text": lambda k, a: scope_blocks("4", 12, 4),
    "a scope that does not divide": lambda k, a: scope_blocks(5, 12, 4, seeded(0)),
    "a scope of 0": lambda k, a: scope_blocks(0, 12, 4, seeded(0)),
    "a mixed scope without a generator": lambda k, a: scope_blocks(4, 12, 4),
    "groups that do not divide": lambda k, a: scope_blocks("group", 12, 5),
    "groups of 0": lambda k, a: scope_blocks("group", 12, 0),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_arguments_are_a_value_error(name):
    _, gram, a = problem(0)
    with pytest.raises(ValueError) as error:
        BAD_CALLS[name](gram, a)
    assert "\n" not in str(error.value)


def test_an_unknown_variant_lists_those_that_exist():
    _, gram, a = problem(0)
    with pytest.raises(ValueError, match="salty.*only-main.*interpolated"):
        salt_advantages(gram, a, "salty")


# Scope

def test_scope_blocks_partition_the_batch():
    for scope, sizes in (("mini-batch", [24]), ("group", [4] * 6), (8, [8] * 3), (1, [1] * 24), (24, [24])):
        blocks = scope_blocks(scope, 24, 4, generator=seeded(0))
        assert [len(block) for block in blocks] == sizes
        assert torch.cat(blocks).sort().values.tolist() == list(range(24))
        assert all(torch.equal(block, block.sort().values) for block in blocks)
    assert [block.tolist() for block in scope_blocks("group", 6, 3)] == [[0, 1, 2], [3, 4, 5]]


def test_groups_without_a_signal_can_stay_out_of_k():
    _, gram, a = problem(2, prompts=3)
    a[4:8] = 0                                                         # the second group of four has no signal
    kept = torch.tensor([0, 1, 2, 3, 8, 9, 10, 11])
    blocks = with_signal(scope_blocks("mini-batch", 12, 4), a, 4)
    assert [block.tolist() for block in blocks] == [kept.tolist()]
    found, alone = reweight(gram, a, blocks), salt_advantages(gram[kept][:, kept], a[kept])
    assert torch.equal(found.coefficients[kept], alone.coefficients) and not found.coefficients[4:8].any()
    assert torch.equal(found.basis[kept], alone.basis) and not found.basis[4:8].any()
    assert found.alpha.tolist() == [alone.alpha] and found.rank.tolist() == [alone.rank]
    whole = reweight(gram, a, scope_blocks("mini-batch", 12, 4))
    assert whole.coefficients[4:8].any()                               # what the flag is for: P_k mixes across prompts
    # By group nothing changes, and without any signal nothing is left out.
    assert torch.equal(*(reweight(gram, a, b).coefficients for b in (
        scope_blocks("group", 12, 4), with_signal(scope_blocks("group", 12, 4), a, 4))))
    assert [len(block) for block in with_signal(scope_blocks(8, 24, 4, seeded(0)), torch.zeros(24), 4)] == [8] * 3
    a[5] = 1e-3                                                        # a response with an advantage must not be lost
    with pytest.raises(ValueError, match="each of the 12 responses once"):
        reweight(gram, a, blocks)


def test_mixed_blocks_mix_prompts_and_repeat():
    first, again, other = (scope_blocks(8, 64, 8, generator=seeded(s)) for s in (0, 0, 1))
    assert all(map(torch.equal, first, again)) and not all(map(torch.equal, first, other))
    assert all(len(set((block // 8).tolist())) > 1 for block in first)


def test_one_block_is_salt_advantages():
    _, gram, a = problem(2)
    for variant in VARIANTS:
        whole = salt_advantages(gram, a, variant, **options(variant))
        found = reweight(gram, a, scope_blocks("mini-batch", 12, 4), variant, **options(variant))
        for name in ("coefficients", "main", "exploration", "basis"):
            assert torch.equal(getattr(found, name), getattr(whole, name))
        for name in ("alpha", "rank", "participation_ratio", "n_eff", "finite"):
            assert getattr(found, name).tolist() == [getattr(whole, name)]                   # not rounded to float32


def test_group_scope_is_one_call_per_group():
    _, gram, a = problem(2, prompts=3)
    found = reweight(gram, a, scope_blocks("group", 12, 4))
    for b in range(3):
        rows = slice(4 * b, 4 * b + 4)
        alone = salt_advantages(gram[rows, rows] * 3, a[rows])       # K of a group: 12/4 times the batch's block
        assert torch.allclose(found.coefficients[rows], alone.coefficients, atol=1e-12)
        assert found.rank[b] == alone.rank and found.alpha[b].item() == pytest.approx(alone.alpha, rel=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_interleaved_blocks_return_to_their_places(variant):
    _, gram, a = problem(2)
    blocks = [torch.tensor([1, 11, 4, 6]), torch.tensor([0, 2, 9, 3, 10]), torch.tensor([8, 5, 7])]
    generator = options(variant)                                      # one generator runs on from block to block
    found, one_by_one = reweight(gram, a, blocks, variant, **options(variant)), []
    for block in blocks:
        alone: Reweighted = salt_advantages(gram[block][:, block], a[block], variant, **generator)
        for name in ("coefficients", "main", "exploration"):
            assert torch.equal(getattr(found, name)[block], getattr(alone, name))
        one_by_one.append(alone)
    for name in ("rank", "finite"):
        assert getattr(found, name).tolist() == [getattr(alone, name) for alone in one_by_one]
    # The basis has the blocks' projectors on its diagonal and nothing between blocks.
    projector = found.basis @ found.basis.T
    assert found.basis.shape == (12, int(found.rank.sum()))
    for i, block in enumerate(blocks):
        own = one_by_one[i].basis @ one_by_one[i].basis.T
        assert torch.allclose(projector[block][:, block], own, atol=1e-14)
        others = torch.cat([other for j, other in enumerate(blocks) if j != i])
        assert not projector[block][:, others].any()


def test_a_bad_block_does_not_spoil_the_others():
    _, gram, a = problem(2)
    gram[0, 1] = math.nan
    found = reweight(gram, a, scope_blocks("group", 12, 4))
    assert found.finite.tolist() == [False, True, True] and found.rank.tolist()[0] == 0
    assert torch.equal(found.coefficients[:4], a[:4]) and torch.isfinite(found.coefficients).all()
    assert not torch.equal(found.coefficients[4:], a[4:])


def test_blocks_of_one_response():
    _, gram, a = problem(2)
    found = reweight(gram, a, scope_blocks(1, 12, 4, generator=seeded(0)))
    assert torch.allclose(found.coefficients, a, atol=1e-14) and (found.rank == 1).all()
    assert torch.allclose(found.n_eff.double(), torch.ones(12, dtype=torch.float64), atol=1e-14)
