"""What SALT adds to TRL's step: stock GRPOTrainer and SaltGRPOTrainer, a step of each in turn.

The model, batch and settings of step_time.py (4 layers, d = 128, 128 tokens, 256 rollouts of at most 32 tokens). Twice:

    two updates     the batch serves two updates, as in the paper: TRL scores it, and the hook takes those states
    one update      TRL scores nothing of the policy's, so the hook runs the backbone once more

Every trainer is a process of its own that stays alive; they take one step (sampling to last update) at a time, in
shuffled order. The ratio is the median over rounds, its interval a 95 % bootstrap. "stock again" is the noise. Run it
in TRL's environment:

    python tests/bench/trl_hook.py                         25 steps each, about three minutes on two threads
"""
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "bench")]

from step_time import GROUP, KL, LONGEST, LR, PROMPTS, TEMPERATURE, make_folder, parity

from salt.errors import Parser, UserError, run
from toy.arithmetic import problems, question

RUNS = ("stock", "SALT", "stock again")
CASES = {"two updates": 2, "one update": 1}


def child(name: str, updates: int, folder: str, scratch: str) -> None:
    """Train for ever; before each step wait for a line, after it say how long it took."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from salt.trl_hook import SaltGRPOTrainer
    answers, sys.stdout = sys.stdout, sys.stderr           # what the libraries print goes to the log
    started = None

    def turn() -> None:
        nonlocal started
        if not sys.stdin.readline():
            os._exit(0)
        started = time.perf_counter()

    class Turns(TrainerCallback):
        def on_train_begin(self, *_, **__):
            turn()

        def on_step_end(self, args, state, control, **_):
            if state.global_step % updates == 0:
                print(time.perf_counter() - started, file=answers, flush=True)
                turn()

    config = GRPOConfig(
        output_dir=scratch, use_cpu=True, bf16=False, gradient_checkpointing=False, dataloader_pin_memory=False,
        per_device_train_batch_size=PROMPTS * GROUP // updates, gradient_accumulation_steps=1, num_iterations=1,
        steps_per_generation=updates, num_generations=GROUP, max_completion_length=LONGEST, temperature=TEMPERATURE,
        top_k=0, top_p=1.0, beta=KL, loss_type="grpo", learning_rate=LR, lr_scheduler_type="constant",
        weight_decay=0.01, max_grad_norm=1.0, max_steps=10 ** 6, model_init_kwargs={"dtype": "float32"},
        logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True)
    rows = Dataset.from_list([{"prompt": question(a, b)} for a, b in problems("train", 2048)])
    kind = SaltGRPOTrainer if name == "SALT" else GRPOTrainer
    kind(folder, reward_funcs=lambda completions, **_: [parity(text) for text in completions], args=config,
         train_dataset=rows, callbacks=[Turns()]).train()


class Trainer:
    def __init__(self, name: str, updates: int, threads: int, folder: Path, scratch: Path):
        scratch.mkdir(parents=True)
        self.name, self.log = name, scratch / "log"
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--child", name, str(updates), folder, scratch], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("w"),
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"})

    def seconds(self) -> float:
        print(file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            last = (self.log.read_text().strip().splitlines() or ["no message"])[-1]
            raise UserError(f"the run {self.name!r} ended early: {last}")
        return float(line)

    def stop(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def ratio(over: list[float], under: list[float]) -> list[float]:
    """Median over pairs, and the ends of its interval."""
    ratios = np.array(over) / np.array(under)
    draws = np.random.default_rng(0).integers(len(ratios), size=(10_000, len(ratios)))
    return [float(np.median(ratios)), *np.quantile(np.median(ratios[draws], 1), (0.025, 0.975)).tolist()]


def measure(updates: int, steps: int, threads: int, folder: Path, scratch: Path) -> dict[str, list[float]]:
    trainers = [Trainer(name, updates, threads, folder, scratch / name) for name in RUNS]
    seconds = {name: [] for name in RUNS}
    try:
        for number in range(-1, steps):                    # the first round loads and warms up
            for trainer in random.Random(number).sample(trainers, len(trainers)):
                taken = trainer.seconds()
                if number >= 0:
                    seconds[trainer.name].append(taken)
    finally:
        for trainer in trainers:
            trainer.stop()
    return seconds


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=25, help="measured steps of each trainer in each case")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "trl_hook.json")
    args = parser.parse_args()
    if args.steps < 2 or args.threads < 1:
        raise UserError(f"--steps {args.steps} and --threads {args.threads}: at least 2 and 1")
    seconds, load = {}, []
    with tempfile.TemporaryDirectory() as scratch:
        make_folder(folder := Path(scratch) / "model")
        for case, updates in CASES.items():
            load.append(os.getloadavg()[0])
            seconds[case] = measure(updates, args.steps, args.threads, folder, Path(scratch) / case)
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    result = {"cpu": cpu[1] if cpu else "unknown", "threads": args.threads, "load": load, "seconds": seconds,
              "ratios": {case: {name: ratio(taken[name], taken["stock"]) for name in ("SALT", "stock again")}
                         for case, taken in seconds.items()}}
    for case, taken in seconds.items():
        for name in RUNS:
            compared = result["ratios"][case].get(name)
            compared = "   / stock {:.3f} [{:.3f}, {:.3f}]".format(*compared) if compared else ""
            print(f"{case:14}{name:14}{1000 * np.median(taken[name]):8.1f} ms{compared}")
    print(f"{result['cpu']}, {args.threads} threads, load {min(load):.1f} to {max(load):.1f}, {args.steps} pairs")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result) + "\n")
    print(f"written: {args.output}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
    else:
        run(main)
