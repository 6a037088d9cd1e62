"""What toy/study.py measured, as tables beside the paper's values, with a verdict for each of its claims.

Intervals are 95 %, over seeds: the test problems are the same for all. Over five seeds a percentile bootstrap, which
the paper uses, covers about 84 %: Student's t decides the verdicts and the bootstrap stands beside it. Differences are
paired by seed. Accuracies and prompts are of the last step ("before": of the first), alpha_t, kept, exploration,
"n_eff of a", the clip fraction and the whole table of the tiny model's points means over the run, s/step and geometry %
medians; everything else is "late", the mean over the last fifth of a run. A verdict is

    holds                             the interval lies on the claim's side
    does not hold                     it lies on the other side, or every seed gave exactly 0
    cannot be tested at this size     it contains 0: this many seeds of this length cannot tell

One interval in twenty misses by chance. The lines share runs (every `grpo+…` line those of `grpo`), so misses come
together. "(ours)": the paper makes no such claim, or makes it for another scope.

Departures from the paper: values of a 0.5 M parameter model stand beside values of a 1.5B or 7B model. The claims can
be compared, the numbers cannot.
"""
import csv
import shlex
from pathlib import Path
from statistics import fmean

from salt.diagnose import KEPT_LITTLE, KEPT_MOST, place_on_the_map
from toy import regimes
from toy.redundancy import SCOPES
from toy.study import CELLS, EXPERIMENTS
from toy.study_measures import (COLUMNS, DIFFERENCE, METRICS, NOTHING, PAPER, POINTS, Gathered, Runs, base_of, interval,
                                interventions, panels, points, verdict_of_cell, whole)
from toy.study_verdicts import NOT_RUN, proxy_line, verdicts

MAP_SAYS = {"most": "much the same", "half": "the border", "little": "slower"}
MAP_NOTE = ("Every cell is a contextual bandit (toy/regimes.py); k_t/m and n_eff are means over its run at the "
            "common learning rate. One interval in twenty misses by chance, and the best and worst of many are picked: "
            "their intervals say too much. At one learning rate a smaller a' is also a smaller step; the tuned rates "
            "make up for that.")


def markdown(lines: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in [lines[0], ["---"] * len(lines[0]), *lines[1:]]]


def experiment_table(name: str, runs: Runs) -> list[list[str]]:
    """One line per method: ours with the interval (the paper's value), the paired difference from its base."""
    columns = COLUMNS[name]
    compared = DIFFERENCE.get(name, columns[0])
    lines = [["method", "seeds", *columns, f"Δ {compared}", "bootstrap", "against", "command"]]
    for cell in EXPERIMENTS[name].methods(full=True):
        full = "" if cell in EXPERIMENTS[name].core else " --full"
        asked = ",".join(dict.fromkeys((base_of(name, cell), cell)))
        full = full or ("" if base_of(name, cell) in EXPERIMENTS[name].core else " --full")
        command = f"`python toy/study.py {name}{full} --methods {shlex.quote(asked)}`"
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
    """The warm start's rollouts in groups of G, means over seeds. no_cancellation: the prediction 1 − κ for n_eff."""
    names = ["signal", "r_in", "r_total", "pr_in", "pr_total", "n_eff_in", "n_eff_in_signal", "no_cancellation",
             "n_eff_out", "n_eff_total",
             *(f"{scope} {name}" for name in ("alpha", "kept", "exploration", "d_a") for scope in SCOPES)]
    return [["G", *names]] + [
        [str(size), *(interval(list(runs.table(size, name).values())).text(".2f") for name in names)]
        for size in runs.group_sizes()]


def points_table(runs: Runs) -> list[list[str]]:
    """What decides a', beside what came of it; and what the map says of SALT at such a share of ‖a‖²."""
    lines = [["method", *POINTS, "Δ avg@8 %", "against", "the map"]]
    for cell, change in points(runs).items():
        measured = [interval([whole(name)(row) for row in runs.by[cell].values()]) for name in POINTS.values()]
        lines.append([cell, *(value.text(".2f") for value in measured), change.text(".1f", signed=True),
                      base_of("main", cell) if change.seeds else "–",
                      MAP_SAYS[place_on_the_map(measured[0].mean)] if CELLS[cell]["salt"] == "salt" else "–"])
    return lines


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


def kept_table(rows: list[dict]) -> list[list[str]]:
    """SALT at both scopes by the share of ‖a‖² that P_k keeps: the table behind `train.py --diagnose`."""
    lines = [["P_k keeps", "cells", "lost, same rate", "largest loss", "lost, tuned", "largest loss, tuned",
              "won, same / tuned"]]
    for low, high, name in ((KEPT_MOST, 2.0, f"{KEPT_MOST:.0%} or more"), (KEPT_LITTLE, KEPT_MOST, "between"),
                            (-1.0, KEPT_LITTLE, f"under {KEPT_LITTLE:.0%}")):
        own = [row for row in rows if row["method"].startswith("salt") and low <= row["kept"] < high]
        told = {(kind, word): [row for row in own if verdict_of_cell(row, kind) == word]
                for kind in ("same", "tuned") for word in ("hurts", "helps")}
        worst = {kind: max((-row[f"{kind}_delta"] for row in told[kind, "hurts"]), default=0.0)
                 for kind in ("same", "tuned")}
        lines.append([name, str(len(own)), str(len(told["same", "hurts"])), f"{worst['same']:.3f}",
                      str(len(told["tuned", "hurts"])), f"{worst['tuned']:.3f}",
                      f"{len(told['same', 'helps'])} / {len(told['tuned', 'helps'])}"])
    return lines


def mean_losses(rows: list[dict]) -> list[list[str]]:
    """What a method loses to GRPO on average over the cells, and how many best rates are the grid's largest."""
    lines = [["method", "mean loss, same rate", "mean loss, tuned", "best rate is the largest tried"]]
    for method in regimes.METHODS:
        own = [row for row in rows if row["method"] == method]
        losses = ["–"] * 2 if method == "grpo" else [f"{-fmean(row[f'{kind}_delta'] for row in own):.3f}"
                                                     for kind in ("same", "tuned")]
        lines.append([method, *losses,
                      f"{sum(row['rate'] == max(regimes.RATES) for row in own)} of {len(own)} cells"])
    return lines


def interventions_table(runs: Runs) -> list[list[str]]:
    names = {"d_a": "D_a", "d_g": "D_g", "n_eff": "n_eff", "u_perp_gain": "U_perp gain"}
    lines = [["coefficients", *names.values()]]
    for method, seeds in interventions(runs).items():
        lines.append(["a" if method == "base" else method,
                      *(interval([row[name] for row in seeds.values()]).text(".2f") for name in names)])
    return lines


# ---------------------------------------------------------------------------- everything

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
            text += ["\nThe warm start's rollouts in groups of G, 1,024 in all, at temperature 0.6:\n",
                     *markdown(redundancy_table(runs))]
        if name == "matched" and "redundancy" in runs.by:
            text += ["\nThe paper's intervention: the warm start's rollouts, rewards and α_t, other coefficients "
                     "(mini-batches of 64, means):\n", *markdown(interventions_table(runs))]
    text += [f"\n## {EXPERIMENTS['regimes'].title}\n", "`python toy/study.py regimes`\n", MAP_NOTE]
    for kind in ("tuned", "same") if map_rows else ():
        what = "each method at its best learning rate" if kind == "tuned" else "all at one learning rate"
        text += [f"\nReward minus GRPO's, {what} ({len(map_rows) // len(regimes.METHODS)} cells, "
                 f"{map_rows[0]['seeds']:g} seeds each):\n", *markdown(regimes_table(map_rows, kind))]
    text += ["\nSALT at both scopes by what P_k keeps:\n", *markdown(kept_table(map_rows)), "",
             *markdown(mean_losses(map_rows))] if map_rows else [NOT_RUN]
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
