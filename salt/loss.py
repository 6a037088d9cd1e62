"""The GRPO and DAPO objectives, the KL penalty, and the entropy controls that the paper compares with.

Glossary
    paper              name             shape          equation
    log π_θ            logprobs         (m, T)         1     of the sampled tokens, at the sampling temperature
    log π_θold         old_logprobs     (m, T)         3     of the policy that wrote the responses
    Â or a'            advantages       (m,) or (m, T) 2, 18
    –                  mask             (m, T)         –     True on tokens of the response, its EOS included
    ε_low, ε_high      clip_low, clip_high             3, 69
    D_KL               kl_k3            (m, T)         68
    H                  entropy_from_logits             70

Every mean here is a sum divided by a `denominator` that belongs to the mini-batch, not to the tensors at hand: the
losses of its micro-batches then add up to the loss of the whole, whatever their size.

Departures from the paper
    1. Log-ratios are clamped to ±20 before the exponential, and the KL estimate to ±10, as in the framework the paper
       used; both are arguments, None leaves the clamp out.
    2. Eq. 3 and 69 are maximised; `policy_loss` returns their negative.
    3. Eq. 69 averages over the tokens of one prompt's group; here over all tokens of the mini-batch, as DAPO's authors
       do.
    4. Clip-Cov and KL-Cov select tokens within the mini-batch, not within a micro-batch: otherwise a memory flag would
       change the objective. KL-Cov's |log-ratio| has gradient 0 at equality: inert on a strictly on-policy step.
    5. The paper does not speak of samplers whose arithmetic differs from the trainer's; `sampling_correction` is the
       truncated importance weight for it, off unless asked for.
"""
import math

import torch
from torch import Tensor

AGGREGATIONS = ("sequence-mean", "token-mean")


def aggregate(values: Tensor, mask: Tensor, aggregation: str = "sequence-mean",
              denominator: float | None = None) -> Tensor:
    """Mean of (m, T) values: over responses of their token means (Eq. 3), or over all valid tokens (Eq. 69) -> ().

    denominator: the mini-batch's number of responses, or of valid tokens; None takes those of this mask. A response
    without tokens counts in the number of responses and contributes 0.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {aggregation!r}: one of {', '.join(AGGREGATIONS)}")
    values = values.masked_fill(~mask, 0.0)
    lengths = mask.sum(1)
    if aggregation == "sequence-mean":                                                                  # Eq. 3
        return (values.sum(1) / lengths.clamp_min(1)).sum() / (len(mask) if denominator is None else denominator)
    return values.sum() / (lengths.sum().clamp_min(1) if denominator is None else denominator)          # Eq. 69


def _per_token(advantages: Tensor, like: Tensor) -> Tensor:
    advantages = advantages.to(like)
    return advantages.unsqueeze(1).expand_as(like) if advantages.ndim == 1 else advantages


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, limit: float | None) -> Tensor:
    log_ratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0)
    return log_ratio if limit is None else log_ratio.clamp(-limit, limit)


def policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float = 0.2,
                clip_high: float = 0.2, aggregation: str = "sequence-mean", denominator: float | None = None,
                excluded: Tensor | None = None, clip: bool = True,
                log_ratio_limit: float | None = 20.0) -> tuple[Tensor, dict[str, float]]:
    """−mean of min(ρ Â, clip(ρ, 1 − clip_low, 1 + clip_high) Â), ρ = exp(logprobs − old_logprobs) (Eq. 3, 65, 66, 69).

    logprobs, old_logprobs, mask: (m, T), mask boolean; advantages: (m,) or (m, T). `excluded` (m, T): tokens whose term
    is 0 while they stay in the denominator (Clip-Cov). clip=False: −mean of ρ Â (KL-Cov). Returns the loss and sums
    over valid tokens that add up over micro-batches: tokens, clipped, ratio_minus_one (of |ρ − 1|).
    """
    advantages = _per_token(advantages, logprobs)
    ratio = _log_ratio(logprobs, old_logprobs, mask, log_ratio_limit).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    terms = torch.maximum(unclipped, clipped) if clip else unclipped                                    # Eq. 3, 65
    if excluded is not None:
        terms = terms.masked_fill(excluded, 0.0)
    stats = {"tokens": mask.sum().item(), "clipped": ((clipped > unclipped) & mask).sum().item() if clip else 0,
             "ratio_minus_one": (ratio.detach() - 1).abs()[mask].sum().item()}
    return aggregate(terms, mask, aggregation, denominator), stats


def sampling_correction(old_logprobs: Tensor, sampler_logprobs: Tensor, *, cap: float) -> Tensor:
    """min(π_old / π_sampler, cap) per token, a constant factor >= 0 on its advantage: (m, T), detached.

    Corrects for an engine whose kernels round otherwise than the trainer's. 1 on padding, where both are 0. Raises
    ValueError for a cap that is not positive.
    """
    if not cap > 0:
        raise ValueError(f"cap {cap}: a positive number")
    return (old_logprobs - sampler_logprobs).detach().clamp(max=math.log(cap)).exp()


def kl_k3(logprobs: Tensor, reference_logprobs: Tensor, *, log_ratio_limit: float | None = 20.0,
          limit: float | None = 10.0) -> Tensor:
    """The k3 estimate of KL(π_θ ‖ π_ref) per token: e^x − x − 1 ≥ 0 with x = log π_ref − log π_θ (Eq. 68).

    Both (…), the result too; nats, so is `limit`."""
    log_ratio = reference_logprobs - logprobs
    if log_ratio_limit is not None:
        log_ratio = log_ratio.clamp(-log_ratio_limit, log_ratio_limit)
    kl = torch.expm1(log_ratio) - log_ratio                                                             # Eq. 68
    return kl if limit is None else kl.clamp(-limit, limit)


def entropy_from_logits(logits: Tensor, logsumexp: Tensor | None = None) -> Tensor:
    """H = logsumexp(z) − Σ softmax(z) z over the last axis (Eq. 70): (..., V) -> (...), in nats.

    logsumexp: that of the logits, (...), where it is known already.
    """
    logsumexp = logits.logsumexp(-1) if logsumexp is None else logsumexp
    return logsumexp - (logits.softmax(-1) * logits).sum(-1)                                            # Eq. 70


def token_covariance(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(Â − mean Â)(ℓ − mean ℓ) with means over the valid tokens: (m, T), detached, 0 outside the mask."""
    logprobs, advantages = logprobs.detach(), _per_token(advantages, logprobs).detach()
    if not mask.any():
        return torch.zeros_like(logprobs)
    covariance = (advantages - advantages[mask].mean()) * (logprobs - logprobs[mask].mean())
    return covariance.masked_fill(~mask, 0.0)


def clip_cov_mask(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, ratio: float = 2e-4,
                  low: float = 1.0, high: float = 5.0, clip_low: float = 1.0, clip_high: float = 1.0,
                  log_ratio_limit: float | None = 20.0, generator: torch.Generator | None = None) -> Tensor:
    """Tokens that Clip-Cov takes out of the loss: (m, T) boolean, over the whole mini-batch.

    Candidates have a covariance in (low, high) and are not clipped already; min(max(⌊ratio · N⌋, 1), candidates) of
    them are drawn with `generator` (a CPU generator). They stay in the denominator.
    """
    covariance = token_covariance(logprobs, advantages, mask)
    advantages = _per_token(advantages, logprobs)
    probability_ratio = _log_ratio(logprobs.detach(), old_logprobs, mask, log_ratio_limit).exp()
    already = -advantages * probability_ratio.clamp(1 - clip_low, 1 + clip_high) > -advantages * probability_ratio
    candidates = (mask & (covariance > low) & (covariance < high) & ~already).flatten().nonzero().flatten().cpu()
    count = min(max(int(ratio * mask.sum().item()), 1), len(candidates))
    chosen = candidates[torch.randperm(len(candidates), generator=generator)[:count]]
    excluded = torch.zeros(mask.numel(), dtype=torch.bool)
    excluded[chosen] = True
    return excluded.view(mask.shape).to(mask.device)


def kl_cov_mask(logprobs: Tensor, advantages: Tensor, mask: Tensor, *, ratio: float = 2e-3) -> Tensor:
    """The max(1, ⌊ratio · N⌋) valid tokens of the largest covariance, over the whole mini-batch: (m, T) boolean."""
    covariance = token_covariance(logprobs, advantages, mask).masked_fill(~mask, -torch.inf).flatten()
    count = min(max(1, int(ratio * mask.sum().item())), int(mask.sum()))
    chosen = torch.zeros_like(mask).flatten()
    chosen[covariance.topk(count).indices] = True
    return chosen.view(mask.shape)


def kl_cov_penalty(logprobs: Tensor, old_logprobs: Tensor, chosen: Tensor, *, coef: float = 1.0) -> Tensor:
    """coef · |log π_θ − log π_θold| on the tokens that `kl_cov_mask` chose, 0 elsewhere: (m, T), to be aggregated."""
    return coef * (logprobs - old_logprobs).abs().masked_fill(~chosen, 0.0)
