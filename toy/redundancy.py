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
from toy.cancellation import language_model_groups, scaling_row

SCOPES = ("mini-batch", "group", "signal only")


def channels(gram: Tensor, a: Tensor, blocks: list[Tensor]) -> dict[str, float]:
    """gram (m, m), a (m,): what SALT does in these blocks of responses."""
    new = reweight(gram, a, blocks)
    main, mixed = new.main.square().sum(), (new.coefficients - new.main).square().sum()                 # Eq. 16, 18
    size = a.square().sum().clamp_min(torch.finfo(torch.float64).tiny)
    return {"alpha": new.alpha.mean().item(), "rank_share": new.rank.sum().item() / sum(map(len, blocks)),
            "kept": (main / size).item(), "exploration": (mixed / (main + mixed).clamp_min(1e-300)).item(),
            "d_a": ((new.coefficients - a).square().sum() / size).sqrt().item()}                        # Eq. 59


def measure(source: str, budget: int, seed: int) -> list[dict]:
    """One row per group size: the model at `source`, `budget` rollouts in all."""
    sizes = [2 ** power for power in range(1, 9) if 2 ** power <= budget // 2]
    table = []
    for size, gram, a in language_model_groups(source, budget, sizes, seed):
        row = {name: value for name, value in scaling_row(size, gram, a).items() if isinstance(value, (int, float))}
        for scope in SCOPES if a.any() else ():
            blocks = scope_blocks("group" if scope == "group" else "mini-batch", len(a), size)
            blocks = blocks if scope == "mini-batch" else with_signal(blocks, a, size)      # a' is the same per group
            row |= {f"{scope} {name}": value for name, value in channels(gram, a, blocks).items()}
        table.append(row)
    return table
