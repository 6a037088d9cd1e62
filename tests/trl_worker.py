"""What the tests of salt/trl_hook.py run: trainers that keep what their loss saw. As a program, one rank of two.

`torchrun ... trl_worker.py FOLDER` reads FOLDER/case.pt, writes FOLDER/rank<r>.pt. Asserts nothing.
"""
import copy
import os
import random
import sys
from pathlib import Path

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from salt import distributed
from salt.errors import UserError
from salt.trl_hook import SaltGRPOTrainer
from toy.arithmetic import problems, question

ROWS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")


def reward(completion_ids, **_) -> list[float]:
    """0 to 3 by the sum of the tokens: groups are mixed even where the model knows nothing."""
    return [float(sum(ids) % 4) for ids in completion_ids]


def config(scratch, **changes) -> GRPOConfig:
    options = dict(
        output_dir=str(scratch), use_cpu=True, bf16=False, gradient_checkpointing=False, dataloader_pin_memory=False,
        per_device_train_batch_size=8, num_generations=4, max_completion_length=12, temperature=0.8, top_k=0, top_p=1.0,
        beta=0.0, loss_type="grpo", learning_rate=1e-3, lr_scheduler_type="constant", max_steps=3, logging_steps=1,
        save_strategy="no", report_to="none", disable_tqdm=True, model_init_kwargs={"dtype": "float32"})
    return GRPOConfig(**options | changes)


def sums(split: str = "train") -> Dataset:
    return Dataset.from_list([{"prompt": question(a, b)} for a, b in problems(split, 64)])


class Recording:
    """Keeps, for each generation batch, the policy that wrote it and the rows as the loss gets them."""

    def __init__(self, *args, **kwargs):
        self.batches = []
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        if self.model.training:
            policy = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
            self.batches.append({"backbone": copy.deepcopy(policy.base_model), "rows": [],
                                 "head": policy.get_output_embeddings().weight.detach().clone()})
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            self.batches[-1]["logged"] = list(self._logs["advantages"])
        return output

    def _compute_loss(self, model, inputs):
        if self.model.training:
            self.batches[-1]["rows"].append({name: inputs[name].clone() for name in ROWS})
        return super()._compute_loss(model, inputs)


class RecordedSalt(Recording, SaltGRPOTrainer):
    pass


class RecordedStock(Recording, GRPOTrainer):
    pass


class Interleaved:
    """A data order of somebody's own: the responses of a prompt are not neighbours any more."""

    def _get_train_sampler(self, dataset=None):
        indices = list(super()._get_train_sampler(dataset))
        size = self.args.generation_batch_size
        order = [indices[first:first + size] for first in range(0, len(indices), size)]
        return [index for batch in order for index in random.Random(0).sample(batch, len(batch))]


class InterleavedSalt(Interleaved, SaltGRPOTrainer):
    pass


def train(kind: type, model, scratch, *, options: dict | None = None, **changes):
    trainer = kind(model, reward_funcs=reward, args=config(scratch, **changes), train_dataset=sums(),
                   eval_dataset=sums("test").select(range(4)), **options or {})
    trainer.train()
    return trainer


def main(folder: Path) -> None:
    case, rank = torch.load(folder / "case.pt", weights_only=False), os.environ["RANK"]
    trainer = train(RecordedSalt, case["model"], folder / "run", **case["changes"])
    try:
        refused = train(InterleavedSalt, case["model"], folder / "refused", **case["changes"]) and "not refused"
    except UserError as error:
        refused = str(error)
    torch.save({"batches": trainer.batches, "refused": refused}, folder / f"rank{rank}.pt")
    distributed.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
