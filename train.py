"""GRPO and DAPO with verifiable rewards, with or without SALT: the whole training loop on one page.

    python train.py --salt                       the tiny model on arithmetic, on a laptop
    accelerate launch train.py --model deepseek-7b --salt            eight GPUs (also torchrun)
    python train.py --resume runs/NAME           go on where a run stopped

The step (the paper's Alg. 1): sample, score, advantage, reweight, loss, step, log. The maths is in salt/; SALT is
the one call of `reweight`. Every random draw is seeded by (seed, purpose, step), so a run that is killed and resumed
writes the same lines as one that was left alone.

With several processes each samples for its share of the prompts; then all know every response and verdict, score and
train on their share of each mini-batch, and hold a shard of the model (salt/distributed.py). One process is the case
in which every share is the whole.
"""
import contextlib
import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from salt import checkpoint, distributed, models
from salt.advantages import group_advantages, reweight, scope_blocks, with_signal
from salt.config import MAY_CHANGE, TINY, Config, parse
from salt.data import Problem, PromptStream, load_problems, stable_seed
from salt.diagnose import report as diagnosis
from salt.errors import UserError, run
from salt.evaluation import evaluate_problems, summarise
from salt.geometry import head_gradient_norm
from salt.lora import add_adapters, merged_weights, without_adapters
from salt.loss import aggregate, clip_cov_mask, kl_cov_mask, kl_cov_penalty, kl_k3, policy_loss, sampling_correction
from salt.metrics import RunDirectory, Tracker, check_tracker, geometry_metrics, mean_of, sample_table, throughput
from salt.plan import plan, refuse_what_does_not_fit
from salt.proxy import NotFinite, lm_head_gram
from salt.reward import RewardPool
from salt.rollout import (GAP_LIMIT, Rollouts, check_sampler_gap, choose_backend, make_sampler, sample_mixed_groups,
                          sampler_gap)

# -------------------------------------------------------------------------------------------------------------- set-up


class Clock:
    """Seconds by phase of one step."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str):
        start = time.perf_counter()
        yield
        self.seconds[phase] = round(self.seconds.get(phase, 0.0) + time.perf_counter() - start, 4)


def encode_problems(problems: list[Problem], tokenizer, max_prompt: int) -> dict[str, list[int]]:
    """Token ids by problem id; prompts that are too long are left out and counted."""
    prompts = {p.id: models.encode_prompt(tokenizer, p.question, p.instruction) for p in problems}
    kept = {key: ids for key, ids in prompts.items() if len(ids) <= max_prompt}
    if len(kept) < len(prompts):
        print(f"dropped {len(prompts) - len(kept)} of {len(prompts)} prompts: longer than {max_prompt} tokens")
    if not kept:
        raise UserError(f"no prompt fits into --max-prompt {max_prompt} tokens")
    return kept


# ----------------------------------------------------------------------------------------------------------- the log


def check_theory(step: int, record: dict) -> None:
    """The run fails where Eq. 10, Eq. 11 or the gradient-norm identity does not hold on its own gradients.

    Tolerances are those of float32 advantages (6e-8 relative, summed over a group) and of a float32 backward pass.
    """
    if record.get("eq10_error", 0) > 1e-5 or record.get("eq11_violations", 0) > 0:
        raise SystemExit(f"step {step}: the residual-only identity or its bound fails (Eq. 10: "
                         f"{record['eq10_error']:.1e}, Eq. 11: {record['eq11_violations']:.0f} violations)")
    if not record.get("head_gradient_error", 0) <= 1e-3:                                           # NaN fails too
        raise SystemExit(f"step {step}: the LM head's gradient does not have the norm sqrt(a'Ka'/m) that K predicts "
                         f"(relative error {record['head_gradient_error']:.1e})")


# ------------------------------------------------------------------------------------------------- one optimizer update


def choose_tokens(config: Config, logprobs: Tensor, old: Tensor, coefficients: Tensor, mask: Tensor, seed: int):
    """Tokens that Clip-Cov leaves out or KL-Cov penalises, over the whole mini-batch: (m, T) or None."""
    if config.regularizer == "clip-cov":
        return clip_cov_mask(logprobs, old, coefficients, mask, ratio=config.clip_cov_ratio, low=config.clip_cov_low,
                             high=config.clip_cov_high, clip_low=config.clip_low, clip_high=config.clip_high,
                             generator=torch.Generator().manual_seed(seed))
    if config.regularizer == "kl-cov":
        return kl_cov_mask(logprobs, coefficients, mask, ratio=config.kl_cov_ratio)
    return None


def update(config: Config, model, optimizer, rollouts: Rollouts, coefficients: Tensor, old: Tensor,
           reference: Tensor | None, *, seed: int, first: bool, head_check: bool,
           correction: Tensor | None = None) -> dict[str, float]:
    """Loss over one mini-batch in micro-batches, backward, clip, step. Each process goes over its share of responses.

    coefficients: (m,); old, reference, correction (importance weights for the sampler's rounding): (m, T).

    `first`: the policy still is the one that wrote the responses. `head_check`: also measure ‖∂L/∂W_out‖ of the policy
    term. The denominator is the mini-batch's, so neither `micro_batch` nor the number of processes changes the gradient
    beyond rounding.
    """
    lengths, mask = rollouts.lengths, models.response_mask(rollouts.lengths).to(old.device)
    coefficients, own = coefficients.to(old.device), list(distributed.share(len(lengths)))
    denominator = len(lengths) if config.aggregation == "sequence-mean" else int(lengths.sum())
    chosen = None
    if config.regularizer in ("clip-cov", "kl-cov"):
        current = old if first else everyones(models.logprobs_only(
            model, rollouts.select(own), config.temperature, config.micro_batch), lengths)
        chosen = choose_tokens(config, current, old, coefficients, mask, seed)
    optimizer.zero_grad(set_to_none=True)
    head = models.lm_head(model).weight
    totals, head_gradient = dict.fromkeys(("tokens", "clipped", "ratio_minus_one", "policy_loss", "loss"), 0.0), 0.0
    for batch in models.micro_batches([rollouts.total_lengths[row] for row in own], config.micro_batch):
        rows = [own[index] for index in batch]
        part = rollouts.select(rows)
        logprobs, entropy = models.forward_logprobs(model, part, config.temperature, config.regularizer == "entropy")
        logprobs = models.unpack(logprobs, part.lengths)
        width = logprobs.shape[1]
        old_part, mask_part = old[rows, :width], mask[rows, :width]
        chosen_part = None if chosen is None else chosen[rows, :width]
        weighted = coefficients[rows] if correction is None else coefficients[rows, None] * correction[rows, :width]
        over_tokens = {"aggregation": config.aggregation, "denominator": denominator}
        policy, stats = policy_loss(logprobs, old_part, weighted, mask_part, clip_low=config.clip_low,
                                    clip_high=config.clip_high, clip=config.regularizer != "kl-cov",
                                    excluded=chosen_part if config.regularizer == "clip-cov" else None, **over_tokens)
        loss = policy                                                                                # Eq. 3 or 69
        stats["policy_loss"] = policy.item()
        if reference is not None:
            kl = aggregate(kl_k3(logprobs, reference[rows, :width]), mask_part, **over_tokens)            # Eq. 68
            loss, stats["kl"] = loss + config.kl_coef * kl, kl.item()
        if config.regularizer == "entropy":
            entropy = models.unpack(entropy, part.lengths)
            loss = loss - config.entropy_coef * aggregate(entropy, mask_part, **over_tokens)              # Eq. 71
        if config.regularizer == "kl-cov":
            penalty = kl_cov_penalty(logprobs, old_part, chosen_part, coef=config.kl_cov_coef)
            loss = loss + aggregate(penalty, mask_part, **over_tokens)
        if head_check:
            head_gradient = head_gradient + torch.autograd.grad(policy, head, retain_graph=True)[0]
        (loss * distributed.world_size()).backward()                   # FSDP2 averages over processes; this is a sum
        for key, value in (stats | {"loss": loss.item()}).items():
            totals[key] = totals.get(key, 0.0) + value
    totals = distributed.add_up(totals)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if not torch.isfinite(norm):
        raise SystemExit("the gradient is not finite: training has diverged, try a lower --lr; the checkpoints are "
                         "intact")
    optimizer.step()
    tokens = max(totals.pop("tokens"), 1)
    totals["clip_fraction"] = totals.pop("clipped") / tokens
    totals["ratio_minus_one"] /= tokens
    totals["grad_norm"] = norm.item()
    return totals | ({"head_gradient": head_gradient.norm().item()} if head_check else {})


def form_gram(config: Config, head: models.Head, scored: models.Scored, size: int, step: int) -> Tensor:
    """Eq. 4 and 19 for the responses of a mini-batch, of which `scored` is this process's share: (m, m), m = `size`.

    NaN where it overflows: SALT then leaves a as it is.
    """
    gram_of = distributed.vocabulary_parallel_gram if isinstance(head.weight, DTensor) else lm_head_gram
    try:
        return gram_of(scored.hidden, scored.tokens, scored.lengths, head.weight.detach(), bias=head.bias,
                       temperature=config.temperature, length_norm=config.length_norm,
                       tolerance=config.gram_tolerance, logsumexp=scored.logsumexp, delta_norms=scored.delta_norms)
    except NotFinite as error:
        if distributed.rank() == 0:
            print(f"step {step}: no Gram matrix, the advantages stay as they are: {error}", file=sys.stderr)
        return torch.full((size, size), torch.nan)


def everyones(packed: Tensor, lengths: Tensor) -> Tensor:
    """This process's packed values of a mini-batch -> those of all its responses: (m, T)."""
    return models.unpack(distributed.gather_packed({"values": packed})["values"], lengths)


# -------------------------------------------------------------------------------------------------------- the whole run


def build(config: Config, device: torch.device, cleanup: contextlib.ExitStack):
    """Policy, frozen reference (None without KL, or with adapters), tokenizer, sampler, largest gap it may show."""
    source = distributed.compute_once(lambda: models.resolve(config.model, seed=config.seed))
    low = config.precision == "bfloat16" or config.precision is None and device.type == "cuda"
    sharded = device.type == "cuda" or distributed.world_size() > 1
    compute = torch.bfloat16 if low and sharded else None                    # one CPU process computes in its weights
    master = torch.bfloat16 if low and config.lora_rank else torch.float32
    reference = None
    if config.kl_coef > 0 and not config.lora_rank:
        # Loaded in its dtype, not cast: a cast takes the rotary frequencies along. First: the policy takes more memory.
        reference = models.load(source, dtype=compute or master)[0].requires_grad_(False)
        reference = distributed.place(reference, device, compute_dtype=compute)
    model, tokenizer = models.load(source, dtype=master)
    if config.lora_rank:
        add_adapters(model, config.lora_rank, seed=config.seed)
    model = distributed.place(model, device, compute_dtype=compute, checkpoint_layers=config.checkpoint_layers)
    backend = choose_backend(config.rollout, gpu=device.type == "cuda")
    sampler = make_sampler(backend, model, tokenizer, source, context=config.max_prompt + config.max_response,
                           dtype=compute or torch.float32, memory_share=config.vllm_memory, seed=config.seed)
    cleanup.callback(sampler.close)
    return model, reference, tokenizer, sampler, GAP_LIMIT[compute or torch.float32]


def train(config: Config, resume: Path | None, problems: list[Problem], pool, device: torch.device,
          preempted: list, cleanup: contextlib.ExitStack, diagnose: bool = False) -> RunDirectory | None:
    """The whole run; None when it was stopped on the way (`preempted` has become non-empty) and a checkpoint written.

    `diagnose`: one batch, no update and no run directory; prints what SALT would do (salt/diagnose.py).
    """
    test = load_problems(config.eval_dataset or config.dataset, split="test", data_dir=config.data_dir,
                         limit=config.eval_limit) if config.eval_every else []
    if test and test[0].kind != problems[0].kind:
        raise UserError(f"--eval-dataset {config.eval_dataset} is judged as {test[0].kind}, {config.dataset} as "
                        f"{problems[0].kind}: a run has one reward")
    model, reference, tokenizer, sampler, gap_limit = build(config, device, cleanup)
    context = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
    if config.max_prompt + config.max_response > context:
        raise UserError(f"--max-prompt {config.max_prompt} and --max-response {config.max_response} exceed the context "
                        f"of {config.model}, {context} tokens")
    prompts = encode_problems(problems, tokenizer, config.max_prompt)
    stream = PromptStream([problem for problem in problems if problem.id in prompts], config.seed)
    drawn_at_once = config.gen_batch if config.algo == "dapo" else config.batch_size
    budget = config.epochs * len(prompts)                                               # prompts in all epochs
    if budget < drawn_at_once:
        raise UserError(f"{config.epochs} epochs of {len(prompts)} prompts do not fill one batch of {drawn_at_once}")
    total = min(config.steps or sys.maxsize, budget // (1 if config.algo == "dapo" else config.batch_size))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=config.lr,
                                  weight_decay=config.weight_decay)
    head = models.lm_head(model)
    entropy_range, done, stopped = None, 0, False

    settings = dataclasses.asdict(config)
    if diagnose:
        run_directory = RunDirectory(Path(config.output))
    elif resume is None:
        run_directory = distributed.compute_once(lambda: RunDirectory.create(Path(config.output), settings))
    else:
        run_directory = RunDirectory(resume)
        state = checkpoint.load(run_directory.checkpoints, model, optimizer, settings, MAY_CHANGE)
        if state is None:
            print(f"no checkpoint in {resume}: starting from the beginning")
        else:
            stream.load(state["stream"])
            entropy_range, done = state["entropy_range"], state["step"]
            sampler.sync(merged_weights(model))
        distributed.compute_once(lambda: run_directory.rewind(done if state else -1))
    main_process = distributed.rank() == 0
    tracker = Tracker(config.tracker, run_directory.path, settings) if config.tracker and main_process else None

    def log(record: dict) -> None:
        if main_process:
            run_directory.log(record)
        if tracker:
            tracker.log(record)

    def evaluate() -> dict[str, float]:
        rows = evaluate_problems(sampler, tokenizer, test, pool, samples=config.eval_samples,
                                 temperature=config.eval_temperature, max_tokens=config.max_response,
                                 seed=stable_seed(config.seed, "evaluation"))
        return {f"eval_{key}": value for key, value in summarise(list(rows), ks=(1, config.eval_samples)).items()}

    print(f"{'one batch' if diagnose else run_directory.path}: {config.model} on {config.dataset}, {config.algo}"
          f"{f' + SALT ({config.salt}, scope {config.salt_scope})' if config.salt else ''}, "
          f"{distributed.world_size()} x {device.type}")
    if done == 0 and config.eval_every:
        log({"step": 0} | evaluate())
    bar = tqdm(total=total if total < budget else None, initial=done, unit="step", dynamic_ncols=True,
               disable=None if main_process else True)

    for step in range(done + 1, total + 1):
        if stream.taken + drawn_at_once > budget:
            break
        clock, started = Clock(), time.perf_counter()
        torch.manual_seed(stable_seed(config.seed, "step", step))                  # nothing below depends on the past

        # ---- sample: B prompts x G responses at temperature tau                                          Alg. 1, l.1
        def sample(attempt: int) -> tuple[Rollouts, list[str]]:
            chosen = stream.take(drawn_at_once)
            chosen = [chosen[index] for index in distributed.share(len(chosen))]
            fresh = sampler.generate([prompts[problem.id] for problem in chosen], config.group_size,
                                     temperature=config.temperature, max_tokens=config.max_response,
                                     seed=distributed.own_seed(stable_seed(config.seed, "rollout", step, attempt)))
            return fresh, [problem.answer for problem in chosen for _ in range(config.group_size)]

        with clock("sample"):
            if config.algo == "dapo":
                rollouts, verdicts, judged = sample_mixed_groups(config, sample, pool)
            else:
                fresh, answers = sample(0)
                pending = pool.submit(fresh.texts, answers)                        # judged while the model scores
                rollouts = Rollouts.join(distributed.gather_objects(fresh))
            sampler.sleep()

        # ---- score: old and reference log-probabilities, entropy, hidden states; then the rewards
        measure = bool(config.salt) or config.diagnostics == "on" or diagnose
        lengths = rollouts.lengths
        mini_batches = list(torch.arange(len(lengths)).split(config.mini_batch * config.group_size))
        scored, old, frozen = [], [], []                                                   # one entry per mini-batch
        with clock("score"):
            for members in mini_batches:
                share = rollouts.select(members[list(distributed.share(len(members)))].tolist())
                scored.append(models.score(model, share, config.temperature, micro_batch=config.micro_batch,
                                           keep_hidden=measure))
                old.append(everyones(scored[-1].logprobs, lengths[members]))                              # (m, T)
                if config.kl_coef > 0:
                    with contextlib.nullcontext() if reference else without_adapters(model):
                        frozen.append(everyones(models.logprobs_only(reference or model, share, config.temperature,
                                                                     config.micro_batch), lengths[members]))
            entropy = distributed.mean(torch.cat([part.entropy for part in scored]))
            gap = sampler_gap(rollouts, torch.cat([values[models.response_mask(lengths[members])]
                                                   for values, members in zip(old, mini_batches)]))
            check_sampler_gap(gap, config.sampler_gap_limit or gap_limit)
            low, high = entropy_range or (entropy, entropy)
            entropy_range = min(low, entropy), max(high, entropy)
        with clock("reward"):
            if config.algo == "grpo":
                verdicts = judged = sum(distributed.gather_objects(pending.result()), [])
            rewards = torch.tensor(verdicts).view(-1, config.group_size)                                  # (B, G)
            rewards = 2 * rewards - 1 if config.algo == "dapo" else rewards

        # ---- advantage, Gram, reweight: for all mini-batches, at the policy that wrote the responses   Alg. 1, l.2-9
        advantages = group_advantages(rewards).flatten()                                                  # Eq. 2, 12
        if diagnose:
            members = mini_batches[0]
            gram = form_gram(config, head, scored[0], len(members), step)
            print(diagnosis(gram, advantages[members], config.group_size, scope=config.salt_scope,
                            signal_only=config.salt_signal_only,
                            generator=torch.Generator().manual_seed(config.seed), rank_scale=config.rank_scale,
                            rank_max=config.rank_max, below_full=config.rank_below_full))
            return None
        coefficients, geometry, grams = advantages.clone(), [], []
        for index, members in enumerate(mini_batches if measure else ()):
            def reweighted_once():
                generator = torch.Generator().manual_seed(stable_seed(config.seed, "salt", step, index))
                blocks = scope_blocks(config.salt_scope, len(members), config.group_size, generator)
                if config.salt_signal_only:
                    blocks = with_signal(blocks, advantages[members], config.group_size)
                return reweight(gram, advantages[members], blocks, config.salt, alpha=config.alpha, entropy=entropy,
                                entropy_range=entropy_range, rank_max=config.rank_max, rank_scale=config.rank_scale,
                                below_full=config.rank_below_full, generator=generator)                   # Eq. 13-17

            with clock("geometry"):
                gram, reweighted = form_gram(config, head, scored.pop(0), len(members), step), None       # Eq. 4, 19
                if config.salt:
                    reweighted = distributed.compute_once(reweighted_once)
                    coefficients[members] = reweighted.coefficients                                       # Eq. 18
            if config.diagnostics == "on":
                with clock("diagnostics"):
                    geometry.append(geometry_metrics(gram, advantages[members], config.group_size,
                                                     coefficients[members], reweighted))
            grams.append(gram)

        # ---- loss, backward, clip, step: one update per mini-batch
        checked = (config.model == "tiny" and config.diagnostics == "on" and not head.tied and not config.lora_rank
                   and config.regularizer != "clip-cov" and not config.gram_tolerance
                   and not isinstance(head.weight, DTensor))
        losses = []
        with clock("update"):
            for index, members in enumerate(mini_batches):
                part = rollouts.select(members.tolist())
                correction = None
                if config.tis_cap and part.packed_logprobs is not None:
                    own = models.unpack(part.packed_logprobs.to(old[index]), part.lengths)
                    correction = sampling_correction(old[index], own, cap=config.tis_cap)
                losses.append(update(config, model, optimizer, part, coefficients[members], old[index],
                                     frozen[index] if frozen else None, first=index == 0,
                                     seed=stable_seed(config.seed, "clip-cov", step, index),
                                     head_check=checked and index == 0, correction=correction))
            optimizer.zero_grad(set_to_none=True)                               # a GPU's sampler needs the room
        if checked and grams[0].isfinite().all():
            members = mini_batches[0]
            predicted, uncancelled = (
                head_gradient_norm(matrix, coefficients[members], lengths[members],
                                   aggregation=config.aggregation, length_norm=config.length_norm)
                for matrix in (grams[0], grams[0].diagonal().diag()))
            error = abs(losses[0]["head_gradient"] - predicted)
            losses[0]["head_gradient_error"] = error / max(predicted, uncancelled / 10, 1e-12)

        # ---- sync, log, save
        with clock("sync"):
            sampler.sync(merged_weights(model))
        right = torch.tensor(judged).view(-1, config.group_size).mean(1)                # also groups that DAPO dropped
        record = {"step": step, "epoch": stream.state()["epoch"], "prompts": stream.taken,
                  "reward": rewards.mean().item(), "pass_rate": sum(judged) / len(judged),
                  "all_right": (right == 1).float().mean().item(), "all_wrong": (right == 0).float().mean().item(),
                  "length": lengths.float().mean().item(), "entropy": entropy,
                  "truncated": 1 - sum(rollouts.finished) / len(rollouts.finished)}
        record |= mean_of(losses) | mean_of(geometry) | gap
        if grams:
            record["gram_not_finite"] = sum(not gram.isfinite().all() for gram in grams) / len(grams)
        if config.model == "tiny":
            check_theory(step, record)
        last = step == total or stream.taken + drawn_at_once > budget
        stopped = any(distributed.gather_objects(bool(preempted))) and not last
        if config.eval_every and (step % config.eval_every == 0 or last):
            with clock("evaluate"):
                record |= evaluate()
        seconds = clock.seconds | {"total": round(time.perf_counter() - started, 4)}
        drawn = int(lengths.sum()) * len(judged) // len(verdicts)                # DAPO: as if the dropped were alike
        steps_left = min(total - step, (budget - stream.taken) * step // stream.taken)
        log(record | {"system": throughput(seconds, drawn, steps_left) | {
            "seconds": seconds, "reward_restarts": pool.restarts, "reward_timeouts": pool.timeouts}})
        if main_process and config.samples_every and (step % config.samples_every == 0 or last):
            asked = tokenizer.batch_decode(rollouts.prompts)
            run_directory.write_samples(step, sample_table(asked, rollouts.texts, rewards.flatten(), advantages,
                                                           coefficients, config.group_size))
        if step % config.save_every == 0 or last or stopped:
            checkpoint.save(run_directory.checkpoints, step, model, optimizer, {
                "config": settings, "step": step, "stream": stream.state(), "entropy_range": entropy_range})
            if main_process:
                run_directory.draw()
        bar.set_postfix({key: f"{record[key]:.2f}" for key in ("pass_rate", "length", "entropy", "alpha", "rank")
                         if key in record})
        bar.update()
        if stopped:
            break

    bar.close()
    if tracker:
        tracker.finish()
    if stopped:
        print(f"stopped by SIGTERM, everything is saved: go on with --resume {run_directory.path}")
        return None
    weights = {name: tensor.cpu() for name, tensor in merged_weights(model) if main_process}
    if main_process:
        model.save_pretrained(run_directory.final, state_dict=weights)
        tokenizer.save_pretrained(run_directory.final)
    return run_directory


def report(run_directory: RunDirectory) -> None:
    """Before and after, as the run's own evaluations have it."""
    evaluated = [record for record in run_directory.records() if "eval_pass@1" in record]
    if len(evaluated) > 1:
        before, after = evaluated[0], evaluated[-1]
        for key in (key for key in before if key.startswith("eval_pass@") and not key.endswith("_se")):
            print(f"{key[5:]:7} {100 * before[key]:5.1f} % before -> {100 * after[key]:5.1f} % after "
                  f"step {after['step']}")
    print(f"log: {run_directory.path}/metrics.jsonl   figure: {run_directory.path}/curves.png   "
          f"model: {run_directory.final}")


@contextlib.contextmanager
def sigterm_noted():
    """A list that SIGTERM (a cluster's preemption, or torchrun's after a lost process) fills: looked at between steps,
    because a handler must not talk to other processes."""
    noted: list[bool] = []
    before = signal.signal(signal.SIGTERM, lambda *_: noted.append(True))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: list[str] | None = None, pool=None) -> int:
    """`pool`: anything with RewardPool's submit, restarts and timeouts, to train on another reward."""
    config, resume, asked = parse(argv)
    if asked.plan:
        if os.environ.get("RANK", "0") == "0":
            print(plan(config, **asked.plan))
        return 0
    if asked.diagnose:
        config = dataclasses.replace(config, eval_every=0, tracker=None)
    if config.tracker:
        check_tracker(config.tracker)
    with contextlib.ExitStack() as stack:
        preempted, device = stack.enter_context(sigterm_noted()), distributed.start()
        stack.callback(distributed.stop)
        config = distributed.compute_once(lambda: config)                          # a run's name holds the time
        processes, prompts = distributed.world_size(), config.mini_batch
        if processes > prompts:
            raise UserError(f"{processes} processes for mini-batches of {prompts} prompts: start at most {prompts}")
        if device.type == "cuda":
            refuse_what_does_not_fit(config, gpus=processes,
                                     gpu_memory=torch.cuda.get_device_properties(device).total_memory / 2 ** 30)
        if config.model == "tiny" and resume is None:
            sizes = ", ".join(f"{name} {getattr(config, name)}" for name in TINY)
            print(f"tiny model: its own sizes instead of Table 4's ({sizes})")
        with contextlib.redirect_stderr(sys.stdout if distributed.rank() else sys.stderr):        # counts: said once
            problems = load_problems(config.dataset, split=config.split, data_dir=config.data_dir, limit=config.limit)
        pool = pool or stack.enter_context(RewardPool(problems[0].kind, config.workers, config.reward_timeout,
                                                      allow_weak_sandbox=config.allow_weak_sandbox))
        try:
            run_directory = train(config, resume, problems, pool, device, preempted, stack, asked.diagnose)
        except RuntimeError as error:
            if not distributed.is_lost_process(error):
                raise
            raise SystemExit("another process of this run was lost: start again with --resume") from error
        if run_directory and distributed.rank() == 0:
            report(run_directory)
    return 0


if __name__ == "__main__":
    run(main)
