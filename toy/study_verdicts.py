"""The paper's claims, each with what was measured and a verdict (toy/study_report.py says what a verdict means).

Departures from the paper: a claim of a size (D_a = 0.24) can fail here, but not hold: it is another model's.
"""
import csv
from pathlib import Path

from toy.study import COMPONENTS, NULLS, REGULARIZERS
from toy.study_measures import METRICS, PAPER, Interval, Runs, base_of, interval, interventions, raised_n_eff

HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot be tested at this size"
NOT_RUN = "not run"


def judge(change: Interval, positive: bool = True) -> str:
    """A claimed change of one sign against its interval."""
    if change.seeds == 0:
        return NOT_RUN
    low, high = (change.low, change.high) if positive else (-change.high, -change.low)
    never = change.seeds > 1 and low == high == 0                                # not a change in any of the seeds
    return HOLDS if low > 0 else FAILS if high < 0 or never else OPEN


def below(found: list[Interval], limit: float) -> str:
    """All of them below a limit, by their intervals."""
    known = [value for value in found if value.seeds]
    if not known:
        return NOT_RUN
    return HOLDS if all(v.high < limit for v in known) else FAILS if any(v.low > limit for v in known) else OPEN


def verdicts(runs: Runs) -> list[list[str]]:
    """claim, what was measured, verdict."""
    lines = [["claim of the paper", "measured here (95 %, paired)", "verdict"]]

    def line(claim: str, measured: str, change: Interval, positive: bool = True) -> None:
        lines.append([claim, measured, judge(change, positive)])

    def changes(claim: str, cell: str, base: str, metric: str, positive: bool = True) -> None:
        change = runs.compare(cell, base, metric)
        own, others = (PAPER["main"].get(name, {}).get(metric) for name in (cell, base))
        paper = f"; the paper: {own - others:+.1f}" if own and others and own != others else ""
        line(claim, f"{metric}: {cell} − {base} = {change.text(METRICS[metric][1], signed=True)}{paper}", change,
             positive)

    for base in ("grpo", "dapo"):
        for scope in ("", "@group"):
            for metric in ("n_eff", "PR", "avg@8 %", "pass@8 %"):
                changes(f"{'(ours) ' if scope else ''}SALT{scope} raises {metric}", f"{base}+salt{scope}", base, metric)
    for cell in ("hard grpo+salt", "hard grpo+salt@group", "hard dapo+salt"):
        for metric in ("avg@8 %", "pass@8 %"):
            changes(f"(ours) {cell.split('+')[1].replace('salt', 'SALT')} raises {metric} on the harder task", cell,
                    base_of("main", cell), metric)
    raised = interval([raised_n_eff(row) for row in runs.by.get("grpo+salt", {}).values()])
    line("a' cancels less than a, in the same batches", f"n_eff of a' − of a, grpo+salt: {raised.text('.2f', True)}",
         raised)
    gain = interval([METRICS["U_perp gain"][0](row) - 1 for row in runs.by.get("grpo+salt", {}).values()])
    line("SALT strengthens the update outside the dominant subspace", f"U_perp gain − 1, grpo+salt: "
         f"{gain.text('.2f', True)}; the paper: +0.47", gain)

    def with_group_size(name: str) -> tuple[Interval, str]:
        """A column of the redundancy table at G = 128 minus that at G = 8."""
        small, large = runs.table(8, name), runs.table(128, name)
        change = interval([large[seed] - small[seed] for seed in sorted(small.keys() & large.keys())])
        return change, f"warm start, G = 128 − G = 8: {change.text('.2f', signed=True)}"

    for claim, name, positive in (("n_eff within groups falls with G", "n_eff_in_signal", False),
                                  ("PR within groups grows with G", "pr_in", True),
                                  ("α_t grows with G", "mini-batch alpha", True),
                                  ("(ours) α_t grows with G, per group", "group alpha", True)):
        change, measured = with_group_size(name)
        line(claim, f"{name}, {measured}", change, positive)
    for claim, name, metric, positive in (("α_t grows with G, in training", "grpo+salt", "alpha_t", True),
                                          ("the base's n_eff falls with G, in training", "grpo", "n_eff", False)):
        sizes, slope = runs.per_doubling(name, metric)
        line(claim, f"{metric}, {name}, per doubling of G ({sizes}): {slope.text('.3f', True)}", slope, positive)
    sizes, slope = runs.per_doubling("grpo+salt", "avg@8 %", base="grpo")
    line("SALT's gain is larger at larger G", f"avg@8 %, gain per doubling of G ({sizes}): {slope.text('.1f', True)}",
         slope)
    for name in (*COMPONENTS, "alpha=0.5"):
        changes(f"{name} is worse than full SALT", f"grpo+{name}", "grpo+salt", "avg@8 %", positive=False)
    for name, metric in (("only-main", "PR"), ("only-exp", "n_eff"), ("no-positive", "n_eff")):
        changes(f"{name} lowers {metric}", f"grpo+{name}", "grpo+salt", metric, positive=False)
    swapped = interventions(runs)
    for name in NULLS:
        change = interval([row["n_eff"] - swapped["salt"][seed]["n_eff"]
                           for seed, row in swapped.get(name, {}).items()])
        line(f"{name}, with SALT's coefficients on the same rollouts, has a lower n_eff",
             f"warm start, n_eff: {name} − SALT = {change.text('.2f', signed=True)}", change, positive=False)
        changes(f"(implied) {name} is worse than SALT", f"grpo+{name}", "grpo+salt", "avg@8 %", positive=False)
    for name in REGULARIZERS:
        changes(f"{name} raises entropy", f"grpo+{name}", "grpo", "entropy")
        change = runs.compare(f"grpo+{name}", "grpo", "n_eff")
        line(f"{name} does not raise n_eff", f"n_eff: {change.text('.2f', signed=True)}", change, positive=False)
        changes(f"{name} raises n_eff less than SALT", f"grpo+{name}", "grpo+salt", "n_eff", positive=False)
    clipped = {cell: runs.measure(cell, "clip fraction") for cell in (
        "grpo", "grpo+salt", "grpo+salt@group", "grpo G=32", "grpo+salt G=32")}
    lines.append(["clip fraction below 2e-4", ", ".join(f"{cell} {found.mean:.1e}" for cell, found in clipped.items()
                                                       if found.seeds) or "–", below([*clipped.values()], 2e-4)])
    share = runs.measure("grpo+salt", "geometry %")
    lines.append(["(ours) Gram and reweighting cost less than the paper's 7.7 % of overhead",
                  f"{share.text('.1f')} % of the rest of a step", below([share], 7.7)])
    for base, paper in (("grpo", 0.24), ("dapo", 0.17)):
        for scope in ("", "@group"):
            found = runs.measure(f"{base}+salt{scope}", "D_a")
            told = OPEN if found.seeds == 1 or found.low <= paper <= found.high else FAILS
            lines.append([f"{'(ours) ' if scope else ''}D_a is the 7B model's {paper} ({base}+salt{scope})",
                          f"D_a = {found.text('.2f')}", told if found.seeds else NOT_RUN])
    for base in ("grpo", "dapo"):
        changes(f"(ours) interpolated raises avg@8 above {base}'s", f"{base}+interpolated", base, "avg@8 %")
    return lines


def proxy_line(path: Path) -> list[str]:
    """The fidelity study's answer, from its own table."""
    claim = "the LM-head proxy preserves a' (a mean cosine above 0.8)"
    if not path.is_file():
        return [claim, "`python toy/fidelity.py` has not been run", NOT_RUN]
    with path.open(newline="", encoding="utf-8") as file:
        found = {row["metric"]: row for row in csv.DictReader(file)
                 if (row["temperature"], row["baseline"]) == ("matched", "Full gradient")}
    (cosine, spread), order = ((float(found["a' cosine"][part]) for part in ("mean", "deviation")),
                               float(found["a' rank corr."]["mean"]))
    return [claim, f"with the full gradient: cosine {cosine:.2f} ± {spread:.2f} (0.86 ± 0.04), rank correlation "
            f"{order:.2f}; `toy/results/fidelity.md`", HOLDS if cosine > 0.8 else FAILS]
