"""One rank of tests/test_parallel.py, started by torchrun: `parallel_worker.py FOLDER`.

Reads FOLDER/cases.pt, goes through a training step on given responses, writes FOLDER/rank<r>.pt. Asserts nothing.
"""
import dataclasses
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import train
from salt import distributed, models
from salt.advantages import reweight, scope_blocks
from salt.config import settle
from salt.lora import add_adapters, merged_weights
from toy.arithmetic import WarmStart, make_model


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def one_step(case: dict) -> dict:
    """Score, Gram, reweight, update: what train.py does with a mini-batch -> everything that must not depend on the
    number of processes."""
    torch.manual_seed(0)
    model = make_model(WarmStart(hidden=32, layers=2), 23).to(case["dtype"]).eval()
    if case["tied"]:
        model.lm_head.weight = model.model.embed_tokens.weight
    if case["lora"]:
        add_adapters(model, 4)
        for name, parameter in model.named_parameters():           # B = 0 would make the gradient of A 0
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    model = distributed.place(model, torch.device("cpu"), checkpoint_layers=case["checkpoint_layers"])
    config = dataclasses.replace(settle({"output": "unused", "salt": "salt"}), **case["config"])
    rollouts, advantages, head = case["rollouts"], case["advantages"], models.lm_head(model)
    lengths = rollouts.lengths
    share = rollouts.select(list(distributed.share(len(lengths))))
    scored = models.score(model, share, config.temperature, micro_batch=config.micro_batch, keep_hidden=True)
    old = train.everyones(scored.logprobs, lengths)
    gram = train.form_gram(config, head, scored, len(lengths), step=1)
    blocks = scope_blocks(config.salt_scope, len(lengths), config.group_size)
    coefficients = distributed.compute_once(lambda: reweight(gram, advantages, blocks, config.salt)).coefficients
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-2)
    stats = train.update(config, model, optimizer, rollouts, coefficients, old + case["moved"], old - 0.1, seed=1,
                         first=False, head_check=False)
    return {"old": old, "gram": gram, "coefficients": coefficients, "stats": stats,
            "entropy": distributed.mean(scored.entropy),
            "gradients": {name: whole(p.grad) for name, p in model.named_parameters() if p.requires_grad},
            "weights": {name: tensor.clone() for name, tensor in merged_weights(model)}}


def main(folder: Path) -> None:
    distributed.start()
    cases = torch.load(folder / "cases.pt", weights_only=False)
    torch.save({name: one_step(case) for name, case in cases.items()}, folder / f"rank{distributed.rank()}.pt")
    distributed.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
