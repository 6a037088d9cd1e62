"""SALT inside TRL: a GRPOTrainer that reweights its advantages before it trains on them.

    trainer = SaltGRPOTrainer(model, reward_funcs=reward, args=GRPOConfig(...), train_dataset=dataset)

TRL samples a generation batch, rewards it and normalises the rewards (ddof 1, eps 1e-4). Before TRL then shuffles and
splits the batch for its updates, K of the whole batch (the responses of all processes) turns the advantages a into the
coefficients a', in the loss and in TRL's logs. Evaluation batches are left alone. The hidden states are those of TRL's
own scoring pass where it makes one (when the policy moves between sampling and the last use of a batch); otherwise
those that wrote the tokens, where transformers' `generate` did; otherwise (vLLM, tools) the backbone runs once more,
without the LM head.

Glossary
    paper      name               shape       equation
    h_t        states             (b, T, d)   19   this process's; b · processes = m
    o_t        completion_ids     (b, T)      19   tokens with mask 0 (padding, tools' answers) do not count
    K          gram               (m, m)      4    of all processes, in rank order
    a, a'      advantages         (m,)        2, 18

Departures from the paper
    1. K is that of the generation batch, formed once; the paper's is that of a mini-batch. They are the same where
       steps_per_generation = gradient_accumulation_steps, TRL's default. TRL shuffles before it splits, so that no
       mini-batch exists yet where the advantages are known.
    2. Eq. 2's eps is TRL's 1e-4. Responses that no reward function could score keep a = 0; their a' need not be 0.
    3. The model is in the mode that TRL scores in: a LoRA adapter with dropout has it in the states, too.

Not run on the machine this was written on: CUDA, vLLM, FSDP2. Plain and DDP training on the CPU are tested.
"""
import zlib
from contextlib import contextmanager
from typing import Callable, Iterator

import torch
from torch import Tensor

from salt.advantages import Reweighted, salt_advantages
from salt.distributed import compute_once, gather_objects, gather_packed
from salt.errors import UserError
from salt.hooks import causal_model, check_head, gram_of_all, require, whole_head

require("trl", "1.16.0")
from trl import GRPOTrainer


class SaltGRPOTrainer(GRPOTrainer):
    """GRPOTrainer with SALT; takes GRPOTrainer's arguments, and

    reweighting: (K (m, m), a (m,)) -> Reweighted; a variant is `partial(salt_advantages, variant="interpolated")`,
    another scope `lambda gram, a: reweight(gram, a, scope_blocks("group", len(a), 8))`. It runs on rank 0.
    length_norm, tolerance: as in `lm_head_gram`.
    UserError for a model, a data order or a way of sharding with which K or the groups would be wrong.
    """

    def __init__(self, *args, reweighting: Callable[[Tensor, Tensor], Reweighted] = salt_advantages,
                 length_norm: str = "mean", tolerance: float = 0.0, **kwargs):
        super().__init__(*args, **kwargs)
        check_head(causal_model(self.model))
        self.reweighting, self.gram_options = reweighting, {"length_norm": length_norm, "tolerance": tolerance}
        self._states = self._written = None

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        check_groups([row.get("prompt") for row in inputs], self.num_generations)
        self._states, self._written = [], []
        output = super()._generate_and_score_completions(inputs)
        if "num_images" in output:
            raise UserError("salt.trl_hook knows text only: this batch holds images, take stock GRPOTrainer for it")
        states = torch.cat(self._states) if "old_per_token_logps" in output else self._unscored_states(output)
        self._states = self._written = None
        advantages = gather_packed({"advantages": output["advantages"]})["advantages"].cpu()
        gram = self._gram(output, states)
        reweighted = compute_once(lambda: self.reweighting(gram, advantages))                     # Alg. 1, l.5–9
        own = self.accelerator.process_index * len(inputs)
        output["advantages"] = reweighted.coefficients[own:own + len(inputs)].to(output["advantages"])    # Eq. 18
        self._log(reweighted)
        return output

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **options):
        """TRL's scoring pass. The first one over a generation batch, which is the policy's, leaves its states here."""
        if self._states is None or self._states:
            return super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep,
                                                              **options)
        with self._recording(model, self._states, slice(-logits_to_keep - 1, -1)):
            return super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep,
                                                              **options)

    def _generate_single_turn(self, *args, **options):
        """TRL's sampling. The states that wrote the tokens are kept, one position for each step of `generate`."""
        if self._written is None or self.use_vllm or self.use_transformers_continuous_batching or self.tools:
            return super()._generate_single_turn(*args, **options)
        with self._recording(self.model, self._written, slice(-1, None)):
            return super()._generate_single_turn(*args, **options)

    @torch.no_grad()
    def _unscored_states(self, output: dict) -> Tensor:
        """The states that predict the completions, (b, T, d), where TRL has no use for a scoring pass of the policy."""
        rows, length = output["completion_ids"].shape
        if len(self._written) >= length and all(step.shape[:2] == (rows, 1) for step in self._written):
            return torch.cat(self._written[:length], dim=1)
        tokens = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        size, states = self.args.per_device_train_batch_size, []
        with self._recording(self.model, states, slice(-length - 1, -1)), self.accelerator.autocast():
            for part, visible in zip(tokens.split(size), mask.split(size)):
                self.model(input_ids=part, attention_mask=visible, use_cache=False, logits_to_keep=1)
        return torch.cat(states)

    @contextmanager
    def _recording(self, model, states: list[Tensor], positions: slice) -> Iterator[None]:
        """Append what the backbone hands to the LM head at these positions of each forward pass: (·, T, d)."""
        def keep(module, arguments, result):
            states.append(result.last_hidden_state[:, positions])
        # The whole model is called, hooked from inside, so that DDP and FSDP2 see a forward pass of theirs.
        handle = causal_model(self.accelerator.unwrap_model(model)).base_model.register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    @torch.no_grad()
    def _gram(self, output: dict, states: Tensor) -> Tensor:
        """K of the completions of all processes, at the trainer's temperature: (m, m) float64, on every process."""
        mask = (output["completion_mask"] * output.get("tool_mask", 1)).bool()                           # (b, T)
        weight, bias = whole_head(causal_model(self.accelerator.unwrap_model(self.model)))
        if self.args.bf16 and not self.args.cast_lm_head_to_fp32:         # the type of the trainer's own logits
            weight = weight.bfloat16()
        return gram_of_all(states[mask], output["completion_ids"][mask], mask.sum(1), weight, bias=bias,
                           temperature=self.temperature, **self.gram_options)[0]                       # Eq. 4, 19

    def _log(self, reweighted: Reweighted) -> None:
        """a' in place of this batch's a in TRL's table of completions, and SALT's figures among TRL's metrics."""
        for _ in reweighted.coefficients:
            self._logs["advantages"].pop()
        self._logs["advantages"].extend(reweighted.coefficients.tolist())
        for name in ("alpha", "rank", "n_eff", "participation_ratio"):
            value = torch.as_tensor(getattr(reweighted, name), dtype=torch.float64).mean().item()
            self._metrics["train"][f"salt/{name}"].append(value)


def check_groups(prompts: list, group_size: int) -> None:
    """UserError unless the prompts of all processes, in rank order, are runs of group_size equal ones.

    TRL takes neighbours for a group without looking, and its advantages would be those of mixed prompts.
    """
    # crc32, since hash() of a string differs between processes
    order = sum(gather_objects([zlib.crc32(repr(prompt).encode()) for prompt in prompts]), [])
    if len(order) % group_size or any(len(set(order[first:first + group_size])) > 1
                                      for first in range(0, len(order), group_size)):
        raise UserError(f"the processes' responses, in rank order, are not groups of num_generations = {group_size} "
                        "with one prompt each: keep TRL's sampler and let it split the batch in order")
