"""What the hooks for other trainers share: the model's plain parts, and K of the responses of all processes.

Needs torch alone, and takes the models of transformers and PEFT as they come.

Glossary
    paper          name           shape          equation
    h_t            hidden         (N, d)         19   this process's, packed over its responses
    o_t            tokens         (N,)           19
    |o_i|          lengths        (b,)           19   0 where nothing of a response counts
    W_out, b_out   weight, bias   (V, d), (V,)   19
    K              gram           (m, m)         4    of all processes, in rank order; Σ b = m

Departures from the paper: none of its own (salt/proxy.py lists those of K).
"""
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from salt.distributed import vocabulary_parallel_gram
from salt.errors import UserError
from salt.proxy import token_statistics

CHUNK_ELEMENTS = 2 ** 26              # logits held at a time: 256 MiB in float32


def require(package: str, tested: str) -> None:
    """UserError unless the package is there in the series of the version that was tested: 1.16.x for "1.16.0"."""
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "none"
    series = tested.rpartition(".")[0]
    if not found.startswith(f"{series}."):                 # the hooks override methods that another version may change
        raise UserError(f"made for {package} {series}.x, found {found}: pip install '{package}=={tested}'")


def causal_model(model: nn.Module) -> nn.Module:
    """The transformers model inside a PEFT model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def check_form(model: nn.Module, name: str) -> None:
    """UserError unless the LM head is one plain matrix by its type and the model's configuration."""
    layer, config = model.get_output_embeddings(), model.config.get_text_config()
    if layer is None:
        raise UserError(f"{name} has no output projection (LM head): take a causal language model")
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        raise UserError(f"the LM head of {name} is adapted ({type(layer).__name__}): leave it out of target_modules, "
                        "modules_to_save and quantization")
    if getattr(config, "final_logit_softcapping", None):
        raise UserError(f"the LM head of {name} is soft-capped at {config.final_logit_softcapping}: SALT's features "
                        "need a plain one, set the model's final_logit_softcapping to None or take another model")


@torch.no_grad()
def check_head(model: nn.Module, name: str = "") -> None:
    """`check_form`, and that the logits of a short text are W h + b: Eq. 19 knows no soft-capping and no scaling."""
    name = name or type(model).__name__
    check_form(model, name)
    layer, states = model.get_output_embeddings(), []
    handle = model.base_model.register_forward_hook(lambda *call: states.append(call[-1].last_hidden_state))
    try:
        logits = model(input_ids=torch.arange(4, device=layer.weight.device)[None], use_cache=False).logits
    finally:
        handle.remove()
    plain = nn.functional.linear(states[0].to(layer.weight.dtype), layer.weight, layer.bias)
    if (logits - plain).abs().max() > 1e-2 * plain.abs().max().clamp_min(1e-6):
        raise UserError(f"{name} does more to its logits than W h + b (soft-capping or scaling): not supported")


def whole_head(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """The LM head's weight (V, d) and bias (V,), gathered where FSDP2 has sharded them."""
    layer = model.get_output_embeddings()
    weight, bias = (value.full_tensor() if isinstance(value, DTensor) else value
                    for value in (layer.weight, layer.bias))
    if weight.ndim != 2 or weight.numel() == 0:
        raise UserError("the LM head lies elsewhere (DeepSpeed ZeRO-3 or FSDP1): train with DDP, ZeRO-2 or FSDP2")
    return weight, bias


@torch.no_grad()
def gram_of_all(hidden: Tensor, tokens: Tensor, lengths: Tensor, weight: Tensor, *, bias: Tensor | None = None,
                temperature: float = 1.0, **options) -> tuple[Tensor, Tensor]:
    """K of all processes' responses, (m, m) float64, the same bits everywhere; and this process's log-probabilities.

    hidden (N, d), tokens (N,), lengths (b,): this process's; weight (V, d) and bias (V,): whole. The hidden states are
    taken in the weight's type. options: of `vocabulary_parallel_gram`. Log-probabilities (N,), of logits / temperature.
    """
    hidden, rows = hidden.to(weight.dtype), max(1, CHUNK_ELEMENTS // len(weight))
    parts = [token_statistics(h, t, weight, bias=bias, temperature=temperature)
             for h, t in zip(hidden.split(rows), tokens.split(rows))]
    known = {name: torch.cat([part[name] for part in parts]) for name in ("logsumexp", "delta_norms")}
    gram = vocabulary_parallel_gram(hidden, tokens, lengths, weight, bias=bias, temperature=temperature, **known,
                                    **options)                                                         # Eq. 4, 19
    return gram, torch.cat([part["logprobs"] for part in parts])                                       # Eq. 1
