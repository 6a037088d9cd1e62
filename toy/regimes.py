"""Where SALT helps, does nothing, or hurts: a map of thousands of short runs on the softmax bandit.

Two numbers decide what Eq. 18 does to the advantages: the share of ‖a‖² that P_k keeps, which follows k_t / m, and
n_eff, which gives α_t. On a bandit both are dials: the feature dimension D bounds PR and with it k_t; a component
that the scores of a prompt share lowers n_eff. The third axis is the signal: the verdict on a response is right with
probability (1 + signal) / 2. In every cell GRPO, SALT and `interpolated` at both scopes train from the same policy with
the same random numbers. Differences from GRPO are paired by seed, and taken twice: each method at the best of the same
learning rates ("tuned"), and all of them at one rate that leaves GRPO on its way ("same rate").

Glossary
    paper    name         shape             equation
    θ        theta        (S, L, D)         1     S seeds, L learning rates, trained side by side
    s        scores       (S, L, m, D)      8     m = B · G responses
    K        gram         (S, L, m, m)      4     scope mini-batch; (S, L, B, G, G) at scope group
    a        advantages   (S, L, m)         2
    a'       coefficients (S, L, m)         18

Departures from the paper
    1. The bandit is not in the paper. Plain gradient ascent on the policy gradient, one update per batch, no clipping.
    2. The tuned learning rate of a method and cell is the best on average over the seeds it is then reported on: a bias
       upwards that every method has alike.
"""
import csv
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import torch
from torch import Tensor

from salt.advantages import group_advantages
from salt.errors import UserError
from salt.metrics import provenance
from salt.stats import mean_interval, paired_bootstrap
from toy.bandit import Bandit, make_bandit

DIMENSIONS, COSINES, SIGNALS = (4, 16, 64, 256, 4096), (0.0, 0.3, 0.6, 0.9), (1.0, 0.3, 0.1)
RATES, COMMON = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0), 1     # COMMON: index of the rate that all share
METHODS = ("grpo", "salt", "interpolated", "salt@group", "interpolated@group")
PROMPTS, GROUP, STEPS, SEEDS = 8, 8, 100, 16


@dataclass(frozen=True)
class Cell:
    """One point of the grid."""
    dimension: int
    cosine: float
    signal: float
    seeds: int = SEEDS
    steps: int = STEPS

    def bandits(self) -> list[Bandit]:
        """A bandit for every seed; it does not depend on the signal."""
        shared = (self.cosine / (1 - self.cosine)) ** 0.5
        return [make_bandit(PROMPTS, torch.Generator().manual_seed(2025 + seed), dimension=self.dimension,
                            shared=shared) for seed in range(self.seeds)]


@dataclass(frozen=True)
class Stack:
    """The bandits of S seeds: features (S, B, N, D), bias and rewards (S, B, N), reachable (N,)."""
    features: Tensor
    bias: Tensor
    rewards: Tensor
    reachable: Tensor


def stack(bandits: list[Bandit]) -> Stack:
    """Features are turned into the space that they span: θ never leaves it, and inner products stay as they are."""
    features = torch.stack([bandit.features for bandit in bandits])                                   # (S, B, N, D)
    flat = features.flatten(1, 2)                                                                     # (S, BN, D)
    if flat.shape[2] > flat.shape[1]:
        features = torch.linalg.qr(flat.mT, mode="r").R.mT.reshape(*features.shape[:3], -1)
    return Stack(features, torch.stack([bandit.bias for bandit in bandits]),
                 torch.stack([bandit.rewards for bandit in bandits]), bandits[0].reachable)


def salt_batched(gram: Tensor, a: Tensor, interpolate: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """`salt.advantages.salt_advantages` on a batch: (..., m, m), (..., m) -> a' (..., m) and k_t/m, n_eff, α_t, and the
    share of ‖a‖² that P_k keeps, and whether a is not 0 (...)."""
    m = a.shape[-1]
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    ratio = diagonal.sum(-1).square() / gram.square().sum((-2, -1)).clamp_min(1e-300)                     # Eq. 5
    rank = (ratio + 0.5).floor().clamp(1, m)                                                              # Eq. 14
    vectors = torch.linalg.eigh(gram).eigenvectors                                                        # Eq. 13
    kept = torch.arange(m) >= m - rank.unsqueeze(-1)                                                      # (..., m)

    def inside(v: Tensor) -> Tensor:
        return (vectors @ (kept * (vectors.mT @ v.unsqueeze(-1)).squeeze(-1)).unsqueeze(-1)).squeeze(-1)  # Eq. 15

    together = torch.einsum("...i,...ij,...j->...", a, gram, a)
    apart = (a.square() * diagonal).sum(-1)
    n_eff = torch.where(apart > 0, together / apart.clamp_min(1e-300), 0.0)                               # Eq. 6
    alpha = (1 - n_eff).clamp(0, 1)                                                                       # Eq. 17
    positive, main, weight = a.clamp_min(0), inside(a), alpha.unsqueeze(-1)
    coefficients = main + weight * (positive - inside(positive))                                          # Eq. 18
    if interpolate:
        coefficients = coefficients + (1 - weight) * (a - main)
    share = main.square().sum(-1) / a.square().sum(-1).clamp_min(1e-300)
    return coefficients, {"rank_share": rank / m, "n_eff": n_eff, "alpha": alpha, "kept": share,
                          "signal": (a != 0).any(-1).double()}


def reweighted(method: str, scores: Tensor, a: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """scores (S, L, B, G, D), a (S, L, B, G) -> a' (S, L, B, G) by one of METHODS, and what decided it: (S, L, ...)."""
    name, _, scope = method.partition("@")
    if name == "grpo":
        return a, {}
    scores, flat = (scores, a) if scope == "group" else (scores.flatten(2, 3), a.flatten(2))
    coefficients, facts = salt_batched(scores @ scores.mT / scores.shape[-2], flat, name == "interpolated")
    return coefficients.view_as(a), facts


def expected_reward(bandits: Stack, theta: Tensor) -> Tensor:
    """Of what the sampler draws, averaged over prompts, without noise: (S, L)."""
    logits = torch.einsum("sbnd,sld->slbn", bandits.features, theta) + bandits.bias.unsqueeze(1)
    policy = logits.masked_fill(~bandits.reachable, -torch.inf).softmax(-1)
    return torch.einsum("slbn,sbn->slb", policy, bandits.rewards).mean(-1)


def train(method: str, bandits: Stack, signal: float, rates: Tensor, steps: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Expected reward after `steps` updates: (S, L); and what decided a', means over all K that had a signal: (L,).

    The uniform numbers behind responses and noise depend on neither method nor learning rate.
    """
    seeds, prompts, _, dimension = bandits.features.shape
    generator = torch.Generator().manual_seed(0)
    theta = torch.zeros(seeds, len(rates), dimension, dtype=torch.float64)
    rows, columns = torch.arange(seeds).view(-1, 1, 1, 1), torch.arange(prompts).view(1, 1, -1, 1)
    facts: dict[str, list[Tensor]] = {}
    for _ in range(steps):
        draw = torch.rand(2, seeds, 1, prompts, GROUP, generator=generator, dtype=torch.float64)
        logits = torch.einsum("sbnd,sld->slbn", bandits.features, theta) + bandits.bias.unsqueeze(1)
        policy = logits.softmax(-1)                                                                   # (S, L, B, N)
        sampler = logits.masked_fill(~bandits.reachable, -torch.inf).softmax(-1).cumsum(-1)
        actions = torch.searchsorted(sampler, draw[0].expand(-1, len(rates), -1, -1).contiguous() * sampler[..., -1:])
        actions = actions.clamp_max(int(bandits.reachable.sum()) - 1)                                 # (S, L, B, G)
        mean = torch.einsum("slbn,sbnd->slbd", policy, bandits.features)
        scores = bandits.features[rows, columns, actions] - mean.unsqueeze(-2)                        # Eq. 8
        right = bandits.rewards[rows, columns, actions]
        rewards = torch.where(draw[1] < (1 - signal) / 2, 1 - right, right)
        a = group_advantages(rewards.flatten(0, 2)).view_as(rewards)                                  # Eq. 2
        coefficients, found = reweighted(method, scores, a)
        for name, values in found.items():
            facts.setdefault(name, []).append((values * found["signal"]).transpose(0, 1).flatten(1).sum(1))
        update = torch.einsum("slbg,slbgd->sld", coefficients, scores) / (prompts * GROUP)            # Eq. 58
        theta = theta + rates.view(1, -1, 1) * update
    totals = {name: torch.stack(values).sum(0) for name, values in facts.items()}
    told = totals.pop("signal", None)
    return expected_reward(bandits, theta), {name: total / told for name, total in totals.items()}


def difference(prefix: str, rewards: Tensor, base: Tensor) -> dict[str, float]:
    """rewards − base, (S,) each: mean, Student's t interval, bootstrap interval."""
    delta, low, high = mean_interval((rewards - base).tolist())
    _, below, above = paired_bootstrap(rewards.tolist(), base.tolist())
    return {f"{prefix}_delta": delta, f"{prefix}_low": low, f"{prefix}_high": high, f"{prefix}_bootstrap_low": below,
            f"{prefix}_bootstrap_high": above}


def run_cell(cell: Cell) -> list[dict]:
    """One row per method: its reward, and the paired difference from GRPO with both intervals."""
    bandits, rates = stack(cell.bandits()), torch.tensor(RATES, dtype=torch.float64)
    before = expected_reward(bandits, torch.zeros(cell.seeds, 1, bandits.features.shape[-1], dtype=torch.float64))
    rows, base = [], None
    for method in METHODS:
        after, facts = train(method, bandits, cell.signal, rates, cell.steps)                          # (S, L)
        best = int(after.mean(0).argmax())
        both = after[:, best], after[:, COMMON]
        base = base or both
        rows.append({**vars(cell), "method": method, "rate": RATES[best], "before": before.mean().item(),
                     "tuned": both[0].mean().item(), "same": both[1].mean().item(),
                     **difference("tuned", both[0], base[0]), **difference("same", both[1], base[1]),
                     **{name: values[COMMON].item() for name, values in facts.items()}})
    return rows


BOUNDS = tuple(f"{kind}_{end}" for kind in ("tuned", "same")
               for end in ("delta", "low", "high", "bootstrap_low", "bootstrap_high"))
COLUMNS = ("dimension", "cosine", "signal", "method", "seeds", "steps", "rate", "before", "tuned", "same", *BOUNDS,
           "rank_share", "kept", "n_eff", "alpha", "commit", "machine", "code")


def grid(size: str) -> list[Cell]:
    """The cells of a map: "full", "quick" or "smoke"."""
    if size == "smoke":
        return [Cell(dimension, cosine, 1.0, seeds=2, steps=10) for dimension in (4, 64) for cosine in (0.0, 0.9)]
    if size == "quick":
        return [Cell(dimension, cosine, 1.0, seeds=5, steps=60) for dimension in DIMENSIONS[:4] for cosine in COSINES]
    return [Cell(*point) for point in ((d, c, s) for s in SIGNALS for d in DIMENSIONS for c in COSINES)]


def read(path: Path, code: str | None) -> list[dict]:
    """Rows of regimes.csv that this code wrote (None: that the code of the last row did); an empty cell is None."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise UserError(f"{path} is of another version of the map: move it away")
        rows = [row for row in reader if row["code"]]                     # a row cut off by a kill has no code
    code = rows[-1]["code"] if rows and code is None else code
    rows = [row for row in rows if row["code"] == code]
    text = {"method", "commit", "machine", "code"}
    return [{k: v if k in text else float(v) if v else None for k, v in row.items()} for row in rows]


def run(size: str, path: Path, code: str, say: Callable[[str], None] = print, spread: Callable = map) -> list[dict]:
    """All cells of the map that are not in `path` yet; a row is written only with its whole cell. UserError where the
    file has other columns.

    spread: `map`, or that of a pool of processes.
    """
    key = lambda row: (row["dimension"], row["cosine"], row["signal"], row["seeds"], row["steps"])
    done = {key(row) for row in read(path, code)}
    left = [cell for cell in grid(size) if key(vars(cell)) not in done]
    origin = {name: value for name, value in provenance().items() if name in ("commit", "machine")} | {"code": code}
    started = time.perf_counter()
    for number, (cell, rows) in enumerate(zip(left, spread(run_cell, left)), 1):
        fresh = not path.is_file()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="")
            if fresh:
                writer.writeheader()
            writer.writerows({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in (row | origin).items()}
                             for row in rows)
        each = (time.perf_counter() - started) / number
        say(f"  regimes {number}/{len(left)}: D = {cell.dimension}, cosine {cell.cosine}, signal {cell.signal}: "
            + ", ".join(f"{row['method']} {row['tuned']:.3f}" for row in rows)
            + f"; {each * (len(left) - number) / 60:.0f} min left")
    wanted = {key(vars(cell)) for cell in grid(size)}
    return [row for row in read(path, code) if key(row) in wanted]
