"""Fig. 2b and what decides α_t, on the tiny model as it stands: the same rollouts in groups of G = 2, 4, 8, …

Beside the redundancy of App. D.1 (toy/cancellation.py) each row has what SALT would make of that batch at the scopes
mini-batch and group, and at the scope mini-batch with the groups without signal left out:

    alpha        Eq. 17 (mean over the blocks that have a signal)
    rank_share   Σ k_t / m, Eq. 14
    kept         ‖P_k a‖² / ‖a‖²
    exploration  share of ‖a'‖² that the exploration channel holds (the two channels are orthogonal)
    d_a          Eq. 59

Departures from the paper: the first m / G prompts make the groups of size G, so sizes share rollouts.
"""
import torch
from torch import Tensor

from salt.advantages import reweight, scope_blocks, with_signal
from salt.geometry import effective_sample_size, residual_diagnostic, update_deviation
from toy.cancellation import language_model_groups, scaling_row

MATCHED = ("salt", "rand-proj", "permuted", "matched-rand-subspace", "interpolated")
SCOPES = ("mini-batch", "group", "signal only")


def channels(gram: Tensor, a: Tensor, blocks: list[Tensor]) -> dict[str, float]:
    """gram (m, m), a (m,): what SALT does in these blocks of responses."""
    new = reweight(gram, a, blocks)
    main, mixed = new.main.square().sum(), (new.coefficients - new.main).square().sum()                 # Eq. 16, 18
    size = a.square().sum().clamp_min(torch.finfo(torch.float64).tiny)
    return {"alpha": new.alpha.mean().item(), "rank_share": new.rank.sum().item() / sum(map(len, blocks)),
            "kept": (main / size).item(), "exploration": (mixed / (main + mixed).clamp_min(1e-300)).item(),
            "d_a": ((new.coefficients - a).square().sum() / size).sqrt().item()}                        # Eq. 59


def without_cancellation(gram: Tensor, a: Tensor, size: int) -> float:
    """1 − κ over the groups with a signal, κ the share of a pair in common: ρ_δ G / (G − 1) (App. B). What n_eff
    would be if rewards knew nothing of the gradients. gram (m, m), a (m,), some of it not 0."""
    rows = (a.view(-1, size) != 0).any(1).repeat_interleave(size)                                       # (m,)
    found = residual_diagnostic(gram[rows][:, rows], a[rows], size)
    return (found["e_residual"].sum() / found["e_total"].sum()).item() * size / (size - 1)


def interventions(gram: Tensor, a: Tensor, size: int, seed: int, responses: int = 64) -> dict[str, dict[str, float]]:
    """App. F.5's test at both scopes: the same rollouts, rewards and α_t, other coefficients; means over mini-batches.

    gram (m, m), a (m,) -> "method" or "method@group" -> d_a, d_g, n_eff, u_perp_gain (Eq. 59–61).
    """
    found: dict[str, list[dict]] = {}
    for index, rows in enumerate(torch.arange(len(a)).split(responses)):
        own, part = a[rows], gram[rows][:, rows]
        for scope in ("mini-batch", "group") if own.any() else ():
            blocks = scope_blocks(scope, len(rows), size)
            for method in MATCHED:
                new = reweight(part, own, blocks, method, generator=torch.Generator().manual_seed(seed + index))
                name = method + ("" if scope == "mini-batch" else "@group")
                found.setdefault(name, []).append(update_deviation(part, own, new.coefficients, new.basis))
        if own.any():
            found.setdefault("base", []).append({"n_eff": effective_sample_size(part, own), "d_a": 0.0, "d_g": 0.0,
                                                 "u_perp_gain": 1.0})
    names = ("d_a", "d_g", "n_eff", "u_perp_gain")
    return {method: {name: sum(row[name] for row in rows) / len(rows) for name in names}
            for method, rows in found.items()}


def measure(source: str, budget: int, seed: int, temperature: float) -> tuple[list[dict], dict[str, dict[str, float]]]:
    """One row per group size, and the `interventions` at G = 8: the model at `source`, `budget` rollouts in all."""
    sizes = [2 ** power for power in range(1, 9) if 2 ** power <= budget // 2]
    table, matched = [], {}
    for size, gram, a in language_model_groups(source, budget, sizes, seed, temperature):
        row = {name: value for name, value in scaling_row(size, gram, a).items() if isinstance(value, (int, float))}
        if a.any():
            row["no_cancellation"] = without_cancellation(gram, a, size)
        else:                                                              # 0/0
            row = {name: value for name, value in row.items() if not name.startswith("n_eff")}
        for scope in SCOPES if a.any() else ():
            blocks = scope_blocks("group" if scope == "group" else "mini-batch", len(a), size)
            blocks = blocks if scope == "mini-batch" else with_signal(blocks, a, size)      # a' is the same per group
            row |= {f"{scope} {name}": value for name, value in channels(gram, a, blocks).items()}
        if size == 8:
            matched = interventions(gram, a, size, seed)
        table.append(row)
    return table, matched
