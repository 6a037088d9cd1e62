"""What SALT adds to TRL's step: stock GRPOTrainer and SaltGRPOTrainer in one process, a step of each in turn.

The model, batch and settings of step_time.py (4 layers, d = 128, 128 tokens, 256 rollouts of at most 32 tokens). Twice:

    two updates     the batch serves two updates, as in the paper: TRL scores it, and the hook takes those states
    one update      TRL scores nothing, so the hook runs the backbone once more

A pair is one step (sampling to last update) of either trainer, in shuffled order; the ratio is the median over pairs,
its interval a 95 % bootstrap. "stock again" is a second stock trainer: the noise. Run it in TRL's environment:

    python tests/bench/trl_hook.py                         25 steps each, about three minutes on two threads
"""
import json
import os
import random
import re
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "bench")]

from step_time import GROUP, KL, LONGEST, LR, PROMPTS, TEMPERATURE, make_folder, parity    # noqa: E402
from transformers import TrainerCallback                                               # noqa: E402

from salt.errors import Parser, UserError, run                                         # noqa: E402
from toy.arithmetic import problems, question                                          # noqa: E402

RUNS = ("stock", "SALT", "stock again")
CASES = {"two updates": 2, "one update": 1}


class Turns(TrainerCallback):
    """Lets a trainer take one step at a time, on request, in a thread of its own."""

    def __init__(self, updates: int):
        self.updates, self.go, self.done = updates, threading.Semaphore(0), threading.Semaphore(0)

    def on_train_begin(self, *_, **__):
        self.go.acquire()

    def on_step_end(self, args, state, control, **_):
        if state.global_step % self.updates == 0:
            self.done.release()
            self.go.acquire()

    def seconds(self) -> float:
        start = time.perf_counter()
        self.go.release()
        self.done.acquire()
        return time.perf_counter() - start


def start(name: str, folder: str, scratch: str, updates: int) -> Turns:
    from datasets import Dataset                           # --help works without TRL
    from trl import GRPOConfig, GRPOTrainer

    from salt.trl_hook import SaltGRPOTrainer
    kind = SaltGRPOTrainer if name == "SALT" else GRPOTrainer
    config = GRPOConfig(
        output_dir=scratch, use_cpu=True, bf16=False, gradient_checkpointing=False, dataloader_pin_memory=False,
        per_device_train_batch_size=PROMPTS * GROUP // updates, gradient_accumulation_steps=1, num_iterations=1,
        steps_per_generation=updates, num_generations=GROUP, max_completion_length=LONGEST, temperature=TEMPERATURE,
        top_k=0, top_p=1.0, beta=KL, loss_type="grpo", learning_rate=LR, lr_scheduler_type="constant",
        weight_decay=0.01, max_grad_norm=1.0, max_steps=10 ** 6, model_init_kwargs={"dtype": "float32"},
        logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True)
    turns = Turns(updates)
    rows = Dataset.from_list([{"prompt": question(a, b)} for a, b in problems("train", 2048)])
    trainer = kind(folder, reward_funcs=lambda completions, **_: [parity(text) for text in completions], args=config,
                   train_dataset=rows, callbacks=[turns])
    threading.Thread(target=trainer.train, daemon=True).start()
    return turns


def ratio(over: list[float], under: list[float]) -> list[float]:
    """Median over pairs, and the ends of its interval."""
    ratios = np.array(over) / np.array(under)
    draws = np.random.default_rng(0).integers(len(ratios), size=(10_000, len(ratios)))
    return [float(np.median(ratios)), *np.quantile(np.median(ratios[draws], 1), (0.025, 0.975)).tolist()]


def measure(updates: int, steps: int, folder: str, scratch: str) -> dict[str, list[float]]:
    trainers = {name: start(name, folder, scratch, updates) for name in RUNS}
    seconds = {name: [] for name in trainers}
    for number in range(-1, steps):                        # the first round warms up
        for name in random.Random(number).sample(list(trainers), len(trainers)):
            taken = trainers[name].seconds()
            if number >= 0:
                seconds[name].append(taken)
    return seconds


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=25, help="measured steps of each trainer in each case")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "trl_hook.json")
    args = parser.parse_args()
    if args.steps < 2 or args.threads < 1:
        raise UserError(f"--steps {args.steps} and --threads {args.threads}: at least 2 and 1")
    torch.set_num_threads(args.threads)
    seconds, load = {}, []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        make_folder(folder := Path(scratch) / "model")
        for case, updates in CASES.items():
            load.append(os.getloadavg()[0])
            seconds[case] = measure(updates, args.steps, str(folder), scratch)
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
    sys.stdout.flush()
    os._exit(0)                                            # the trainers' threads wait for turns that never come


if __name__ == "__main__":
    run(main)
