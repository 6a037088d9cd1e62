"""What a training step costs: plain GRPO, GRPO + SALT, and TRL's plain GRPO, side by side.

The same random model (4 layers, d = 128, 128 tokens), the same prompts, 32 x 8 = 256 rollouts of at most 32 tokens per
step, two optimizer updates of 128 rollouts each, the same loss, KL reference, optimizer and reward (a parity: no
verifier on either side), float32, 2 threads.

A round is one block of steps of each run, in shuffled order, one at a time, so that a busy machine hits all alike. A
block is a process of its own, because where a process happens to lie in memory moves all of its steps by up to 8 %; its
first two steps warm up and are not counted. A step lasts from the end of the one before it (log line written) to its
own end; phases are train.py's (metrics.jsonl, system.seconds), TRL's are its methods timed from outside. A ratio is the
median over rounds of the ratio of the blocks' medians, its interval a 95 % bootstrap over rounds. "GRPO again" is the
same run a second time: the noise.

    python tests/bench/step_time.py                                    without TRL
    python tests/bench/step_time.py --make-trl-env DIR                 makes TRL's environment, then measures
    python tests/bench/step_time.py --trl-python DIR/bin/python        measures with one that is there
"""
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from salt.errors import Parser, UserError, run as run_program
from salt.metrics import provenance
from toy.arithmetic import EOS, PAD, WarmStart, make_model, problems, question

PINS = ("trl==1.16.0", "torch==2.13.0", "transformers==5.19.0", "accelerate==1.15.0")
PROMPTS, GROUP, UPDATES, LONGEST, VOCABULARY = 32, 8, 2, 32, 128
WARM_UP, BLOCK = 2, 4                                    # steps of a process
LR, KL, TEMPERATURE = 1e-6, 1e-3, 0.6                     # so small a rate that lengths stay what they are
RUNS = {"GRPO": ["--diagnostics", "off"], "GRPO again": ["--diagnostics", "off"], "SALT": ["--salt"],
        "SALT, bare": ["--salt", "--diagnostics", "off"], "TRL GRPO": None}            # flags of train.py; None: TRL
RATIOS = (("GRPO again", "GRPO", "(the noise)"), ("SALT", "GRPO", "at most 1.05"), ("SALT, bare", "GRPO", ""),
          ("SALT", "TRL GRPO", "below 1"), ("GRPO", "TRL GRPO", ""))                   # and what is wanted
PHASES = ("sample", "score", "reward", "geometry", "diagnostics", "update", "sync", "other", "step")


def make_folder(folder: Path) -> None:
    """A Qwen2 with random weights and a tokenizer of one token per character, as a Hugging Face folder."""
    from transformers import Qwen2Tokenizer
    alphabet = ["Ġ", *map(chr, [*range(33, 127), *range(161, 173), *range(174, 256)])]   # of byte-level tokenizers
    tokens = [PAD, EOS, *alphabet][:VOCABULARY]
    torch.manual_seed(0)
    make_model(WarmStart(hidden=128, layers=4), VOCABULARY).save_pretrained(folder)
    Qwen2Tokenizer(vocab={token: index for index, token in enumerate(tokens)}, merges=[], pad_token=PAD, eos_token=EOS,
                   unk_token=None, model_max_length=256).save_pretrained(folder)


def parity(text: str) -> float:
    return float(sum(map(ord, text)) % 2)


# ---- a run: says what its steps took, and ends

class Steps:
    def __init__(self):
        self.answer = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)                                      # what the trainers print goes to the log
        self.steps, self.began = [], time.perf_counter()

    def step_done(self, length: float, seconds: dict[str, float]) -> None:
        took = time.perf_counter() - self.began
        phases = {phase: seconds[phase] for phase in PHASES if phase in seconds}
        self.steps.append(phases | {"other": took - sum(phases.values()), "step": took, "length": length})
        if len(self.steps) == WARM_UP + BLOCK:
            versions = {name: sys.modules[name].__version__ for name in ("torch", "transformers", "accelerate", "trl")
                        if name in sys.modules}
            print(json.dumps({"steps": self.steps[WARM_UP:], "versions": versions}), file=self.answer, flush=True)
            sys.exit(0)
        self.began = time.perf_counter()


def run_ours(folder: str, flags: list[str], scratch: str) -> None:
    import train
    steps = Steps()

    class Parity:
        restarts = timeouts = 0

        def submit(self, texts, answers):
            self.verdicts = [parity(text) for text in texts]
            return self

        def result(self):
            return self.verdicts

    class TimedRun(train.RunDirectory):
        def log(self, record):
            super().log(record)
            steps.step_done(record["length"], record["system"]["seconds"])

    train.RunDirectory = TimedRun
    options = {"model": folder, "dataset": "arith", "output": f"{scratch}/run", "batch-size": PROMPTS,
               "group-size": GROUP, "mini-batch": PROMPTS // UPDATES, "micro-batch": PROMPTS * GROUP // UPDATES,
               "max-prompt": 16, "max-response": LONGEST, "temperature": TEMPERATURE, "lr": LR, "kl-coef": KL,
               "epochs": 10 ** 6, "save-every": 10 ** 9}
    train.main([f"--{name}={value}" for name, value in options.items()] + flags, pool=Parity())


def run_trl(folder: str, scratch: str) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    steps, seconds, lengths = Steps(), {}, []

    def reward(completions, completion_ids, **_):
        lengths[:] = [sum(map(len, completion_ids)) / len(completion_ids)]
        return [parity(text) for text in completions]

    class Report(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step % UPDATES == 0:           # the methods are nested: each phase without the inner ones
                phases = seconds | {"score": seconds["score"] - seconds["sample"] - seconds["reward"],
                                    "update": seconds["update"] - seconds["score"]}
                seconds.clear()
                steps.step_done(lengths[0], phases)

    def timed(method, phase):
        def call(*args, **kwargs):
            start = time.perf_counter()
            result = method(*args, **kwargs)
            seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
            return result
        return call

    config = GRPOConfig(
        output_dir=scratch, use_cpu=True, bf16=False, gradient_checkpointing=False, dataloader_pin_memory=False,
        per_device_train_batch_size=PROMPTS * GROUP // UPDATES, gradient_accumulation_steps=1, num_iterations=1,
        steps_per_generation=UPDATES, num_generations=GROUP, max_completion_length=LONGEST, temperature=TEMPERATURE,
        top_k=0, top_p=1.0, beta=KL, loss_type="grpo", learning_rate=LR, lr_scheduler_type="constant",
        weight_decay=0.01, max_grad_norm=1.0, max_steps=10 ** 6, model_init_kwargs={"dtype": "float32"},
        logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True)
    rows = Dataset.from_list([{"prompt": question(a, b)} for a, b in problems("train", 2048)])
    trainer = GRPOTrainer(folder, reward_funcs=reward, args=config, train_dataset=rows, callbacks=[Report()])
    for method, phase in (("_generate", "sample"), ("_calculate_rewards", "reward"),
                          ("_generate_and_score_completions", "score"), ("training_step", "update")):
        setattr(trainer, method, timed(getattr(trainer, method), phase))
    trainer.train()


# ---- the parent: starts the runs, compares ----

class Run:
    def __init__(self, name: str, python: str, folder: Path, scratch: Path, threads: int):
        scratch.mkdir()
        self.name, self.scratch, self.blocks, self.versions = name, scratch, [], {}
        self.command = [python, __file__, "--child", name, folder]
        self.environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}

    def block(self) -> None:
        own = self.scratch / str(len(self.blocks))
        own.mkdir()
        ended = subprocess.run([*self.command, own], capture_output=True, text=True, env=self.environment)
        if ended.returncode or not ended.stdout:
            said = ended.stderr.strip().splitlines() or ["no message"]
            raise UserError(f"the run {self.name!r} failed: {said[-1]}")
        reply = json.loads(ended.stdout)
        self.versions = reply["versions"]
        self.blocks.append(reply["steps"])

    def values(self, phase: str) -> np.ndarray:            # (rounds, BLOCK)
        return np.array([[step.get(phase, np.nan) for step in block] for block in self.blocks])


def compare(over: Run, under: Run) -> list[float]:
    """Ratio of two runs' step times, and the ends of its interval."""
    ratios = np.median(over.values("step"), 1) / np.median(under.values("step"), 1)    # (rounds,)
    draws = np.random.default_rng(0).integers(len(ratios), size=(10_000, len(ratios)))
    return [float(np.median(ratios)), *np.quantile(np.median(ratios[draws], 1), (0.025, 0.975)).tolist()]


def print_table(runs: dict[str, Run]) -> None:
    print(f"\n{'ms per step':12}" + "".join(f"{name:>22}" for name in runs) + "    median [quartiles]")
    for phase in PHASES:
        quartiles = [1000 * np.quantile(run.values(phase), (0.25, 0.5, 0.75)) for run in runs.values()]
        cells = ["-" if np.isnan(low) else f"{mid:.1f} [{low:.1f} {high:.1f}]" for low, mid, high in quartiles]
        print(f"{phase:12}" + "".join(f"{cell:>22}" for cell in cells))
    print(f"{'tokens':12}" + "".join(f"{run.values('length').mean():22.1f}" for run in runs.values())
          + "    mean response length")


def make_environment(folder: Path) -> str:
    python = str(folder / "bin" / "python")
    for command in ([sys.executable, "-m", "venv", folder], [python, "-m", "pip", "install", *PINS]):
        if subprocess.run(command).returncode:
            raise UserError(f"cannot make an environment for TRL in {folder}: see above")
    return python


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", help="python of an environment with TRL 1.16")
    parser.add_argument("--make-trl-env", type=Path, metavar="DIR", help=f"make it there first: {', '.join(PINS)}")
    parser.add_argument("--rounds", type=int, default=12, help=f"blocks of {BLOCK} steps of each run (default 12)")
    parser.add_argument("--threads", type=int, default=2, help="OMP_NUM_THREADS of every run (default 2)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "step_time.json")
    args = parser.parse_args()
    if args.rounds < 2:
        raise UserError(f"--rounds {args.rounds}: at least two are needed")
    trl = make_environment(args.make_trl_env) if args.make_trl_env else args.trl_python
    if trl and not shutil.which(trl):
        raise UserError(f"--trl-python {trl}: there is no such program (--make-trl-env DIR makes an environment)")

    runs, load = {}, []
    with tempfile.TemporaryDirectory() as scratch:
        make_folder(folder := Path(scratch) / "model")
        for index, (name, flags) in enumerate(RUNS.items()):
            if python := trl if flags is None else sys.executable:
                runs[name] = Run(name, python, folder, Path(scratch) / str(index), args.threads)
        for number in range(args.rounds):
            for run in random.Random(number).sample(list(runs.values()), len(runs)):
                run.block()
            load.append(os.getloadavg()[0])

    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    about = provenance() | {"cpu": cpu[1] if cpu else "unknown", "threads": args.threads, "load": load,
                            "versions_of_runs": {name: run.versions for name, run in runs.items()}}
    ratios = {f"{a} / {b}": compare(runs[a], runs[b]) for a, b, _ in RATIOS if {a, b} <= runs.keys()}
    print_table(runs)
    print(f"\n{'ratio':25}  95 % interval      wanted")
    for a, b, wanted in RATIOS:
        if {a, b} <= runs.keys():
            print("{:20}{:.3f}  [{:.3f}, {:.3f}]     {}".format(f"{a} / {b}", *ratios[f"{a} / {b}"], wanted))
    if not trl:
        print("TRL is left out: --make-trl-env DIR makes its environment (1.5 GB), --trl-python names one")
    print(f"\n{about['cpu']}, {os.cpu_count()} cores, {args.threads} threads, load {min(load):.1f} to {max(load):.1f}, "
          f"{args.rounds} rounds of {BLOCK} steps; commit {about['commit'][:12]}")
    for name, run in runs.items():
        print(f"{name:12}" + ", ".join(f"{package} {version}" for package, version in run.versions.items()))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    measured = {"ratios": ratios, "blocks": {name: run.blocks for name, run in runs.items()}}
    args.output.write_text(json.dumps(about | measured) + "\n")
    print(f"written: {args.output}")


if __name__ == "__main__":
    if sys.argv[1:2] != ["--child"]:
        run_program(main)
    elif RUNS[sys.argv[2]] is None:
        run_trl(*sys.argv[3:])
    else:
        run_ours(sys.argv[3], RUNS[sys.argv[2]], sys.argv[4])
