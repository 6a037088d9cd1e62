"""Eq. 3, 65–71, Clip-Cov and KL-Cov against numpy in float64; micro-batches; what lies outside the mask."""
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from salt.loss import (AGGREGATIONS, aggregate, clip_cov_mask, entropy_from_logits, kl_cov_mask, kl_cov_penalty, kl_k3,
                       policy_loss, sampling_correction, token_covariance)


def batch(seed: int, m: int = 7, longest: int = 6, dtype: torch.dtype = torch.float64, spread: float = 0.5):
    """logprobs, old_logprobs, advantages (m,), mask: ragged, response 2 empty, response 0 full."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(m, longest, generator=generator, dtype=torch.float64) * 3
    old = logprobs + spread * torch.randn(m, longest, generator=generator, dtype=torch.float64)
    advantages = torch.randn(m, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, longest + 1, (m,), generator=generator)
    lengths[0], lengths[2] = longest, 0
    mask = torch.arange(longest) < lengths.unsqueeze(1)
    return logprobs.to(dtype), old.to(dtype), advantages.to(dtype), mask


def numpy_loss(logprobs, old, advantages, mask, clip_low, clip_high, aggregation, excluded=None, clip=True) -> float:
    """Eq. 3 and Eq. 69 as they stand, token by token; −J, because J is maximised."""
    m, longest = mask.shape
    per_response, tokens = [], int(mask.sum())
    for i in range(m):
        terms = []
        for t in range(longest):
            if not mask[i, t]:
                continue
            ratio = math.exp(logprobs[i, t] - old[i, t])
            a = float(advantages[i] if advantages.ndim == 1 else advantages[i, t])
            clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
            term = min(ratio * a, clipped * a) if clip else ratio * a
            terms.append(0.0 if excluded is not None and excluded[i, t] else term)
        per_response.append(terms)
    if aggregation == "sequence-mean":
        return -sum(sum(terms) / len(terms) for terms in per_response if terms) / m
    return -sum(map(sum, per_response)) / tokens


def backward(loss_of, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logprobs.clone().requires_grad_()
    loss = loss_of(leaf)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


# Eq. 3, 65, 66, 69

@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("clip_low, clip_high", [(0.2, 0.2), (0.2, 0.28), (0.5, 0.1), (1.0, 1.0)])
def test_policy_loss_against_numpy(aggregation, clip_low, clip_high):
    for seed in range(8):
        logprobs, old, advantages, mask = batch(seed)
        per_token = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for a in (advantages, per_token):
            loss, _ = policy_loss(logprobs, old, a, mask, clip_low=clip_low, clip_high=clip_high,
                                  aggregation=aggregation)
            expected = numpy_loss(logprobs.numpy(), old.numpy(), a.numpy(), mask.numpy(), clip_low, clip_high,
                                  aggregation)
            assert loss.shape == () and loss.item() == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_policy_loss_by_hand():
    # Ratios 1.5 and 0.5 with Â = 2, then 1.5 and 0.5 with Â = −1, clip 0.2 / 0.3:
    # response 1: min(3, 2.6) = 2.6, min(1, 1.6) = 1 → mean 1.8; response 2: min(−1.5, −1.3) = −1.5,
    # min(−0.5, −0.8) = −0.8 → mean −1.15. −(1.8 − 1.15) / 2 = −0.325; two of four tokens are clipped, Σ|ρ − 1| = 2
    ratio = torch.tensor([[1.5, 0.5], [1.5, 0.5]], dtype=torch.float64)
    a, mask = torch.tensor([2., -1.], dtype=torch.float64), torch.ones(2, 2, dtype=torch.bool)
    loss, stats = policy_loss(ratio.log(), torch.zeros(2, 2).double(), a, mask, clip_high=0.3)
    assert loss.item() == pytest.approx(-0.325, rel=1e-14)
    assert stats == {"tokens": 4, "clipped": 2, "ratio_minus_one": pytest.approx(2.0)}
    # Ragged: response 2 loses its second token. sequence-mean −(1.8 − 1.5) / 2, token-mean −(2.6 + 1 − 1.5) / 3
    mask[1, 1] = False
    found = [policy_loss(ratio.log(), torch.zeros(2, 2).double(), a, mask, clip_high=0.3, aggregation=name)[0].item()
             for name in AGGREGATIONS]
    assert found == pytest.approx([-0.15, -0.7], rel=1e-14)


def test_an_empty_response_counts_in_the_number_of_responses():
    values, mask = torch.tensor([[4., 2.], [9., 9.]]), torch.tensor([[True, True], [False, False]])
    assert aggregate(values, mask, "sequence-mean") == 1.5             # (3 + 0) / 2
    assert aggregate(values, mask, "token-mean") == 3                  # 6 / 2
    assert aggregate(values, mask, "sequence-mean", 4) == 0.75
    assert aggregate(values, mask, "token-mean", 12) == 0.5


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_batch_without_a_token(aggregation):
    advantages = batch(0)[2]
    for shape in ((7, 6), (7, 0)):
        nothing = torch.zeros(shape, dtype=torch.bool)
        logprobs, old = torch.full(shape, -1.0), torch.full(shape, math.nan)
        loss, gradient = backward(lambda x: policy_loss(x, old, advantages, nothing, aggregation=aggregation)[0],
                                  logprobs)
        assert loss == 0 and not gradient.any()
        assert not clip_cov_mask(logprobs, old, advantages, nothing).any()
        assert not kl_cov_mask(logprobs, advantages, nothing).any()


def test_an_unknown_aggregation_is_refused():
    logprobs, old, advantages, mask = batch(0)
    with pytest.raises(ValueError, match="sequence-mean, token-mean"):
        policy_loss(logprobs, old, advantages, mask, aggregation="token_mean")


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradient_at_ratio_one(aggregation):
    """∂L/∂log π = −Â_i / (T_i m), or −Â_i / N: nothing is lost at the tie of the two branches."""
    logprobs, _, advantages, mask = batch(1)
    _, gradient = backward(lambda x: policy_loss(x, logprobs, advantages, mask, aggregation=aggregation)[0], logprobs)
    lengths = mask.sum(1, keepdim=True).clamp_min(1)
    weight = 1 / (lengths * len(mask)) if aggregation == "sequence-mean" else 1 / mask.sum()
    assert torch.allclose(gradient, -advantages.unsqueeze(1) * weight * mask, atol=1e-16)


def test_clipped_tokens_have_no_gradient_and_the_others_keep_theirs():
    # Â > 0: clipped above 1.28 only. Â < 0: clipped below 0.8 only. One token per response.
    ratio = torch.tensor([[1.29], [1.27], [0.5], [0.79], [0.81], [1.5]], dtype=torch.float64)
    a = torch.tensor([1., 1., 1., -1., -1., -1.], dtype=torch.float64)
    mask = torch.ones(6, 1, dtype=torch.bool)
    _, gradient = backward(lambda x: policy_loss(x, torch.zeros_like(x), a, mask, clip_high=0.28)[0], ratio.log())
    kept = torch.tensor([[0.], [1.], [1.], [0.], [1.], [1.]], dtype=torch.float64)
    assert torch.allclose(gradient, -a.unsqueeze(1) * ratio * kept / 6, atol=1e-16)


def test_gradient_against_finite_differences():
    logprobs, old, advantages, mask = batch(2)
    for aggregation in AGGREGATIONS:
        def loss_of(x: Tensor) -> Tensor:
            return policy_loss(x, old, advantages, mask, clip_low=0.2, clip_high=0.28, aggregation=aggregation)[0]
        torch.autograd.gradcheck(loss_of, (logprobs.clone().requires_grad_(),))


def test_log_ratio_limit():
    zero, a, mask = torch.zeros(1, 1).double(), torch.tensor([-1.]).double(), torch.ones(1, 1, dtype=torch.bool)
    far = torch.full((1, 1), 30.0, dtype=torch.float64)
    assert policy_loss(far, zero, a, mask)[0].item() == pytest.approx(math.exp(20))
    assert policy_loss(far, zero, a, mask, log_ratio_limit=None)[0].item() == pytest.approx(math.exp(30))
    assert policy_loss(far, zero, a, mask, log_ratio_limit=2.0)[0].item() == pytest.approx(math.exp(2))


def test_only_logprobs_receive_gradients_and_inputs_are_left_alone():
    tensors = batch(3)
    copies = [tensor.clone() for tensor in tensors]
    leaf = tensors[0].clone().requires_grad_()
    policy_loss(leaf, *tensors[1:])[0].backward()
    assert leaf.grad.abs().sum() > 0 and not any(tensor.requires_grad for tensor in tensors)
    assert all(map(torch.equal, tensors, copies))


def test_advantages_of_another_type_take_the_type_of_the_logprobs():
    logprobs, old, advantages, mask = batch(4)
    for dtype in (torch.float32, torch.float64):
        loss, _ = policy_loss(logprobs.float(), old.float(), advantages.to(dtype), mask)
        assert loss.dtype == torch.float32
        expected = policy_loss(logprobs, old, advantages, mask)[0].item()
        assert loss.item() == pytest.approx(expected, rel=1e-5)


# Micro-batches

def whole_objective(logprobs, old, reference, advantages, mask, clip_excluded, kl_chosen, aggregation, denominator):
    """Policy loss, KL and KL-Cov's penalty, as a trainer adds them up."""
    policy, stats = policy_loss(logprobs, old, advantages, mask, clip_high=0.28, aggregation=aggregation,
                                denominator=denominator, excluded=clip_excluded)
    penalty = kl_k3(logprobs, reference) * 0.05 + kl_cov_penalty(logprobs, old, kl_chosen, coef=2.0)
    return policy + aggregate(penalty, mask, aggregation, denominator), stats


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_micro_batches_add_up(aggregation, dtype, tolerance):
    logprobs, old, advantages, mask = batch(5, m=9, longest=40, dtype=dtype)
    reference = old + 0.3
    excluded = clip_cov_mask(logprobs, old, advantages, mask, ratio=0.05, low=-1.0, high=1.0,
                             generator=torch.Generator().manual_seed(0))
    chosen = kl_cov_mask(logprobs, advantages, mask, ratio=0.05)
    assert excluded.any() and chosen.sum() > 2
    denominator = len(mask) if aggregation == "sequence-mean" else int(mask.sum())

    def run(size: int, given: float | None):
        leaf, total, counts = logprobs.clone().requires_grad_(), 0.0, {}
        for rows in torch.arange(len(mask)).split(size):
            loss, stats = whole_objective(leaf[rows], old[rows], reference[rows], advantages[rows], mask[rows],
                                          excluded[rows], chosen[rows], aggregation, given)
            loss.backward()
            total += loss.item()
            counts = {name: counts.get(name, 0) + value for name, value in stats.items()}
        return total, leaf.grad, counts

    total, gradient, counts = run(len(mask), None)
    for size in (1, 3, 4, len(mask)):
        other_total, other_gradient, other_counts = run(size, denominator)
        assert other_total == pytest.approx(total, rel=tolerance)
        assert (other_gradient - gradient).norm() <= tolerance * gradient.norm()
        assert other_counts == {name: pytest.approx(value, rel=1e-5) for name, value in counts.items()}
        assert other_counts["tokens"] == int(mask.sum()) and other_counts["clipped"] == counts["clipped"]
    if aggregation == "token-mean":                              # without the denominator they would not: ragged rows
        assert run(1, None)[0] != pytest.approx(total, rel=1e-3)


# What lies outside the mask

LOSSES = {
    "policy": lambda x, old, a, mask: policy_loss(x, old, a, mask)[0],
    "policy, no clamp": lambda x, old, a, mask: policy_loss(x, old, a, mask, log_ratio_limit=None)[0],
    "policy, token-mean": lambda x, old, a, mask: policy_loss(x, old, a, mask, aggregation="token-mean")[0],
    "KL-Cov": lambda x, old, a, mask: (policy_loss(x, old, a, mask, clip=False)[0] + aggregate(
        kl_cov_penalty(x, old, kl_cov_mask(x, a, mask, ratio=0.2)), mask)),
    "Clip-Cov": lambda x, old, a, mask: policy_loss(x, old, a, mask, excluded=clip_cov_mask(
        x, old, a, mask, ratio=0.2, low=-9, high=9, generator=torch.Generator().manual_seed(0)))[0],
    "KL": lambda x, old, a, mask: aggregate(kl_k3(x, old), mask),
    "KL, token-mean": lambda x, old, a, mask: aggregate(kl_k3(x, old), mask, "token-mean"),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30, 7.0])
def test_padding_does_not_leak(name, bad):
    logprobs, old, advantages, mask = batch(6)
    per_token = advantages.unsqueeze(1).expand_as(mask).clone()
    wanted = backward(lambda x: LOSSES[name](x, old, per_token, mask), logprobs)
    assert wanted[1].abs().sum() > 0
    for spoiled in ((0,), (1,), (2,), (0, 1, 2)):
        x, o, a = (tensor.masked_fill(~mask, bad) if i in spoiled else tensor
                   for i, tensor in enumerate((logprobs, old, per_token)))
        found = backward(lambda leaf: LOSSES[name](leaf, o, a, mask), x)
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_statistics_ignore_the_padding(bad):
    logprobs, old, advantages, mask = batch(6)
    spoiled = logprobs.masked_fill(~mask, bad)
    assert policy_loss(spoiled, old, advantages, mask)[1] == policy_loss(logprobs, old, advantages, mask)[1]
    covariance = token_covariance(spoiled, advantages, mask)
    assert torch.equal(covariance, token_covariance(logprobs, advantages, mask)) and not covariance[~mask].any()


# Eq. 68

def test_kl_by_hand():
    # π_ref / π_θ = 2: 2 − ln 2 − 1; ½: ½ + ln 2 − 1; equal: 0
    x = torch.tensor([2.0, 0.5, 1.0], dtype=torch.float64).log()
    expected = [1 - math.log(2), math.log(2) - 0.5, 0]
    assert kl_k3(torch.zeros(3, dtype=torch.float64), x).tolist() == pytest.approx(expected, rel=1e-14)


def test_kl_value_and_gradient_against_numpy():
    logprobs, old, _, _ = batch(7)
    kl, gradient = backward(lambda x: kl_k3(x, old).sum(), logprobs)
    x = (old - logprobs).numpy()
    assert kl.item() == pytest.approx((np.exp(x) - x - 1).sum(), rel=1e-12)
    assert np.allclose(gradient.numpy(), 1 - np.exp(x), rtol=1e-12, atol=1e-15)      # d/dlogπ (eˣ − x − 1), x' = −1
    assert kl_k3(logprobs, old).shape == logprobs.shape


def test_kl_is_never_negative_and_small_differences_survive_float32():
    x = torch.linspace(-3, 3, 200_001)
    assert (kl_k3(torch.zeros_like(x), x) >= 0).all()
    tiny = torch.tensor([1e-3, -1e-3])
    assert torch.allclose(kl_k3(torch.zeros(2), tiny), tiny.double().square().float() / 2, rtol=1e-2)


def test_kl_limits():
    zero, far = torch.zeros(3).double(), torch.tensor([5.0, 30.0, -30.0]).double()
    # e⁵ − 6 = 142 and e²⁰ are cut to 10; at −30 the log-ratio is cut to −20: e⁻²⁰ + 20 − 1 = 19 is cut to 10, too
    kl, gradient = backward(lambda x: kl_k3(x, far).sum(), zero)
    assert kl == 30 and not gradient.any()
    assert kl_k3(zero, far, limit=None).tolist() == pytest.approx(
        [math.exp(5) - 6, math.exp(20) - 21, math.exp(-20) + 19])
    assert kl_k3(zero, far, log_ratio_limit=None, limit=None)[1].item() == pytest.approx(math.exp(30) - 31)


def test_expected_kl_is_the_kl():
    """Σ_a π_θ(a) k3(a) = KL(π_θ ‖ π_ref) exactly: the −1 and the ratio cancel in expectation."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(9, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2))
    expectation = (p.exp() * kl_k3(p, q, limit=None)).sum().item()
    assert expectation == pytest.approx((p.exp() * (p - q)).sum().item(), rel=1e-12)


# Eq. 70

def test_entropy_by_hand():
    # uniform over 4: ln 4; probabilities ½, ¼, ¼: 1.5 ln 2; one certain token: 0
    logits = torch.tensor([[0., 0., 0., 0.], [math.log(2), 0., 0., -200.], [500., 0., 0., 0.]], dtype=torch.float64)
    found = entropy_from_logits(logits + 7.0)
    assert found.tolist() == pytest.approx([math.log(4), 1.5 * math.log(2), 0], abs=1e-12)


def test_entropy_and_its_gradient_against_numpy():
    logits = torch.randn(3, 5, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _, gradient = backward(lambda z: entropy_from_logits(z).sum(), logits)
    z = logits.numpy()
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    entropy = -(p * np.log(p)).sum(-1)
    assert entropy_from_logits(logits).shape == (3, 5) and np.allclose(entropy_from_logits(logits).numpy(), entropy)
    assert np.allclose(gradient.numpy(), -p * (np.log(p) + entropy[..., None]), atol=1e-13)


# Clip-Cov and KL-Cov (FACTS: c = (A − ⟨A⟩)(ℓ − ⟨ℓ⟩) over the valid tokens)

def numpy_covariance(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> np.ndarray:
    valid, a = mask.numpy(), np.broadcast_to(advantages.numpy()[:, None], mask.shape)
    ell = logprobs.numpy()
    return np.where(valid, (a - a[valid].mean()) * (ell - ell[valid].mean()), 0.0)


def test_covariance_against_numpy():
    for seed in range(5):
        logprobs, _, advantages, mask = batch(seed)
        found = token_covariance(logprobs.requires_grad_(), advantages, mask)
        expected = numpy_covariance(logprobs.detach(), advantages, mask)
        assert np.allclose(found.numpy(), expected, atol=1e-14) and not found.requires_grad


def numpy_candidates(logprobs, old, advantages, mask, low, high, clip_low=1.0, clip_high=1.0) -> np.ndarray:
    covariance = numpy_covariance(logprobs, advantages, mask)
    ratio, a = np.exp((logprobs - old).numpy()), advantages.numpy()[:, None]
    already = -a * np.clip(ratio, 1 - clip_low, 1 + clip_high) > -a * ratio
    return mask.numpy() & (covariance > low) & (covariance < high) & ~already


@pytest.mark.parametrize("ratio", [2e-4, 0.03, 0.5])
def test_clip_cov_draws_candidates_only_and_as_many_as_it_should(ratio):
    drawn = 0
    for seed in range(10):
        logprobs, old, advantages, mask = batch(seed, m=12, longest=20, spread=1.0)
        candidates = numpy_candidates(logprobs, old, advantages, mask, 0.3, 1.5)
        found = clip_cov_mask(logprobs, old, advantages, mask, ratio=ratio, low=0.3, high=1.5,
                              generator=torch.Generator().manual_seed(seed))
        assert found.dtype == torch.bool and found.shape == mask.shape
        assert not (found.numpy() & ~candidates).any()
        assert found.sum() == min(max(math.floor(ratio * int(mask.sum())), 1), candidates.sum())
        drawn += int(found.sum())
    assert drawn >= 10


def test_clip_cov_draws_every_candidate_sometimes_and_repeats():
    logprobs, old, advantages, mask = batch(0, m=12, longest=20, spread=1.0)
    candidates = numpy_candidates(logprobs, old, advantages, mask, 0.3, 1.5)
    before = torch.get_rng_state()

    def draw(seed: int) -> Tensor:
        return clip_cov_mask(logprobs, old, advantages, mask, low=0.3, high=1.5,
                             generator=torch.Generator().manual_seed(seed))
    hit = torch.stack([draw(seed) for seed in range(400)]).any(0)
    assert np.array_equal(hit.numpy(), candidates) and candidates.sum() > 5
    assert torch.equal(draw(3), draw(3)) and torch.equal(torch.get_rng_state(), before)


def test_clip_cov_leaves_clipped_tokens_alone():
    # Two tokens, A = ±1, covariance: mean A = 0, mean ℓ = −2; c = 1 · 1 = 1 and −1 · −1 = 1, in the band (0.5, 2).
    logprobs = torch.tensor([[-1.0], [-3.0]], dtype=torch.float64)
    a, mask = torch.tensor([1., -1.], dtype=torch.float64), torch.ones(2, 1, dtype=torch.bool)
    options = {"ratio": 1.0, "low": 0.5, "high": 2.0}
    assert clip_cov_mask(logprobs, logprobs, a, mask, **options).all()
    # The first token's ratio e^1.1 = 3 exceeds 1 + 1 with A > 0: clipped already, so only the second is a candidate.
    old = logprobs - torch.tensor([[1.1], [0.0]], dtype=torch.float64)
    assert clip_cov_mask(logprobs, old, a, mask, **options).flatten().tolist() == [False, True]
    assert clip_cov_mask(logprobs, old, a, mask, **options, clip_high=3.0).all()
    # The band is open at both ends.
    assert not clip_cov_mask(logprobs, logprobs, a, mask, ratio=1.0, low=1.0, high=2.0).any()
    assert not clip_cov_mask(logprobs, logprobs, a, mask, ratio=1.0, low=0.5, high=1.0).any()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_clip_cov_loss_keeps_the_denominator(aggregation):
    for seed in range(5):
        logprobs, old, advantages, mask = batch(seed)
        excluded = clip_cov_mask(logprobs, old, advantages, mask, ratio=0.3, low=-2, high=2,
                                 generator=torch.Generator().manual_seed(seed))
        assert excluded.sum() > 1
        loss, gradient = backward(lambda x: policy_loss(x, old, advantages, mask, aggregation=aggregation,
                                                        excluded=excluded)[0], logprobs)
        expected = numpy_loss(logprobs.numpy(), old.numpy(), advantages.numpy(), mask.numpy(), 0.2, 0.2, aggregation,
                              excluded=excluded.numpy())
        assert loss.item() == pytest.approx(expected, rel=1e-12) and not gradient[excluded].any()


@pytest.mark.parametrize("ratio", [2e-3, 0.1, 1.0])
def test_kl_cov_chooses_the_largest(ratio):
    for seed in range(10):
        logprobs, _, advantages, mask = batch(seed, m=12, longest=20)
        found = kl_cov_mask(logprobs, advantages, mask, ratio=ratio)
        covariance = np.where(mask.numpy(), numpy_covariance(logprobs, advantages, mask), -np.inf).ravel()
        count = max(1, math.floor(ratio * int(mask.sum())))
        expected = np.zeros(mask.numel(), dtype=bool)
        expected[np.argsort(-covariance, kind="stable")[:count]] = True
        assert np.array_equal(found.numpy().ravel(), expected) and not (found & ~mask).any()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_kl_cov_objective_against_numpy(aggregation):
    """−A ρ without clipping, plus λ |ℓ − ℓ_old| on the chosen tokens."""
    for seed in range(5):
        logprobs, old, advantages, mask = batch(seed)
        chosen = kl_cov_mask(logprobs, advantages, mask, ratio=0.2)

        def loss_of(x: Tensor) -> Tensor:
            return (policy_loss(x, old, advantages, mask, clip=False, aggregation=aggregation)[0]
                    + aggregate(kl_cov_penalty(x, old, chosen, coef=0.7), mask, aggregation))
        loss, gradient = backward(loss_of, logprobs)
        difference, weight = (logprobs - old).numpy(), mask.numpy() / mask.numpy().sum()
        if aggregation == "sequence-mean":
            weight = mask.numpy() / np.maximum(mask.numpy().sum(1, keepdims=True), 1) / len(mask)
        penalty = 0.7 * np.abs(difference) * chosen.numpy()
        a = advantages.numpy()[:, None]
        assert loss.item() == pytest.approx((weight * (-a * np.exp(difference) + penalty)).sum(), rel=1e-12)
        slope = weight * (-a * np.exp(difference) + 0.7 * np.sign(difference) * chosen.numpy())
        assert np.allclose(gradient.numpy(), slope, atol=1e-14)


def test_kl_cov_is_inert_on_policy():
    logprobs, _, advantages, mask = batch(0)
    chosen = kl_cov_mask(logprobs, advantages, mask, ratio=0.5)
    value, gradient = backward(lambda x: aggregate(kl_cov_penalty(x, logprobs, chosen), mask), logprobs)
    assert value == 0 and not gradient.any()


def test_nothing_counts_as_clipped_on_policy_or_without_a_clip():
    logprobs, old, advantages, mask = batch(0, spread=2.0)
    assert policy_loss(logprobs, old, advantages, mask)[1]["clipped"] > 0
    assert policy_loss(logprobs, logprobs, advantages, mask)[1] == {
        "tokens": int(mask.sum()), "clipped": 0, "ratio_minus_one": 0}
    assert policy_loss(logprobs, old, advantages, mask, clip=False)[1]["clipped"] == 0


def test_sampling_correction_is_the_capped_ratio_and_a_constant():
    old = torch.tensor([[math.log(0.5), math.log(0.2), -1.0, -700.0]], dtype=torch.float64, requires_grad=True)
    sampler = torch.tensor([[math.log(0.25), math.log(0.4), -1.0, -1500.0]], dtype=torch.float64)
    weights = sampling_correction(old, sampler, cap=3.0)
    assert weights.tolist()[0] == pytest.approx([2.0, 0.5, 1.0, 3.0], rel=1e-12)           # 0.5/0.25, 0.2/0.4, 1, e^800
    assert not weights.requires_grad
    assert sampling_correction(old, sampler, cap=1.5)[0, 0] == pytest.approx(1.5)
    for cap in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="a positive number"):
            sampling_correction(old, sampler, cap=cap)


def test_a_sampling_correction_on_the_advantages_scales_each_tokens_term():
    """Weighted advantages go through min and clip as the weight times the term: Â may be (m, T)."""
    logprobs, old, advantages, mask = batch(3)
    weights = sampling_correction(old, old + 0.3 * torch.randn(old.shape, dtype=old.dtype), cap=1.2)
    loss, _ = policy_loss(logprobs, old, advantages[:, None] * weights, mask)
    ratio, a = (logprobs - old).numpy(), advantages.numpy()[:, None]
    terms = -np.minimum(a * np.exp(ratio), a * np.exp(ratio).clip(0.8, 1.2)) * weights.numpy() * mask.numpy()
    assert loss.item() == pytest.approx((terms.sum(1) / np.maximum(mask.numpy().sum(1), 1)).mean(), rel=1e-12)
