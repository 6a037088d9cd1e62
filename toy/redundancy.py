"""Fig. 2b and what decides α_t, on the tiny model as it stands: the same rollouts in groups of G = 2, 4, 8, …

Beside the redundancy of App. D.1 (toy/cancellation.py) each row has what SALT would make of that batch at the scopes
mini-batch and group, and at the scope mini-batch with the groups without signal left out:

    alpha        Eq. 17 (mean over blocks)
    rank_share   Σ k_t / m, Eq. 14
    kept         ‖P_k a‖² / ‖a‖²
    exploration  share of ‖a'‖² that the exploration channel holds (the two channels are orthogonal)
    d_a          Eq. 59

Departures from the paper: the first m / G prompts make the groups of size G, so sizes share rollouts.
"""
import torch
from torch import Tensor

from salt.advantages import reweight, scope_blocks
from toy.cancellation import language_model_groups, scaling_row

SCOPES = ("mini-batch", "group", "signal only")


def channels(gram: Tensor, a: Tensor, blocks: list[Tensor]) -> dict[str, float]:
    """gram (m, m), a (m,): what SALT does in these blocks of responses."""
    new = reweight(gram, a, blocks)
    sizes = torch.tensor([len(block) for block in blocks])
    alpha = torch.empty(len(a), dtype=torch.float64)
    alpha[torch.cat(blocks)] = new.alpha.repeat_interleave(sizes)
    main, mixed = new.main.square().sum(), (alpha * new.exploration).square().sum()                     # Eq. 16
    size = a.square().sum().clamp_min(torch.finfo(torch.float64).tiny)
    return {"alpha": new.alpha.mean().item(), "rank_share": new.rank.sum().item() / len(a),
            "kept": (main / size).item(), "exploration": (mixed / (main + mixed).clamp_min(1e-300)).item(),
            "d_a": ((new.coefficients - a).square().sum() / size).sqrt().item()}                        # Eq. 59


def measure(source: str, budget: int, seed: int) -> list[dict]:
    """One row per group size: the model at `source`, `budget` rollouts in all."""
    sizes = [2 ** power for power in range(1, 9) if 2 ** power <= budget // 2]
    table = []
    for size, gram, a in language_model_groups(source, budget, sizes, seed):
        row = {name: value for name, value in scaling_row(size, gram, a).items() if isinstance(value, (int, float))}
        signal = (a.view(-1, size) != 0).any(1).repeat_interleave(size)                                 # (m,)
        for scope in SCOPES:
            rows = signal if scope == "signal only" else torch.ones_like(signal)
            if rows.any():
                blocks = scope_blocks("group" if scope == "group" else "mini-batch", int(rows.sum()), size)
                row |= {f"{scope} {name}": value
                        for name, value in channels(gram[rows][:, rows], a[rows], blocks).items()}
        table.append(row)
    return table
