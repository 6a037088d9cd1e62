"""LoRA: train low-rank adapters on the projections of every decoder layer, and hand out merged weights.

    h W^T  becomes  h W^T + s (h A^T) B^T,   W frozen (out, in), A (r, in), B (out, r) = 0 at first, s = ALPHA_PER_RANK

The adapters are injected into the model in place: it stays the ordinary Hugging Face model that the scoring passes
know. The LM head and the embedding get none, so the feature of Eq. 19, the gradient with respect to the head, is
computed as ever: in closed form, of a weight that happens to be frozen. The sampler and the final folder get W + s B A.

Departures from the paper
    1. The paper trains all weights. With adapters the update is not -lr * G a' in the space of the features, so the
       geometry describes what the responses ask for, not the step that is taken.
"""
from contextlib import contextmanager
from typing import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from salt.errors import UserError

ALPHA_PER_RANK = 2.0                  # s: so that --lora-rank changes the capacity and not the size of an update
ADAPTER = "default"                   # peft's name for the only one


def add_adapters(model: nn.Module, rank: int, seed: int = 0) -> None:
    """Freeze the model and inject trainable adapters of `rank`, in float32 or better; `seed` draws A, alike everywhere.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(f"--lora-rank {rank} needs the package peft: pip install -r requirements-optional.txt") \
            from error
    settings = LoraConfig(r=rank, lora_alpha=ALPHA_PER_RANK * rank, target_modules="all-linear", lora_dropout=0.0)
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, model, adapter_name=ADAPTER)          # "all-linear" leaves the LM head out
    for layer in _adapted(model).values():                                      # master weights, as without LoRA
        for factor in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
            factor.to(torch.promote_types(torch.float32, factor.weight.dtype))


def _adapted(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


@contextmanager
def without_adapters(model: nn.Module):
    """Inside, the model is the one before training: the reference of Eq. 68, without a second copy."""
    layers = _adapted(model).values()
    for layer in layers:
        layer.set_scale(ADAPTER, 0.0)                   # not peft's switch, which also turns requires_grad off and on
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(ADAPTER, 1.0)


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


@torch.no_grad()
def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every parameter as the model without adapters has it: W + s B A where there are some.

    One tensor at a time, none changed in place; the sum is formed in float32 at least and returned in W's dtype.
    Without adapters these are the plain parameters. Under FSDP2 every process must walk to the end: it gathers them.
    """
    adapted = _adapted(model)
    for name, parameter in model.named_parameters():
        place, _, kind = name.rpartition(".base_layer.")
        if ".lora_A." in name or ".lora_B." in name:
            continue
        weight = _whole(parameter)
        if place in adapted and kind == "weight":
            layer = adapted[place]
            a, b = (_whole(factor[ADAPTER].weight) for factor in (layer.lora_A, layer.lora_B))
            exact = torch.promote_types(torch.float32, weight.dtype)
            weight = (weight.to(exact) + layer.scaling[ADAPTER] * (b.to(exact) @ a.to(exact))).to(weight.dtype)
        yield name.replace(".base_layer.", "."), weight
