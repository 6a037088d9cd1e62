"""Prompts → responses: the sampler on Hugging Face's `generate`, and DAPO's dynamic sampling on top of any sampler.

Glossary
    paper     name         shape        equation
    q         prompts      m lists      1     token ids, one list per response (a prompt stands G times)
    o_i       responses    m lists      1     token ids, the EOS included when it was sampled
    |o_i|     lengths      (m,)         3
    τ         temperature  ()           –     one value for sampler, loss and proxy

Every call takes its seed as an argument and leaves torch's global generator alone, so a run that is resumed, or one
that evaluates more often, draws the same responses.

Departures from the paper
    1. DAPO's groups beyond a full batch are not thrown away: they come first in the next step.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from salt.errors import UserError


@dataclass(frozen=True)
class Rollouts:
    """Sampled responses, one entry per response; responses to one prompt stand next to each other."""
    prompts: list[list[int]]
    responses: list[list[int]]
    finished: list[bool]                 # an EOS was sampled; False: cut off at the length limit
    texts: list[str]                     # decoded without special tokens, for the verifier

    @property
    def lengths(self) -> Tensor:         # (m,)
        return torch.tensor([len(response) for response in self.responses], dtype=torch.long)

    @property
    def total_lengths(self) -> list[int]:
        """Tokens of prompt and response: what a forward pass over the row costs."""
        return [len(prompt) + len(response) for prompt, response in zip(self.prompts, self.responses)]

    def select(self, indices) -> "Rollouts":
        return Rollouts(*([column[i] for i in indices] for column in
                          (self.prompts, self.responses, self.finished, self.texts)))

    def __add__(self, other: "Rollouts") -> "Rollouts":
        return Rollouts(self.prompts + other.prompts, self.responses + other.responses, self.finished + other.finished,
                        self.texts + other.texts)


class TransformersSampler:
    """Samples with `model.generate`, from the very weights that are trained.

    Rows of a call influence one another's random numbers, so rows go in calls of a fixed size, each with a seed of its
    own: what is drawn depends on prompts, seed and `rows_per_call` only.
    """

    def __init__(self, model, tokenizer, *, rows_per_call: int = 256):
        self.model, self.tokenizer, self.rows_per_call = model, tokenizer, rows_per_call
        declared = model.generation_config.eos_token_id
        declared = declared if isinstance(declared, list) else [declared]
        self.eos = sorted({int(token) for token in [*declared, tokenizer.eos_token_id] if token is not None})

    def sync(self, model) -> None:
        """Push trained weights into the sampler: nothing to do, they are the same tensors."""

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], samples: int, *, temperature: float, max_tokens: int,
                 seed: int) -> Rollouts:
        """`samples` responses to each prompt, in the order of the prompts. temperature 0: greedy."""
        rows = [prompt for prompt in prompts for _ in range(samples)]
        drawn = Rollouts([], [], [], [])
        with torch.random.fork_rng(devices=[self.model.device] if self.model.device.type == "cuda" else []):
            for call, start in enumerate(range(0, len(rows), self.rows_per_call)):
                torch.manual_seed(seed + call)
                drawn += self._call(rows[start:start + self.rows_per_call], temperature, max_tokens)
        return drawn

    def _call(self, rows: list[list[int]], temperature: float, max_tokens: int) -> Rollouts:
        width = max(map(len, rows))
        device = self.model.device
        tokens = torch.tensor([[self.eos[0]] * (width - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        try:
            out = self.model.generate(tokens, attention_mask=mask,
                                      generation_config=self._config(temperature, max_tokens))
        except RuntimeError as error:
            if "probability tensor" not in str(error):
                raise
            raise UserError("the model's next-token probabilities are not finite: training has diverged, try a lower "
                            "--lr; its checkpoints are intact") from error
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


def sample_mixed_groups(config, sample, pool, leftover: tuple[Rollouts, list[float]]):
    """DAPO's dynamic sampling: only groups with right and wrong answers (Eq. 69's condition), until a batch is full.

    config: batch_size, group_size, gen_batch and max_gen_batches. `sample(attempt)` draws a generation batch ->
    (rollouts, answers). Groups beyond the batch wait for the next step; they are a step's updates old by then, and the
    ratio of Eq. 3 is taken to the policy at the start of the step that trains on them.
    Returns rollouts, verdicts, the new leftover, and the verdicts on everything drawn.
    """
    kept, verdicts = leftover
    wanted, drawn = config.batch_size * config.group_size, []
    for attempt in range(config.max_gen_batches + 1):
        if len(verdicts) >= wanted:
            break
        if attempt == config.max_gen_batches:
            raise UserError(f"DAPO found {len(verdicts) // config.group_size} of {config.batch_size} groups with both "
                            f"right and wrong answers in {attempt} generation batches of {config.gen_batch} prompts: "
                            "the data are too easy or too hard for this model (or raise --max-gen-batches)")
        fresh, answers = sample(attempt)
        judged = pool.submit(fresh.texts, answers).result()
        groups = [range(start, start + config.group_size) for start in range(0, len(judged), config.group_size)]
        mixed = [i for group in groups if len({judged[i] for i in group}) > 1 for i in group]
        kept, verdicts, drawn = kept + fresh.select(mixed), verdicts + [judged[i] for i in mixed], drawn + judged
    leftover = kept.select(range(wanted, len(verdicts))), verdicts[wanted:]
    return kept.select(range(wanted)), verdicts[:wanted], leftover, drawn or verdicts[:wanted]
