"""Many processes: the group, the sharded model (FSDP2), what they tell each other, and one Gram matrix of all.

K adds up over slices of the vocabulary (salt/proxy.py). Rank r needs the hidden states of all responses (N·d numbers)
but only its own V/R rows of the LM head, which under FSDP2 are the rows it holds anyway; the R partial matrices (m, m)
are summed: hidden states travel, never features, and with the certified filter only those of the tokens that are kept.

Every rank calls these functions equally often and in the same order. Without a process group they act on the one
process there is. What is wrong on one rank is raised on all of them; a rank that dies or stays away ends the others
after the process group's timeout.

Glossary
    paper      name               shape       equation
    h_t        hidden             (N, d)      19   this rank's, packed over its responses; d and dtype equal everywhere
    o_t        tokens             (N,)        19
    |o_i|      lengths            (m_r,)      19   m = Σ m_r, and m_r may be 0
    W_out      weight             (V, d)      19   whole on every rank, or a DTensor sharded by rows (FSDP2)
    K          gram               (m, m)      4    the responses in rank order
    a'         (compute_once)     (m,)        18

Departures from the paper
    1. The paper does not say how K is formed over processes. Here it is that of the whole mini-batch, and a' is
       computed on one rank only: near λ_k ≈ λ_{k+1} two processes could choose different subspaces.
    2. No sketch: it belongs to the scoring pass, where whole rows of logits are at hand.
"""
import datetime
import os
import sys
import time
from functools import partial
from types import MethodType
from typing import Any, Callable, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from salt import proxy

Value = TypeVar("Value")


TIMEOUT = datetime.timedelta(minutes=60)               # of one collective: ranks wait for the longest responses
LINGER = 0.5                                           # seconds; the threads need milliseconds


def start() -> torch.device:
    """Join the group that torchrun or accelerate launch has described in the environment -> this process's device.

    All ranks say the same, so only rank 0's standard output is kept. A single process on a GPU forms a group of one:
    FSDP2's mixed precision needs it.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group(backend, timeout=TIMEOUT)
        if rank() > 0:
            sys.stdout = open(os.devnull, "w")
    elif cuda:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def stop() -> None:
    """Leave the group, and let its threads let go of their tensors.

    DTensor's caches keep a mesh and with it the group, so that destroying it does not join gloo's threads. One that
    drops the last collective's tensors while Python shuts down wants a lock that is gone, and takes the process with it
    (SIGABRT, pytorch/pytorch#190489); here it can still have it.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(LINGER)


def place(model: nn.Module, device: torch.device, *, compute_dtype: torch.dtype | None = None,
          checkpoint_layers: bool = False) -> nn.Module:
    """The model where it is trained: as it is on one CPU process, sharded over all ranks by FSDP2 otherwise.

    A shard of every decoder layer, and one of what is left (embedding, last norm, LM head). Parameters keep their
    dtype; products run in `compute_dtype`, and gradients are averaged in float32 or better. `checkpoint_layers`: keep
    only the layers' inputs for the backward pass.
    """
    layers = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    if checkpoint_layers:
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    if world_size() == 1 and device.type == "cpu":
        return model
    mesh = init_device_mesh(device.type, (world_size(),))
    dtype = next(model.parameters()).dtype
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype or dtype,
                                  reduce_dtype=torch.promote_types(torch.float32, dtype))
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    model.call = MethodType(lambda self, function: function(self), model)
    register_fsdp_forward_method(model, "call")
    return model.to(device)


def call(model: nn.Module, function: Callable[[nn.Module], Value]) -> Value:
    """`function(model)`, in which the model may be used in parts: FSDP2 has gathered what lies outside the layers."""
    return model.call(function) if isinstance(model, FSDPModule) else function(model)


def share(count: int) -> range:
    """Which of `count` things are this rank's: neighbours, as evenly as they go."""
    return range(count * rank() // world_size(), count * (rank() + 1) // world_size())


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


def gather_objects(value: Any) -> list:
    """A small picklable value of every rank, in rank order, on every rank."""
    values = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def add_up(totals: dict[str, float]) -> dict[str, float]:
    """The sums over all ranks of numbers by name."""
    gathered = gather_objects(totals)
    return {name: sum(each[name] for each in gathered) for name in totals}


def mean(values: Tensor) -> float:
    """The mean over the values (n_r,) of all ranks."""
    if world_size() == 1:
        return values.mean().item()
    parts = add_up({"sum": values.double().sum().item(), "count": len(values)})
    return parts["sum"] / max(parts["count"], 1)


def own_seed(seed: int) -> int:
    """A seed for draws in which the ranks must not repeat each other; rank 0's is `seed`."""
    return seed + 1_000_003 * rank()


def is_lost_process(error: RuntimeError) -> bool:
    """A collective failed because another process of the group has gone."""
    said = str(error).lower()
    return world_size() > 1 and any(word in said for word in ("connection", "timed out", "timeout", "peer", "socket"))


def agree(check: Callable[[], tuple[dict, Value]]) -> Value:
    """Run `check` on every rank and return its value. Its facts must be the same everywhere.

    Where it raises ValueError or TypeError on one rank, or the facts differ, every rank raises.
    """
    facts, value, problem = {}, None, None
    try:
        facts, value = check()
    except (ValueError, TypeError) as error:
        problem = error
    reports = gather_objects((facts, problem))
    for source, (_, error) in enumerate(reports):
        if error is not None:
            raise type(error)(f"rank {source}: {error}" if world_size() > 1 else str(error))
    first = reports[0][0]
    for source, (other, _) in enumerate(reports):
        for name in first:
            if other[name] != first[name]:
                raise ValueError(f"{name} differs between ranks: {first[name]} on rank 0, {other[name]} on {source}")
    return value


def gather_packed(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that every rank has some rows of, perhaps none -> all rows in rank order on every rank, bit for bit.

    A column is (N_r, …) and packed over tokens, or (m_r, …) with a row for each response; what follows the first
    dimension, and the dtype, must agree across ranks, or every rank raises ValueError.
    """
    agree(lambda: ({"layout": {name: (str(v.dtype), tuple(v.shape[1:])) for name, v in columns.items()}}, None))
    counts = gather_objects({name: len(column) for name, column in columns.items()})
    return {name: _gather_rows(column, [count[name] for count in counts]) for name, column in columns.items()}


def _gather_rows(local: Tensor, counts: list[int]) -> Tensor:
    """Each rank broadcasts its rows into their place: no padding, and no second copy of the whole."""
    if len(counts) == 1:
        return local
    whole = local.new_empty(sum(counts), *local.shape[1:])
    for source, rows in enumerate(whole.split(counts)):
        if source == rank():
            rows.copy_(local)
        if rows.numel():
            dist.broadcast(rows, src=source)
    return whole


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum of every rank's tensor. Added up on rank 0 and sent from there, so that all hold the same bits."""
    total = values.clone()
    if world_size() > 1:
        dist.reduce(total, dst=0)
        dist.broadcast(total, src=0)
    return total


def compute_once(compute: Callable[[], Value]) -> Value:
    """`compute()` on rank 0, its value on every rank, as in `compute_once(lambda: reweight(gram, advantages, blocks))`.

    For small values on the CPU. What it raises is raised everywhere. A generator it draws from advances on rank 0 only.
    """
    outcome: list = [None, None]
    if rank() == 0:
        try:
            outcome[0] = compute()
        except Exception as error:                         # whatever it is: the other ranks are waiting for an answer
            outcome[1] = error
    if world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def vocabulary_share(weight: Tensor) -> tuple[Tensor, int]:
    """This rank's rows of a (V, …) tensor and the index of the first: (V_r, …), by torch.chunk's rule as in FSDP2.

    V that R does not divide leaves the last ranks fewer rows, perhaps none. A DTensor gives the rows that lie here.
    """
    size = -(-len(weight) // world_size())
    start = min(rank() * size, len(weight))
    if not isinstance(weight, DTensor):
        return weight[start:start + size], start
    mesh = weight.device_mesh.mesh.tolist()
    if weight.placements != (Shard(0),) or mesh != list(range(world_size())):
        raise ValueError(f"the LM head lies as {weight.placements} on the mesh {mesh}: it must be sharded by rows over "
                         f"all {world_size()} ranks")
    return weight.to_local(), start


@torch.no_grad()
def vocabulary_parallel_gram(hidden: Tensor, tokens: Tensor, lengths: Tensor, weight: Tensor, *, logsumexp: Tensor,
                             bias: Tensor | None = None, temperature: float = 1.0, length_norm: str = "mean",
                             tolerance: float = 0.0, delta_norms: Tensor | None = None, block: int | None = None,
                             return_bound: bool = False) -> Tensor | tuple[Tensor, float]:
    """`proxy.lm_head_gram` of the responses of all ranks: K (m, m) float64 on the CPU, the same bits on every rank.

    hidden (N, d), tokens, logsumexp and delta_norms (N,), lengths (m_r,): this rank's. weight (V, d) and bias (V,):
    whole, or DTensors sharded by rows; sharded ones are taken in the dtype of the hidden states, in which FSDP2's mixed
    precision uses them. The other arguments as there. logsumexp is needed, and delta_norms where tolerance > 0.
    Raises ValueError or TypeError on every rank where an argument is wrong on one; responses are numbered over all.
    """
    scaled = partial(proxy.feature_scale, temperature=temperature, length_norm=length_norm)
    options = {"temperature": temperature, "length_norm": length_norm, "tolerance": tolerance}
    head, start, own = agree(lambda: _own_share(hidden, tokens, lengths, weight, bias, logsumexp, delta_norms, block,
                                                **options))
    columns = {"tokens": tokens.long(), "logsumexp": logsumexp, "peaks": proxy.peaks(hidden), "sizes": own}
    if tolerance > 0:
        terms, rounding = proxy.filter_terms(hidden, own, scaled(own), logsumexp, delta_norms)
        columns |= {"delta_norms": delta_norms, "terms": terms, "rounding": rounding}
    whole = gather_packed({name: column.to(hidden.device) for name, column in columns.items()})
    sizes, first = whole["sizes"].cpu(), sum(gather_objects(len(hidden))[:rank()])                     # (m,)
    if len(sizes) == 0:
        raise ValueError("lengths is empty on every rank: there is no response")
    proxy.check_values(whole["peaks"], whole["tokens"], sizes, len(weight), whole["logsumexp"],
                       whole.get("delta_norms"))

    def walk(keep: Tensor) -> Tensor:
        counts = torch.stack([part.sum() for part in keep.split(sizes.tolist())])
        states = gather_packed({"hidden": hidden[keep[first:first + len(hidden)]]})["hidden"]
        share = proxy.exact_gram(states, whole["tokens"][keep] - start, counts, scaled(sizes), head,
                                 whole["logsumexp"][keep], block, None)
        return sum_over_ranks(share.to(hidden.device)).cpu()

    if tolerance > 0:
        gram, _, errors = proxy.filtered_gram(walk, whole["terms"].cpu(), whole["rounding"].cpu(), sizes, tolerance)
        bound = proxy.gram_bound(gram, errors) if return_bound else None
    else:
        gram, bound = walk(torch.ones(int(sizes.sum()), dtype=torch.bool)), 0.0
    proxy.check_finite(gram)
    return (gram, bound) if return_bound else gram


def _own_share(hidden: Tensor, tokens: Tensor, lengths: Tensor, weight: Tensor, bias: Tensor | None, logsumexp: Tensor,
               delta_norms: Tensor | None, block: int | None, **options) -> tuple[dict, tuple[dict, int, Tensor]]:
    """What can be checked before anything travels -> facts for `agree`; own rows of the head, their start, sizes."""
    proxy.check_options(options["temperature"], options["length_norm"], "exact", options["tolerance"], 1, block)
    if options["tolerance"] > 0 and delta_norms is None:
        raise ValueError(f"tolerance is {options['tolerance']}: the filter needs delta_norms from the scoring pass")
    rows, start = vocabulary_share(weight)
    head = {"weight": rows.to(hidden.dtype) if isinstance(weight, DTensor) else rows,
            "bias": None if bias is None else vocabulary_share(bias)[0], "temperature": options["temperature"]}
    sizes = proxy.check_layout(hidden, tokens, lengths, head["weight"], head["bias"], logsumexp, delta_norms, fewest=0)
    facts = {"the LM head's shape": tuple(weight.shape), "the dtype": str(hidden.dtype), "its bias": bias is not None}
    return facts | options, (head, start, sizes)
