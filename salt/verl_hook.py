"""SALT inside verl 0.9: an engine that forms K while it scores, and a trainer that applies it. No file of verl changes.

    VERL_USE_EXTERNAL_MODULES=salt.verl_hook VERL_ENGINE_VENDOR=salt python -m verl.trainer.main_ppo \
        trainer.v1.trainer_mode=salt_sync algorithm.adv_estimator=grpo actor_rollout_ref.actor.strategy=fsdp2 ...

The engine is what computes the old log-probabilities on the workers. In that pass, and not in the reference's, it keeps
the states that the LM head reads, and returns the rows of K that belong to its own responses as one more output,
`salt_gram`. verl carries outputs to the trainer row by row, so there K is whole again; the trainer turns verl's
advantages into coefficients and puts them back. `+algorithm.salt_variant=interpolated` chooses another variant.

Glossary
    paper    name                 shape                 equation
    h_t      states               (1, tokens, d)        19   of a micro-batch without padding, or (b, longest, d)
    K        salt_gram            (b, m) of (m, m)      4    columns in the order of the batch
    a, a'    advantages           (m, |o_i|), nested    2, 18

Departures from the paper
    1. K is that of the batch for which verl computes advantages, formed once, also where verl then splits it into
       several PPO mini-batches.
    2. verl's padding responses, which fill a batch up, have no token that counts: feature 0, a' = 0.

What has run, and what has not. Run on a CPU, in tests/test_verl_hook.py: this engine under verl's real FSDP2 engine
(its scoring pass on two ranks, packed and padded, with and without dynamic micro-batches), and this trainer's advantage
step through Ray and TransferQueue. Not run: rollouts, CUDA, LoRA, and a training from beginning to end.
"""
import os

import torch
from torch import Tensor

from salt.advantages import Reweighted, salt_advantages
from salt.distributed import gather_objects
from salt.errors import UserError
from salt.hooks import causal_model, check_form, gram_of_all, require, whole_head

DEVIATION = 0.1                       # nats: more than bfloat16 and another attention kernel can do to a mean

require("verl", "0.9.1")
import transfer_queue as tq
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cuda", vendor="salt")
class SaltEngine(FSDPEngineWithLMHead):
    """verl's FSDP2 engine; the policy's scoring pass also returns its rows of K."""
    _parts: list | None = None                              # not None while that pass is under way

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        # The trainer asks for entropies where it scores the policy, and never where it scores the reference.
        if not (forward_only and tu.get_non_tensor_data(data, "calculate_entropy", False)):
            return super().forward_backward_batch(data, loss_function, forward_only)
        if self.ulysses_sequence_parallel_size > 1:
            raise UserError("ulysses_sequence_parallel_size is above 1: salt.verl_hook needs whole sequences")
        self._parts, data["salt_row"] = [], torch.arange(len(data))
        output = super().forward_backward_batch(data, loss_function, forward_only)
        _, hidden, tokens = zip(*sorted((part for parts in self._parts for part in parts), key=lambda part: part[0]))
        self._parts = None
        output["model_output"]["salt_gram"] = self._own_rows(data, hidden, tokens, output["model_output"]["log_probs"])
        return output

    def forward_step(self, micro_batch, loss_function, forward_only):
        if self._parts is None:
            return super().forward_step(micro_batch, loss_function, forward_only)
        states = []
        handle = causal_model(self.module).base_model.register_forward_hook(
            lambda *call: states.append(call[-1].last_hidden_state))
        try:
            result = super().forward_step(micro_batch, loss_function, forward_only)
        finally:
            handle.remove()
        self._parts.append(response_parts(states[0], micro_batch["input_ids"], micro_batch["response_mask"],
                                          micro_batch["salt_row"]))
        return result

    def _own_rows(self, data, hidden: tuple[Tensor, ...], tokens: tuple[Tensor, ...], log_probs: Tensor) -> Tensor:
        """This rank's rows of K, (b, m) float64. The LM head's form is checked by verl's own log-probabilities."""
        model = causal_model(self.module)
        check_form(model, type(model).__name__)
        weight, bias = whole_head(model)
        temperature = torch.as_tensor(tu.get(data, "temperature"), dtype=torch.float64).unique()
        if len(temperature) != 1:
            raise UserError(f"temperatures {temperature.tolist()} in one batch: salt.verl_hook needs a single one")
        weight, lengths = weight.to(self._autocast_dtype), torch.tensor([len(part) for part in tokens])
        gram, own = gram_of_all(torch.cat(hidden), torch.cat(tokens), lengths, weight, bias=bias,
                                temperature=float(temperature))                                        # Eq. 4, 19
        theirs = torch.cat(response_values(log_probs, data["input_ids"], data["response_mask"]))
        if len(own) and (own - theirs.to(own)).abs().mean() > DEVIATION:
            raise UserError(f"{type(model).__name__} does more to its logits than W h + b: not supported")
        first = sum(gather_objects(len(lengths))[:torch.distributed.get_rank()])
        return gram[first:first + len(lengths)]


def response_values(values: Tensor, input_ids: Tensor, response_mask: Tensor) -> list[Tensor]:
    """What `values` holds at the positions that predict each response's counted tokens.

    values: nested (b, length, …) like input_ids; response_mask: nested (b, |o_i|), the end of every sequence.
    """
    return [row[-len(mask) - 1:-1][mask.bool()] for row, mask in zip(values.unbind(), response_mask.unbind())]


def response_parts(states: Tensor, input_ids: Tensor, response_mask: Tensor,
                   rows: Tensor) -> list[tuple[int, Tensor, Tensor]]:
    """(row, states (T_i, d), tokens (T_i,)) of each response of a micro-batch; T_i tokens count.

    states: packed (1, at least Σ lengths, d), or padded on the right (b, longest, d); the others nested (b, ·).
    """
    sizes = input_ids.offsets().diff().tolist()
    whole = states[0, :sum(sizes)].split(sizes) if len(states) == 1 else [s[:n] for s, n in zip(states, sizes)]
    parts = []
    for row, sequence, ids, mask in zip(rows.tolist(), whole, input_ids.unbind(), response_mask.unbind()):
        counts = mask.bool()
        parts.append((row, sequence[-len(mask) - 1:-1][counts], ids[-len(mask):][counts]))
    return parts


def salt_coefficients(advantages: Tensor, response_mask: Tensor, gram: Tensor,
                      variant: str = "salt") -> tuple[Tensor, Reweighted]:
    """verl's advantages, nested (m, |o_i|), and K (m, m) -> a' on every counted token, and what SALT found.

    UserError where an advantage differs between the tokens of a response: SALT reweights responses (GRPO and its kin).
    """
    per_response = []
    for values, mask in zip(advantages.unbind(), response_mask.unbind()):
        counted = values[mask.bool()]
        if len(counted) and counted.amax() - counted.amin() > 1e-5:
            raise UserError("advantages differ between the tokens of a response: take algorithm.adv_estimator=grpo")
        per_response.append(counted[0] if len(counted) else values.new_zeros(()))
    reweighted = salt_advantages(gram, torch.stack(per_response).float(), variant)                     # Eq. 18
    spread = [value * mask.to(value) for value, mask in zip(reweighted.coefficients, response_mask.unbind())]
    return torch.nested.as_nested_tensor(spread, layout=torch.jagged), reweighted


def check_run(config, environment: dict[str, str]) -> None:
    """UserError for a verl configuration under which no K would be formed, or a wrong one."""
    actor = config.actor_rollout_ref.actor
    correction = config.algorithm.get("rollout_correction") or {}
    for wrong, message in (
            (actor.strategy != "fsdp2", f"actor.strategy is {actor.strategy}: salt.verl_hook needs fsdp2"),
            (environment.get("VERL_ENGINE_VENDOR") != "salt", "VERL_ENGINE_VENDOR is not salt: the engine would be "
             "verl's own, which forms no K"),
            (config.algorithm.adv_estimator != "grpo", f"algorithm.adv_estimator is {config.algorithm.adv_estimator}: "
             "SALT reweights GRPO's advantages"),
            (correction.get("bypass_mode", False), "algorithm.rollout_correction.bypass_mode leaves out the scoring "
             "pass in which K is formed")):
        if wrong:
            raise UserError(message)


@register_trainer("salt_sync")
class SaltTrainer(PPOTrainerSync):
    """verl's synchronous trainer, with SALT after its advantages."""

    def __init__(self, config):
        check_run(config, os.environ)
        super().__init__(config)

    def _compute_advantage(self, batch, metrics):
        batch = super()._compute_advantage(batch, metrics)
        rows = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id,
                               select_fields=["advantages", "response_mask", "salt_gram"])
        gram = torch.stack(list(rows["salt_gram"].unbind()))                                           # (m, m)
        rows["advantages"], found = salt_coefficients(rows["advantages"], rows["response_mask"], gram,
                                                      self.config.algorithm.get("salt_variant", "salt"))
        metrics.update({f"salt/{name}": getattr(found, name)
                        for name in ("alpha", "rank", "n_eff", "participation_ratio")})
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=rows.select("advantages"))
