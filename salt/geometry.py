"""Everything that is a function of the Gram matrix K and the advantages a.

Glossary
    paper                name                  shape     equation
    K                    gram                  (m, m)    4      K = SᵀS / m; a column of S is a response's feature
    a, Â                 advantages            (m,)      12     group-normalised, stacked prompt by prompt
    c                    coefficients          (m,)      58     any weights put on the responses: a, a', ...
    PR(K)                participation_ratio   ()        5      tr(K)² / ‖K‖²: how many directions share the energy
    n_eff                effective_sample_size ()        6      ‖Σ c_i g_i‖² / Σ ‖c_i g_i‖²: below 1 the updates cancel
    r                    positive_cosine       ()        7      mean of [cos(g_i, g_j)]_+ over pairs
    k_t                  dominant_rank         ()        14     round(PR), at least 1, at most m
    V_k                  dominant_subspace     (m, k)    13     eigenvectors of the k largest eigenvalues
    E_tot, E_sh, E_δ     e_total, e_shared, e_residual (B,)  App. B
    ρ_δ, ‖g_q‖, B_δ      rho, update_norm, bound       (B,)  App. B, 11
    D_a, D_g, U_⊥        d_a, d_g, u_perp      ()        59–61

Every function takes a Gram matrix of any floating type on any device and computes in float64 on the CPU: the matrix is
m × m, and the projector is decided by differences of eigenvalues.

Departures from the paper
    1. PR is computed without eigenvalues: Σλ = tr(K) and Σλ² = ‖K‖_F². No clamping at 0 is needed.
    2. ⌊x⌉ in Eq. 14 is floor(x + 1/2). The text of App. G.1 (floor, and a rank of 0) is not followed.
    3. 0/0 is defined as 0: PR of K = 0, n_eff of a group without signal, the cosine of an empty response.
    4. App. B writes K_q = SᵀS; here the argument is Eq. 4's K and the factor m is put back inside.
"""
import contextlib
import ctypes
import functools
import math
from pathlib import Path
from typing import Callable, Iterator

import torch
from torch import Tensor


def _as_gram(gram: Tensor) -> Tensor:
    """K on the host in float64, its shape checked."""
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1]:
        raise ValueError(f"a Gram matrix is square, not {tuple(gram.shape)}")
    return gram.detach().to("cpu", torch.float64)


def _as_vector(values: Tensor, size: int, name: str) -> Tensor:
    if values.shape != (size,):
        raise ValueError(f"{name} has shape {tuple(values.shape)}, the Gram matrix needs ({size},)")
    return values.detach().to("cpu", torch.float64)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, and 0 where the denominator is 0 (departure 3); NaN stays NaN."""
    return torch.where(denominator == 0, 0.0, numerator / denominator)


def _group_blocks(gram: Tensor, group_size: int) -> Tensor:
    """The diagonal blocks of K, one for each prompt: (m, m) -> (B, G, G)."""
    m = gram.shape[0]
    if group_size < 1 or m % group_size:
        raise ValueError(f"{m} responses do not divide into groups of {group_size}")
    blocks = gram.view(m // group_size, group_size, m // group_size, group_size)
    return blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)


@functools.cache
def mkl_threads() -> Callable[[int], int] | None:
    """MKL's own switch for the calling thread, where torch has MKL: a number of threads, or 0 for the process's."""
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        return None


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Around `eigh`, whose threads wait for one another on busy cores: 4.6 s at worst against 33 ms at m = 256.

    Not by `torch.set_num_threads` where it can be helped: once called, MKL no longer chooses its threads itself, and
    every later matrix product of the process is slower (a step of the tiny model by 8 %).
    """
    set_threads, before = mkl_threads(), 0                                  # 0: as all other threads of the process
    if set_threads is None:
        set_threads, before = torch.set_num_threads, torch.get_num_threads()
    set_threads(1)
    try:
        yield
    finally:
        set_threads(before)


# The three statistics of Sec. 2.2.1. The batched forms take (..., m, m), so that the within-group means need no loop.

def _participation_ratio(gram: Tensor) -> Tensor:
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    return _ratio(trace.square(), gram.square().sum((-2, -1)))                                             # Eq. 5


def _effective_sample_size(gram: Tensor, coefficients: Tensor) -> Tensor:
    # Not below 0 even where float32 features have made K slightly indefinite: α_t must not exceed 1.
    together = torch.einsum("...i,...ij,...j->...", coefficients, gram, coefficients).clamp_min(0)
    apart = (coefficients.square() * gram.diagonal(dim1=-2, dim2=-1)).sum(-1)
    return _ratio(together, apart)                                                                          # Eq. 6


def _cosines(gram: Tensor) -> Tensor:
    norms = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    return _ratio(gram, norms.unsqueeze(-1) * norms.unsqueeze(-2))


def _positive_cosine(gram: Tensor) -> Tensor:
    m = gram.shape[-1]
    if m < 2:
        return gram.new_zeros(gram.shape[:-2])
    pairs = torch.triu(_cosines(gram).clamp_min(0), diagonal=1).sum((-2, -1))
    return pairs * 2 / (m * (m - 1))                                                                        # Eq. 7


def participation_ratio(gram: Tensor) -> float:
    """PR(K) = tr(K)² / ‖K‖_F² (Eq. 5): between 1 and m, 0 for K = 0. gram: (m, m)."""
    return _participation_ratio(_as_gram(gram)).item()


def effective_sample_size(gram: Tensor, coefficients: Tensor) -> float:
    """n_eff = cᵀKc / Σ c_i² K_ii (Eq. 6 and 60). gram: (m, m), coefficients: (m,). 0 where nothing has a signal."""
    gram = _as_gram(gram)
    return _effective_sample_size(gram, _as_vector(coefficients, len(gram), "coefficients")).item()         # Eq. 60


def positive_cosine(gram: Tensor) -> float:
    """r = mean over pairs of [cos(g_i, g_j)]_+ (Eq. 7). gram: (m, m); 0 when there is no pair."""
    return _positive_cosine(_as_gram(gram)).item()


# The dominant subspace (Sec. 3.1).

def dominant_rank(gram: Tensor, *, scale: float = 1.0, maximum: int | None = None) -> int:
    """k_t = clip(⌊scale · PR⌉, 1, m) (Eq. 14). gram: (m, m); `maximum` lowers the upper end (released code: 64)."""
    upper = len(gram) if maximum is None else max(1, min(maximum, len(gram)))
    return min(max(math.floor(scale * participation_ratio(gram) + 0.5), 1), upper)                          # Eq. 14


def dominant_subspace(gram: Tensor, rank: int) -> Tensor:
    """Eigenvectors of the `rank` largest eigenvalues of K (Eq. 13): (m, m) -> (m, rank), float64.

    The sign of an eigenvector is arbitrary; here its largest entry is positive, so that runs can be compared. Where
    λ_k = λ_{k+1} the subspace itself is arbitrary: compute it once and share it, never once per process.
    """
    gram = _as_gram(gram)
    if not 1 <= rank <= len(gram):
        raise ValueError(f"rank {rank} is not between 1 and {len(gram)}")
    with one_thread():
        vectors = torch.linalg.eigh(gram).eigenvectors                                                      # Eq. 13
    basis = vectors.flip(-1)[:, :rank]                                                  # eigh sorts in ascending order
    largest = basis.gather(0, basis.abs().argmax(0, keepdim=True))                                       # (1, rank)
    return basis * torch.where(largest < 0, -1.0, 1.0)


# Diagnostics of App. B and D.1 and of the bias-cancellation table.

def group_geometry(gram: Tensor, advantages: Tensor, group_size: int) -> dict[str, float]:
    """Redundancy within and across prompts (Eq. 38–53). gram: (m, m), advantages: (m,), m = B · group_size.

    `n_eff_in` averages over all groups, those without signal counting 0 (GRPO keeps them); `n_eff_in_signal` over the
    groups that have one (DAPO samples no others).
    """
    gram = _as_gram(gram)
    advantages = _as_vector(advantages, len(gram), "advantages")
    blocks = _group_blocks(gram, group_size)                                                          # (B, G, G)
    grouped = advantages.view(-1, group_size)                                                            # (B, G)
    n_eff_in = _effective_sample_size(blocks, grouped)                                           # (B,)  Eq. 37, 50
    signal = grouped.abs().amax(1) > 0
    # ū_b = Σ_i a_bi g_bi / G, so ⟨ū_b, ū_c⟩ is a double sum over blocks; Eq. 6 does not see the factors 1/G and 1/m.
    spread = torch.block_diag(*grouped.unsqueeze(-1))                                                    # (m, B)
    between = spread.T @ gram @ spread                                                            # (B, B)  Eq. 52
    return {
        "r_in": _positive_cosine(blocks).mean().item(),                                                 # Eq. 39–40
        "r_total": _positive_cosine(gram).item(),                                                       # Eq. 41
        "pr_in": _participation_ratio(blocks).mean().item(),                                            # Eq. 44–46
        "pr_total": _participation_ratio(gram).item(),                                                  # Eq. 47
        "n_eff_in": n_eff_in.mean().item(),                                                             # Eq. 51
        "n_eff_in_signal": n_eff_in[signal].mean().item() if signal.any() else 0.0,
        "n_eff_total": _effective_sample_size(gram, advantages).item(),
        "n_eff_out": _effective_sample_size(between, between.new_ones(len(between))).item(),            # Eq. 53
    }


def residual_diagnostic(gram: Tensor, advantages: Tensor, group_size: int) -> dict[str, Tensor]:
    """Energy left after group centring, and the two bounds on the group update (App. B, Eq. 8–11), each (B,).

    gram: (m, m), Eq. 4's; advantages: (m,). Keys: e_total, e_shared, e_residual, rho (0 for an empty group),
    update_norm = ‖g_q‖, bound_signed = ‖a_q‖ √E_δ / G (Eq. 11, first form), bound = √(E_δ / G) (Eq. 11, last form:
    holds for the sample and the population standard deviation), identity_error = ‖g_q − Σ a_i δ_i / G‖ divided by
    ‖a_q‖ √E_tot / G: the error of Eq. 10, 0 up to rounding whenever the advantages are centred. Through a Gram matrix
    it can only be |mean a| ‖s̄_q‖; the check that sees the gradient itself is `head_gradient_norm`.
    """
    gram = _as_gram(gram)
    products = _group_blocks(gram, group_size) * len(gram)                                # (B, G, G)  K_q = SᵀS
    grouped = _as_vector(advantages, len(gram), "advantages").view(-1, group_size)                       # (B, G)
    total = products.diagonal(dim1=-2, dim2=-1).sum(-1)
    shared = products.sum((-2, -1)) / group_size
    residual = (total - shared).clamp_min(0)
    update = torch.einsum("bi,bij,bj->b", grouped, products, grouped).clamp_min(0).sqrt() / group_size
    norm = grouped.norm(dim=1)
    # Eq. 10 replaces s_i by δ_i; the difference of the two sides is (mean of a) · Σ s_i, whose norm is √(G · E_sh).
    identity = grouped.mean(1).abs() * (shared.clamp_min(0) * group_size).sqrt() / group_size          # Eq. 10
    return {
        "e_total": total, "e_shared": shared, "e_residual": residual,
        "rho": _ratio(residual, total),
        "update_norm": update,                                                                          # Eq. 8
        "bound_signed": norm * residual.sqrt() / group_size,                                            # Eq. 11
        "bound": (residual / group_size).sqrt(),                                                        # Eq. 11
        "identity_error": _ratio(identity, norm * total.clamp_min(0).sqrt() / group_size),
    }


def update_deviation(gram: Tensor, advantages: Tensor, coefficients: Tensor, basis: Tensor) -> dict[str, float]:
    """How far the coefficients c move the update away from GRPO's, and what that buys (Eq. 58–61).

    gram: (m, m), advantages and coefficients: (m,), basis: (m, k) with P_k = basis · basisᵀ. Keys: d_a = ‖c − a‖/‖a‖,
    d_g = ‖ĝ(c) − ĝ(a)‖/‖ĝ(a)‖, n_eff of c, u_perp = ‖S P_k^⊥ c‖/m, u_perp_gain = u_perp(c) / u_perp(a).
    """
    gram = _as_gram(gram)
    m = len(gram)
    a = _as_vector(advantages, m, "advantages")
    c = _as_vector(coefficients, m, "coefficients")
    if basis.ndim != 2 or basis.shape[0] != m:
        raise ValueError(f"a basis of {m} responses is ({m}, k), not {tuple(basis.shape)}")
    basis = basis.detach().to("cpu", torch.float64)

    def update_norm(v: Tensor) -> Tensor:
        return ((v @ gram @ v).clamp_min(0) / m).sqrt()                                                 # Eq. 58

    def residual_norm(v: Tensor) -> Tensor:
        return update_norm(v - basis @ (basis.T @ v))                                                   # Eq. 61

    return {
        "d_a": _ratio((c - a).norm(), a.norm()).item(),                                                 # Eq. 59
        "d_g": _ratio(update_norm(c - a), update_norm(a)).item(),                                       # Eq. 59
        "n_eff": _effective_sample_size(gram, c).item(),                                                # Eq. 60
        "u_perp": residual_norm(c).item(),
        "u_perp_gain": _ratio(residual_norm(c), residual_norm(a)).item(),
    }


def head_gradient_norm(gram: Tensor, coefficients: Tensor, lengths: Tensor, *, aggregation: str = "sequence-mean",
                       length_norm: str = "mean") -> float:
    """What ‖∂L/∂W_out‖ must be at ratio 1, without KL and with an untied head: √(cᵀKc / m).

    The loss weighs the summed log-probability of response i by w_i = c_i / (m T_i) (sequence-mean, Eq. 3) or
    c_i / N (token-mean, Eq. 69); the feature in K is that sum, divided by T_i where length_norm is "mean" (Eq. 19).
    This one number binds proxy, temperature, reweighting, denominator and loss together. lengths: (m,).
    """
    gram = _as_gram(gram)
    m = len(gram)
    lengths = _as_vector(lengths, m, "lengths")
    if aggregation not in ("sequence-mean", "token-mean") or length_norm not in ("mean", "sum"):
        raise ValueError(f"unknown aggregation {aggregation!r} or length_norm {length_norm!r}")
    weights = _as_vector(coefficients, m, "coefficients")
    weights = weights * (m / lengths.sum().clamp_min(1) if aggregation == "token-mean" else 1 / lengths.clamp_min(1))
    if length_norm == "mean":
        weights = weights * lengths
    return ((weights @ gram @ weights).clamp_min(0) / m).sqrt().item()
