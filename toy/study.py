"""The paper's experiments on the tiny model and the bandit: matched seeds, paired intervals, a verdict for each claim.

    python toy/study.py core             # 24 configurations x 5 seeds, redundancy, the map, then the report
    python toy/study.py ablation         # one experiment: redundancy, main, entropy, ablation, fixed-alpha, matched,
                                         # bias, rollouts, cost, regimes
    python toy/study.py all              # everything, also what --full adds, over as many sittings as it takes
    python toy/study.py report           # tables, figures and verdicts from what is on disk

Every run has one thread; as many go on side by side as there are cores. A finished run is one line of
runs.jsonl in the output folder; its key holds the configuration and a hash of the code that decides the numbers, and a
run whose key is there is not done again. So an interrupted study continues where it stopped, and results of another
version of the code are not mixed in.

Matched: for one seed all methods start from one warm start and see the same prompts in the same order, with the same
random numbers for sampling. DAPO draws as many prompts as it takes to fill a batch, so its position in that order, not
the order, depends on the policy.

Departures from the paper: the task, the model and the number of steps (SIZES) are what a laptop does in an hour.
"""
import argparse
import ast
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from salt.errors import Parser, UserError, run
from toy.arithmetic import HARD, WarmStart, warm_start

ROOT = Path(__file__).resolve().parents[1]
SEEDS = (2025, 2026, 2027, 2028, 2029)
MATHS = ("salt/advantages.py", "salt/geometry.py", "salt/stats.py")
MODEL = ("salt/models.py", "salt/proxy.py", "salt/reward.py", "salt/rollout.py", "toy/arithmetic.py")
DECIDES = {"train": ("train.py", "salt/config.py", "salt/data.py", "salt/evaluation.py", "salt/loss.py",
                     "salt/metrics.py", *MATHS, *MODEL),
           "redundancy": ("toy/cancellation.py", "toy/redundancy.py", *MATHS, *MODEL),
           "regimes": ("toy/bandit.py", "toy/regimes.py", "salt/advantages.py", "salt/stats.py")}

# ---------------------------------------------------------------------------- what there is to run

TINY = {"max_prompt": 16, "max_response": 48, "micro_batch": 128, "gram_tolerance": 0.0, "checkpoint_layers": False,
        "epochs": 8, "samples_every": 0, "workers": 1, "save_every": 1000}
SIZES = {
    "standard": TINY | {"batch_size": 16, "mini_batch": 8, "gen_batch": 24, "steps": 40, "eval_every": 20,
                        "eval_limit": 128, "lr": 1e-4},
    "quick": TINY | {"batch_size": 16, "mini_batch": 8, "gen_batch": 24, "steps": 6, "eval_every": 6, "eval_limit": 48,
                     "lr": 3e-4},
    "smoke": TINY | {"batch_size": 4, "mini_batch": 2, "gen_batch": 8, "group_size": 4, "steps": 2, "eval_every": 2,
                     "eval_limit": 4, "eval_samples": 4, "lr": 3e-4, "max_gen_batches": 99},
}
SEEDS_OF = {"standard": SEEDS, "quick": SEEDS[:3], "smoke": SEEDS[:2]}
HARD_FLAGS = {"dataset": "arith-hard", "max_prompt": 24, "max_response": 96}
GROUP_SIZES = (2, 4, 16, 32, 64)                                                # always the same responses per step
REGULARIZERS = ("entropy", "clip-cov", "kl-cov")
COMPONENTS = ("only-main", "only-exp", "no-positive", "no-proj", "rand-proj", "pr-alpha", "entropy-alpha")
NULLS = ("permuted", "matched-rand-subspace")
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)


def cells() -> dict[str, dict]:
    """Every method by name -> the flags of train.py by which it differs from plain GRPO."""
    found: dict[str, dict] = {}
    for base, own in (("grpo", {}), ("dapo", {"algo": "dapo"})):
        found[base] = own
        for variant in ("salt", "interpolated", *COMPONENTS, *NULLS):
            found[f"{base}+{variant}"] = own | {"salt": variant}
            found[f"{base}+{variant}@group"] = own | {"salt": variant, "salt_scope": "group"}
        for alpha in ALPHAS:
            found[f"{base}+alpha={alpha:g}"] = own | {"salt": "fixed-alpha", "alpha": alpha}
            found[f"{base}+alpha={alpha:g}@group"] = found[f"{base}+alpha={alpha:g}"] | {"salt_scope": "group"}
        for scope in ("mini-batch", "group", "8"):
            name = f"{base}+salt" + {"mini-batch": "", "group": "@group", "8": "@8"}[scope]
            found[name] = own | {"salt": "salt"} | ({} if scope == "mini-batch" else
                                                    {"salt_scope": int(scope) if scope == "8" else scope})
            found[f"{name} sum"] = found[name] | {"length_norm": "sum"}
        found[f"{base}+salt signal"] = found[f"{base}+salt"] | {"salt_signal_only": True}
        found[f"{base}+released-code"] = own | {"salt": "salt", "salt_preset": "released-code"}
        for regularizer in REGULARIZERS:
            found[f"{base}+{regularizer}"] = own | {"regularizer": regularizer}
            found[f"{base}+{regularizer}+salt"] = own | {"regularizer": regularizer, "salt": "salt"}
    found["grpo token-mean"] = {"aggregation": "token-mean"}                    # the base of grpo+released-code
    for size in GROUP_SIZES:
        for name in ("grpo", "grpo+salt", "grpo+salt@group", "grpo+interpolated", "grpo+entropy", "dapo", "dapo+salt"):
            found[f"{name} G={size}"] = found[name] | {"group_size": size}
    for name in ("grpo", "grpo+salt", "grpo+salt@group", "grpo+interpolated"):
        found[f"{name} T=1"] = found[name] | {"temperature": 1.0}
    for name in ("grpo", "grpo+salt", "grpo+salt@group", "grpo+interpolated", "dapo", "dapo+salt"):
        found[f"hard {name}"] = found[name] | HARD_FLAGS
        for size in (2, 32):
            if f"{name} G={size}" in found:
                found[f"hard {name} G={size}"] = found[f"{name} G={size}"] | HARD_FLAGS
    return found


CELLS = cells()
MAIN = ("grpo", "grpo+salt", "grpo+salt@group", "grpo+interpolated", "dapo", "dapo+salt", "dapo+salt@group",
        "dapo+interpolated")


@dataclass(frozen=True)
class Experiment:
    title: str
    core: tuple[str, ...] = ()                   # run by default
    full: tuple[str, ...] = ()                   # run with --full
    measured: bool = False                       # also measures the warm start (redundancy)

    def methods(self, full: bool) -> tuple[str, ...]:
        return self.core + (self.full if full else ())


EXPERIMENTS = {
    "main": Experiment("Main results (Table 2, its averages)", MAIN, (
        "grpo+salt sum", "grpo+salt@group sum", "grpo+salt@8", "grpo+salt signal", "dapo+released-code",
        *(f"{name} T=1" for name in ("grpo", "grpo+salt", "grpo+salt@group", "grpo+interpolated")),
        *(f"hard {name}" for name in ("grpo", "grpo+salt", "grpo+salt@group", "grpo+interpolated", "dapo",
                                      "dapo+salt")))),
    "redundancy": Experiment("Redundancy of rollouts (the paper's Fig. 2)", ("grpo", "dapo"), measured=True),
    "entropy": Experiment("Entropy controls (the entropy tables)", (
        "grpo", "grpo+salt", *(f"grpo+{name}" for name in REGULARIZERS)), (
        "dapo", "dapo+salt", *(f"dapo+{name}" for name in REGULARIZERS),
        *(f"{base}+{name}+salt" for base in ("grpo", "dapo") for name in REGULARIZERS),
        *(f"{name} G={size}" for size in (2, 16, 32, 64) for name in ("grpo", "grpo+salt", "grpo+entropy")))),
    "ablation": Experiment("Components and mixing rules (the ablation table)", (
        "grpo", "grpo+salt", *(f"grpo+{name}" for name in COMPONENTS)), (
        "grpo+salt@group", *(f"grpo+{name}@group" for name in COMPONENTS))),
    "fixed-alpha": Experiment("Fixed mixing coefficients (the fixed-alpha figure)", ("grpo+salt", "grpo+alpha=0.5"), (
        "grpo", "grpo+salt@group", *(f"grpo+alpha={alpha:g}" for alpha in ALPHAS if alpha != 0.5),
        *(f"grpo+alpha={alpha:g}@group" for alpha in ALPHAS))),
    "matched": Experiment("Matched coefficients (the matched table)", (
        "grpo", "grpo+salt", "grpo+rand-proj", *(f"grpo+{name}" for name in NULLS)), (
        "dapo", "dapo+salt", "dapo+rand-proj", *(f"dapo+{name}" for name in NULLS),
        "grpo+salt@group", *(f"grpo+{name}@group" for name in ("rand-proj", *NULLS)))),
    "bias": Experiment("Bias and cancellation (the bias table)", (
        "grpo", "grpo+salt", "grpo+salt@group", "grpo+released-code", "dapo", "dapo+salt", "dapo+salt@group"), (
        "grpo+salt sum", "grpo+salt@group sum", "grpo+salt@8", "grpo+salt@8 sum", "grpo+salt signal",
        "grpo token-mean")),
    "rollouts": Experiment("Group size at a fixed number of responses (the rollout figures)", (
        "grpo", "grpo+salt", "grpo G=32", "grpo+salt G=32"), (
        *(f"{name} G={size}" for size in (2, 4, 16, 64) for name in ("grpo", "grpo+salt")),
        *(f"{name} G={size}" for size in GROUP_SIZES for name in ("grpo+salt@group", "grpo+interpolated", "dapo",
                                                               "dapo+salt")),
        *(f"hard {name} G={size}" for size in (2, 32) for name in ("grpo", "grpo+salt")))),
    "cost": Experiment("Time (the time table)", ("grpo", "grpo+salt", *(f"grpo+{name}" for name in REGULARIZERS),
                                                 "dapo", "dapo+salt")),
    "regimes": Experiment("Where SALT helps: the map"),
}
CORE = tuple(dict.fromkeys(name for experiment in EXPERIMENTS.values() for name in experiment.core))


@dataclass(frozen=True)
class Job:
    """One run: a method, or the redundancy of the warm start, with one seed."""
    kind: str                                    # "train" or "redundancy"
    cell: str
    seed: int
    size: str
    code: str
    flags: dict = field(default_factory=dict, hash=False)                   # of train.py, the warm start aside

    @classmethod
    def make(cls, kind: str, cell: str, seed: int, size: str, code: str) -> "Job":
        if kind == "redundancy":
            return cls(kind, cell, seed, size, code, {"budget": 32 if size == "smoke" else 1024, "temperature": 0.6})
        flags = {"group_size": 8} | SIZES[size]
        responses = flags["batch_size"] * flags["group_size"]
        flags |= CELLS[cell]
        flags["group_size"] = group = min(flags["group_size"], responses)
        flags |= {"batch_size": responses // group, "mini_batch": max(responses // group // 2, 1),
                  "gen_batch": max(3 * responses // group // 2, 1)}
        if flags.get("salt_scope") == 8 or flags.get("salt_preset") == "released-code":
            flags["salt_scope"] = min(8, flags["mini_batch"] * group)
        return cls(kind, cell, seed, size, code, flags)

    @property
    def warm(self) -> WarmStart:
        seed = 0 if self.size == "smoke" else self.seed              # smoke: the one that train.py has cached already
        return dataclasses.replace(HARD if self.cell.startswith("hard") else WarmStart(), seed=seed)

    @property
    def key(self) -> str:
        """What decides the numbers: flags that cost only time are left out."""
        free = ("workers", "samples_every", "save_every", "micro_batch")
        decided = {k: v for k, v in self.flags.items() if k not in free}
        said = [self.kind, self.seed, decided, dataclasses.asdict(self.warm), self.code]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def code_hash(kind: str, root: Path = ROOT) -> str:
    """Of the files that decide the numbers, without comments, docstrings and layout, which do not."""
    digest = hashlib.sha256()
    for name in DECIDES[kind]:
        tree = ast.parse((root / name).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(
                    body[0].value, ast.Constant) and isinstance(body[0].value.value, str):
                body[0].value.value = ""
        digest.update(f"{name}\n{ast.unparse(tree)}\n".encode())
    return digest.hexdigest()[:12]


# ---------------------------------------------------------------------------- what is on disk

class Results:
    """runs.jsonl: one line per finished run. Only one study at a time may write into a folder."""

    def __init__(self, folder: Path, write: bool = False):
        self.path, self.rows = folder / "runs.jsonl", []
        try:
            if write:
                folder.mkdir(parents=True, exist_ok=True)
                self._lock = open(folder / "lock", "w")
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        except BlockingIOError as error:
            raise UserError(f"another study is writing into {folder}: wait for it, or choose --output") from error
        except OSError as error:
            raise UserError(f"cannot use {folder}: {error.strerror}; choose another --output") from error
        *lines, broken = text.split("\n")                          # an interrupted write leaves a line without its end
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                row["key"], row["cell"], row["seed"], row["size"], row["code"], row["kind"]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{self.path}, line {number} is not a result: delete that line") from error
            self.rows.append(row)
        if write and broken:
            self.path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")

    def __contains__(self, job: Job) -> bool:
        return any(row["key"] == job.key for row in self.rows)

    def add(self, row: dict) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.rows.append(row)


# ---------------------------------------------------------------------------- one run, in a process of its own

KEPT = ("pass_rate", "length", "entropy", "clip_fraction", "alpha", "rank_share", "pr_in", "pr_total", "r_in",
        "r_total", "n_eff_in", "n_eff_in_signal", "n_eff_out", "n_eff_total", "n_eff", "d_a", "d_g", "u_perp_gain",
        "no_signal_share", "kept", "exploration", "prompts", "eval_avg", "eval_pass@8")
PHASES = ("geometry", "diagnostics", "evaluate", "total")


def short(value):
    return float(f"{value:.5g}") if isinstance(value, float) else value


def arguments(job: Job, model: str, folder: Path) -> list[str]:
    """The command line of train.py."""
    found = ["--model", model, "--seed", str(job.seed), "--output", str(folder)]
    for name, value in job.flags.items():
        flag = name.replace("_", "-")
        found += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return found


def train_cell(job: Job, folder: Path) -> dict:
    """One run of train.py -> its curves, one list per key of KEPT over steps 0, 1, … (None: not measured)."""
    import train
    warm = job.warm
    model = "tiny" if warm == WarmStart(seed=job.seed) else str(warm_start(warm))
    train.main(arguments(job, model, folder))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    best = f"eval_pass@{job.flags.get('eval_samples', 8)}"                      # smoke draws fewer than 8
    for record in records:
        record.setdefault("eval_pass@8", record.get(best))
        record |= {f"seconds_{phase}": record.get("system", {}).get("seconds", {}).get(phase) for phase in PHASES}
    names = [name for name in (*KEPT, *(f"seconds_{phase}" for phase in PHASES))
             if any(record.get(name) is not None for record in records)]
    return {"steps": [record["step"] for record in records],
            "curves": {name: [short(record.get(name)) for record in records] for name in names}}


def redundancy_of(job: Job, folder: Path) -> dict:
    from toy import redundancy
    table, matched = redundancy.measure(str(warm_start(job.warm)), job.flags["budget"], job.seed,
                                        job.flags["temperature"])
    shortened = lambda row: {name: short(value) for name, value in row.items()}
    return {"table": [shortened(row) for row in table],
            "matched": {method: shortened(row) for method, row in matched.items()}}


def work(job: Job, folder: Path) -> dict:
    """Everything a job prints goes to a log; the run's folder is left only where it failed."""
    shutil.rmtree(folder, ignore_errors=True)                     # what an interrupted study left of this run
    folder.parent.mkdir(parents=True, exist_ok=True)
    started, log = time.perf_counter(), folder.with_suffix(".log")
    with log.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            found = {"train": train_cell, "redundancy": redundancy_of}[job.kind](job, folder)
        except (UserError, SystemExit) as error:
            return {"failed": str(error)}
    from salt.metrics import provenance
    where = provenance()
    shutil.rmtree(folder, ignore_errors=True)
    log.unlink()
    return {"key": job.key, "kind": job.kind, "cell": job.cell, "seed": job.seed, "size": job.size, "code": job.code,
            "flags": job.flags, "commit": where["commit"], "machine": where["machine"],
            "seconds": round(time.perf_counter() - started, 1)} | found


def end_with_the_study() -> None:
    """In a worker: end when the study does, even if it is killed. A worker that waits for work would stay for good."""
    study = multiprocessing.parent_process()

    def watch() -> None:
        multiprocessing.connection.wait([study.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def workers(processes: int):
    """A pool of processes; where the study is interrupted, what waits in it is not done."""
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=end_with_the_study)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def run_all(jobs: list[Job], results: Results, processes: int, say=print) -> list[str]:
    """Every job that is not on disk, `processes` at a time. Returns what failed; the others are done all the same."""
    left = [job for job in jobs if job not in results]
    say(f"{len(jobs)} runs: {len(jobs) - len(left)} on disk, {len(left)} to do, {processes} at a time")
    if not left:
        return []
    started, failed, done = time.perf_counter(), [], 0
    with workers(processes) as pool:
        say("warm starts, where they are not cached")
        list(pool.map(warm_start, dict.fromkeys(job.warm for job in left)))
        waiting = {pool.submit(work, job, results.path.parent / "work" / job.key): job for job in left}
        while waiting:
            finished, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in finished:
                job, done = waiting.pop(future), done + 1
                error = future.exception()
                row = {"failed": f"{type(error).__name__}: {error}"} if error else future.result()
                name = f"{job.cell}, seed {job.seed}"
                if "failed" in row:
                    failed.append(f"{name}: {row['failed']}")
                else:
                    results.add(row)
                minutes = (time.perf_counter() - started) / done * (len(left) - done) / 60
                say(f"[{done}/{len(left)}] {name}: {outcome(row)}; {minutes:.0f} min left")
    return failed


def outcome(row: dict) -> str:
    if "failed" in row:
        return f"FAILED, {row['failed']}"
    accuracy = [value for value in row.get("curves", {}).get("eval_avg", ()) if value is not None]
    gained = f"avg@8 {100 * accuracy[0]:.1f} -> {100 * accuracy[-1]:.1f} %, " if accuracy else ""
    return f"{gained}{row['seconds']} s"


# ---------------------------------------------------------------------------- program

def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description="The paper's experiments with five matched seeds on the tiny model and the bandit.")
    parser.add_argument("what", metavar="WHAT", help=f"core, all, report, or one of {', '.join(EXPERIMENTS)}")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="three seeds, six steps: some minutes for core")
    size.add_argument("--smoke", action="store_true", help="two seeds, two steps: does it run at all?")
    parser.add_argument("--full", action="store_true", help="also what the core leaves out")
    parser.add_argument("--methods", help="only these, separated by commas")
    parser.add_argument("--seeds", help="only these, separated by commas")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="runs side by side, one thread each")
    parser.add_argument("--output", type=Path, help="folder of results (default runs/study, runs/study-quick, …)")
    parser.add_argument("--any-code", action="store_true", help="report the results of whichever version of the code "
                        "has most of them, instead of the present one's")
    options = parser.parse_args(argv)
    if options.what not in ("core", "all", "report", *EXPERIMENTS):
        raise UserError(f"unknown experiment {options.what!r}: core, all, report, {', '.join(EXPERIMENTS)}")
    options.methods = options.methods.split(",") if options.methods else None
    for name in options.methods or ():
        if name not in CELLS:
            raise UserError(f"unknown method {name!r}: one of {', '.join(CELLS)}")
    options.full |= options.what == "all"
    options.size = "quick" if options.quick else "smoke" if options.smoke else "standard"
    try:
        options.seeds = [int(seed) for seed in options.seeds.split(",")] if options.seeds else SEEDS_OF[options.size]
    except ValueError as error:
        raise UserError(f"--seeds {options.seeds}: whole numbers, separated by commas") from error
    if options.processes < 1:
        raise UserError(f"--processes {options.processes}: at least 1")
    suffix = "" if options.size == "standard" else f"-{options.size}"
    options.output = options.output or ROOT / "runs" / f"study{suffix}"
    return options


def jobs_of(options: argparse.Namespace, code: dict[str, str]) -> list[Job]:
    """Experiment by experiment and seed by seed: a study that is stopped early has whole tables, or all of their rows
    with the seeds it got to."""
    chosen = list(EXPERIMENTS.values()) if options.what in ("core", "all") else [EXPERIMENTS[options.what]]
    known = dict.fromkeys(name for experiment in chosen for name in experiment.methods(options.full))
    unused = [name for name in options.methods or () if name not in known]
    if unused:
        raise UserError(f"{options.what} has no method {unused[0]!r}{'' if options.full else ' without --full'}: "
                        f"{', '.join(known)}")
    jobs: dict[Job, None] = {}
    for experiment in chosen:
        for seed in options.seeds:
            if experiment.measured and not options.methods:
                jobs[Job.make("redundancy", "redundancy", seed, options.size, code["redundancy"])] = None
            for name in experiment.methods(options.full):
                if options.methods is None or name in options.methods:
                    jobs[Job.make("train", name, seed, options.size, code["train"])] = None
    return list(jobs)


def main(argv: list[str] | None = None) -> int:
    options, code = parse(argv), {kind: code_hash(kind) for kind in DECIDES}
    os.environ["OMP_NUM_THREADS"] = "1"                                           # read by the processes started below
    failed = []
    if options.what != "report":
        results = Results(options.output, write=True)
        failed = run_all(jobs_of(options, code), results, options.processes)
        if options.what in ("regimes", "core", "all") and not options.methods:
            from toy import regimes
            size = {"standard": "full"}.get(options.size, options.size)
            with workers(options.processes) as pool:
                regimes.run(size, options.output / "regimes.csv", code["regimes"], spread=pool.map)
    elif not options.output.is_dir():
        raise UserError(f"{options.output} holds no results: run `python toy/study.py core` first, or name --output")
    from toy import study_figures, study_measures, study_report
    found = study_measures.gather(options.output, Results(options.output).rows, code, options.any_code)
    print(study_report.write(found, options.output))
    study_figures.draw(found, options.output)
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    run(main)
