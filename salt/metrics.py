"""The run directory: what was asked for, what happened at every step, and a figure of it.

    config.json     the configuration in full, argv, seed, versions, commit
    metrics.jsonl   one line per step; what depends on the clock is under "system"
    samples/        step-000020.jsonl: some of a step's responses, with reward, advantage and coefficient
    curves.png      redrawn now and then
    checkpoints/    salt/checkpoint.py
    final/          the trained model as an ordinary Hugging Face folder

Departures from the paper: none.
"""
import json
import math
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from salt.advantages import Reweighted
from salt.errors import UserError
from salt.geometry import group_geometry, residual_diagnostic, update_deviation

PANELS = (
    ("accuracy", {"pass_rate": "train, pass rate", "eval_pass@1": "test, pass@1", "eval_pass@8": "test, pass@8"}),
    ("effective sample size", {"n_eff_total": "$n_{eff}$ total", "n_eff_in": "$n_{eff}$ within groups",
                               "alpha": r"$\alpha_t$"}),
    ("dimension", {"pr_total": "PR total", "rank": "$k_t$", "pr_in": "PR within groups"}),
    ("policy entropy (nats per token)", {"entropy": "entropy"}),
    ("response length (tokens)", {"length": "mean length"}),
    ("deviation from GRPO", {"d_a": "$D_a$", "d_g": "$D_g$", "no_signal_share": "$\\|a'\\|^2$ without signal"}),
)


def _commit() -> str:
    root = Path(__file__).resolve().parents[1]
    try:
        head = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        dirty = subprocess.run(["git", "-C", root, "status", "--porcelain"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (head.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")) if head.returncode == 0 else "unknown"


def command_line(arguments: list[str]) -> list[str]:
    """The arguments without the folders of absolute paths: results travel, and nobody else has those folders."""
    shortened = []
    for argument in arguments:
        flag, equals, value = argument.rpartition("=")
        shortened.append(flag + equals + Path(value).name if Path(value).is_absolute() else argument)
    return shortened


def provenance() -> dict:
    """Where a number came from: versions, commit, machine."""
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "math-verify")}
    return {"argv": command_line(sys.argv), "python": platform.python_version(), "versions": versions,
            "commit": _commit(), "machine": f"{platform.machine()}, {os.cpu_count()} cores"}


class RunDirectory:
    """Files of one run. `create` refuses a folder that holds something; the constructor takes any, for --resume."""

    def __init__(self, path: Path):
        self.path, self.checkpoints, self.final = path, path / "checkpoints", path / "final"
        self._metrics = path / "metrics.jsonl"

    @classmethod
    def create(cls, path: Path, config: dict) -> "RunDirectory":
        try:
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise UserError(f"{path} already holds something: choose another --output, or --resume {path}")
            path.mkdir(parents=True, exist_ok=True)
            (path / "config.json").write_text(json.dumps(config | {"provenance": provenance()}, indent=1) + "\n")
        except OSError as error:
            raise UserError(f"cannot write to {str(path)[:200]}: {error.strerror}") from error
        return cls(path)

    @staticmethod
    def config(path: Path, names: list[str]) -> dict:
        """The configuration a run was started with: a value for each of `names`."""
        try:
            recorded = json.loads((path / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is not a run directory: its config.json cannot be read ({error})") from error
        if not isinstance(recorded, dict) or {*recorded} - {"provenance"} != {*names}:
            raise UserError(f"{path}/config.json is of another version of this program: start a new run")
        return {name: recorded[name] for name in names}

    def records(self) -> list[dict]:
        """The lines written so far; a last line that was cut off is left out."""
        if not self._metrics.exists():
            return []
        whole = [line for line in self._metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
        try:
            return [json.loads(line) for line in whole]
        except ValueError as error:
            raise UserError(f"{self._metrics} has a line that is not JSON ({error}): mend or delete it") from error

    def rewind(self, step: int) -> None:
        """Forget the lines after `step`: they are about to be computed again."""
        kept = [record for record in self.records() if record["step"] <= step]
        temporary = self._metrics.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
        temporary.replace(self._metrics)
        for path in (self.path / "samples").glob("step-*.jsonl"):
            if int(path.stem.removeprefix("step-")) > step:
                path.unlink()

    def write_samples(self, step: int, rows: list[dict]) -> Path:
        """The table of a step (`sample_table`), whole or not at all."""
        target = self.path / "samples" / f"step-{step:06d}.jsonl"
        target.parent.mkdir(exist_ok=True)
        temporary = target.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(_finite(row), ensure_ascii=False) + "\n" for row in rows))
        temporary.replace(target)
        return target

    def log(self, record: dict) -> None:
        """Append one line. NaN and infinity are not JSON: they become null."""
        with self._metrics.open("a") as file:
            file.write(json.dumps(_finite(record), allow_nan=False) + "\n")

    def draw(self) -> Path:
        """curves.png from metrics.jsonl."""
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot

        records = self.records()
        figure, axes = pyplot.subplots(2, 3, figsize=(13, 6.5), layout="constrained")
        for axis, (title, series) in zip(axes.flat, PANELS):
            for name, label in series.items():
                points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
                if points:
                    axis.plot(*zip(*points), label=label, linewidth=1.6,
                              marker="o" if name.startswith("eval") else None)
            axis.set_title(title, fontsize=10)
            axis.set_xlabel("step")
            axis.spines[["top", "right"]].set_visible(False)
            if axis.lines:
                axis.legend(fontsize=8, frameon=False)
            else:
                axis.text(0.5, 0.5, "not measured in this run", ha="center", transform=axis.transAxes, color="gray")
        axes[0, 0].set_ylim(0, 1)
        figure.suptitle(self.path.name, fontsize=11)
        target = self.path / "curves.png"
        figure.savefig(target, dpi=110)
        pyplot.close(figure)
        return target


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sample_table(prompts: list[str], completions: list[str], rewards: Tensor, advantages: Tensor,
                 coefficients: Tensor, group_size: int, groups: int = 2) -> list[dict]:
    """Rows for the first groups that carry a signal, or the first at all: texts (m), the others (m,), Eq. 2, 18."""
    silent = (advantages.view(-1, group_size) == 0).all(1)                                              # (B,)
    chosen = silent.int().argsort(stable=True)[:groups]
    columns = {"reward": rewards, "advantage": advantages, "coefficient": coefficients}
    return [{"prompt": prompts[i], "completion": completions[i]} | {k: v[i].item() for k, v in columns.items()}
            for group in chosen.tolist() for i in range(group * group_size, (group + 1) * group_size)]


def throughput(seconds: dict[str, float], tokens: int, steps_left: int) -> dict[str, float]:
    """From the seconds by phase of a step that sampled `tokens`: tokens per second, in all and while sampling, and the
    seconds the run still takes if its other steps are like this one."""
    return {"tokens_per_second": round(tokens / max(seconds["total"], 1e-9), 1),
            "sample_tokens_per_second": round(tokens / max(seconds["sample"], 1e-9), 1),
            "seconds_left": round(seconds["total"] * steps_left)}


def check_tracker(name: str) -> None:
    """UserError for a tracker that Accelerate does not know, or whose package is missing. Loads neither."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    from accelerate.utils import LoggerType
    if name not in LOGGER_TYPE_TO_CLASS:
        raise UserError(f"--tracker {name}: one of {', '.join(map(str, LOGGER_TYPE_TO_CLASS))}")
    if name in LoggerType.list() and name not in map(str, get_available_trackers()):
        raise UserError(f"--tracker {name} needs its package: pip install {name.replace('_', '-')}")


class Tracker:
    """Hands the log to wandb, tensorboard, … by way of Accelerate. Make one on the first process only.

    Accelerate's trackers are used without its Accelerator, which would choose a device and a way of sharding.
    """

    def __init__(self, name: str, run: Path, config: dict):
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS
        check_tracker(name)
        PartialState(cpu=not torch.cuda.is_available())          # its loggers ask for it; it joins the group there is
        kind = LOGGER_TYPE_TO_CLASS[name]
        named = {"name": run.name, "dir": str(run)} if name == "wandb" else {}
        try:
            self.tracker = kind(name, run) if kind.requires_logging_directory else kind("salt", **named)
            self.tracker.main_process_only = False
            self.tracker.start()
            self.tracker.store_init_configuration({key: value if isinstance(value, (bool, int, float, str)) else
                                                   str(value) for key, value in config.items()})
        except Exception as error:                 # whatever a service's client raises: no login, no network, a bad key
            raise UserError(f"--tracker {name} does not start: {' '.join(str(error).split())[:300]}") from error

    def log(self, record: dict) -> None:
        """One line of metrics.jsonl: its numbers under their names, those of "system" below seconds/ and the like."""
        self.tracker.log(_numbers(record), step=record["step"])

    def finish(self) -> None:
        self.tracker.finish()


def _numbers(record: dict, prefix: str = "") -> dict[str, float]:
    """Nested numbers by path; what is not finite is left out."""
    found = {}
    for key, value in record.items():
        if isinstance(value, dict):
            found |= _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and math.isfinite(value):
            found[prefix + key] = value
    return found


def geometry_metrics(gram: Tensor, advantages: Tensor, group_size: int, coefficients: Tensor,
                     reweighted: Reweighted | None) -> dict[str, float]:
    """What the K of a mini-batch says: redundancy (App. D.1), the residual bottleneck with the errors of Eq. 10 and 11
    (App. B), and with SALT the channels and the deviation from the base algorithm (App. F.5).

    gram: (m, m); advantages, coefficients: (m,). What is 0/0 is left out; {} where K is not finite."""
    if not torch.isfinite(gram).all():
        return {}
    record = group_geometry(gram, advantages, group_size)
    residual = residual_diagnostic(gram, advantages, group_size)
    energy = residual["e_total"].sqrt() / group_size
    exceeds = lambda a, b: a > b * (1 + 1e-5) + 1e-6 * energy               # the advantages are float32
    record |= {"rho": (residual["e_residual"].sum() / residual["e_total"].sum().clamp_min(1e-300)).item(),
               "update_norm": residual["update_norm"].mean().item(), "residual_bound": residual["bound"].mean().item(),
               "eq10_error": residual["identity_error"].max().item(),
               "eq11_violations": (exceeds(residual["update_norm"], residual["bound_signed"])
                                   | exceeds(residual["bound_signed"], residual["bound"])).sum().item()}
    if not advantages.any():                      # 0/0: nothing, so that no mean over mini-batches takes it for a 0
        return {key: value for key, value in record.items() if key == "n_eff_in" or not key.startswith("n_eff")}
    if reweighted is not None:
        silent = (advantages.view(-1, group_size) == 0).all(1).repeat_interleave(group_size)
        of = lambda part, whole: (part.sum() / whole.sum().clamp_min(1e-30)).item()
        weight, mixed = coefficients.square(), (coefficients - reweighted.main).square()
        inside = (reweighted.basis.T @ advantages.to(reweighted.basis)).square()                             # P_k a
        told = reweighted.signal & (reweighted.rank > 0)          # without a signal n_eff is 0/0, and α means nothing
        record |= update_deviation(gram, advantages, coefficients, reweighted.basis)
        record |= {"rank": reweighted.rank.double().mean().item(),
                   "rank_share": reweighted.rank.sum().item() / len(advantages),
                   "kept": of(inside, advantages.double().square()), "exploration": of(mixed, weight),
                   "no_signal_share": of(weight[silent], weight)}
        record |= {"alpha": reweighted.alpha[told].mean().item()} if told.any() else {}
    return record


def mean_of(records: list[dict]) -> dict:
    """Mean over mini-batches, for every key that any of them has."""
    keys = dict.fromkeys(key for record in records for key in record)
    return {key: sum(values) / len(values) for key in keys if (values := [r[key] for r in records if key in r])}
