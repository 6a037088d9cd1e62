"""TRL trains the tiny model to add, with its own GRPO and with SALT inside; prints mean reward on sums not trained on.

Both runs start from the same warm start and the same seed, and differ in one class name: GRPOTrainer, SaltGRPOTrainer.

    pip install -r requirements-trl.txt
    python toy/trl_example.py                              60 steps of 128 responses each
    accelerate launch toy/trl_example.py                   on the GPUs that are there

Departures from the paper: those of salt/trl_hook.py.
"""
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from salt.errors import Parser, run
from toy.arithmetic import WarmStart, problems, question, warm_start

PROMPTS, GROUP, HELD_OUT = 16, 8, 64


def rows(split: str, count: int, seed: int):
    from datasets import Dataset
    sums = problems(split, count, seed)
    return Dataset.from_list([{"prompt": question(a, b), "answer": str(a + b)} for a, b in sums])


def right(completions: list[str], answer: list[str], **_) -> list[float]:
    """1.0 for a response that boxes the sum, which the tiny model always writes in plain digits."""
    return [float(f"\\boxed{{{gold}}}" in text) for text, gold in zip(completions, answer)]


def train(kind: type, model: str, steps: int, seed: int) -> tuple[float, float, dict]:
    """Mean held-out reward before and after, and what the last step logged."""
    from trl import GRPOConfig
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch, use_cpu=not torch.cuda.is_available(), bf16=torch.cuda.is_available(), seed=seed,
            per_device_train_batch_size=PROMPTS * GROUP, per_device_eval_batch_size=HELD_OUT * 4, num_generations=GROUP,
            num_generations_eval=4, max_completion_length=48, temperature=1.0, top_k=0, beta=0.0, loss_type="grpo",
            learning_rate=1e-4, lr_scheduler_type="constant", max_steps=steps, logging_steps=1, save_strategy="no",
            gradient_checkpointing=False, dataloader_pin_memory=False, report_to="none", disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"})
        trainer = kind(model, reward_funcs=right, args=config, train_dataset=rows("train", 2048, seed),
                       eval_dataset=rows("test", HELD_OUT, seed))
        before = trainer.evaluate()["eval_reward"]
        trainer.train()
        logged = next(line for line in reversed(trainer.state.log_history) if "loss" in line)
        return before, trainer.evaluate()["eval_reward"], logged


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="a Hugging Face folder (default: the tiny model's warm start)")
    args = parser.parse_args()
    from salt.trl_hook import SaltGRPOTrainer                 # first: it says in one line which TRL is missing
    from trl import GRPOTrainer
    model = args.model or str(warm_start(WarmStart()))
    print(f"{'':16}{'before':>8}{'after':>8}   held-out reward")
    for name, kind in (("stock TRL", GRPOTrainer), ("TRL with SALT", SaltGRPOTrainer)):
        before, after, logged = train(kind, model, args.steps, args.seed)
        figures = ", ".join(f"{key} {value:.3g}" for key, value in logged.items() if key.startswith("salt/"))
        print(f"{name:16}{before:8.3f}{after:8.3f}   {figures and 'last step: ' + figures}".rstrip())


if __name__ == "__main__":
    run(main)
