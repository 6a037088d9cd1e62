"""The theory on one screen: Sec. 2.3 and App. A and B, checked and measured.

    python toy/cancellation.py            # half a minute on two cores; --quick: a few seconds

1. Group centring cancels what the score gradients of a group share (Eq. 10), and what is left bounds the update
   (Eq. 11): on random groups, on a softmax bandit with exact score gradients, on the tiny language model's own LM-head
   gradients. Exit status 1 if one of the two fails anywhere.
2. Rollout scaling (Fig. 2b, App. B): the same number of rollouts in groups of G = 2 … 256, on the tiny language model.
3. What SALT does about it as the shared component grows, on the bandit, where that component is a dial.

Everything is computed in float64. Results that contradict the paper are printed as they are.

Glossary
    paper      name        shape      equation
    s_{q,i}    scores      (B, G, D)  8      score gradients of G responses to each of B prompts
    δ_{q,i}    residuals   (B, G, D)  9
    Â, a       advantages  (B, G)     2      Σ_i Â_{q,i} = 0
    K          gram        (m, m)     4      m = B · G rollouts, the budget
    κ          kappa       ()         –      mean ⟨s_i, s_j⟩ over pairs of a group, divided by the mean ‖s_i‖²

Two predictions stand beside the measurements. Independent zero-mean scores have E[E_δ] / E[E_tot] = 1 − 1/G, however
redundant they are. And averaged over all assignments of a group's advantages to its responses, n_eff's numerator over
its denominator is exactly 1 − κ = ρ_δ · G / (G − 1): n_eff ≈ 1 − κ and α_t ≈ κ, unless the rewards know the gradients.

Departures from the paper
    1. ρ_δ is the ratio of sums over groups; correlations and mean norms are over groups with a signal (a ≠ 0).
    2. The first G rollouts of the first m / G prompts make the groups of size G, so sizes share rollouts.
"""
import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from salt.advantages import group_advantages, reweight, scope_blocks
from salt.errors import Parser, UserError, run
from salt.geometry import (effective_sample_size, group_geometry, residual_diagnostic,
                           update_deviation)
from toy.bandit import make_bandit, sample, score_gradients

TOLERANCE = 1e-12                 # of the identity (relative), and of the squared norms in the bounds
TEMPERATURE = 1.0


# ---------------------------------------------------------------------------- 1. the identity and the bounds

def explicit_diagnostic(scores: Tensor, advantages: Tensor) -> dict[str, Tensor]:
    """What `residual_diagnostic` finds, from the vectors themselves: (B, G, D), (B, G) -> dict of (B,)."""
    size = scores.shape[1]
    residuals = scores - scores.mean(1, keepdim=True)                                                   # Eq. 9
    update = torch.einsum("bg,bgd->bd", advantages, scores) / size                                      # Eq. 8
    residual_only = torch.einsum("bg,bgd->bd", advantages, residuals) / size                            # Eq. 10
    total, rest = scores.square().sum((1, 2)), residuals.square().sum((1, 2))
    norm = advantages.norm(dim=1)
    scale = (norm * total.sqrt() / size).clamp_min(torch.finfo(torch.float64).tiny)
    return {"e_total": total, "e_residual": rest, "update_norm": update.norm(dim=1),
            "bound_signed": norm * rest.sqrt() / size, "bound": (rest / size).sqrt(),                   # Eq. 11
            "identity_error": (update - residual_only).norm(dim=1) / scale}


@dataclass
class Check:
    """Eq. 10 and both forms of Eq. 11, over all the groups added so far."""
    groups: int = 0
    error: float = 0.0                           # of the identity, relative to ‖a‖ √E_tot / G
    violations: tuple[int, int] = (0, 0)         # of Eq. 11's first and last form
    slack: tuple[float, float] = (1.0, 1.0)      # smallest 1 − ‖g_q‖ / bound, where the bound exceeds rounding
    disagreement: float = float("nan")           # vectors against Gram, squared norms relative to E_tot / G

    def add(self, found: dict[str, Tensor], size: int) -> None:
        scale = found["e_total"] / size
        update, bounds = found["update_norm"], (found["bound_signed"], found["bound"])
        self.groups += len(update)
        self.error = max(found["identity_error"].nan_to_num(torch.inf).max().item(), self.error)
        self.violations = tuple(n + int((~(update.square() <= b.square() + TOLERANCE * scale)).sum())   # nan violates
                                for n, b in zip(self.violations, bounds))
        certain = [b.square() > TOLERANCE * scale for b in bounds]
        self.slack = tuple(min([s, *(1 - update[c] / b[c]).tolist()])
                           for s, b, c in zip(self.slack, bounds, certain))

    def add_vectors(self, scores: Tensor, advantages: Tensor) -> None:
        """The explicit vectors (B, G, D), and the Gram route on the same groups beside them."""
        size = scores.shape[1]
        self.add(explicit := explicit_diagnostic(scores, advantages), size)
        step = max(1, 256 // size)
        for start in range(0, len(scores), step):
            stacked = scores[start:start + step].flatten(0, 1)                                          # (m, D)
            gram = stacked @ stacked.T / len(stacked)                                                   # Eq. 4
            through = residual_diagnostic(gram, advantages[start:start + step].flatten(), size)
            scale = through["e_total"].clamp_min(torch.finfo(torch.float64).tiny) / size
            for name in ("update_norm", "bound_signed", "bound"):
                apart = (through[name].square() - explicit[name][start:start + step].square()).abs() / scale
                self.disagreement = max(apart.nan_to_num(torch.inf).max().item(), self.disagreement)

    @property
    def passed(self) -> bool:
        return self.error <= TOLERANCE and not self.disagreement > TOLERANCE and not any(self.violations)


def random_groups(generator: torch.Generator, per_kind: int):
    """Scores (B, G, D) of every awkward kind with advantages (B, G), both standard deviations of Eq. 2 in turn."""
    draw = {"generator": generator, "dtype": torch.float64}
    for size in (1, 2, 3, 4, 8, 16, 32, 64):
        plain = torch.randn(5, per_kind, size, 16, **draw)
        kinds = (plain[0],                                                               # independent
                 plain[1] + 1e3 * torch.randn(per_kind, 1, 16, **draw),                  # nearly all of it shared
                 plain[2, ..., :1] * torch.randn(per_kind, 1, 16, **draw),               # rank one
                 plain[3][:, torch.randint(size, (size,), generator=generator)],         # duplicated rollouts
                 plain[4] * torch.exp(5 * torch.randn(per_kind, size, 1, **draw)))       # norms from 1e-8 to 1e8
        for index, scores in enumerate(kinds):
            # On a grid: rewards that differ by 1e-10 are centred to 1e-6 of their spread only, whatever the code does.
            rewards = torch.randint(101, (per_kind, size), generator=generator).double() / 100
            if index % 2 == 0:                                                           # binary, all-equal groups too
                rewards = (rewards < torch.rand(per_kind, 1, **draw)).double()
            yield scores, group_advantages(rewards, ddof=index % 2)


def bandit_groups(generator: torch.Generator, per_kind: int):
    """The bandit's exact score gradients, on policy and with a sampler that is colder than the policy."""
    for size in (2, 4, 8, 16, 32, 64):
        for shared in (0.0, 0.5, 2.0):
            for temperature in (1.0, 0.6):
                bandit = make_bandit(per_kind, generator, shared=shared)
                theta = torch.randn(32, generator=generator, dtype=torch.float64)
                actions = sample(bandit, theta, size, generator, temperature)
                yield score_gradients(bandit, theta, actions), group_advantages(bandit.rewards.gather(1, actions))


# ---------------------------------------------------------------------------- 2. rollout scaling

def language_model_groups(source: str, budget: int, sizes: list[int], seed: int,
                          temperature: float = TEMPERATURE) -> list[tuple[int, Tensor, Tensor]]:
    """(G, K (m, m), a (m,)) for every group size: rollouts of the tiny model, the real verifier, the exact Gram."""
    from salt.models import encode_prompt, lm_head, load, score
    from salt.proxy import lm_head_gram
    from salt.reward import math_reward
    from salt.rollout import Rollouts, TransformersSampler
    from toy.arithmetic import problems, question

    model, tokenizer = load(source)
    sampler, head = TransformersSampler(model, tokenizer), lm_head(model)
    sums = problems("train", budget // sizes[0], seed)
    prompts = [encode_prompt(tokenizer, question(a, b)) for a, b in sums]
    rollouts, first, groups = Rollouts([], [], [], []), [], []
    for size in reversed(sizes):                          # a prompt needs as many as the largest group it appears in
        new, start = prompts[len(first):budget // size], len(rollouts.texts)
        rollouts += sampler.generate(new, size, temperature=temperature, max_tokens=64, seed=seed + 1000 * size)
        first += range(start, len(rollouts.texts), size)
    scored = score(model, rollouts, temperature, micro_batch=256, keep_hidden=True)
    for size in sizes:
        rows = torch.cat([torch.arange(start, start + size) for start in first[:budget // size]])       # (m,)
        part = scored.select(rows)
        gram = lm_head_gram(part.hidden.double(), part.tokens, part.lengths, head.weight.double(), bias=head.bias,
                            temperature=temperature)                                                    # Eq. 19
        golds = [str(a + b) for a, b in sums[:budget // size] for _ in range(size)]
        rewards = torch.tensor([math_reward(rollouts.texts[row], gold) for row, gold in zip(rows.tolist(), golds)])
        groups.append((size, gram, group_advantages(rewards.double().view(-1, size)).flatten()))        # Eq. 2
    return groups


def correlations(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Pearson's and Spearman's correlation of two vectors; nan below three points."""
    if len(x) < 3:
        return float("nan"), float("nan")

    def ranks(v: Tensor) -> Tensor:                                                      # ties share their mean rank
        return (v.unsqueeze(1) > v).double().sum(1) + (v.unsqueeze(1) == v).double().sum(1) / 2

    return tuple(torch.corrcoef(torch.stack(pair))[0, 1].item() for pair in ((x, y), (ranks(x), ranks(y))))


def scaling_row(size: int, gram: Tensor, advantages: Tensor) -> dict:
    """One line of the rollout-scaling table, and the groups behind it (App. B, D.1)."""
    found = residual_diagnostic(gram, advantages, size)
    signal = advantages.view(-1, size).abs().amax(1) > 0
    update, bound = found["update_norm"][signal], found["bound"][signal]
    pearson, spearman = correlations(update, bound)
    rho = (found["e_residual"].sum() / found["e_total"].sum()).item()
    return {**group_geometry(gram, advantages, size), "G": size, "B": len(signal),
            "signal": signal.double().mean().item(), "rho": rho, "shared": 1 - rho, "iid": 1 - 1 / size,
            "largest": (gram.diagonal().max() / gram.diagonal().sum()).item(),
            "update": update.mean().item(), "bound": bound.mean().item(), "pearson": pearson, "spearman": spearman,
            "updates": update, "bounds": bound, "found": found}


# ---------------------------------------------------------------------------- 3. SALT as the shared component grows

def salt_row(cosine: float, spread: float | None, seed: int, draws: int, prompts: int = 32, size: int = 8) -> dict:
    """Means over `draws` bandits of m = 256 rollouts (the paper's mini-batch) whose within-group cosine is a dial."""
    rows = []
    for draw in range(draws):
        generator = torch.Generator().manual_seed(seed + draw)
        shared = (cosine / (1 - cosine)) ** 0.5
        bandit = make_bandit(prompts, generator, dimension=256, shared=shared, spread=spread)
        theta = torch.zeros(256, dtype=torch.float64)
        actions = sample(bandit, theta, size, generator)
        scores = score_gradients(bandit, theta, actions)                                                # (B, G, D)
        directions = torch.nn.functional.normalize(scores, dim=-1)
        pairs = (directions.sum(1).square().sum() - prompts * size) / (prompts * size * (size - 1))
        stacked = scores.flatten(0, 1)
        gram = stacked @ stacked.T / len(stacked)                                                       # Eq. 4
        a = group_advantages(bandit.rewards.gather(1, actions)).flatten()
        new = reweight(gram, a, scope_blocks("mini-batch", len(a), size))                               # Eq. 13–18
        found = residual_diagnostic(gram, a, size)
        kappa = 1 - (found["e_residual"].sum() / found["e_total"].sum()).item() * size / (size - 1)
        means = new.coefficients.view(-1, size).mean(1).repeat_interleave(size)          # what is not centred in a'
        back = ((means @ gram @ means) / (new.coefficients @ gram @ new.coefficients)).clamp_min(0).sqrt()
        rows.append({"1-cos": 1 - pairs.item(), "kappa": kappa, "1-kappa": 1 - kappa, "alpha": new.alpha.item(),
                     "n_eff_grpo": effective_sample_size(gram, a), "pr": new.participation_ratio.item(),
                     "rank": new.rank.item() / len(a), "back": back.item(),
                     **update_deviation(gram, a, new.coefficients, new.basis)})
    return {name: sum(row[name] for row in rows) / draws for name in rows[0]}


# ---------------------------------------------------------------------------- tables and verdicts

CHECKS = [("", "name", "<38"), ("groups", "groups", ","), ("Eq. 10 error", "error", ".0e"),
          ("Eq. 11 violated", "first", "d"), ("last form", "last", "d"), ("slack", "tight", ".0e"),
          ("last form", "loose", ".0e"), ("Gram - vectors", "disagreement", ".0e")]
SCALING = [("G", "G", "d"), ("B", "B", "d"), ("signal", "signal", ".0%"), ("PR_in", "pr_in", ".2f"),
           ("PR_tot", "pr_total", ".1f"), ("n_eff in", "n_eff_in", ".2f"), ("signal", "n_eff_in_signal", ".2f"),
           ("out", "n_eff_out", ".2f"), ("r_in", "r_in", ".2f"), ("rho_d", "rho", ".3f"), ("1-1/G", "iid", ".3f"),
           ("||g_q||", "update", ".3f"), ("B_d", "bound", ".3f"), ("Pearson", "pearson", ".2f"),
           ("Spearman", "spearman", ".2f"), ("largest", "largest", ".0%")]
SALT = [("1-cos", "1-cos", ".2f"), ("1-kappa", "1-kappa", ".2f"), ("n_eff(a)", "n_eff_grpo", ".2f"),
        ("alpha_t", "alpha", ".2f"), ("PR", "pr", ".1f"), ("k_t/m", "rank", ".3f"), ("D_a", "d_a", ".2f"),
        ("D_g", "d_g", ".2f"), ("n_eff(a')", "n_eff", ".2f"), ("U_perp gain", "u_perp_gain", ".2f"),
        ("shared again", "back", ".2f")]
SCENARIOS = {"one shared direction for all prompts": None,
             "every prompt its own direction, strengths log-normal": 1.0}


def print_table(rows: list[dict], columns: list[tuple[str, str, str]]) -> None:
    """columns: (heading, key, format). nan (nothing to measure) prints as a dash."""
    def cell(value, spec: str) -> str:
        return "-" if value != value else format(value, spec)

    lines = [[heading for heading, _, _ in columns]]
    lines += [[cell(row[key], spec) for _, key, spec in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print("  " + "  ".join(text.rjust(width) for text, width in zip(line, widths)))


def verdict(word: str, text: str) -> None:
    print(f"  {word + ':':<9} {text}")


def claim(agrees: bool, text: str) -> None:
    verdict("agrees" if agrees else "DIFFERS", text)


def judge_checks(checks: dict[str, Check]) -> bool:
    print_table([{**vars(check), "name": name, "first": check.violations[0], "last": check.violations[1],
                  "tight": check.slack[0], "loose": check.slack[1]} for name, check in checks.items()], CHECKS)
    failed = [name for name, check in checks.items() if not check.passed]
    if failed:
        verdict("FAILS", f"{'; '.join(failed)}: an error above {TOLERANCE:g}, or a bound violated")
    else:
        verdict("holds", "Eq. 10 and 11 in every group. Slack 0 up to rounding: Cauchy-Schwarz is an equality at G = 2")
    return not failed


def judge_scaling(rows: list[dict]) -> None:
    rows = [row for row in rows if len(row["updates"])]
    first, last = rows[0], rows[-1]
    growth = {key: last[key] / first[key] for key in ("G", "pr_in", "n_eff_in_signal")}
    claim(growth["pr_in"] < growth["G"] / 2 and growth["n_eff_in_signal"] < growth["G"] / 2,
          f"PR and n_eff do not scale with G (Fig. 2b): G grows {growth['G']:.0f}-fold, PR_in "
          f"{growth['pr_in']:.1f}-fold, n_eff {growth['n_eff_in_signal']:.1f}-fold")
    claim(growth["n_eff_in_signal"] < 1, "GRPO's n_eff falls as G grows (Sec. 4.4): "
          f"{first['n_eff_in_signal']:.2f} -> {last['n_eff_in_signal']:.2f} in groups with a signal")
    claim(last["rho"] > first["rho"], "rho_delta rises and saturates (App. B), but within "
          f"{max(abs(r['rho'] - r['iid']) for r in rows):.3f} of the 1 - 1/G of independent zero-mean scores")
    low, high = (extreme(row["bound"] for row in rows) for extreme in (min, max))
    claim(last["update"] < first["update"] and high < 2 * low, f"||g_q|| falls from {first['update']:.2f} to "
          f"{last['update']:.2f}, B_delta stays between {low:.2f} and {high:.2f} (App. B)")
    pearson, spearman = correlations(torch.cat([r["updates"] for r in rows]), torch.cat([r["bounds"] for r in rows]))
    claim(abs(pearson - 0.56) < 0.1 and abs(spearman - 0.52) < 0.1,
          f"||g_q|| with B_delta, all G: Pearson {pearson:.2f} (paper 0.56), Spearman {spearman:.2f} (paper 0.52)")
    enough = [row for row in rows if len(row["updates"]) > 2]
    pearson, spearman = (min((row[name] for row in enough), default=1.0) for name in ("pearson", "spearman"))
    claim(min(pearson, spearman) > 0.95, f"... within each G at least {pearson:.2f}, {spearman:.2f} (paper > 0.95; "
          f"G = 2 gives 1 by construction, G = {last['G']} has {len(last['updates'])} groups)")


def judge_salt(rows: list[dict]) -> None:
    distance = max(abs(row["n_eff_grpo"] - row["1-kappa"]) for row in rows)
    verdict("measured", f"n_eff(a) is 1 - kappa to within {distance:.2f}, whether or not 1 - cos is")
    row = min(rows, key=lambda row: abs(row["n_eff_grpo"] - 0.31))
    before, after, gain = row["n_eff_grpo"], row["n_eff"], row["u_perp_gain"]
    claim(after > 1.25 * before, f"SALT cuts cancellation: n_eff {before:.2f} -> {after:.2f} (App. F.5: 0.31 -> 0.80)")
    claim(gain > 1, f"... and strengthens the residual update: U_perp gain {gain:.2f} (1.47)")
    claim(row["d_a"] < 0.5, f"... by a moderate deviation: D_a {row['d_a']:.2f} (0.24), D_g {row['d_g']:.2f} (0.16)")
    verdict("measured", f"the shared gradient that Eq. 10 cancels in GRPO is back, with {row['back']:.0%} of its norm")


# ---------------------------------------------------------------------------- figures

def new_figure(rows: int, columns: int, size: tuple[float, float]):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    pyplot.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
                            "axes.grid": True, "grid.alpha": 0.25, "lines.markersize": 4, "axes.titlesize": 11})
    return pyplot.subplots(rows, columns, figsize=size, layout="constrained")


def panel(axis, rows: list[dict], x: str, solid: dict[str, str], dashed: dict[str, str], **settings) -> None:
    """Columns of a table against its column x; solid and dashed: key -> label."""
    for key, label in solid.items():
        axis.plot([row[x] for row in rows], [row[key] for row in rows], "o-", label=label)
    for key, label in dashed.items():
        axis.plot([row[x] for row in rows], [row[key] for row in rows], "k--", lw=1, label=label)
    axis.set(**settings)
    if x == "G":
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes := [row[x] for row in rows], sizes)
        axis.set_xlabel("group size $G$")
        axis.legend()


def draw_bottleneck(rows: list[dict], path: Path) -> None:
    """App. B's figure: residual energy, update norm and bound, and one against the other."""
    figure, (left, middle, right) = new_figure(1, 3, (13, 4))
    panel(left, rows, "G", {"rho": r"residual $\rho_\delta=E_\delta/E_{tot}$", "shared": r"shared $E_{sh}/E_{tot}$"},
          {"iid": "independent scores: $1-1/G$"}, ylim=(0, 1.02), title="(a) residual share of the score energy")
    guided = [{**row, "guide": rows[0]["update"] * (rows[0]["G"] / row["G"]) ** 0.5} for row in rows]
    panel(middle, guided, "G", {"bound": r"bound $B_\delta$", "update": r"update $\|g_q\|_2$"},
          {"guide": r"$\propto 1/\sqrt{G}$"}, title="(b) means over groups with a signal")
    middle.set_ylim(bottom=0)
    updates, bounds = (torch.cat([row[name] for row in rows]) for name in ("updates", "bounds"))
    top = 10 ** bounds.max().log10().ceil().item()
    left_edge, floor = (max(10 ** v.min().log10().floor().item(), top / 1e3) for v in (bounds, updates))
    for row in rows:
        right.scatter(row["bounds"], row["updates"], s=10, c=[row["G"]] * len(row["updates"]), cmap="viridis_r",
                      norm="log", vmin=rows[0]["G"], vmax=rows[-1]["G"], label=row["G"])
    right.plot([top / 1e3, top], [top / 1e3, top], "k--", lw=1)
    right.set(xscale="log", yscale="log", xlim=(left_edge, top), ylim=(floor, top), title="(c) every such group; "
              "dashed: Eq. 11", xlabel=r"bound $B_\delta(q)$", ylabel=r"update $\|g_q\|_2$")
    for axis in (right.xaxis, right.yaxis):
        axis.set_minor_formatter("")
    right.legend(title="$G$", fontsize=8, ncols=2, loc="upper left")                     # no point can lie there
    figure.savefig(path, dpi=130)


def draw_scaling(rows: list[dict], path: Path) -> None:
    """Fig. 2b: what a fixed number of rollouts gives when it comes in larger groups."""
    figure, (left, middle, right) = new_figure(1, 3, (13, 4))
    panel(left, rows, "G", {"pr_total": "$PR_{total}$, all rollouts", "pr_in": "$PR_{in}$"},
          {"G": "$PR_{in}$ of orthogonal rollouts"}, title="(a) participation ratio")
    left.set_yscale("log", base=2)
    panel(middle, [{**row, "one": 1} for row in rows], "G",
          {"n_eff_in_signal": r"$n_{eff}^{in}$, groups with a signal", "n_eff_in": r"$n_{eff}^{in}$, all groups",
           "n_eff_out": r"$n_{eff}^{out}$, across prompts"}, {"one": "orthogonal updates"},
          title="(b) effective sample size")
    middle.set_ylim(bottom=0)
    panel(right, rows, "G", {"r_in": "$r_{in}$, within groups", "r_total": "$r_{total}$, all pairs"}, {}, ylim=(0, 1),
          title="(c) mean positive-part cosine")
    figure.savefig(path, dpi=130)


def draw_salt(scenarios: dict[str, list[dict]], path: Path) -> None:
    """SALT against the shared component, one column for each kind of sharing."""
    figure, axes = new_figure(2, len(scenarios), (11, 8))
    for (above, below), (name, rows) in zip(axes.T, scenarios.items()):
        panel(above, rows, "kappa", {"n_eff_grpo": r"GRPO, $n_{eff}(a)$", "n_eff": r"SALT, $n_{eff}(a')$"},
              {"1-kappa": r"prediction $1-\kappa$"}, title=name, ylabel="effective sample size")
        panel(below, rows, "kappa", {"alpha": r"$\alpha_t$", "rank": "$k_t/m$", "d_a": "$D_a$",
                                     "u_perp_gain": r"$U_\perp$ gain"}, {"back": r"$\hat g(a')$ along $\bar s_q$"},
              xlabel=r"shared part of the score energy, $\kappa$", ylabel="ratio")
    for axis in axes.flat:
        axis.set_ylim(0, 1.25 * axis.get_ylim()[1])
        axis.legend(ncols=3, loc="upper center")
    figure.savefig(path, dpi=130)


# ---------------------------------------------------------------------------- program

def main(argv: list[str] | None = None) -> int:
    parser = Parser(description="Sec. 2.3, App. A and B of the SALT paper, checked and measured; three figures.")
    parser.add_argument("--quick", action="store_true", help="fewer rollouts and draws: a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/cancellation"), help="folder of the figures")
    options = parser.parse_args(argv)
    if not 0 <= options.seed < 2 ** 32:
        raise UserError(f"--seed {options.seed} is not between 0 and 2^32 - 1")
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {options.output}: {error.strerror}; choose another --output") from error
    from toy.arithmetic import warm_start
    source = str(warm_start())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)      # many small products: a second thread gains little, and on a busy machine loses much
    try:
        return report(options, source)
    finally:
        torch.set_num_threads(threads)


def report(options: argparse.Namespace, source: str) -> int:
    """All three parts and the figures. Returns the exit status."""
    began = time.perf_counter()
    sizes = [2 ** power for power in range(1, 6 if options.quick else 9)]
    budget, draws = (8 if options.quick else 4) * sizes[-1], 2 if options.quick else 6
    dial = [0.0, 0.3, 0.6, 0.9] if options.quick else [step / 10 for step in range(10)]
    generator = torch.Generator().manual_seed(options.seed)

    print("1. Centring cancels what a group shares (Eq. 10), the rest bounds the update (Eq. 11: ||g_q|| <= "
          "||a|| sqrt(E_d)/G <= B_d)\n")
    checks = {"(a) random groups": Check(), "(b) softmax bandit, exact gradients": Check()}
    for check, groups in zip(checks.values(), (random_groups(generator, 252), bandit_groups(generator, 280))):
        for scores, advantages in groups:
            check.add_vectors(scores, advantages)
    rows = [scaling_row(*group) for group in language_model_groups(source, budget, sizes, options.seed)]
    checks["(c) tiny language model, LM-head Gram"] = from_gram = Check()
    for row in rows:
        from_gram.add(row["found"], row["G"])
    passed = judge_checks(checks)

    print(f"\n2. Rollout scaling: {budget} rollouts of the tiny language model in B groups of G (Fig. 2b, App. B)\n")
    print_table(rows, SCALING)
    print("  signal: groups whose rewards differ, and n_eff over these. largest: one rollout's share of all ||s||^2\n")
    judge_scaling(rows)

    print(f"\n3. SALT as the shared component grows (Eq. 14-18, 59-61): bandit, m = 32 x 8, means of {draws} draws")
    print("   shared again: how much of g(a') lies along the group means of the scores; in GRPO nothing (Eq. 10)")
    scenarios = {name: [salt_row(cosine, spread, options.seed, draws) for cosine in dial]
                 for name, spread in SCENARIOS.items()}
    for name, table in scenarios.items():
        print(f"\n  {name}")
        print_table(table, SALT)
        judge_salt(table)

    draw_bottleneck(rows, options.output / "bottleneck.png")
    draw_scaling(rows, options.output / "rollout_scaling.png")
    draw_salt(scenarios, options.output / "salt.png")
    print(f"\nbottleneck.png, rollout_scaling.png, salt.png in {options.output} ({time.perf_counter() - began:.0f} s)")
    return 0 if passed else 1


if __name__ == "__main__":
    run(main)
