"""What a run needs, before anything is loaded: memory per GPU by part and phase, steps, tokens, what divides evenly.

Parameters are counted on the meta device, from a preset's shape or a config.json: no weights, no network, no GPU. The
rest is arithmetic on upper bounds: every response has its full length, and the Gram's filter drops no token.

Glossary (n GPUs; d, I, V: hidden, intermediate, vocabulary; L layers; N = --micro-batch * (--max-prompt +
--max-response) tokens of a micro-batch; T = --max-response; w bytes of a number in products, 2 for bfloat16)
    name        symbol       what
    parameters  P            tied weights once
    layer       P_l          parameters of one decoder layer
    outside     P_o          embedding, LM head and last norm: the root unit of FSDP
    adapter     A            LoRA parameters per unit of rank: inputs plus outputs of every projection in the layers

    part of memory          bytes per GPU                     when
    master weights          4 P/n                             always
    Adam's moments          8 P/n                             always
    reference               w P/n                             always; absent with --kl-coef 0
    gathered weights        w (P_o + 2 P_l)                   whenever the model runs: this layer and the next
    gradients               4 P/n + (w + 4) max(P_o, P_l)     update: shards; the largest unit before reduction
    layer inputs            w N d L                           update: what gradient checkpointing keeps
    one layer               w N (12 d + 7 I)                  update: its states, computed again, and gradients; without
                                                              checkpointing those of all L
    one layer               w N (4 d + 3 I)                   score: no gradients
    logits chunk            24, 16 per logit                  update, score; models.CHUNK_ELEMENTS logits
    hidden states for K     w T d per response of a step      score (a mini-batch's thrice, put in order), gram
    Gram                    w T d per response of a           gram: gathered and put in batches; the own share sent;
                            mini-batch, twice and a bit       proxy.DEVICE_BUDGET
    vLLM                    --vllm-memory of the GPU: w P,    sample; it sleeps otherwise
                            its work, and the cache
With --lora-rank r the base is frozen (w P/n), only r A parameters have master weights, gradients and moments, and the
reference is the base itself.

Departures from the paper
    1. The paper names no memory figures and no precision, only eight GPUs (Table 4's sizes are the defaults here).
"""
import dataclasses
from dataclasses import dataclass
from math import ceil
from typing import Iterator

import torch
from torch import nn

from salt import models
from salt.data import ARITH_SIZES
from salt.errors import UserError
from salt.proxy import DEVICE_BUDGET
from salt.rollout import vllm_problem

GIB = 2 ** 30
PHASES = ("sample", "score", "gram", "update")
OVERHEAD = 3 * GIB                    # CUDA, NCCL, and what the allocator cannot use
VLLM_WORK = 2 * GIB                   # vLLM's activations and captured graphs
ROWS_PER_CALL = 256                   # of rollout.TransformersSampler
LORA_RANK = 32                        # suggested where the whole model does not fit
PUBLISHED = {"arith": ARITH_SIZES["train"], "gsm8k": 7473, "math": 7500, "dapo-math": 17_400, "mbpp": 374}


@dataclass(frozen=True)
class Shape:
    """Counts and widths of a model; the names are those of the glossary."""
    parameters: int
    layer: int
    outside: int
    adapter: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    cache: int                        # numbers in one token's keys and values


def measure(architecture) -> Shape:
    """The shape of a transformers configuration, counted on the meta device. UserError without decoder layers."""
    from transformers import AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(architecture)
    except ValueError:                                                          # not a causal language model
        model = None
    layers = getattr(getattr(model, "base_model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList) or not all(
            hasattr(architecture, name) for name in ("intermediate_size", "max_position_embeddings")):
        raise UserError(f"no plan for {architecture.model_type}: only for decoders of the usual form (Qwen, Llama)")
    parameters, inside = (sum(p.numel() for p in module.parameters()) for module in (model, layers))
    projections = [module for module in layers.modules() if isinstance(module, nn.Linear)]
    heads = architecture.num_attention_heads
    head_dim = getattr(architecture, "head_dim", None) or architecture.hidden_size // heads
    kv_heads = getattr(architecture, "num_key_value_heads", None) or heads
    return Shape(parameters, inside // len(layers), parameters - inside,
                 sum(module.in_features + module.out_features for module in projections), len(layers),
                 architecture.hidden_size, architecture.intermediate_size, architecture.vocab_size,
                 2 * len(layers) * kv_heads * head_dim)


# ---- memory: part -> phase -> bytes on one GPU


def memory(config, shape: Shape, gpus: int, gpu_memory: float) -> dict[str, dict[str, float]]:
    """Every part of the glossary's table with the phases it is alive in. gpu_memory: GiB."""
    return (_states(config, shape, gpus) | _sampler(config, shape, gpus, gpu_memory) | _passes(config, shape)
            | _geometry(config, shape, gpus) | _gradients(config, shape, gpus))


def needed(parts: dict[str, dict[str, float]]) -> dict[str, float]:
    """Bytes by phase."""
    return {phase: sum(part.get(phase, 0) for part in parts.values()) for phase in PHASES}


def _width(config) -> int:
    """Bytes of a number in products, on a GPU."""
    return 4 if config.precision == "float32" else 2


def _states(config, shape: Shape, gpus: int) -> dict[str, dict[str, float]]:
    always = lambda size: dict.fromkeys(PHASES, size / gpus)
    trained = config.lora_rank * shape.adapter if config.lora_rank else shape.parameters
    parts = {"master weights": always(4 * trained)}
    if config.lora_rank:
        parts["frozen base"] = always(_width(config) * shape.parameters)
    parts["Adam's two moments"] = always(8 * trained)
    if config.kl_coef > 0 and not config.lora_rank:
        parts["reference"] = always(_width(config) * shape.parameters)
    return parts | {"CUDA, NCCL, fragments": dict.fromkeys(PHASES, OVERHEAD)}


def _sampler(config, shape: Shape, gpus: int, gpu_memory: float) -> dict[str, dict[str, float]]:
    response = _cached_response(config, shape)
    if config.rollout == "transformers":
        return {"keys and values": {"sample": response * min(_sampled(config, gpus), ROWS_PER_CALL)}}
    weights = _width(config) * shape.parameters
    return {"vLLM: weights and work": {"sample": weights + VLLM_WORK},
            "vLLM: cache": {"sample": max(response, config.vllm_memory * gpu_memory * GIB - weights - VLLM_WORK)}}


def _cached_response(config, shape: Shape) -> int:
    """Bytes of the keys and values of one prompt and response."""
    return _width(config) * shape.cache * (config.max_prompt + config.max_response)


def _sampled(config, gpus: int) -> int:
    """Responses that one GPU samples at a time."""
    return ceil((config.gen_batch if config.algo == "dapo" else config.batch_size) / gpus) * config.group_size


def _passes(config, shape: Shape) -> dict[str, dict[str, float]]:
    tokens, width = config.micro_batch * (config.max_prompt + config.max_response), _width(config)
    gathered = width * (shape.outside + 2 * shape.layer)
    logits = min(models.CHUNK_ELEMENTS, config.micro_batch * config.max_response * shape.vocabulary)
    d, inner = shape.hidden, shape.intermediate
    layer = width * tokens * (12 * d + 7 * inner)
    parts = {"gathered weights": dict.fromkeys(("score", "update"), gathered)
             | ({"sample": gathered} if config.rollout == "transformers" else {})}
    if config.checkpoint_layers:
        parts["layer inputs"] = {"update": width * tokens * d * shape.layers}
    return parts | {"one layer" if config.checkpoint_layers else "all layers": {
        "score": width * tokens * (4 * d + 3 * inner),
        "update": layer * (1 if config.checkpoint_layers else shape.layers)},
        "logits chunk": {"score": 16 * logits, "update": 24 * logits}}


def _geometry(config, shape: Shape, gpus: int) -> dict[str, dict[str, float]]:
    """Hidden states of the step's responses that lie here, and what forms K of one mini-batch; Eq. 4, 19."""
    if not config.salt and config.diagnostics == "off":
        return {}
    response, mini_batch = _width(config) * config.max_response * shape.hidden, config.mini_batch * config.group_size
    own = ceil(mini_batch / gpus) * response
    kept = own * (config.batch_size // config.mini_batch)
    return {"hidden states for K": {"score": kept + 2 * own, "gram": kept},
            "Gram": {"gram": 2 * mini_batch * response + (own if gpus > 1 else 0) + DEVICE_BUDGET}}


def _gradients(config, shape: Shape, gpus: int) -> dict[str, dict[str, float]]:
    if config.lora_rank:
        whole, unit = config.lora_rank * shape.adapter, config.lora_rank * shape.adapter / shape.layers
    else:
        whole, unit = shape.parameters, max(shape.outside, shape.layer)
    return {"gradients, sharded": {"update": 4 * whole / gpus},
            "gradients, largest unit": {"update": (_width(config) + 4) * unit}}


# ---- what follows from it


def plan(config, problems: int | None = None, *, gpus: int = 8, gpu_memory: float = 80.0) -> str:
    """The table that --plan prints. problems: how many the data set has, where known; gpu_memory: GiB of each GPU."""
    architecture = models.architecture(config.model)
    shape, asked = measure(architecture), config.max_response
    context = architecture.max_position_embeddings
    config = _within(config, context)
    parts, preset = memory(config, shape, gpus, gpu_memory), models.PRESETS.get(config.model)
    lines = [f"{config.model}{f' ({preset.hub})' if preset and preset.hub else ''}: {shape.parameters:,} parameters, "
             f"context {context:,}, {gpus} GPU(s) of {gpu_memory:g} GiB"]
    lines += [f"format: {preset.chat}"] if preset else []
    if config.max_response < asked:
        lines.append(f"responses shortened from {asked:,} to {config.max_response:,} tokens: the context holds no more")
    lines += ["", *_table(parts, gpu_memory), ""]
    if config.rollout != "transformers":
        lines.append(_cache_line(config, shape, parts, gpus, gpu_memory))
    lines += [_host_line(config, shape, gpus), *_workload(config, problems), *_division(config, gpus), ""]
    return "\n".join(lines + [shortfall(config, shape, gpus, gpu_memory) or "it fits"])


def refuse_what_does_not_fit(config, *, gpus: int, gpu_memory: float) -> None:
    """UserError, in the words of --plan, where a phase needs more than `gpu_memory` GiB on each of `gpus` GPUs."""
    if config.rollout == "auto" and vllm_problem(gpu=True):
        config = dataclasses.replace(config, rollout="transformers")
    architecture = models.architecture(config.model)
    shape = measure(architecture)
    short = shortfall(_within(config, architecture.max_position_embeddings), shape, gpus, gpu_memory)
    if short:
        raise UserError(f"{short} (--plan shows the parts)")


def _within(config, context: int):
    return dataclasses.replace(config, max_response=models.fit_context(config.max_prompt, config.max_response, context))


def shortfall(config, shape: Shape, gpus: int, gpu_memory: float) -> str | None:
    """One line: what does not fit, and which single change makes everything fit. None where all does."""
    wanting = _wanting(config, shape, gpus, gpu_memory)
    if not wanting:
        return None
    ways = [family[0] for family in (
        [flag for flag, changed, number in family if not _wanting(changed, shape, number, gpu_memory)]
        for family in _changes(config, gpus)) if family]
    remedy = f"would fit with {', or with '.join(ways)}" if ways else "no single flag helps: take a smaller model"
    return f"{config.model} does not fit on {gpus} GPU(s) of {gpu_memory:g} GiB: {' and '.join(wanting)}; {remedy}"


def _wanting(config, shape: Shape, gpus: int, gpu_memory: float) -> list[str]:
    """What is too large: phases, and vLLM for its share."""
    parts = memory(config, shape, gpus, gpu_memory)
    found = [f"{phase} needs {size / GIB:.1f} GiB" for phase, size in needed(parts).items() if size > gpu_memory * GIB]
    engine = sum(part["sample"] for name, part in parts.items() if name.startswith("vLLM")) / GIB
    if engine > config.vllm_memory * gpu_memory * (1 + 1e-9):
        found.append(f"vLLM needs {engine:.1f} GiB of its {config.vllm_memory * gpu_memory:.1f}")
    return found


def _changes(config, gpus: int) -> Iterator[list[tuple[str, object, int]]]:
    """Families of single changes, the mildest of each first: (flag, changed configuration, number of GPUs)."""
    def change(flag: str, number: int = gpus, **fields) -> tuple[str, object, int]:
        return flag, dataclasses.replace(config, **fields), number

    def halved(name: str, least: int) -> list[tuple[str, object, int]]:
        sizes = [getattr(config, name) >> power for power in range(1, 16)]
        return [change(f"--{name.replace('_', '-')} {size}", **{name: size}) for size in sizes if size >= least]

    smallest = {"micro_batch": 1, "kl_coef": 0.0}
    shares = sorted((share / 20 for share in range(1, 20)), key=lambda share: abs(share - config.vllm_memory))
    yield [change(f"--vllm-memory {share:g}", vllm_memory=share) for share in shares]
    yield [*halved("micro_batch", 1), change("--micro-batch 1 --kl-coef 0", **smallest)]
    yield [way for way in halved("mini_batch", 1) if config.batch_size % way[1].mini_batch == 0]
    yield [change("--kl-coef 0", kl_coef=0.0)]
    yield halved("max_response", 1024)
    yield [change("--checkpoint-layers", checkpoint_layers=True)]
    if not config.lora_rank:
        yield [change(f"--lora-rank {LORA_RANK}", lora_rank=LORA_RANK),
               change(f"--lora-rank {LORA_RANK} --micro-batch 1", lora_rank=LORA_RANK, **smallest)]
    yield [change(f"{gpus * factor} GPUs", gpus * factor) for factor in (2, 4, 8)]


def _table(parts: dict[str, dict[str, float]], gpu_memory: float) -> list[str]:
    row = lambda name, sizes: f"{name:<32}" + "".join(
        f"{sizes[phase] / GIB:>9.1f}" if phase in sizes else f"{'-':>9}" for phase in PHASES)
    return [f"{'GiB per GPU, at most':<32}" + "".join(f"{phase:>9}" for phase in PHASES),
            *(row(name, sizes) for name, sizes in parts.items()), "-" * 68, row("together", needed(parts)),
            row("left", {phase: gpu_memory * GIB - size for phase, size in needed(parts).items()})]


def _cache_line(config, shape: Shape, parts: dict[str, dict[str, float]], gpus: int, gpu_memory: float) -> str:
    """vLLM queues what its cache cannot hold, so a smaller one costs time only."""
    response, asked = _cached_response(config, shape), _sampled(config, gpus)
    room = min(asked, int(parts["vLLM: cache"]["sample"] // response))
    others = sum(part.get("sample", 0) for name, part in parts.items() if not name.startswith("vLLM"))
    share = int(100 * (1 - others / (gpu_memory * GIB))) / 100
    more = f" (--vllm-memory may go up to {share:g})" if room < asked and share > config.vllm_memory else ""
    return (f"vLLM's cache: {response / GIB:.2f} GiB per response at full length; room for {room} of a GPU's {asked} "
            f"at a time{more}")


def _host_line(config, shape: Shape, gpus: int) -> str:
    """Each process reads all weights in their master dtype before they are sharded; nothing of size stays there."""
    size = (_width(config) if config.lora_rank else 4) * shape.parameters / GIB
    return (f"host memory: {size:.1f} GiB per process while it reads the model, {gpus * size:.0f} GiB for {gpus} "
            "process(es) on one machine")


def _workload(config, problems: int | None) -> list[str]:
    said = "" if problems is not None else " (published size)"
    problems = PUBLISHED.get(config.dataset) if problems is None else problems
    updates, responses = config.batch_size // config.mini_batch, config.batch_size * config.group_size
    lines = [f"step: {config.batch_size} prompts x {config.group_size} responses, {updates} optimizer update(s), "
             f"at most {responses * (config.max_prompt + config.max_response):,} tokens"]
    if problems is None:
        return [*lines, f"epoch: unknown, {config.dataset} is not at hand"]
    problems = min(problems, config.limit or problems)
    at_most = "at most " if config.algo == "dapo" else ""                # dynamic sampling draws more prompts per step
    steps = min(config.epochs * problems // config.batch_size, config.steps or config.epochs * problems)
    return [*lines, f"epoch: {problems:,} problems{said}, {at_most}{problems / config.batch_size:.1f} steps and "
            f"{updates * problems / config.batch_size:.1f} updates, at most "
            f"{problems * config.group_size * config.max_response:,} sampled tokens",
            f"run: {config.epochs} epoch(s), {at_most}{steps:,} steps and {steps * updates:,} updates"]


def _division(config, gpus: int) -> list[str]:
    """How prompts and responses go over the GPUs; an uneven share costs waiting, and changes no gradient."""
    lines, responses = [], config.mini_batch * config.group_size
    prompts = config.gen_batch if config.algo == "dapo" else config.batch_size
    for name, count in (("prompts sampled at a time", prompts), ("responses of an update", responses)):
        share, rest = divmod(count, gpus)
        if count < gpus:
            lines.append(f"{count} {name} over {gpus} GPUs: {gpus - count} would have none, take fewer GPUs")
        elif rest:
            lines.append(f"{count} {name} over {gpus} GPUs: {rest} take {share + 1}, the others {share} and wait")
        else:
            lines.append(f"{count} {name} over {gpus} GPU(s): {share} each")
    each = ceil(responses / gpus)
    return [*lines, f"{each} responses of a GPU in micro-batches of {config.micro_batch}: "
            f"{ceil(each / config.micro_batch)} pass(es) per update"]
