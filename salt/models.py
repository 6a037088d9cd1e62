"""Models: presets, prompts in a model's own format, and the two passes over sampled responses.

Glossary
    paper             name           shape     equation
    h_t               hidden         (N, d)    19    the state that predicts response token t, packed over responses
    o_t               tokens         (N,)      1     the sampled tokens, EOS included
    |o_i|             lengths        (m,)      3
    W_out, b_out      weight, bias   (V, d)    19    the LM head
    log π(o_t)        logprobs       (N,)      1     of logits / temperature

"Packed" means: the responses' values one after another, without padding, N = Σ lengths. Prompt positions never meet
the LM head.

Departures from the paper
    1. The temperature of the sampler divides the logits here too: scored otherwise, E[∇ log π] is not 0.
    2. Models stay in evaluation mode: dropout would make the ratio of Eq. 3 differ from 1 on the first update.
    3. The cross-model table names families. Taken here: Llama-3.1's Instruct checkpoint (it stands under "Instruct
       Model"), DeepSeek-Math's Instruct one (it has a chat format), Qwen2.5-Math's base one.
    4. Two of these models hold 4,096 tokens; Table 4's 1,024 + 8,192 does not fit them: `fit_context` shortens the
       response.
    5. The paper's "system prompt" ends the user's turn here: the models' cards ask for no system prompt.
"""
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from salt import distributed
from salt.errors import UserError
from salt.hooks import check_head
from salt.loss import entropy_from_logits
from salt.proxy import WideProduct, token_statistics
from salt.rollout import Rollouts

CHUNK_ELEMENTS = 2 ** 26                                   # logits held at a time: 256 MiB in float32

# What the chat templates are told; each reads what it knows. Qwen3 thinks before it answers. Llama's system header
# carries a date: always the template's own, or prompts would differ from day to day.
TEMPLATE_ARGUMENTS = {"enable_thinking": True, "date_string": "26 Jul 2024"}
OPEN_THINK = "chat template that opens <think>; no system prompt, the instruction ends the user's turn"


@dataclass(frozen=True)
class Preset:
    """A model by its public card: where it lies, its chat format, and the shape that --plan computes with.

    The family settles the rest: Qwen2 has biases on the query, key and value projections, Qwen3 has norms on queries
    and keys instead, Llama has neither. The dimension of a head is hidden / heads in all of them.
    """
    hub: str | None                   # None: made on the spot by toy/arithmetic.py
    family: str                       # transformers' model_type
    context: int                      # tokens of prompt and response together
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int                   # rows of the LM head, more than the tokenizer has tokens
    chat: str
    tied: bool = False
    gated: bool = False

    def config(self):
        """The configuration as transformers has it, without network."""
        from transformers import AutoConfig
        return AutoConfig.for_model(
            self.family, hidden_size=self.hidden, intermediate_size=self.intermediate, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, head_dim=self.hidden // self.heads,
            vocab_size=self.vocabulary, tie_word_embeddings=self.tied, max_position_embeddings=self.context)


PRESETS = {                    # context, hidden, intermediate, layers, heads, kv_heads, vocabulary
    "tiny": Preset(None, "qwen2", 256, 128, 256, 3, 4, 4, 23, "plain text, one token per character"),
    "deepseek-1.5b": Preset("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "qwen2",
                            131072, 1536, 8960, 28, 12, 2, 151936, OPEN_THINK),
    "deepseek-7b": Preset("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen2",
                          131072, 3584, 18944, 28, 28, 4, 152064, OPEN_THINK),
    "qwen3-8b": Preset("Qwen/Qwen3-8B", "qwen3", 40960, 4096, 12288, 36, 32, 8, 151936,
                       "chat template in thinking mode; the response writes <think> itself"),
    "llama-3.1-8b": Preset("meta-llama/Llama-3.1-8B-Instruct", "llama", 131072, 4096, 14336, 32, 32, 8, 128256,
                           "chat template with its system header at a fixed date; no thinking", gated=True),
    "qwen2.5-math-1.5b": Preset("Qwen/Qwen2.5-Math-1.5B", "qwen2", 4096, 1536, 8960, 28, 12, 2, 151936,
                                "chat template whose system turn already asks for the box: not asked twice", tied=True),
    "deepseek-math-7b": Preset("deepseek-ai/deepseek-math-7b-instruct", "llama", 4096, 4096, 11008, 30, 32, 32, 102400,
                               "User: ... Assistant: without a system prompt, the instruction ends the user's turn"),
}


@dataclass(frozen=True)
class Head:
    """The LM head: logits = hidden · weightᵀ + bias."""
    weight: Tensor                    # (V, d)
    bias: Tensor | None               # (V,)
    tied: bool                        # shared with the input embedding: its gradient is then not Eq. 19's alone


@dataclass(frozen=True)
class Scored:
    """What the pass without gradients knows of every response token, packed (N,), and the states (N, d)."""
    tokens: Tensor
    lengths: Tensor                   # (m,)
    logprobs: Tensor
    entropy: Tensor
    logsumexp: Tensor
    delta_norms: Tensor               # ‖p_t − e_{o_t}‖
    hidden: Tensor | None

    def select(self, responses: Tensor) -> "Scored":
        """The same for some of the responses, in their given order."""
        starts = self.lengths.cumsum(0) - self.lengths
        index = packed_positions(starts[responses], self.lengths[responses])
        return Scored(self.tokens[index], self.lengths[responses], self.logprobs[index], self.entropy[index],
                      self.logsumexp[index], self.delta_norms[index],
                      None if self.hidden is None else self.hidden[index])


def resolve(name: str, *, seed: int = 0) -> str:
    """A preset, a Hugging Face folder or a hub id -> something `from_pretrained` takes."""
    if name == "tiny":
        from toy.arithmetic import WarmStart, warm_start
        return str(warm_start(WarmStart(seed=seed)))
    if name in PRESETS:
        return PRESETS[name].hub
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise UserError(f"{name} holds no config.json: it is not a Hugging Face model folder")
        return name
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UserError(f"unknown model {name!r}: one of {', '.join(PRESETS)}, a folder, or a hub id such as org/name")
    return name


def architecture(name: str):
    """The transformers configuration of a preset (no network), a folder or a hub id. Loads no weights."""
    if name in PRESETS:
        return PRESETS[name].config()
    from transformers import AutoConfig
    try:
        return AutoConfig.from_pretrained(resolve(name))
    except (OSError, ValueError) as error:
        raise UserError(_cannot_load(name, error)) from error


def fit_context(max_prompt: int, max_response: int, context: int) -> int:
    """The response's length in tokens, shortened where prompt and response exceed `context`. UserError if none is left.
    """
    if max_prompt >= context:
        raise UserError(f"--max-prompt {max_prompt} leaves no room for a response in a context of {context} tokens")
    return min(max_response, context - max_prompt)


def _cannot_load(source: str, error: Exception) -> str:
    """One line: what went wrong, and for a hub id where a copy was looked for and how a gated one is got."""
    said = f"cannot load the model {source}: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
    if Path(source).is_dir():
        return said
    from huggingface_hub import constants
    cached = Path(constants.HF_HUB_CACHE) / f"models--{source.replace('/', '--')}"
    gated = "gated" in str(error) or any(preset.gated and preset.hub == source for preset in PRESETS.values())
    terms = (f"; it is gated: accept its terms at https://huggingface.co/{source} and log in (`hf auth login`, or set "
             f"HF_TOKEN)") if gated else ""
    return f"{said}; looked for {cached} (HF_HOME){terms}; or pass a folder that holds the model"


def load(source: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32):
    """Model and tokenizer of a folder or hub id, checked: master weights in `dtype`, LM head of the plain form."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model, found = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(_cannot_load(source, error)) from error
    if found["missing_keys"]:                                       # the library would make up random ones
        raise UserError(f"{source} has no weights for {sorted(found['missing_keys'])[0]}: take a causal language model")
    if len(tokenizer) < 3 or tokenizer.eos_token_id is None:        # a folder without one gives an empty tokenizer
        raise UserError(f"{source} has no tokenizer with an end-of-sequence token: save one beside the model")
    model.to(device).eval()
    check_head(model, source)
    return model, tokenizer


def lm_head(model) -> Head:
    layer = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    return Head(layer.weight, getattr(layer, "bias", None), embedding is not None and embedding.weight is layer.weight)


def encode_prompt(tokenizer, question: str, instruction: str = "") -> list[int]:
    """Token ids of a prompt: in the tokenizer's chat template where it has one, as plain text otherwise.

    The instruction goes to the end of the user's turn; one that asks for the box is left out where the template already
    says the same. A system prompt is never added. A rendered template holds its BOS: it is not added a second time.
    """
    text = f"{question}\n{instruction}" if instruction else question
    if tokenizer.chat_template:
        rendered = _render(tokenizer, question)
        if "\\boxed" not in instruction or instruction not in rendered:
            rendered = _render(tokenizer, text)
        return tokenizer.encode(rendered, add_special_tokens=False, verbose=False)
    ids = tokenizer.encode(text, verbose=False)
    lost = sorted(set(text) - set(tokenizer.decode(ids)))
    if lost:
        raise UserError(f"the model's tokenizer cannot spell {''.join(lost[:10])!r}: model and data set do not fit")
    return ids


def _render(tokenizer, content: str) -> str:
    return tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False,
                                         add_generation_prompt=True, **TEMPLATE_ARGUMENTS)


def micro_batches(lengths: list[int], size: int | None) -> Iterator[list[int]]:
    """Indices in batches of at most `size` (None: all), similar lengths together so that little padding is computed.

    Every process gets equally many, the last ones perhaps empty: under FSDP2 they run the model together or not at all.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    size = size or max(len(order), 1)
    count = max(distributed.gather_objects(-(-len(order) // size)))
    return (order[number * size:(number + 1) * size] for number in range(count))


def response_states(model, prompts: list[list[int]], responses: list[list[int]]) -> Tensor:
    """Hidden states that predict each response token, packed: (N, d).

    Rows are padded on the right: under causal attention no real position sees what follows it, so there is no mask.
    Without any response the model still runs, over one token of which nothing is kept.
    """
    prompts, responses = prompts or [[0]], responses or [[]]
    rows = [prompt + response[:-1] for prompt, response in zip(prompts, responses)]
    first = torch.tensor([len(prompt) - 1 for prompt in prompts])
    last = first + torch.tensor([len(response) for response in responses])
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=model.device)
    states = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state           # (b, width, d)
    position = torch.arange(width)
    keep = (position >= first.unsqueeze(1)) & (position < last.unsqueeze(1))
    return states[keep.to(states.device)]


def _chunk_logprobs(hidden: Tensor, tokens: Tensor, weight: Tensor, bias: Tensor | None, temperature: float,
                    with_entropy: bool) -> tuple[Tensor, Tensor]:
    if hidden.dtype in (torch.float32, torch.float64):
        logits = F.linear(hidden, weight, bias) / temperature
    else:
        logits = WideProduct.apply(hidden, weight)
        logits = (logits if bias is None else logits + bias) / temperature
    logsumexp = logits.logsumexp(-1)
    logprobs = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logsumexp                          # Eq. 1
    return logprobs, entropy_from_logits(logits, logsumexp) if with_entropy else torch.zeros_like(logprobs)


def token_logprobs(hidden: Tensor, tokens: Tensor, head: Head, temperature: float,
                   with_entropy: bool = False) -> tuple[Tensor, Tensor]:
    """Differentiable log-probabilities (and entropies, or zeros) of packed tokens: (N,), (N,).

    In chunks that are recomputed in the backward pass, so that no (N, V) logits of a whole batch exist.
    """
    rows = max(1, CHUNK_ELEMENTS // len(head.weight))
    arguments = (head.weight, head.bias, temperature, with_entropy)
    if len(tokens) <= rows:
        return _chunk_logprobs(hidden, tokens, *arguments)
    parts = [checkpoint(_chunk_logprobs, h, t, *arguments, use_reentrant=False)
             for h, t in zip(hidden.split(rows), tokens.split(rows))]
    logprobs, entropy = zip(*parts)
    return torch.cat(logprobs), torch.cat(entropy)


def pack_tokens(responses: list[list[int]], device: torch.device) -> Tensor:
    return torch.tensor([token for response in responses for token in response], dtype=torch.long, device=device)


def forward_logprobs(model, rollouts: Rollouts, temperature: float,
                     with_entropy: bool = False) -> tuple[Tensor, Tensor]:
    """The pass with gradients over one micro-batch: packed log-probabilities and entropies (N,)."""
    def forward(model):
        states = response_states(model, rollouts.prompts, rollouts.responses)
        return token_logprobs(states, pack_tokens(rollouts.responses, states.device), lm_head(model), temperature,
                              with_entropy)
    return distributed.call(model, forward)


def packed_positions(starts: Tensor, lengths: Tensor) -> Tensor:
    """Where the tokens of responses lie that begin at `starts` (b,) and are `lengths` (b,) long: (Σ lengths,)."""
    return torch.arange(int(lengths.sum())) + (starts - lengths.cumsum(0) + lengths).repeat_interleave(lengths)


@torch.no_grad()
def in_micro_batches(rollouts: Rollouts, size: int | None, columns_of) -> dict[str, Tensor]:
    """`columns_of(part)`, a dict of packed columns, over micro-batches of a batch; put back into the batch's order."""
    lengths, visited, parts = rollouts.lengths, [], []
    for indices in micro_batches(rollouts.total_lengths, size):
        parts.append(columns_of(rollouts.select(indices)))
        visited += indices
    starts = torch.empty_like(lengths)
    starts[visited] = lengths[visited].cumsum(0) - lengths[visited]
    order = packed_positions(starts, lengths)
    return {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}


def logprobs_only(model, rollouts: Rollouts, temperature: float, micro_batch: int | None = None) -> Tensor:
    """Log-probabilities of a batch without gradients: packed (N,)."""
    return in_micro_batches(rollouts, micro_batch, lambda part: {
        "logprobs": forward_logprobs(model, part, temperature)[0]})["logprobs"]


def score(model, rollouts: Rollouts, temperature: float, *, micro_batch: int | None = None,
          keep_hidden: bool = False) -> Scored:
    """The pass without gradients over a batch: old log-probabilities, entropies, and what the Gram needs."""
    def columns_of(part: Rollouts) -> dict[str, Tensor]:
        return distributed.call(model, partial(_score_part, part=part, temperature=temperature,
                                               keep_hidden=keep_hidden))

    columns = in_micro_batches(rollouts, micro_batch, columns_of)
    return Scored(lengths=rollouts.lengths, hidden=columns.pop("hidden", None), **columns)


def _score_part(model, part: Rollouts, temperature: float, keep_hidden: bool) -> dict[str, Tensor]:
    head = lm_head(model)
    states = response_states(model, part.prompts, part.responses)
    tokens = pack_tokens(part.responses, states.device)
    rows = max(1, CHUNK_ELEMENTS // len(head.weight))
    chunks = [token_statistics(h, t, head.weight, bias=head.bias, temperature=temperature)
              for h, t in zip(states.split(rows), tokens.split(rows))]
    packed = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]} | {"tokens": tokens}
    return packed | ({"hidden": states} if keep_hidden else {})


def unpack(values: Tensor, lengths: Tensor) -> Tensor:
    """(N,) packed -> (m, T) with zeros behind each response's end."""
    if len(lengths) == 0:
        return values.view(0, 0)
    return pad_sequence(values.split(lengths.tolist()), batch_first=True)


def response_mask(lengths: Tensor) -> Tensor:
    """(m,) -> (m, T) boolean: True on response tokens."""
    return torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
