"""What toy/study.py measured, as tables beside the paper's values, with a verdict for each of its claims.

Intervals are 95 %. Over five seeds a percentile bootstrap, which the paper uses, covers about 84 %: Student's t decides
the verdicts and the bootstrap stands beside it. Differences are paired by seed. "Late" is the mean over the last fifth
of a run. A verdict is

    holds                             the interval lies on the claim's side
    does not hold                     it lies on the other side
    cannot be tested at this size     it contains 0: this many seeds of this length cannot tell

Each interval misses in one case of twenty, so of all the lines below one or two are wrong by chance.

Departures from the paper: values of a 0.5 M parameter model stand beside values of a 1.5B or 7B model. The claims can
be compared, the numbers cannot.
"""
import csv
import math
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Callable, Iterator

from salt.diagnose import KEPT_LITTLE, KEPT_MOST
from salt.errors import UserError
from salt.stats import mean_interval, paired_bootstrap
from toy import regimes
from toy.redundancy import SCOPES
from toy.study import CELLS, COMPONENTS, EXPERIMENTS, NULLS, REGULARIZERS

MAP_SAYS = {"most": "much the same", "half": "the border", "little": "slower"}
HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot be tested at this size"
NOT_RUN = "not run"
MAP_NOTE = ("Every cell is a contextual bandit (toy/regimes.py); k_t/m and n_eff are means over its own run. At 95 % "
            "one interval in twenty misses by chance: of 240, six on either side. At one learning rate a smaller a' is "
            "also a smaller step; at the tuned rates that is made up for.")


# ---------------------------------------------------------------------------- metrics of one run

def curve(row: dict, name: str) -> list[float]:
    return [value for value in row["curves"].get(name, ()) if value is not None]


def last(name: str, scale: float = 1.0) -> Callable[[dict], float]:
    return lambda row: scale * curve(row, name)[-1] if curve(row, name) else math.nan


def late(name: str, otherwise: str | None = None) -> Callable[[dict], float]:
    """Mean over the last fifth of the steps; of another curve where a run has none of this name."""
    def mean(row: dict) -> float:
        values = curve(row, name) or (curve(row, otherwise) if otherwise else [])
        return fmean(values[-max(1, len(values) // 5):]) if values else math.nan
    return mean


def whole(name: str, scale: float = 1.0) -> Callable[[dict], float]:
    return lambda row: scale * fmean(curve(row, name)) if curve(row, name) else math.nan


def step_seconds(row: dict) -> float:
    """Of a step, without diagnostics and evaluation: the median is deaf to what else the machine does."""
    names = ("seconds_total", "seconds_diagnostics", "seconds_evaluate")
    total, *aside = ([value or 0.0 for value in row["curves"].get(name, ())] for name in names)
    steps = sorted(t - sum(column[i] if column else 0.0 for column in aside) for i, t in enumerate(total) if t)
    return steps[len(steps) // 2] if steps else math.nan


def geometry_share(row: dict) -> float:
    """Percent that Gram and reweighting add to the rest of a step."""
    spent = whole("seconds_geometry")(row)
    return 100 * spent / max(step_seconds(row) - spent, 1e-9)


METRICS: dict[str, tuple[Callable[[dict], float], str]] = {               # heading -> (of a run, format)
    "avg@8 %": (last("eval_avg", 100), ".1f"), "pass@8 %": (last("eval_pass@8", 100), ".1f"),
    "entropy": (late("entropy"), ".3f"), "PR": (late("pr_total"), ".2f"),
    "n_eff": (late("n_eff", "n_eff_total"), ".2f"),
    "alpha_t": (whole("alpha"), ".2f"), "k_t/m": (late("rank_share"), ".3f"), "D_a": (late("d_a"), ".2f"),
    "D_g": (late("d_g"), ".2f"), "U_perp gain": (late("u_perp_gain"), ".2f"),
    "kept": (whole("kept"), ".2f"), "exploration": (whole("exploration"), ".2f"),
    "n_eff of a": (whole("n_eff_total"), ".2f"),
    "no signal": (late("no_signal_share"), ".2f"), "clip fraction": (whole("clip_fraction"), ".1e"),
    "s/step": (step_seconds, ".3f"), "geometry %": (geometry_share, ".1f"),
}
COLUMNS = {
    "main": ("avg@8 %", "pass@8 %", "n_eff", "k_t/m"), "redundancy": ("PR", "n_eff"),
    "entropy": ("avg@8 %", "pass@8 %", "entropy", "PR", "n_eff"), "ablation": ("avg@8 %", "pass@8 %", "PR", "n_eff"),
    "fixed-alpha": ("avg@8 %", "pass@8 %", "PR", "n_eff", "alpha_t"),
    "matched": ("D_a", "D_g", "n_eff", "U_perp gain", "avg@8 %"),
    "bias": ("D_a", "D_g", "n_eff", "U_perp gain", "k_t/m", "no signal", "avg@8 %"),
    "rollouts": ("avg@8 %", "pass@8 %", "PR", "n_eff", "alpha_t", "kept", "exploration", "clip fraction"), "cost": ("s/step", "geometry %"),
}
AGAINST_SALT = ("ablation", "fixed-alpha", "matched")                                    # others: the base algorithm
DIFFERENCE = {"matched": "n_eff", "bias": "n_eff", "redundancy": "n_eff"}                  # others: the first column
PAPER: dict[str, dict[str, dict[str, float]]] = {
    # Averages over five benchmarks, DeepSeek-Distill-Qwen-1.5B on MATH-TRAIN (tables rq2 and app_ablation).
    "main": {"grpo": (51.2, 75.4), "grpo+salt": (53.7, 78.1), "dapo": (51.6, 75.8), "dapo+salt": (53.1, 77.0)},
    "entropy": {"grpo": (51.2, 75.4), "grpo+salt": (53.7, 78.1), "grpo+entropy": (51.0, 75.1),
                "grpo+clip-cov": (51.6, 75.9), "grpo+kl-cov": (51.8, 75.8), "dapo": (51.6, 75.8),
                "dapo+salt": (53.1, 77.0), "dapo+entropy": (51.6, 75.9), "dapo+clip-cov": (51.9, 76.0),
                "dapo+kl-cov": (52.0, 76.1)},
    "ablation": {"grpo": (51.2, 75.4), "grpo+salt": (53.7, 78.1), "grpo+only-main": (51.9, 76.2),
                 "grpo+only-exp": (51.6, 75.9), "grpo+no-positive": (51.3, 75.6), "grpo+no-proj": (51.1, 75.4),
                 "grpo+rand-proj": (51.2, 75.5), "grpo+pr-alpha": (52.1, 76.6), "grpo+entropy-alpha": (51.8, 76.2)},
    # D_a, D_g, n_eff, U_perp gain of the 7B model (tables matched_subspace_intervention and bias_cancellation).
    "matched": {"grpo": (0.0, 0.0, 0.31, 1.0), "grpo+rand-proj": (0.22, 0.18, 0.50, 1.13),
                "grpo+permuted": (0.24, 0.19, 0.43, 1.08), "grpo+matched-rand-subspace": (0.24, 0.18, 0.55, 1.18),
                "grpo+salt": (0.24, 0.16, 0.80, 1.47), "dapo": (0.0, 0.0, 0.82, 1.0),
                "dapo+rand-proj": (0.16, 0.13, 0.86, 1.07), "dapo+permuted": (0.17, 0.13, 0.84, 1.04),
                "dapo+matched-rand-subspace": (0.17, 0.12, 0.89, 1.10), "dapo+salt": (0.17, 0.11, 1.00, 1.24)},
}
PAPER["bias"] = {name: PAPER["matched"][name] for name in ("grpo", "grpo+salt", "dapo", "dapo+salt")}
PAPER = {experiment: {cell: dict(zip(COLUMNS[experiment], values)) for cell, values in cells.items()}
         for experiment, cells in PAPER.items()}


# ---------------------------------------------------------------------------- runs together

@dataclass(frozen=True)
class Interval:
    """A mean, or a paired difference, over seeds."""
    mean: float
    low: float
    high: float
    bootstrap: tuple[float, float]
    seeds: int

    def text(self, form: str, signed: bool = False) -> str:
        sign = "+" if signed else ""
        if self.seeds == 0:
            return "–"
        if self.seeds == 1:
            return f"{self.mean:{sign}{form}}"
        return f"{self.mean:{sign}{form}} [{self.low:{sign}{form}}, {self.high:{sign}{form}}]"


NOTHING = Interval(math.nan, math.nan, math.nan, (math.nan, math.nan), 0)


def interval(values: list[float]) -> Interval:
    values = [value for value in values if value == value]
    if not values:
        return NOTHING
    bootstrap = paired_bootstrap(values, [0.0] * len(values))[1:] if len(values) > 1 else (math.nan, math.nan)
    return Interval(*mean_interval(values), bootstrap, len(values))


class Runs:
    """Training runs by method and seed, and the warm starts' redundancy tables by seed."""

    def __init__(self, rows: list[dict]):
        self.by: dict[str, dict[int, dict]] = {}
        for row in rows:
            self.by.setdefault(row["cell"], {})[row["seed"]] = row

    def measure(self, cell: str, metric: str) -> Interval:
        return interval([METRICS[metric][0](row) for row in self.by.get(cell, {}).values()])

    def compare(self, cell: str, base: str, metric: str) -> Interval:
        """cell − base over the seeds that both have."""
        one, other, of = self.by.get(cell, {}), self.by.get(base, {}), METRICS[metric][0]
        return interval([of(one[seed]) - of(other[seed]) for seed in sorted(one.keys() & other.keys())])

    def table(self, size: int, name: str) -> dict[int, float]:
        """seed -> a column of the redundancy table at group size `size`."""
        return {seed: row["table"][i][name] for seed, row in self.by.get("redundancy", {}).items()
                for i in range(len(row["table"])) if row["table"][i]["G"] == size and name in row["table"][i]}


def base_of(experiment: str, cell: str) -> str:
    """What a method is compared with: the base algorithm under the same conditions, or full SALT."""
    if experiment in AGAINST_SALT:
        return cell.split("+")[0] + "+salt" + ("@group" if cell.endswith("@group") else "")
    prefix, rest = ("hard ", cell[5:]) if cell.startswith("hard ") else ("", cell)
    method, _, condition = rest.partition(" ")
    condition = f" {condition}" if condition and condition not in ("sum", "signal") else ""
    return f"{prefix}{method.split('+')[0]}{condition}"


# ---------------------------------------------------------------------------- tables

def markdown(lines: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in [lines[0], ["---"] * len(lines[0]), *lines[1:]]]


def experiment_table(name: str, runs: Runs) -> list[list[str]]:
    """One line per method: ours with the interval (the paper's value), the paired difference from its base."""
    columns = COLUMNS[name]
    compared = DIFFERENCE.get(name, columns[0])
    lines = [["method", "seeds", *columns, f"Δ {compared}", "bootstrap", "against", "command"]]
    for cell in EXPERIMENTS[name].methods(full=True):
        full = "" if cell in EXPERIMENTS[name].core else " --full"
        command = f"`python toy/study.py {name}{full} --methods {shlex.quote(cell)}`"
        if cell not in runs.by:
            lines.append([cell, NOT_RUN] + ["–"] * (len(columns) + 3) + [command])
            continue
        paper = PAPER.get(name, {}).get(cell, {})
        texts = []
        for metric in columns:
            form = METRICS[metric][1]
            texts.append(runs.measure(cell, metric).text(form) + (f" ({paper[metric]:g})" if metric in paper else ""))
        base = base_of(name, cell)
        change = NOTHING if base == cell else runs.compare(cell, base, compared)
        form = METRICS[compared][1]
        texts += [change.text(form, signed=True),
                  f"[{change.bootstrap[0]:+{form}}, {change.bootstrap[1]:+{form}}]" if change.seeds > 1 else "–",
                  base if change.seeds else "–", command]
        lines.append([cell, str(len(runs.by[cell])), *texts])
    return lines


def redundancy_table(runs: Runs) -> list[list[str]]:
    """The warm start's rollouts in groups of G, means over seeds."""
    names = {"signal": ".2f", "r_in": ".2f", "pr_in": ".2f", "pr_total": ".2f", "n_eff_in_signal": ".2f",
             "n_eff_out": ".2f", "n_eff_total": ".2f"} | {
        f"{scope} {name}": ".2f" for name in ("alpha", "kept", "exploration", "d_a") for scope in SCOPES}
    sizes = sorted({row["G"] for found in runs.by.get("redundancy", {}).values() for row in found["table"]})
    lines = [["G", *names, "1 − κ"]]
    for size in sizes:
        kappa = [rho * size / (size - 1) for rho in runs.table(size, "rho").values()]      # 1 − κ = ρ_δ G / (G − 1)
        lines.append([str(size), *(interval(list(runs.table(size, name).values())).text(form)
                                   for name, form in names.items()), interval(kappa).text(".2f")])
    return lines


POINTS = ("kept", "k_t/m", "n_eff of a", "alpha_t", "D_a")


def points(runs: Runs) -> dict[str, Interval]:
    """The tiny model's own points of the map: SALT and `interpolated` under each condition -> Δ avg@8 from the base."""
    found = {}
    for cell in CELLS:
        flags = CELLS[cell]
        if cell in runs.by and flags.get("salt") in ("salt", "interpolated") and "regularizer" not in flags:
            found[cell] = runs.compare(cell, base_of("main", cell), "avg@8 %")
    return found


def points_table(runs: Runs) -> list[list[str]]:
    """What decides a', beside what came of it; and what the map says of such a share of ‖a‖²."""
    lines = [["method", *POINTS, "Δ avg@8 %", "against", "the map"]]
    for cell, change in points(runs).items():
        measured = [runs.measure(cell, name) for name in POINTS]
        kept = measured[0].mean
        place = "most" if kept >= KEPT_MOST else "half" if kept >= KEPT_LITTLE else "little"
        lines.append([cell, *(value.text(METRICS[name][1]) for name, value in zip(POINTS, measured)),
                      change.text(".1f", signed=True), base_of("main", cell) if change.seeds else "–", MAP_SAYS[place]])
    return lines


def verdict_of_cell(row: dict, kind: str) -> str:
    """helps, hurts or no difference, by the interval of Student's t. kind: "tuned" or "same"."""
    return "helps" if row[f"{kind}_low"] > 0 else "hurts" if row[f"{kind}_high"] < 0 else "no difference"


def panels(rows: list[dict]) -> Iterator[tuple[float, str, list[dict]]]:
    """(signal, method, its rows) for the methods other than GRPO."""
    for signal in sorted({row["signal"] for row in rows}, reverse=True):
        for method in regimes.METHODS[1:]:
            yield signal, method, [row for row in rows if row["signal"] == signal and row["method"] == method]


def regimes_table(rows: list[dict], kind: str) -> list[list[str]]:
    """In how many cells a method helps, does nothing, hurts; its best and worst cell."""
    def place(row: dict) -> str:
        return (f"{row[f'{kind}_delta']:+.3f} [{row[f'{kind}_low']:+.3f}, {row[f'{kind}_high']:+.3f}] "
                f"(D {row['dimension']:g}, cosine {row['cosine']:g}, k_t/m {row['rank_share']:.2f}, "
                f"n_eff {row['n_eff']:.2f})")

    lines = [["method, signal", "helps", "no difference", "hurts", "best cell", "worst cell"]]
    for signal, method, own in panels(rows):
        counts = [sum(verdict_of_cell(row, kind) == word for row in own) for word in lines[0][1:4]]
        best, worst = (pick(own, key=lambda row: row[f"{kind}_delta"]) for pick in (max, min))
        lines.append([f"{method}, {signal:g}", *map(str, counts), place(best), place(worst)])
    return lines


# ---------------------------------------------------------------------------- verdicts

def judge(change: Interval, positive: bool = True) -> str:
    """A claimed change of one sign against its interval."""
    if change.seeds == 0:
        return NOT_RUN
    low, high = (change.low, change.high) if positive else (-change.high, -change.low)
    return HOLDS if low > 0 else FAILS if high < 0 else OPEN


def verdicts(runs: Runs) -> list[list[str]]:
    """claim, what was measured, verdict."""
    lines = [["claim of the paper", "measured here (95 %, paired)", "verdict"]]

    def changes(claim: str, cell: str, base: str, metric: str, positive: bool = True) -> None:
        change = runs.compare(cell, base, metric)
        lines.append([claim, f"{metric}: {cell} − {base} = {change.text(METRICS[metric][1], signed=True)}",
                      judge(change, positive)])

    for base in ("grpo", "dapo"):
        for scope in ("", "@group"):
            for metric in ("n_eff", "PR", "avg@8 %", "pass@8 %"):
                changes(f"SALT{scope} raises {metric}", f"{base}+salt{scope}", base, metric)
    for scope in ("mini-batch", "group"):
        small, large = runs.table(8, f"{scope} alpha"), runs.table(128, f"{scope} alpha")
        growth = interval([large[seed] - small[seed] for seed in sorted(small.keys() & large.keys())])
        lines.append([f"α_t grows with G ({scope} scope)", "warm start, α_t(G = 128) − α_t(G = 8) = "
                      + growth.text(".2f", signed=True), judge(growth)])
    changes("α_t grows with G, in training", "grpo+salt G=32", "grpo+salt", "alpha_t")
    for name in (*COMPONENTS, "alpha=0.5"):
        changes(f"{name} is worse than full SALT", f"grpo+{name}", "grpo+salt", "avg@8 %", positive=False)
    for name in NULLS:
        changes(f"{name}, with SALT's coefficients, has a lower n_eff", f"grpo+{name}", "grpo+salt", "n_eff", False)
        changes(f"{name} is worse than SALT", f"grpo+{name}", "grpo+salt", "avg@8 %", positive=False)
    for name in REGULARIZERS:
        changes(f"{name} raises entropy", f"grpo+{name}", "grpo", "entropy")
        change = runs.compare(f"grpo+{name}", "grpo", "n_eff")
        told = {HOLDS: FAILS, FAILS: HOLDS, OPEN: OPEN, NOT_RUN: NOT_RUN}[judge(change)]
        lines.append([f"{name} does not raise n_eff", f"n_eff: {change.text('.2f', signed=True)}", told])
    clipped = {cell: runs.measure(cell, "clip fraction") for cell in ("grpo", "grpo+salt", "grpo+salt@group")}
    clipped = {cell: found for cell, found in clipped.items() if found.seeds}
    largest = max((found.mean for found in clipped.values()), default=math.nan)
    lines.append(["clip fraction below 2e-4", ", ".join(f"{cell} {found.mean:.1e}" for cell, found in clipped.items())
                  or "–", NOT_RUN if not clipped else HOLDS if largest < 2e-4 else FAILS])
    share = runs.measure("grpo+salt", "geometry %")
    lines.append(["SALT takes at most 7.7 % more time",
                  f"Gram and reweighting take {share.text('.1f')} % of the rest of a step",
                  NOT_RUN if share.seeds == 0 else HOLDS if share.high <= 7.7 else FAILS])
    for base, paper in (("grpo", 0.24), ("dapo", 0.17)):
        for scope in ("", "@group"):
            found = runs.measure(f"{base}+salt{scope}", "D_a")
            inside = HOLDS if found.low <= paper <= found.high else FAILS
            told = NOT_RUN if not found.seeds else inside if found.seeds > 1 else OPEN
            lines.append([f"D_a = {paper} ({base}+salt{scope})", f"D_a = {found.text('.2f')}", told])
    for base in ("grpo", "dapo"):
        changes(f"(ours) interpolated does not lose to {base}", f"{base}+interpolated", base, "avg@8 %")
    return lines


def proxy_line(path: Path) -> list[str]:
    """The fidelity study's answer, from its own table."""
    claim = "the LM-head proxy preserves a'"
    if not path.is_file():
        return [claim, "`python toy/fidelity.py` has not been run", NOT_RUN]
    with path.open(newline="", encoding="utf-8") as file:
        found = {row["metric"]: row for row in csv.DictReader(file)
                 if (row["temperature"], row["baseline"]) == ("matched", "Full gradient")}
    cosine, order = (float(found[name]["mean"]) for name in ("a' cosine", "a' rank corr."))
    return [claim, f"with the full gradient: cosine {cosine:.2f} (0.86), rank correlation {order:.2f}; "
            "`toy/results/fidelity.md`", HOLDS if cosine > 0.8 else FAILS]


# ---------------------------------------------------------------------------- everything

def of_one_version(rows: list[dict], code: dict[str, str], any_code: bool) -> list[dict]:
    """Rows of the present code; with any_code, of the version that most rows of a kind are of."""
    kept = []
    for kind in ("train", "redundancy"):
        own = [row for row in rows if row["kind"] == kind]
        version = code[kind]
        if any_code and own:
            version = Counter(row["code"] for row in own).most_common(1)[0][0]
        kept += [row for row in own if row["code"] == version]
    return kept


@dataclass(frozen=True)
class Gathered:
    """What a report is made of."""
    runs: Runs
    rows: list[dict]                             # of one version and one size
    left_out: int                                # rows of other versions or sizes
    map_rows: list[dict]


def gather(folder: Path, rows: list[dict], code: dict[str, str], any_code: bool = False) -> Gathered:
    """From runs.jsonl's rows and the folder's regimes.csv. UserError where nothing of this version is there."""
    own = of_one_version(rows, code, any_code)
    map_rows = regimes.read(folder / "regimes.csv", None if any_code else code["regimes"])
    if not own and not map_rows:
        other = f" ({len(rows)} runs of other code: --any-code reports them)" if rows else ""
        raise UserError(f"{folder} holds no results of this version of the code{other}: "
                        "run `python toy/study.py core` first")
    sizes = Counter(row["size"] for row in own).most_common(1)
    own = [row for row in own if row["size"] == sizes[0][0]]                                # sizes are never mixed
    return Gathered(Runs(own), own, len(rows) - len(own), map_rows)


def write(found: Gathered, folder: Path) -> Path:
    """study.md and study.csv in `folder`. Returns the former's path."""
    runs, map_rows = found.runs, found.map_rows
    text = ["# The study\n", __doc__.split("\n\n", 1)[1].split("\n\nDepartures")[0] + "\n", *facts(found)]
    text += ["\n## Verdicts\n", "`python toy/study.py core`, then `python toy/study.py report`\n",
             *markdown(verdicts(runs) + [proxy_line(Path(__file__).parent / "results" / "fidelity.csv")])]
    for name, experiment in EXPERIMENTS.items():
        if name == "regimes":
            continue
        text += [f"\n## {experiment.title}\n", f"`python toy/study.py {name}` (with `--full`: the rows marked "
                 f"{NOT_RUN} too; one seed of a row: its command with `--seeds SEED`)\n",
                 *markdown(experiment_table(name, runs))]
        if name == "redundancy" and "redundancy" in runs.by:
            text += ["\nThe warm start's rollouts in groups of G:\n", *markdown(redundancy_table(runs))]
    text += [f"\n## {EXPERIMENTS['regimes'].title}\n", "`python toy/study.py regimes`\n", MAP_NOTE]
    for kind in ("tuned", "same") if map_rows else ():
        what = "each method at its best learning rate" if kind == "tuned" else "all at one learning rate"
        text += [f"\nReward minus GRPO's, {what} ({len(map_rows) // len(regimes.METHODS)} cells, "
                 f"{map_rows[0]['seeds']:g} seeds each):\n", *markdown(regimes_table(map_rows, kind))]
    text += [] if map_rows else [NOT_RUN]
    text += ["\nThe tiny model's own points, means over the run (`kept`: the share of ‖a‖² that P_k keeps):\n",
             *markdown(points_table(runs))]
    write_csv(runs, folder / "study.csv")
    target = folder / "study.md"
    target.write_text("\n".join(text) + "\n", encoding="utf-8")
    return target


def facts(found: Gathered) -> list[str]:
    """Where the numbers come from."""
    if not found.rows:
        return []
    seconds = sum(row["seconds"] for row in found.rows)
    machines, commits, code = (", ".join(sorted({row[name] for row in found.rows}))
                               for name in ("machine", "commit", "code"))
    seeds = ", ".join(str(seed) for seed in sorted({row["seed"] for row in found.rows}))
    left_out = f"; {found.left_out} of other code or another size left out" if found.left_out else ""
    return [f"{len(found.rows)} runs (size {found.rows[0]['size']}, seeds {seeds}{left_out}), {seconds / 3600:.1f} "
            f"hours of one thread, {seconds / len(found.rows):.0f} s each; {machines}; commit {commits}; code {code}."]


def write_csv(runs: Runs, path: Path) -> None:
    """Every method and metric with its interval and the paired difference from its base."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["experiment", "method", "metric", "seeds", "mean", "low", "high", "base", "delta", "t_low",
                         "t_high", "bootstrap_low", "bootstrap_high", "paper"])
        for name in (name for name in EXPERIMENTS if name in COLUMNS):
            for cell in EXPERIMENTS[name].methods(full=True):
                for metric in COLUMNS[name]:
                    found, base = runs.measure(cell, metric), base_of(name, cell)
                    if not found.seeds:
                        writer.writerow([name, cell, metric, 0, NOT_RUN])
                        continue
                    change = NOTHING if base == cell else runs.compare(cell, base, metric)
                    numbers = (found.mean, found.low, found.high), (change.mean, change.low, change.high,
                                                                    *change.bootstrap)
                    one, two = ([f"{value:.5g}" if value == value else "" for value in part] for part in numbers)
                    writer.writerow([name, cell, metric, found.seeds, *one, base, *two,
                                     PAPER.get(name, {}).get(cell, {}).get(metric, "")])
