"""The figures of toy/study.py: training dynamics, redundancy, the PR-n_eff plane, the map.

Departures from the paper: means over seeds instead of smoothed single runs; the map is ours.
"""
import math
from pathlib import Path
from statistics import fmean

from toy import regimes
from toy.cancellation import new_figure
from toy.study import ALPHAS, CELLS, COMPONENTS, REGULARIZERS
from toy.study_measures import Gathered, Interval, Runs, by_group_size, panels, points, verdict_of_cell


def draw(found: Gathered, folder: Path) -> None:
    """Every figure that there are results for."""
    runs = found.runs
    if found.rows:
        draw_dynamics(runs, folder / "dynamics.png")
        draw_redundancy(runs, folder / "redundancy.png")
        draw_plane(runs, folder / "ablation.png")
        draw_rollouts(runs, folder / "rollouts.png")
    for kind in ("tuned", "same") if found.map_rows else ():
        draw_map(found.map_rows, kind, folder / f"regimes_{kind}.png")
    if found.map_rows:
        draw_points(found, folder / "regimes_points.png")


def mean_curve(runs: Runs, cell: str, name: str, otherwise: str | None = None) -> tuple[list[int], list[float]]:
    """Steps and the mean over seeds of the curve there."""
    points: dict[int, list[float]] = {}
    for row in runs.by.get(cell, {}).values():
        values = row["curves"].get(name) or row["curves"].get(otherwise or name) or []
        for step, value in zip(row["steps"], values):
            if value is not None:
                points.setdefault(step, []).append(value)
    return [*points], [fmean(values) for values in points.values()]


def draw_dynamics(runs: Runs, path: Path) -> None:
    """Accuracy, entropy, PR, n_eff of the update against the step, means over seeds: GRPO's methods above DAPO's."""
    figure, rows = new_figure(2, 4, (17, 8))
    names = (("eval_avg", None, "avg@8"), ("entropy", None, "entropy (nats per token)"),
             ("pr_total", None, "PR"), ("n_eff", "n_eff_total", "n_eff of the update"))
    for base, axes in zip(("grpo", "dapo"), rows):
        cells = [base, *(f"{base}+{name}" for name in ("salt", "salt@group", "interpolated", *REGULARIZERS))]
        for axis, (name, otherwise, title) in zip(axes, names):
            for cell in cells:
                if cell in runs.by:
                    axis.plot(*mean_curve(runs, cell, name, otherwise), label=cell, lw=1.3)
            axis.set(title=title, xlabel="step")
        _legend(axes[0])
    figure.savefig(path, dpi=110)


def draw_redundancy(runs: Runs, path: Path) -> None:
    """Fig. 2: redundancy through training, and with the group size at a fixed number of responses."""
    figure, (above, below) = new_figure(2, 4, (17, 7.5))
    panels_above = ((("r_in", "r_total"), "r"), (("pr_in", "pr_total"), "PR"),
                    (("n_eff_in", "n_eff_in_signal", "n_eff_total"), "n_eff"), (("n_eff_out",), "n_eff across prompts"))
    for axis, (names, title) in zip(above, panels_above):
        for cell, style in (("grpo", "-"), ("dapo", "--")):
            for number, name in enumerate(names if cell in runs.by else ()):
                axis.plot(*mean_curve(runs, cell, name), style, color=f"C{number}", label=f"{cell}, {name}", lw=1.2)
        axis.set(title=title, xlabel="step")
    lines = (("r_in", "r_total"), ("pr_in", "pr_total"),
             ("n_eff_in", "n_eff_in_signal", "n_eff_total", "no_cancellation"),
             ("mini-batch alpha", "group alpha", "mini-batch kept", "group kept"))
    for axis, names in zip(below, lines):
        for name in names:
            found = {size: list(runs.table(size, name).values()) for size in runs.group_sizes()}
            found = {size: fmean(values) for size, values in found.items() if values}
            axis.plot([*found], [*found.values()], "k--" if name == "no_cancellation" else "o-", label=name, lw=1.2)
        axis.set_xscale("log", base=2)
        axis.set(title="the warm start's rollouts", xlabel="group size G")
    if runs.group_sizes():
        below[2].set_yscale("log")
    for axis in (*above, *below):
        _legend(axis)
    figure.savefig(path, dpi=110)


def draw_plane(runs: Runs, path: Path) -> None:
    """PR against n_eff of the update, late in training; the adaptive α_t by group size; what fixed ones do."""
    figure, (plane, trace, fixed, cancelled) = new_figure(1, 4, (20, 4.6))
    for number, cell in enumerate(("grpo", "grpo+salt", "grpo+salt@group", "grpo+interpolated", "grpo+alpha=0.5",
                                   *(f"grpo+{name}" for name in COMPONENTS))):
        x, y = runs.measure(cell, "PR"), runs.measure(cell, "n_eff")
        if x.seeds:
            plane.errorbar(x.mean, y.mean, xerr=_half(x), yerr=_half(y), fmt="oD"[number // 10], label=cell, lw=0.8)
    plane.set(title="late in training", xlabel="PR", ylabel="n_eff of the update")
    for cell in (*by_group_size("grpo+salt").values(), "grpo+salt@group"):
        if cell in runs.by:
            trace.plot(*mean_curve(runs, cell, "alpha"), label=cell, lw=1.2)
    trace.set(title="adaptive α_t", xlabel="step")
    for axis, metric in ((fixed, "avg@8 %"), (cancelled, "n_eff")):
        for scope, colour in (("", "C0"), ("@group", "C1")):
            found = [(alpha, runs.measure(f"grpo+alpha={alpha:g}{scope}", metric)) for alpha in ALPHAS]
            found = [(alpha, value) for alpha, value in found if value.seeds]
            if found:
                axis.errorbar([a for a, _ in found], [v.mean for _, v in found], yerr=[_half(v) for _, v in found],
                              fmt="o-", label=f"fixed α{scope}", color=colour)
            full = runs.measure(f"grpo+salt{scope}", metric)
            if full.seeds:
                axis.axhline(full.mean, ls="--", lw=1, color=colour, label=f"adaptive{scope}")
        axis.set(title="fixed α against the adaptive one", xlabel="α", ylabel=metric)
    for axis in (plane, trace, fixed):
        _legend(axis)
    figure.savefig(path, dpi=110)


def _legend(axis) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)


def draw_rollouts(runs: Runs, path: Path) -> None:
    """Against the group size, at as many responses per step: what SALT reads, what it does, what comes of it."""
    figure, axes = new_figure(2, 4, (17, 7.5))
    names = ("avg@8 %", "pass@8 %", "PR", "n_eff", "alpha_t", "kept", "exploration", "clip fraction")
    for axis, name in zip(axes.flat, names):
        for number, base in enumerate(("grpo", "grpo+salt", "grpo+salt@group", "grpo+interpolated", "grpo+entropy",
                                       "dapo", "dapo+salt")):
            found = {size: runs.measure(cell, name) for size, cell in by_group_size(base).items()}
            found = {size: value for size, value in found.items() if value.seeds}
            if len(found) > 1:
                axis.errorbar([*found], [v.mean for v in found.values()], yerr=[_half(v) for v in found.values()],
                              fmt="o-", label=base, color=f"C{number}", lw=1.2, capsize=2)
        axis.set_xscale("log", base=2)
        axis.set(title=name, xlabel="group size G")
    _legend(axes.flat[0])
    figure.savefig(path, dpi=110)


def draw_points(found: Gathered, path: Path) -> None:
    """The map's cells by the share of ‖a‖² that P_k keeps, and the tiny model's points beside them."""
    figure, axes = new_figure(1, 2, (13, 5))
    for axis, kind in zip(axes, ("salt", "interpolated")):
        for method, colour in ((kind, "tab:blue"), (f"{kind}@group", "tab:orange")):
            own = [row for row in found.map_rows if row["method"] == method]
            axis.scatter([row["kept"] for row in own], [100 * row["same_delta"] for row in own], s=12, color=colour,
                         alpha=0.5, label=f"{method}, bandit")
        for cell, change in points(found.runs).items():
            if CELLS[cell]["salt"] == kind and change.seeds:
                x = found.runs.measure(cell, "kept").mean
                axis.errorbar(x, change.mean, yerr=_half(change), fmt="D", ms=4, lw=1, color="k")
                axis.annotate(cell, (x, change.mean), fontsize=6.5, xytext=(4, 3), textcoords="offset points")
        axis.axhline(0, color="k", lw=0.8)
        axis.set_xlim(-0.05, 1.1)
        axis.set(title=f"{kind}: bandits (dots) and the tiny model", xlabel="share of ‖a‖² that P_k keeps",
                 ylabel="points of accuracy above the base algorithm")
        axis.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110)


def _half(value: Interval) -> float:
    return (value.high - value.low) / 2 if value.seeds > 1 else 0.0


def draw_map(rows: list[dict], kind: str, path: Path) -> None:
    """Difference from GRPO over the grid, one panel per signal and method; grey text where the interval contains 0."""
    signals = sorted({row["signal"] for row in rows}, reverse=True)
    dimensions, cosines = (sorted({row[name] for row in rows}) for name in ("dimension", "cosine"))
    figure, axes = new_figure(len(signals), len(regimes.METHODS) - 1, (18, 3.3 * len(signals) + 0.5))
    limit = max(max(abs(row[f"{kind}_delta"]) for row in rows), 1e-3)
    for axis, (signal, method, own) in zip(axes.flat, panels(rows)):
        values = [[math.nan] * len(dimensions) for _ in cosines]
        for row in own:
            i, j = cosines.index(row["cosine"]), dimensions.index(row["dimension"])
            values[i][j] = row[f"{kind}_delta"]
            same = verdict_of_cell(row, kind) == "no difference"
            half = (row[f"{kind}_high"] - row[f"{kind}_low"]) / 2
            axis.text(j, i, f"{values[i][j]:+.3f}\n±{half:.3f}\nk/m {row['rank_share']:.2f}\nn {row['n_eff']:.2f}",
                      ha="center", va="center", fontsize=6.5, color="0.4" if same else "k",
                      weight="normal" if same else "bold")
        image = axis.imshow(values, cmap="RdBu", vmin=-limit, vmax=limit, origin="lower", aspect="auto", alpha=0.75)
        axis.grid(False)
        axis.set_xticks(range(len(dimensions)), [f"{d:g}" for d in dimensions])
        axis.set_yticks(range(len(cosines)), [f"{c:g}" for c in cosines])
        axis.set(title=f"{method}, signal {signal:g}", xlabel="feature dimension D", ylabel="shared part (cosine)")
    figure.colorbar(image, ax=list(axes.flat), label=f"expected reward minus GRPO's ({kind} rate)", shrink=0.8)
    figure.savefig(path, dpi=110)
