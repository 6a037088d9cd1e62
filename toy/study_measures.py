"""What a run, a method and a set of seeds come to: metrics, intervals over seeds, and the paper's values.

"Late" is the mean over the last fifth of a run. Differences are paired by seed; intervals are Student's t, with the
percentile bootstrap that the paper uses beside them.

Departures from the paper: Table 2's own cells give DAPO 51.8 on average, the table of averages 51.6, taken here.
"""
import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import Callable, Iterator

from salt.errors import UserError
from salt.stats import mean_interval, paired_bootstrap
from toy import regimes
from toy.study import CELLS, GROUP_SIZES


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


def seconds_of(row: dict, *, without: tuple[str, ...]) -> list[float]:
    """Of each step, without these phases."""
    columns = row["curves"].get("seconds_total", ()), *(row["curves"].get(f"seconds_{name}") for name in without)
    steps = zip(*(column or [0.0] * len(columns[0]) for column in columns))
    return [total - sum(value or 0.0 for value in aside) for total, *aside in steps if total]


def step_seconds(row: dict) -> float:
    """Of a step as it is without diagnostics, for which plain GRPO forms K too; a median is deaf to other load."""
    aside = ("diagnostics", "evaluate") + (() if row["flags"].get("salt") else ("geometry",))
    return median(seconds_of(row, without=aside) or [math.nan])


def geometry_share(row: dict) -> float:
    """Percent that Gram and reweighting add to the rest of a step: the median over steps."""
    rest = seconds_of(row, without=("diagnostics", "evaluate", "geometry"))
    whole_steps = seconds_of(row, without=("diagnostics", "evaluate"))
    return median([100 * (step / part - 1) for step, part in zip(whole_steps, rest)] or [math.nan])


def raised_n_eff(row: dict) -> float:
    """n_eff of a' minus n_eff of the advantages a themselves, in one run's own batches."""
    return late("n_eff")(row) - late("n_eff_total")(row)


METRICS: dict[str, tuple[Callable[[dict], float], str]] = {               # heading -> (of a run, format)
    "before %": (lambda row: 100 * curve(row, "eval_avg")[0], ".1f"), "prompts": (last("prompts"), ".0f"),
    "avg@8 %": (last("eval_avg", 100), ".1f"), "pass@8 %": (last("eval_pass@8", 100), ".1f"),
    "entropy": (late("entropy"), ".3f"), "PR": (late("pr_total"), ".2f"),
    "n_eff": (late("n_eff", "n_eff_total"), ".2f"),
    "alpha_t": (whole("alpha"), ".2f"), "k_t/m": (late("rank_share"), ".3f"), "D_a": (late("d_a"), ".2f"),
    "D_g": (late("d_g"), ".2f"), "U_perp gain": (late("u_perp_gain"), ".2f"),
    "kept": (whole("kept"), ".2f"), "exploration": (whole("exploration"), ".2f"),
    "n_eff of a": (whole("n_eff_total"), ".2f"), "n_eff of a' − of a": (raised_n_eff, ".2f"),
    "no signal": (late("no_signal_share"), ".2f"), "clip fraction": (whole("clip_fraction"), ".1e"),
    "s/step": (step_seconds, ".3f"), "geometry %": (geometry_share, ".1f"),
}
COLUMNS = {
    "main": ("avg@8 %", "pass@8 %", "before %", "prompts", "n_eff", "k_t/m"), "redundancy": ("PR", "n_eff"),
    "entropy": ("avg@8 %", "pass@8 %", "entropy", "PR", "n_eff"), "ablation": ("avg@8 %", "pass@8 %", "PR", "n_eff"),
    "fixed-alpha": ("avg@8 %", "pass@8 %", "PR", "n_eff", "alpha_t"),
    "matched": ("D_a", "D_g", "n_eff", "U_perp gain", "avg@8 %"),
    "bias": ("D_a", "D_g", "n_eff", "U_perp gain", "k_t/m", "no signal", "avg@8 %"),
    "rollouts": ("avg@8 %", "pass@8 %", "PR", "n_eff", "alpha_t", "kept", "exploration", "clip fraction"),
    "cost": ("s/step", "geometry %"),
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
for cell, accuracy in {"grpo": 66.9, "grpo+salt": 69.7, "dapo": 65.8, "dapo+salt": 68.2}.items():        # 7B as well
    PAPER["bias"][cell]["avg@8 %"] = accuracy
PAPER["cost"] = {"grpo+salt": {"geometry %": 7.7}}                            # of the whole training time, on average


# ---------------------------------------------------------------------------- runs together

@dataclass(frozen=True)
class Interval:
    """A mean, or a paired difference, over seeds."""
    mean: float
    low: float
    high: float
    values: tuple[float, ...]

    @property
    def seeds(self) -> int:
        return len(self.values)

    @cached_property                 # seldom asked for, and a hundred times slower than the rest
    def bootstrap(self) -> tuple[float, float]:
        return paired_bootstrap(self.values, [0.0] * self.seeds)[1:] if self.seeds > 1 else (math.nan, math.nan)

    def text(self, form: str, signed: bool = False) -> str:
        sign = "+" if signed else ""
        if self.seeds == 0:
            return "–"
        if self.seeds == 1:
            return f"{self.mean:{sign}{form}}"
        return f"{self.mean:{sign}{form}} [{self.low:{sign}{form}}, {self.high:{sign}{form}}]"


NOTHING = Interval(math.nan, math.nan, math.nan, ())


def interval(values: list[float]) -> Interval:
    values = [value for value in values if value == value]
    return Interval(*mean_interval(values), tuple(values)) if values else NOTHING


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

    def per_doubling(self, cell: str, metric: str, base: str | None = None) -> tuple[str, Interval]:
        """How a metric, or its difference from a base, changes when G doubles: each seed's least-squares slope over
        log2 G, at the group sizes that were run with every seed. Returns these sizes as well."""
        of, cells = METRICS[metric][0], by_group_size(cell)
        bases = by_group_size(base) if base else {}
        seeds = set(self.by.get(cell, {}))
        whole = [size for size in cells if all(seeds <= set(self.by.get(found[size], {})) for found in (cells, bases)
                                               if found)]
        slopes = []
        for seed in sorted(seeds) if len(whole) > 1 else ():
            values = [of(self.by[cells[size]][seed]) - (of(self.by[bases[size]][seed]) if base else 0.0)
                      for size in whole]
            slopes.append(linear_regression([math.log2(size) for size in whole], values).slope)
        return ", ".join(map(str, whole)), interval(slopes)

    def group_sizes(self) -> list[int]:
        """Those of the redundancy tables."""
        return sorted({row["G"] for found in self.by.get("redundancy", {}).values() for row in found["table"]})

    def table(self, size: int, name: str) -> dict[int, float]:
        """seed -> a column of the redundancy table at group size `size`."""
        return {seed: row["table"][i][name] for seed, row in self.by.get("redundancy", {}).items()
                for i in range(len(row["table"])) if row["table"][i]["G"] == size and name in row["table"][i]}


def by_group_size(cell: str) -> dict[int, str]:
    """Group size -> the name under which a method was run with it. Without a size in its name a method has 8."""
    return {size: cell if size == 8 else f"{cell} G={size}" for size in sorted((8, *GROUP_SIZES))}


def base_of(experiment: str, cell: str) -> str:
    """What a method is compared with: the base algorithm under the same conditions, or full SALT."""
    if cell == "grpo+released-code":
        return "grpo token-mean"                                                # its preset changes the loss as well
    if experiment in AGAINST_SALT:
        return cell.split("+")[0] + "+salt" + ("@group" if cell.endswith("@group") else "")
    prefix, rest = ("hard ", cell[5:]) if cell.startswith("hard ") else ("", cell)
    method, _, condition = rest.partition(" ")
    condition = f" {condition}" if condition and condition not in ("sum", "signal") else ""
    return f"{prefix}{method.split('+')[0]}{condition}"


def interventions(runs: Runs) -> dict[str, dict[int, dict[str, float]]]:
    """method -> seed -> D_a, D_g, n_eff, U_perp gain on the warm start's rollouts (toy/redundancy.py)."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    for seed, row in runs.by.get("redundancy", {}).items():
        for method, values in row.get("matched", {}).items():
            found.setdefault(method, {})[seed] = values
    return found


POINTS = {"kept": "kept", "k_t/m": "rank_share", "n_eff of a": "n_eff_total", "alpha_t": "alpha", "D_a": "d_a"}


def points(runs: Runs) -> dict[str, Interval]:
    """The tiny model's own points of the map: SALT and `interpolated` under each condition -> Δ avg@8 from the base."""
    found = {}
    for cell in CELLS:
        flags = CELLS[cell]
        if cell in runs.by and flags.get("salt") in ("salt", "interpolated") and "regularizer" not in flags:
            found[cell] = runs.compare(cell, base_of("main", cell), "avg@8 %")
    return found


# ---------------------------------------------------------------------------- the map

def verdict_of_cell(row: dict, kind: str) -> str:
    """helps, hurts or no difference, by the interval of Student's t. kind: "tuned" or "same"."""
    return "helps" if row[f"{kind}_low"] > 0 else "hurts" if row[f"{kind}_high"] < 0 else "no difference"


def panels(rows: list[dict]) -> Iterator[tuple[float, str, list[dict]]]:
    """(signal, method, its rows) for the methods other than GRPO."""
    for signal in sorted({row["signal"] for row in rows}, reverse=True):
        for method in regimes.METHODS[1:]:
            yield signal, method, [row for row in rows if row["signal"] == signal and row["method"] == method]


# ---------------------------------------------------------------------------- what a report is made of

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
