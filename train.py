"""GRPO and DAPO with verifiable rewards, with or without SALT: the whole training loop on one page.

    python train.py --salt                       the tiny model on arithmetic, on a laptop
    python train.py --resume runs/NAME           go on where a run stopped

The step (DESIGN and paper, Alg. 1): sample, score, advantage, reweight, loss, step, log. The maths is in salt/; SALT is
the one call of `reweight`. Every random draw is seeded by (seed, purpose, step), so a run that is killed and resumed
writes the same lines as one that was left alone.
"""
import argparse
import contextlib
import copy
import dataclasses
import math
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from salt import checkpoint, models
from salt.advantages import VARIANTS, group_advantages, reweight, scope_blocks
from salt.data import NAMES, Problem, PromptStream, load_problems, stable_seed
from salt.errors import Parser, UserError, run
from salt.evaluation import evaluate_problems, summarise
from salt.geometry import head_gradient_norm
from salt.loss import (AGGREGATIONS, aggregate, clip_cov_mask, kl_cov_mask, kl_cov_penalty, kl_k3, policy_loss)
from salt.metrics import RunDirectory, geometry_metrics, mean_of
from salt.proxy import lm_head_gram
from salt.reward import RewardPool
from salt.rollout import Rollouts, TransformersSampler, sample_mixed_groups

# ------------------------------------------------------------------------------------------------------- configuration


def option(default, help: str, choices=None):
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass
class Config:
    """Table 4's values are the defaults. None: decided by --algo, --salt-preset or the model (see `settle`)."""
    model: str = option("tiny", f"{', '.join(models.PRESETS)}, a Hugging Face folder or a hub id")
    dataset: str = option("arith", f"{', '.join(NAMES)}, or a .jsonl or .parquet file with prompt and answer")
    split: str = option("train", "split to train on")
    data_dir: str | None = option(None, "folder with local copies of the data sets (default: the hub)")
    limit: int | None = option(None, "train on the first N problems only")
    output: str | None = option(None, "run directory (default: a new one below runs/)")
    seed: int = option(0, "decides every random draw, the tiny model's warm start included")

    algo: str = option("grpo", "the base algorithm", ("grpo", "dapo"))
    salt: str | None = option(None, "reweight the advantages; --salt alone means --salt salt", tuple(VARIANTS))
    salt_preset: str | None = option(None, "the paper's, or the authors' released code's scope, feature length, rank "
                                     "rule and aggregation together", ("paper", "released-code"))
    salt_scope: str | int | None = option(None, "responses that form one K: mini-batch, group, or a number")
    length_norm: str | None = option(None, "feature of a response: mean or sum over its tokens", ("mean", "sum"))
    rank_scale: float = option(1.0, "k_t = round(rank_scale * PR)")
    rank_max: int | None = option(None, "upper end of k_t")
    rank_below_full: bool | None = option(None, "k_t <= m - 1")
    gram_tolerance: float | None = option(None, "certified share of a feature that near-certain tokens may take along "
                                          "when they are left out of K: 0 (exact) for tiny, else 0.1")
    alpha: float = option(0.5, "the constant of --salt fixed-alpha")

    group_size: int = option(8, "responses per prompt, G")
    batch_size: int = option(64, "prompts per step")
    mini_batch: int = option(32, "prompts per optimizer update, B")
    micro_batch: int = option(8, "responses per forward pass: memory only, the gradient does not depend on it")
    epochs: int = option(2, "passes over the training problems (DAPO finishes the step it has begun)")
    steps: int | None = option(None, "stop after this many steps")
    temperature: float = option(0.6, "of the sampler, and of the logits in loss and proxy")
    top_p: float = option(1.0, "refused below 1: the ratio of Eq. 3 would be biased")
    top_k: int = option(0, "refused above 0, for the same reason")
    max_prompt: int = option(1024, "tokens; longer prompts are dropped and counted")
    max_response: int = option(8192, "tokens")
    gen_batch: int = option(128, "DAPO: prompts per generation batch")
    max_gen_batches: int = option(10, "DAPO: generation batches per step at most")

    lr: float = option(1e-6, "learning rate, constant")
    weight_decay: float = option(0.01, "of AdamW")
    max_grad_norm: float = option(1.0, "gradient clipping")
    clip_low: float | None = option(None, "0.2; 1 with --regularizer clip-cov")
    clip_high: float | None = option(None, "0.2; 0.28 for DAPO; 1 with --regularizer clip-cov")
    kl_coef: float | None = option(None, "KL to the frozen first policy: 0.001; 0 for DAPO")
    aggregation: str | None = option(None, "sequence-mean (GRPO, Eq. 3) or token-mean (DAPO, Eq. 69)", AGGREGATIONS)
    regularizer: str = option("none", "entropy control to compare with", ("none", "entropy", "clip-cov", "kl-cov"))
    entropy_coef: float = option(1e-3, "weight of the entropy bonus, with --regularizer entropy")
    clip_cov_ratio: float = option(2e-4, "share of tokens that Clip-Cov takes out")
    clip_cov_low: float = option(1.0, "covariance from which on")
    clip_cov_high: float = option(5.0, "covariance up to which")
    kl_cov_ratio: float = option(2e-3, "share of tokens that KL-Cov penalises")
    kl_cov_coef: float = option(1.0, "weight of its penalty")

    eval_every: int = option(0, "evaluate before, every N steps and after; 0: never")
    eval_limit: int = option(128, "test problems per evaluation")
    eval_samples: int = option(8, "responses per test problem")
    eval_temperature: float = option(0.6, "temperature of the evaluation")
    save_every: int = option(10, "steps between checkpoints")
    diagnostics: str = option("on", "geometry and theory checks, also in runs without SALT", ("on", "off"))
    workers: int = option(2, "reward processes")
    reward_timeout: int = option(5, "seconds per verdict")


TINY = {"batch_size": 32, "mini_batch": 16, "micro_batch": 128, "gen_batch": 48, "max_prompt": 16, "max_response": 48,
        "steps": 60, "lr": 1e-4, "eval_every": 20, "gram_tolerance": 0.0}
RELEASED_CODE = {"salt_scope": 8, "length_norm": "sum", "rank_max": 64, "rank_below_full": True,
                 "aggregation": "token-mean"}
PAPER = {"salt_scope": "mini-batch", "length_norm": "mean", "rank_below_full": False}
MAY_CHANGE = ("steps", "save_every", "workers")                       # on --resume
MAY_BE_ZERO, MAY_BE_INFINITE = ("seed", "top_k", "eval_every"), ("max_grad_norm", "clip_high")


def scope(text: str) -> str | int:
    return int(text) if text.isdecimal() else text


def parse(argv: list[str] | None) -> tuple[Config, Path | None]:
    """The settled configuration, and the run directory to go on with (--resume)."""
    parser = Parser(description="GRPO and DAPO with SALT. Defaults are Table 4 of the paper; the tiny model has its "
                    f"own: {', '.join(f'{name} {value}' for name, value in TINY.items())}.")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with this run directory")
    for item in dataclasses.fields(Config):
        kind = scope if item.name == "salt_scope" else next(
            t for t in (bool, str, float, int) if t.__name__ in str(item.type))
        extra = {"action": argparse.BooleanOptionalAction} if kind is bool else {
            "type": kind, "metavar": item.name[0].upper()}
        if item.name == "salt":
            extra |= {"nargs": "?", "const": "salt"}
        default = "" if item.default is None else f" (default {item.default})"
        parser.add_argument(f"--{item.name.replace('_', '-')}", default=argparse.SUPPRESS, **extra,
                            help=(item.metadata["help"] + default).replace("%", "%%"))
    given = vars(parser.parse_args(argv))
    resume = given.pop("resume")
    if resume is None:
        config = settle(given)
    else:
        recorded = RunDirectory.config(resume, [item.name for item in dataclasses.fields(Config)])
        changed = [k for k, v in given.items() if k not in MAY_CHANGE and v != recorded.get(k)]
        if changed:
            raise UserError(f"{resume} was started with another configuration: {changed[0]} is "
                            f"{recorded.get(changed[0])!r} there, not {given[changed[0]]!r}")
        config = Config(**recorded | {k: v for k, v in given.items() if k in MAY_CHANGE})
    validate(config)
    return config, resume


def settle(given: dict) -> Config:
    """What was not asked for follows from the model, the preset and the algorithm, in this order."""
    preset = RELEASED_CODE if given.get("salt_preset") == "released-code" else PAPER
    dapo = given.get("algo") == "dapo"
    regularizer = given.get("regularizer")
    clip = {"clip_low": 1.0, "clip_high": 1.0} if regularizer == "clip-cov" else {
        "clip_low": 0.2, "clip_high": 0.28 if dapo and regularizer != "kl-cov" else 0.2}
    derived = {"kl_coef": 0.0 if dapo else 0.001, "aggregation": "token-mean" if dapo else "sequence-mean"} | clip
    sizes = TINY if given.get("model", "tiny") == "tiny" else {"gram_tolerance": 0.1}
    config = Config(**derived | preset | sizes | given)
    if config.output is None:
        names = Path(config.model).name, Path(config.dataset).stem, config.algo, config.salt
        config.output = f"runs/{'-'.join(filter(None, names))}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    return config


def validate(config: Config) -> None:
    """One line for every configuration that cannot mean anything."""
    for item in dataclasses.fields(config):
        name, value, choices = item.name, getattr(config, item.name), item.metadata["choices"]
        flag, least = f"--{name.replace('_', '-')} {value}", 0 if name in MAY_BE_ZERO else 1
        if choices and value is not None and value not in choices:
            raise UserError(f"{flag}: one of {', '.join(choices)}")
        if type(value) is int and name != "salt_scope" and value < least:
            raise UserError(f"{flag}: at least {least}")
        if type(value) is float and not (0 <= value < math.inf or value == math.inf and name in MAY_BE_INFINITE):
            raise UserError(f"{flag}: a finite number that is not negative")
    if config.alpha > 1 or config.gram_tolerance >= 1:
        raise UserError(f"--alpha {config.alpha} and --gram-tolerance {config.gram_tolerance}: shares, at most 1")
    if config.batch_size % config.mini_batch:
        raise UserError(f"--batch-size {config.batch_size} is not a multiple of --mini-batch {config.mini_batch}")
    if config.algo == "dapo" and config.gen_batch * config.max_gen_batches < config.batch_size:
        raise UserError(f"--max-gen-batches {config.max_gen_batches} of --gen-batch {config.gen_batch} prompts cannot "
                        f"fill --batch-size {config.batch_size}")
    if config.temperature <= 0:
        raise UserError(f"--temperature {config.temperature}: training needs a positive one (greedy responses "
                        "of a group are all the same)")
    if config.top_p != 1.0 or config.top_k != 0:
        raise UserError("--top-p and --top-k are refused in training: responses from a cut distribution bias the ratio "
                        "pi / pi_old (Eq. 3); leave them out")
    size = config.mini_batch * config.group_size
    one_k = config.salt_scope
    if one_k not in ("mini-batch", "group") and (not isinstance(one_k, int) or one_k < 1 or size % one_k):
        raise UserError(f"--salt-scope {one_k}: mini-batch, group, or a number that divides the mini-batch's {size} "
                        "responses")


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
           reference: Tensor | None, *, seed: int, first: bool, head_check: bool) -> dict[str, float]:
    """Loss over one mini-batch in micro-batches, backward, clip, step. old, reference: (m, T).

    `first`: the policy still is the one that wrote the responses. `head_check`: also measure ‖∂L/∂W_out‖ of the policy
    term. The denominator is the mini-batch's, so `micro_batch` changes memory and rounding, nothing else.
    """
    lengths, mask = rollouts.lengths, models.response_mask(rollouts.lengths).to(old.device)
    denominator = len(lengths) if config.aggregation == "sequence-mean" else int(lengths.sum())
    chosen = None
    if config.regularizer in ("clip-cov", "kl-cov"):
        current = old if first else models.unpack(
            models.logprobs_only(model, rollouts, config.temperature, config.micro_batch), lengths)
        chosen = choose_tokens(config, current, old, coefficients, mask, seed)
    optimizer.zero_grad(set_to_none=True)
    head = models.lm_head(model).weight
    totals, head_gradient = {}, 0.0
    for rows in models.micro_batches(rollouts.total_lengths, config.micro_batch):
        part = rollouts.select(rows)
        logprobs, entropy = models.forward_logprobs(model, part, config.temperature, config.regularizer == "entropy")
        logprobs, width = models.unpack(logprobs, part.lengths), int(part.lengths.max())
        old_part, mask_part = old[rows, :width], mask[rows, :width]
        chosen_part = None if chosen is None else chosen[rows, :width]
        over_tokens = {"aggregation": config.aggregation, "denominator": denominator}
        policy, stats = policy_loss(logprobs, old_part, coefficients[rows], mask_part, clip_low=config.clip_low,
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
        loss.backward()
        for key, value in (stats | {"loss": loss.item()}).items():
            totals[key] = totals.get(key, 0.0) + value
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    if not torch.isfinite(norm):
        raise SystemExit("the gradient is not finite: training has diverged, try a lower --lr; the checkpoints are "
                         "intact")
    optimizer.step()
    tokens = max(totals.pop("tokens"), 1)
    totals["clip_fraction"] = totals.pop("clipped") / tokens
    totals["ratio_minus_one"] /= tokens
    totals["grad_norm"] = norm.item()
    return totals | ({"head_gradient": head_gradient.norm().item()} if head_check else {})


def form_gram(config: Config, head: models.Head, scored: models.Scored, step: int) -> Tensor:
    """Eq. 4 and 19 for the responses of a mini-batch: (m, m). NaN where it overflows: SALT then leaves a as it is."""
    try:
        return lm_head_gram(scored.hidden, scored.tokens, scored.lengths, head.weight.detach(), bias=head.bias,
                            temperature=config.temperature, length_norm=config.length_norm,
                            tolerance=config.gram_tolerance, logsumexp=scored.logsumexp,
                            delta_norms=scored.delta_norms)
    except ValueError as error:
        print(f"step {step}: no Gram matrix, the advantages stay as they are: {error}", file=sys.stderr)
        return torch.full((len(scored.lengths),) * 2, torch.nan)


# -------------------------------------------------------------------------------------------------------- the whole run


def train(config: Config, resume: Path | None, problems: list[Problem], pool) -> RunDirectory:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    test = load_problems(config.dataset, split="test", data_dir=config.data_dir, limit=config.eval_limit) \
        if config.eval_every else []
    model, tokenizer = models.load(models.resolve(config.model, seed=config.seed), device=device)
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
    reference = copy.deepcopy(model).requires_grad_(False) if config.kl_coef > 0 else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    sampler = TransformersSampler(model, tokenizer)
    head = models.lm_head(model)
    leftover, entropy_range, done = (Rollouts([], [], [], []), []), None, 0

    settings = dataclasses.asdict(config)
    if resume is None:
        run_directory = RunDirectory.create(Path(config.output), settings)
    else:
        run_directory, state = RunDirectory(resume), checkpoint.latest(resume / "checkpoints")
        if state is None:
            print(f"no checkpoint in {resume}: starting from the beginning")
        else:
            checkpoint.check(state, settings, MAY_CHANGE)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            stream.load(state["stream"])
            leftover = Rollouts(**state["leftover"]["rollouts"]), state["leftover"]["verdicts"]
            entropy_range, done = state["entropy_range"], state["step"]
        run_directory.rewind(done if state else -1)

    def evaluate() -> dict[str, float]:
        rows = evaluate_problems(sampler, tokenizer, test, pool, samples=config.eval_samples,
                                 temperature=config.eval_temperature, max_tokens=config.max_response,
                                 seed=stable_seed(config.seed, "evaluation"))
        return {f"eval_{key}": value for key, value in summarise(list(rows), ks=(1, config.eval_samples)).items()}

    print(f"{run_directory.path}: {config.model} on {config.dataset}, {config.algo}"
          f"{f' + SALT ({config.salt}, scope {config.salt_scope})' if config.salt else ''}, {device}")
    if done == 0 and config.eval_every:
        run_directory.log({"step": 0} | evaluate())
    bar = tqdm(total=total if total < budget else None, initial=done, unit="step", dynamic_ncols=True, disable=None)

    for step in range(done + 1, total + 1):
        if stream.taken + drawn_at_once > budget:
            break
        clock, started = Clock(), time.perf_counter()
        torch.manual_seed(stable_seed(config.seed, "step", step))                  # nothing below depends on the past

        # ---- sample: B prompts x G responses at temperature tau                                          Alg. 1, l.1
        def sample(attempt: int) -> tuple[Rollouts, list[str]]:
            chosen = stream.take(drawn_at_once)
            fresh = sampler.generate([prompts[problem.id] for problem in chosen], config.group_size,
                                     temperature=config.temperature, max_tokens=config.max_response,
                                     seed=stable_seed(config.seed, "rollout", step, attempt))
            return fresh, [problem.answer for problem in chosen for _ in range(config.group_size)]

        with clock("sample"):
            if config.algo == "dapo":
                rollouts, verdicts, leftover, judged = sample_mixed_groups(config, sample, pool, leftover)
            else:
                rollouts, answers = sample(0)
                pending = pool.submit(rollouts.texts, answers)                     # judged while the model scores

        # ---- score: old and reference log-probabilities, entropy, hidden states; then the rewards
        measure = bool(config.salt) or config.diagnostics == "on"
        with clock("score"):
            scored = models.score(model, rollouts, config.temperature, micro_batch=config.micro_batch,
                                  keep_hidden=measure)
            old, frozen = models.unpack(scored.logprobs, scored.lengths), None                            # (m, T)
            if reference is not None:
                frozen = models.unpack(models.logprobs_only(reference, rollouts, config.temperature,
                                                            config.micro_batch), scored.lengths)
            entropy = scored.entropy.mean().item()
            low, high = entropy_range or (entropy, entropy)
            entropy_range = min(low, entropy), max(high, entropy)
        with clock("reward"):
            if config.algo == "grpo":
                verdicts = judged = pending.result()
            rewards = torch.tensor(verdicts).view(-1, config.group_size)                                  # (B, G)
            rewards = 2 * rewards - 1 if config.algo == "dapo" else rewards

        # ---- advantage, Gram, reweight: for all mini-batches, at the policy that wrote the responses   Alg. 1, l.2-9
        advantages = group_advantages(rewards).flatten()                                                  # Eq. 2, 12
        mini_batches = list(torch.arange(len(advantages)).split(config.mini_batch * config.group_size))
        coefficients, geometry, grams = advantages.clone(), [], []
        for index, members in enumerate(mini_batches if measure else ()):
            with clock("geometry"):
                gram, reweighted = form_gram(config, head, scored.select(members), step), None            # Eq. 4, 19
                if config.salt:
                    generator = torch.Generator().manual_seed(stable_seed(config.seed, "salt", step, index))
                    blocks = scope_blocks(config.salt_scope, len(members), config.group_size, generator)
                    reweighted = reweight(gram, advantages[members], blocks, config.salt, alpha=config.alpha,
                                          entropy=entropy, entropy_range=entropy_range, rank_max=config.rank_max,
                                          rank_scale=config.rank_scale, below_full=config.rank_below_full,
                                          generator=generator)                                            # Eq. 13-17
                    coefficients[members] = reweighted.coefficients                                       # Eq. 18
            if config.diagnostics == "on":
                with clock("diagnostics"):
                    geometry.append(geometry_metrics(gram, advantages[members], config.group_size,
                                                     coefficients[members], reweighted))
            grams.append(gram)

        # ---- loss, backward, clip, step: one update per mini-batch
        checked = (config.model == "tiny" and config.diagnostics == "on" and not head.tied
                   and config.regularizer != "clip-cov")
        losses = []
        with clock("update"):
            for index, members in enumerate(mini_batches):
                losses.append(update(config, model, optimizer, rollouts.select(members.tolist()), coefficients[members],
                                     old[members], None if frozen is None else frozen[members], first=index == 0,
                                     seed=stable_seed(config.seed, "clip-cov", step, index),
                                     head_check=checked and index == 0))
        if checked and grams[0].isfinite().all():
            members = mini_batches[0]
            predicted, uncancelled = (
                head_gradient_norm(matrix, coefficients[members], scored.lengths[members],
                                   aggregation=config.aggregation, length_norm=config.length_norm)
                for matrix in (grams[0], grams[0].diagonal().diag()))
            error = abs(losses[0]["head_gradient"] - predicted)
            losses[0]["head_gradient_error"] = error / max(predicted, uncancelled / 10, 1e-12)

        # ---- sync, log, save
        with clock("sync"):
            sampler.sync(model)
        right = torch.tensor(verdicts).view(-1, config.group_size).mean(1)                                 # (B,)
        record = {"step": step, "epoch": stream.state()["epoch"], "prompts": stream.taken,
                  "reward": rewards.mean().item(), "pass_rate": sum(judged) / len(judged),
                  "all_right": (right == 1).float().mean().item(), "all_wrong": (right == 0).float().mean().item(),
                  "length": scored.lengths.float().mean().item(), "entropy": entropy,
                  "truncated": 1 - sum(rollouts.finished) / len(rollouts.finished)}
        record |= mean_of(losses) | mean_of(geometry)
        if grams:
            record["gram_not_finite"] = sum(not gram.isfinite().all() for gram in grams) / len(grams)
        if config.model == "tiny":
            check_theory(step, record)
        last = step == total or stream.taken + drawn_at_once > budget
        if config.eval_every and (step % config.eval_every == 0 or last):
            with clock("evaluate"):
                record |= evaluate()
        seconds = clock.seconds | {"total": round(time.perf_counter() - started, 4)}
        run_directory.log(record | {"system": {"seconds": seconds, "reward_restarts": pool.restarts,
                                               "reward_timeouts": pool.timeouts}})
        if step % config.save_every == 0 or last:
            checkpoint.save(run_directory.checkpoints, step, {
                "config": settings, "step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                "stream": stream.state(), "entropy_range": entropy_range,
                "leftover": {"rollouts": dataclasses.asdict(leftover[0]), "verdicts": leftover[1]}})
            run_directory.draw()
        bar.set_postfix({key: f"{record[key]:.2f}" for key in ("pass_rate", "length", "entropy", "alpha", "rank")
                         if key in record})
        bar.update()

    bar.close()
    model.save_pretrained(run_directory.final)
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


def main(argv: list[str] | None = None, pool=None) -> int:
    """`pool`: anything with RewardPool's submit, restarts and timeouts, to train on another reward."""
    config, resume = parse(argv)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("train.py runs in one process; start it without a launcher, or with one process")
    if config.model == "tiny" and resume is None:
        sizes = ", ".join(f"{name} {getattr(config, name)}" for name in TINY)
        print(f"tiny model: its own sizes instead of Table 4's ({sizes})")
    problems = load_problems(config.dataset, split=config.split, data_dir=config.data_dir, limit=config.limit)
    with contextlib.ExitStack() as stack:
        pool = pool or stack.enter_context(RewardPool(problems[0].kind, config.workers, config.reward_timeout))
        report(train(config, resume, problems, pool))
    return 0


if __name__ == "__main__":
    run(main)
