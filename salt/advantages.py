"""Rewards → advantages (Eq. 2) → SALT's coefficients (Eq. 16–18), and every variant of the paper's ablations.

Glossary
    paper            name                 shape     equation
    r                rewards              (B, G)    –      B prompts, G responses each
    Â, a             advantages           (m,)      2, 12  m = B · G, stacked prompt by prompt
    K_total          gram                 (m, m)    4      from salt.proxy
    V_k              basis                (m, k)    13     P_k = V_k V_kᵀ (Eq. 15)
    k_t              rank                 ()        14
    a_main           main                 (m,)      16     P_k a
    a_exp            exploration          (m,)      16     P_k^⊥ [a]_+
    α_t              alpha                ()        17     max(0, 1 − n_eff)
    a'               coefficients         (m,)      18     main + alpha · exploration, for every variant

Departures from the paper
    1. Eq. 2 does not say which standard deviation: the sample one (ddof = 1) plus 1e-6, as in the framework the paper
       used; both are arguments. A group whose rewards are all equal gives 0 (tested by max == min: a mean is rounded).
    2. K = 0 and a K with NaN or inf leave the advantages as they are (rank 0); `finite` says which of the two.
    3. rank_scale, rank_max and below_full reproduce the authors' released code, which clips k_t to min(64, m − 1).
    4. Entropy-α: H_min and H_max are the extremes so far (the paper's need the whole run). No range yet: α = 0.
    5. Matched-RandSubspace ranks the samples by what the random subspace would give them in Eq. 18; ranked by the
       residual score alone, D_a would exceed 1.1 and could not be the paper's 0.24.
    6. `interpolated` is ours: it gives GRPO back when nothing cancels (α = 0), which Eq. 18 does not.
"""
import dataclasses
from dataclasses import dataclass
from typing import Callable

import torch
from torch import Tensor

from salt.geometry import dominant_rank, dominant_subspace, effective_sample_size, participation_ratio


def group_advantages(rewards: Tensor, *, eps: float = 1e-6, ddof: int = 1) -> Tensor:
    """Â = (r − mean) / (std + eps) within each group (Eq. 2): (B, G) -> (B, G), detached, float32 (float64 stays).

    ddof: 1 for the sample standard deviation, 0 for the population one. Groups of equal rewards, and G = 1, give 0.
    """
    if rewards.ndim != 2:
        raise ValueError(f"rewards are (prompts, responses), not {tuple(rewards.shape)}")
    exact = rewards.detach().double()
    flat = exact.amax(1, keepdim=True) == exact.amin(1, keepdim=True)
    centred = exact - exact.mean(1, keepdim=True)
    std = (centred.square().sum(1, keepdim=True) / max(exact.shape[1] - ddof, 1)).sqrt()
    advantages = torch.where(flat, 0.0, centred / (std + eps))                                          # Eq. 2
    return advantages.to(rewards.dtype if rewards.dtype == torch.float64 else torch.float32)


@dataclass(frozen=True)
class Reweighted:
    """What SALT makes of the advantages. From `reweight`, alpha … signal hold one value per block, (blocks,)."""
    coefficients: Tensor                 # (m,)  a' = main + alpha · exploration, Eq. 18
    main: Tensor                         # (m,)
    exploration: Tensor                  # (m,)
    alpha: float | Tensor
    rank: int | Tensor                   # 0: passed through (departure 2)
    participation_ratio: float | Tensor
    n_eff: float | Tensor
    basis: Tensor                        # (m, rank) float64; from `reweight` (m, Σ rank), zero outside the own block
    finite: bool | Tensor                # False: K held NaN or inf
    signal: bool | Tensor = True         # False: a is 0, n_eff then 0/0


@dataclass(frozen=True)
class Channels:
    """What a variant may draw on."""
    a: Tensor                            # (m,) float64
    basis: Tensor                        # (m, k)
    alpha: float                         # Eq. 17
    participation_ratio: float
    fixed_alpha: float | None
    entropy: float | None
    entropy_range: tuple[float, float] | None
    generator: torch.Generator | None

    @property
    def positive(self) -> Tensor:
        return self.a.clamp_min(0)                                                                      # [a]_+

    def inside(self, v: Tensor) -> Tensor:
        return self.basis @ (self.basis.T @ v)                                                          # Eq. 15

    def outside(self, v: Tensor) -> Tensor:
        return v - self.inside(v)                                                                       # Eq. 15


# One function per variant: Channels -> (alpha, main, exploration), with a' = main + alpha · exploration.
Split = tuple[float, Tensor, Tensor]


def salt(s: Channels) -> Split:
    return s.alpha, s.inside(s.a), s.outside(s.positive)                                                # Eq. 16, 18


def only_main(s: Channels) -> Split:
    return s.alpha, s.inside(s.a), torch.zeros_like(s.a)


def only_exp(s: Channels) -> Split:
    return s.alpha, torch.zeros_like(s.a), s.outside(s.positive)


def no_positive(s: Channels) -> Split:
    return s.alpha, s.inside(s.a), s.outside(s.a)


def no_proj(s: Channels) -> Split:
    return s.alpha, s.a, s.positive


def rand_proj(s: Channels) -> Split:
    """A random subspace of the same dimension (the matched table's RandSubspace-SALT)."""
    return salt(dataclasses.replace(s, basis=_random_basis(s)))


def fixed_alpha(s: Channels) -> Split:
    if s.fixed_alpha is None or not 0 <= s.fixed_alpha <= 1:
        raise ValueError(f"variant fixed-alpha needs 0 <= alpha <= 1, not {s.fixed_alpha}")
    return salt(dataclasses.replace(s, alpha=s.fixed_alpha))


def pr_alpha(s: Channels) -> Split:
    return salt(dataclasses.replace(s, alpha=min(s.participation_ratio / max(len(s.a) - 1, 1), 1.0)))


def entropy_alpha(s: Channels) -> Split:
    if s.entropy is None or s.entropy_range is None:
        raise ValueError("variant entropy-alpha needs entropy and entropy_range")
    low, high = s.entropy_range
    alpha = min(max((s.entropy - low) / (high - low), 0.0), 1.0) if high > low else 0.0
    return salt(dataclasses.replace(s, alpha=alpha))


def permuted(s: Channels) -> Split:
    """The same coefficients on the wrong samples: a null with an identical distribution."""
    alpha, main, exploration = salt(s)
    order = torch.randperm(len(s.a), generator=_needed(s.generator))
    return alpha, main[order], exploration[order]


def matched_rand_subspace(s: Channels) -> Split:
    """SALT's sorted coefficients, dealt out in the order that a random subspace would rank the samples in."""
    alpha, main, exploration = salt(s)
    source = (main + alpha * exploration).argsort(stable=True)
    _, random_main, random_exploration = rand_proj(s)
    order = torch.empty_like(source)
    order[(random_main + alpha * random_exploration).argsort(stable=True)] = source
    return alpha, main[order], exploration[order]


def interpolated(s: Channels) -> Split:
    """Ours: P_k a + P_k^⊥((1 − α) a + α [a]_+). GRPO at α = 0, SALT at α = 1."""
    return s.alpha, s.inside(s.a) + (1 - s.alpha) * s.outside(s.a), s.outside(s.positive)


VARIANTS: dict[str, Callable[[Channels], Split]] = {
    "salt": salt, "only-main": only_main, "only-exp": only_exp, "no-positive": no_positive, "no-proj": no_proj,
    "rand-proj": rand_proj, "fixed-alpha": fixed_alpha, "pr-alpha": pr_alpha, "entropy-alpha": entropy_alpha,
    "permuted": permuted, "matched-rand-subspace": matched_rand_subspace, "interpolated": interpolated,
}


def _random_basis(s: Channels) -> Tensor:
    """A uniformly distributed subspace of the same dimension as s.basis: (m, k)."""
    gaussian = torch.randn(s.basis.shape, dtype=s.basis.dtype, generator=_needed(s.generator))
    return torch.linalg.qr(gaussian).Q


def _needed(generator: torch.Generator | None) -> torch.Generator:
    if generator is None:
        raise ValueError("a random choice needs a generator (torch.Generator), so that a run can be repeated")
    return generator


def salt_advantages(gram: Tensor, advantages: Tensor, variant: str = "salt", *, alpha: float | None = None,
                    entropy: float | None = None, entropy_range: tuple[float, float] | None = None,
                    rank_scale: float = 1.0, rank_max: int | None = None, below_full: bool = False,
                    generator: torch.Generator | None = None) -> Reweighted:
    """Eq. 13–18 (Alg. 1, l.5–9): the dominant subspace, the two channels, the mixing coefficient.

    gram: (m, m), any device and floating type; advantages: (m,). The coefficients come back in the advantages' type and
    on their device, detached. alpha: the constant of `fixed-alpha`. entropy, entropy_range: of `entropy-alpha`.
    rank_scale, rank_max, below_full: k_t = clip(⌊rank_scale · PR⌉, 1, min(rank_max, m or m − 1)). generator: of the
    random variants. ValueError: unknown variant, shapes that do not agree, a missing argument of the variant.
    """
    if variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r}: one of {', '.join(VARIANTS)}")
    m = len(advantages)
    if advantages.shape != (m,) or gram.shape != (m, m):
        raise ValueError(f"gram {tuple(gram.shape)} and advantages {tuple(advantages.shape)} do not agree")
    if not advantages.is_floating_point():
        raise TypeError(f"advantages are floating-point numbers, not {advantages.dtype}")
    a = advantages.detach().to("cpu", torch.float64)
    finite = bool(torch.isfinite(gram).all())
    if not finite or not gram.diagonal().any():                                                         # departure 2
        nothing = torch.zeros(m, 0, dtype=torch.float64)
        ratio = 0.0 if finite else float("nan")
        return Reweighted(advantages.detach(), advantages.detach(), torch.zeros_like(advantages), 0.0, 0, ratio, ratio,
                          nothing, finite, bool(a.any()))

    maximum = min(m if rank_max is None else rank_max, m - 1 if below_full else m)
    rank = dominant_rank(gram, scale=rank_scale, maximum=maximum)                       # Eq. 14; Alg. 1, l.5
    n_eff = effective_sample_size(gram, a)                                              # Eq. 6; Alg. 1, l.8
    channels = Channels(a, dominant_subspace(gram, rank), max(0.0, 1.0 - n_eff),        # Eq. 17; Alg. 1, l.9
                        participation_ratio(gram), alpha, entropy, entropy_range, generator)
    mix, main, exploration = VARIANTS[variant](channels)                                # Alg. 1, l.6–7
    main, exploration = main.to(advantages), exploration.to(advantages)
    return Reweighted(main + mix * exploration, main, exploration, mix, rank,           # Eq. 18; Alg. 1, l.9
                      channels.participation_ratio, n_eff, channels.basis, finite, bool(a.any()))


def scope_blocks(scope: str | int, m: int, group_size: int, generator: torch.Generator | None = None) -> list[Tensor]:
    """Over which responses K is formed: index tensors that partition range(m).

    "mini-batch": all of them (the paper). "group": one block per prompt. N: blocks of N responses mixed across prompts
    by a seeded shuffle (the released code does it per micro-batch, N of the order of 8).
    """
    if scope == "mini-batch":
        return [torch.arange(m)]
    if scope == "group":
        if group_size < 1 or m % group_size:
            raise ValueError(f"{m} responses do not divide into groups of {group_size}")
        return list(torch.arange(m).split(group_size))
    if not isinstance(scope, int) or scope < 1 or m % scope:
        raise ValueError(f"scope {scope!r} is neither mini-batch nor group nor a number that divides {m} responses")
    return [block.sort().values for block in torch.randperm(m, generator=_needed(generator)).split(scope)]


def with_signal(blocks: list[Tensor], advantages: Tensor, group_size: int) -> list[Tensor]:
    """The blocks without the groups whose rewards are all equal; as they are where that is every group.

    advantages: (m,). What is left out shapes neither K nor P_k, and `reweight` gives it a' = 0.
    """
    signal = (advantages.view(-1, group_size) != 0).any(1).repeat_interleave(group_size).cpu()            # (m,)
    return [kept for block in blocks if len(kept := block[signal[block]])] or blocks


def reweight(gram: Tensor, advantages: Tensor, blocks: list[Tensor], variant: str = "salt", **options) -> Reweighted:
    """`salt_advantages` on each block of responses (see `scope_blocks`); options as there.

    gram: (m, m), advantages: (m,), blocks: disjoint index tensors into range(m). A response that is in none of them
    must have the advantage 0, and gets 0. A block's own K is the submatrix up to a factor, which neither PR nor n_eff
    nor the eigenvectors see. Returns vectors (m,), one alpha, rank, participation_ratio, n_eff and finite per block,
    and a basis (m, Σ rank) whose projector is block-diagonal.
    """
    m = len(advantages)
    if gram.shape != (m, m):
        raise ValueError(f"gram {tuple(gram.shape)} and advantages {tuple(advantages.shape)} do not agree")
    order = torch.cat(blocks) if blocks else torch.empty(0, dtype=torch.long)
    times = torch.bincount(order, minlength=m)
    if not blocks or len(times) > m or times.max() > 1 or advantages.cpu()[times == 0].any():
        raise ValueError(f"the blocks must hold each of the {m} responses once (those of advantage 0 may be left out)")
    parts = [salt_advantages(gram[b][:, b], advantages[b], variant, **options) for b in blocks]

    def placed(values: Tensor) -> Tensor:
        whole = values.new_zeros(m, *values.shape[1:])
        whole[order.to(values.device)] = values
        return whole

    def vector(name: str) -> Tensor:
        return placed(torch.cat([getattr(part, name) for part in parts]))

    def column(name: str) -> Tensor:
        values = [getattr(part, name) for part in parts]
        return torch.tensor(values, dtype=torch.float64 if isinstance(values[0], float) else None)

    return Reweighted(vector("coefficients"), vector("main"), vector("exploration"), column("alpha"), column("rank"),
                      column("participation_ratio"), column("n_eff"),
                      placed(torch.block_diag(*(part.basis for part in parts))), column("finite"), column("signal"))
