"""Numbers into files and tables: plain text, Markdown, CSV, JSON, and a figure of paired differences.

Departures from the paper: none; the figure shows App. H's table.
"""
import csv
import io
import json
import math
from pathlib import Path
from typing import Any, Sequence


def write(path: Path, text: str) -> None:
    """The whole file or nothing of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def to_json(value: Any) -> str:
    """Indented JSON; NaN (the standard error of one problem, say), which JSON does not have, becomes null."""
    def finite(part):
        if isinstance(part, dict):
            return {key: finite(item) for key, item in part.items()}
        if isinstance(part, (list, tuple)):
            return [finite(item) for item in part]
        return None if isinstance(part, float) and math.isnan(part) else part

    return json.dumps(finite(value), indent=1, allow_nan=False) + "\n"


def to_csv(rows: Sequence[dict]) -> str:
    """One line per row; the columns are the first row's keys."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def to_markdown(header: list[str], table: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in [header, rule, *table])


def to_text(header: list[str], table: list[list[str]]) -> str:
    """For the terminal: the first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(header, *table)]
    return "\n".join("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
                     for line in [header, *table])


def draw_differences(lines: Sequence[dict], path: Path, title: str) -> None:
    """delta with its interval [delta - minus, delta + plus] per line, in percentage points."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 1.2 + 0.35 * len(lines)), layout="constrained")
    heights = range(len(lines), 0, -1)
    spans = [[100 * line[side] for line in lines] for side in ("minus", "plus")]
    axis.errorbar([100 * line["delta"] for line in lines], heights, xerr=spans, fmt="o", capsize=3)
    axis.axvline(0, color="gray", linewidth=0.8)
    axis.set_yticks(heights, [f"{line['task']}, {line['metric']} ({line['over']})" for line in lines])
    axis.set_xlabel("difference in percentage points, 95 % paired bootstrap interval")
    axis.set_title(title, fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
