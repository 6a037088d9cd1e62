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
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from eval import evaluate_problems, summarise
from salt import checkpoint, models
from salt.advantages import VARIANTS, group_advantages, reweight, scope_blocks
from salt.data import DATASETS, Problem, PromptStream, load_problems, stable_seed
from salt.errors import Parser, UserError, run
from salt.geometry import head_gradient_norm
from salt.loss import (AGGREGATIONS, aggregate, clip_cov_mask, kl_cov_mask, kl_cov_penalty, kl_k3, policy_loss)
from salt.metrics import RunDirectory, geometry_metrics, mean_of
from salt.proxy import lm_head_gram
from salt.reward import RewardPool
from salt.rollout import Rollouts, TransformersSampler

# ------------------------------------------------------------------------------------------------------- configuration


def option(default, help: str, choices=None):
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass
class Config:
    """Table 4's values are the defaults. None: decided by --algo, --salt-preset or the model (see `settle`)."""
    model: str = option("tiny", f"{', '.join(models.PRESETS)}, a Hugging Face folder or a hub id")
    dataset: str = option("arith", f"{', '.join(DATASETS)}, or a .jsonl or .parquet file with prompt and answer")
    split: str = option("train", "split to train on")
    data_dir: str | None = option(None, "folder with local copies of the data sets (default: the hub)")
    limit: int | None = option(None, "train on the first N problems only")
    output: str | None = option(None, "run directory (default: a new one below runs/)")
    seed: int = option(0, "decides every random draw, the tiny model's warm start included")

    algo: str = option("grpo", "the base algorithm", ("grpo", "dapo"))
    salt: str | None = option(None, "reweight the advantages; --salt alone means --salt salt", tuple(VARIANTS))
    salt_preset: str | None = option(None, "paper, or the authors' released code: scope, feature length, rank rule and "
                                     "aggregation together", ("paper", "released-code"))
    salt_scope: str | None = option(None, "responses that form one K: mini-batch, group, or a number of responses")
    length_norm: str | None = option(None, "feature of a response: mean over its tokens (Eq. 19) or sum", ("mean", "sum"))
    rank_scale: float = option(1.0, "k_t = round(rank_scale * PR)")
    rank_max: int | None = option(None, "upper end of k_t")
    rank_below_full: bool | None = option(None, "k_t <= m - 1")
    alpha: float = option(0.5, "the constant of --salt fixed-alpha")

    group_size: int = option(8, "responses per prompt, G")
    batch_size: int = option(64, "prompts per step")
    mini_batch: int = option(32, "prompts per optimizer update, B")
    micro_batch: int = option(8, "responses per forward pass: memory only, the gradient does not depend on it")
    epochs: int = option(2, "passes over the training problems")
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
    diagnostics: str = option("on", "geometry in the log for runs without SALT too, and the theory checks", ("on", "off"))
    workers: int = option(2, "reward processes")
    reward_timeout: int = option(5, "seconds per verdict")


TINY = {"batch_size": 32, "mini_batch": 16, "micro_batch": 128, "gen_batch": 48, "max_prompt": 16, "max_response": 48,
        "steps": 60, "lr": 5e-4, "eval_every": 20}
RELEASED_CODE = {"salt_scope": "8", "length_norm": "sum", "rank_max": 64, "rank_below_full": True,
                 "aggregation": "token-mean"}
PAPER = {"salt_scope": "mini-batch", "length_norm": "mean", "rank_below_full": False}
MAY_CHANGE = ("steps", "save_every", "workers")                       # on --resume


def parse(argv: list[str] | None) -> tuple[Config, Path | None]:
    """The settled configuration, and the run directory to go on with (--resume)."""
    parser = Parser(description="GRPO and DAPO with SALT. Defaults are Table 4 of the paper; the tiny "
                                     f"model has its own: {', '.join(f'{k} {v}' for k, v in TINY.items())}.")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with this run directory")
    for item in dataclasses.fields(Config):
        kind = next(t for t in (bool, int, float, str) if t.__name__ in str(item.type))
        extra = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind, "metavar": item.name[0].upper()}
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
        recorded = RunDirectory.config(resume)
        changed = [k for k, v in given.items() if k not in MAY_CHANGE and v != recorded.get(k)]
        if changed:
            raise UserError(f"{resume} was started with another configuration: {changed[0]} is "
                            f"{recorded.get(changed[0])!r} there, not {given[changed[0]]!r}")
        try:
            config = Config(**recorded | {k: v for k, v in given.items() if k in MAY_CHANGE})
        except TypeError as error:
            raise UserError(f"{resume}/config.json is of another version of train.py: {error}") from error
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
    sizes = TINY if given.get("model", "tiny") == "tiny" else {}
    return Config(**derived | preset | sizes | given)


def validate(config: Config) -> None:
    """One line for every configuration that cannot mean anything."""
    for item in dataclasses.fields(config):
        value, choices = getattr(config, item.name), item.metadata["choices"]
        if choices and value is not None and value not in choices:
            raise UserError(f"--{item.name.replace('_', '-')} {value}: one of {', '.join(choices)}")
    for name in ("group_size", "batch_size", "mini_batch", "micro_batch", "epochs", "max_prompt", "max_response", "gen_batch",
                 "max_gen_batches", "workers", "reward_timeout", "save_every", "eval_limit", "eval_samples"):
        if getattr(config, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(config, name)}")
    if config.batch_size % config.mini_batch:
        raise UserError(f"--batch-size {config.batch_size} is not a multiple of --mini-batch {config.mini_batch}")
    if config.temperature <= 0:
        raise UserError(f"--temperature {config.temperature}: training needs a positive temperature (greedy responses of "
                        "a group are all the same)")
    if config.top_p != 1.0 or config.top_k != 0:
        raise UserError("--top-p and --top-k are refused in training: responses from a cut distribution bias the ratio "
                        "pi / pi_old (Eq. 3); leave them out")
    size = config.mini_batch * config.group_size
    if config.salt_scope not in ("mini-batch", "group"):
        if not config.salt_scope.isdigit() or not 0 < int(config.salt_scope) or size % int(config.salt_scope):
            raise UserError(f"--salt-scope {config.salt_scope}: mini-batch, group, or a number that divides the "
                            f"mini-batch's {size} responses")


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


def sample_mixed_groups(config: Config, sample, pool, leftover: tuple[Rollouts, list[float]]):
    """DAPO's dynamic sampling: only groups with right and wrong answers (Eq. 69's condition), until a batch is full.

    `sample(attempt)` draws a generation batch -> (rollouts, answers). Groups beyond the batch wait for the next step.
    Returns rollouts, verdicts, the new leftover, and the verdicts on everything drawn.
    """
    kept, verdicts = leftover
    wanted, drawn = config.batch_size * config.group_size, []
    for attempt in range(config.max_gen_batches + 1):
        if len(verdicts) >= wanted:
            break
        if attempt == config.max_gen_batches:
            raise UserError(f"DAPO found {len(verdicts) // config.group_size} of {config.batch_size} groups with both right "
                            f"and wrong answers in {attempt} generation batches of {config.gen_batch} prompts: the data are "
                            "too easy or too hard for this model (or raise --max-gen-batches)")
        fresh, answers = sample(attempt)
        judged = pool.submit(fresh.texts, answers).result()
        groups = [range(start, start + config.group_size) for start in range(0, len(judged), config.group_size)]
        mixed = [i for group in groups if len({judged[i] for i in group}) > 1 for i in group]
        kept, verdicts, drawn = kept + fresh.select(mixed), verdicts + [judged[i] for i in mixed], drawn + judged
    rest = range(wanted, len(verdicts))
    return (kept.select(range(wanted)), verdicts[:wanted], (kept.select(rest), verdicts[wanted:]), drawn or verdicts[:wanted])


# ----------------------------------------------------------------------------------------------------------- the log


def check_theory(step: int, record: dict) -> None:
    """The run fails where Eq. 10, Eq. 11 or the gradient-norm identity does not hold on its own gradients.

    Tolerances are those of float32 advantages (6e-8 relative, summed over a group) and of a float32 backward pass.
    """
    if record.get("eq10_error", 0) > 1e-5 or record.get("eq11_violations", 0) > 0:
        raise SystemExit(f"step {step}: the residual-only identity or its bound fails (Eq. 10: {record['eq10_error']:.1e}, "
                         f"Eq. 11: {record['eq11_violations']:.0f} violations)")
    if record.get("head_gradient_error", 0) > 1e-3:
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


def update(config: Config, model, optimizer, rollouts: Rollouts, coefficients: Tensor, old: Tensor, reference: Tensor | None,
           *, seed: int, first: bool, head_check: bool) -> dict[str, float]:
    """Loss over one mini-batch in micro-batches, backward, clip, step. old, reference: (m, T).

    `first`: the policy still is the one that wrote the responses. `head_check`: also measure ‖∂L/∂W_out‖ of the policy
    term. The denominator is the mini-batch's, so `micro_batch` changes memory and rounding, nothing else.
    """
    lengths, mask = rollouts.lengths, models.response_mask(rollouts.lengths).to(old.device)
    denominator = len(lengths) if config.aggregation == "sequence-mean" else int(lengths.sum())
    chosen = None
    if config.regularizer in ("clip-cov", "kl-cov"):
        current = old if first else models.unpack(
            models.score(model, rollouts, config.temperature, micro_batch=config.micro_batch).logprobs, lengths)
        chosen = choose_tokens(config, current, old, coefficients, mask, seed)
    optimizer.zero_grad(set_to_none=True)
    head = models.lm_head(model).weight
    totals, head_gradient = {}, 0.0
    for rows in models.micro_batches([len(p) + n for p, n in zip(rollouts.prompts, lengths.tolist())], config.micro_batch):
        part = rollouts.select(rows)
        logprobs, entropy = models.forward_logprobs(model, part, config.temperature, config.regularizer == "entropy")
        logprobs, width = models.unpack(logprobs, part.lengths), int(part.lengths.max())
        token = lambda grid: grid[rows][:, :width]                                         # (m, T) -> this micro-batch's
        mean = lambda values: aggregate(values, token(mask), config.aggregation, denominator)
        policy, stats = policy_loss(logprobs, token(old), coefficients[rows], token(mask), clip_low=config.clip_low,
                                    clip_high=config.clip_high, aggregation=config.aggregation, denominator=denominator,
                                    clip=config.regularizer != "kl-cov",
                                    excluded=token(chosen) if config.regularizer == "clip-cov" else None)
        loss = policy                                                                                # Eq. 3 or 69
        stats["policy_loss"] = policy.item()
        if reference is not None:
            kl = mean(kl_k3(logprobs, token(reference)))                                                # Eq. 68
            loss, stats["kl"] = loss + config.kl_coef * kl, kl.item()
        if config.regularizer == "entropy":
            loss = loss - config.entropy_coef * mean(models.unpack(entropy, part.lengths))              # Eq. 71
        if config.regularizer == "kl-cov":
            loss = loss + mean(kl_cov_penalty(logprobs, token(old), token(chosen), coef=config.kl_cov_coef))
        if head_check:
            head_gradient = head_gradient + torch.autograd.grad(policy, head, retain_graph=True)[0]
        loss.backward()
        for key, value in (stats | {"loss": loss.item()}).items():
            totals[key] = totals.get(key, 0.0) + value
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    optimizer.step()
    tokens = max(totals.pop("tokens"), 1)
    record = totals | {"clip_fraction": totals.pop("clipped") / tokens, "ratio_minus_one": totals["ratio_minus_one"] / tokens,
                       "grad_norm": norm.item()}
    return record | ({"head_gradient": head_gradient.norm().item()} if head_check else {})


# --------------------------------------------------------------------------------------------------------- the whole run


def train(config: Config, resume: Path | None, pool=None) -> RunDirectory:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    problems = load_problems(config.dataset, split=config.split, data_dir=config.data_dir, limit=config.limit)
    test = load_problems(config.dataset, split="test", data_dir=config.data_dir, limit=config.eval_limit) \
        if config.eval_every else []
    model, tokenizer = models.load(models.resolve(config.model, seed=config.seed), device=device)
    prompts = encode_problems(problems, tokenizer, config.max_prompt)
    stream = PromptStream([problem for problem in problems if problem.id in prompts], config.seed)
    needed = config.gen_batch if config.algo == "dapo" else config.batch_size           # prompts drawn at a time
    budget = config.epochs * len(prompts)                                               # prompts in all epochs
    total = min(config.steps or sys.maxsize, budget // (config.batch_size if config.algo == "grpo" else 1))
    if budget < needed:
        raise UserError(f"{config.epochs} epochs of {len(prompts)} prompts do not fill one batch of {needed}")
    reference = copy.deepcopy(model).requires_grad_(False) if config.kl_coef > 0 else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    sampler = TransformersSampler(model, tokenizer)
    leftover, entropy_range, done = (Rollouts([], [], [], []), []), None, 0

    if resume is None:
        run_directory = RunDirectory.create(Path(config.output), dataclasses.asdict(config))
    else:
        run_directory = RunDirectory(resume)
        state = checkpoint.latest(run_directory.checkpoints)
        if state is None:
            print(f"no checkpoint in {resume}: starting from step 0")
        else:
            checkpoint.check(state, dataclasses.asdict(config), MAY_CHANGE)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            stream.load(state["stream"])
            leftover, entropy_range, done = (Rollouts(*state["leftover"][0]), state["leftover"][1]), state["entropy_range"], state["step"]
        run_directory.rewind(done if state else -1)

    def evaluate(step: int) -> dict[str, float]:
        rows = evaluate_problems(sampler, tokenizer, test, pool, samples=config.eval_samples, temperature=config.eval_temperature,
                                 max_tokens=config.max_response, seed=stable_seed(config.seed, "evaluation"))
        summary = summarise(list(rows), ks=sorted({1, config.eval_samples}))
        return {f"eval_{key}": summary[key] for key in summary}

    print(f"{run_directory.path}: {config.model} on {config.dataset}, {config.algo}"
          f"{f' + SALT ({config.salt}, scope {config.salt_scope})' if config.salt else ''}, {device}")
    if done == 0 and config.eval_every:
        run_directory.log({"step": 0} | evaluate(0))
    bar = tqdm(total=total if config.algo == "grpo" or config.steps else None, initial=done, unit="step",
               dynamic_ncols=True, disable=None)

    for step in range(done + 1, total + 1):
        if stream.taken + needed > budget:
            break
        clock, started = Clock(), time.perf_counter()
        torch.manual_seed(stable_seed(config.seed, "step", step))                   # nothing below depends on the past

        # ---- sample: B prompts x G responses at temperature tau                                     Alg. 1, l.1
        def sample(attempt: int) -> tuple[Rollouts, list[str]]:
            chosen = stream.take(needed)
            drawn = sampler.generate([prompts[p.id] for p in chosen], config.group_size, temperature=config.temperature,
                                     max_tokens=config.max_response, seed=stable_seed(config.seed, "rollout", step, attempt))
            return drawn, [p.answer for p in chosen for _ in range(config.group_size)]

        with clock("sample"):
            if config.algo == "dapo":
                rollouts, verdicts, leftover, drawn = sample_mixed_groups(config, sample, pool, leftover)
            else:
                rollouts, answers = sample(0)
                pending = pool.submit(rollouts.texts, answers)                      # judged while the model scores

        # ---- score: old log-probabilities, entropy, hidden states; reference log-probabilities; rewards
        measure = bool(config.salt) or config.diagnostics == "on"
        with clock("score"):
            scored = models.score(model, rollouts, config.temperature, micro_batch=config.micro_batch, keep_hidden=measure)
            old = models.unpack(scored.logprobs, scored.lengths)                                           # (m, T)
            frozen = None if reference is None else models.unpack(models.score(
                reference, rollouts, config.temperature, micro_batch=config.micro_batch).logprobs, scored.lengths)
            entropy = scored.entropy.mean().item()
            low, high = entropy_range or (entropy, entropy)
            entropy_range = (min(low, entropy), max(high, entropy))
        with clock("reward"):
            if config.algo == "grpo":
                verdicts = drawn = pending.result()
            rewards = torch.tensor(verdicts).view(-1, config.group_size)                                   # (B, G)
            rewards = 2 * rewards - 1 if config.algo == "dapo" else rewards

        # ---- advantage (Alg. 1, l.2), Gram (l.3-4), reweight (l.5-9): both mini-batches at the old policy
        advantages = group_advantages(rewards).flatten()                                                  # Eq. 2, 12
        mini_batches = list(torch.arange(len(advantages)).split(config.mini_batch * config.group_size))
        coefficients, geometry, grams = advantages.clone(), [], []
        head = models.lm_head(model)
        for index, members in enumerate(mini_batches):
            if not measure:
                break
            with clock("geometry"):
                part, reweighted = scored.select(members), None
                gram = lm_head_gram(part.hidden, part.tokens, part.lengths, head.weight.detach(), bias=head.bias,   # Eq. 19
                                    temperature=config.temperature, length_norm=config.length_norm,
                                    logsumexp=part.logsumexp, delta_norms=part.delta_norms)
                if config.salt:
                    generator = torch.Generator().manual_seed(stable_seed(config.seed, "salt", step, index))
                    scope = config.salt_scope if not config.salt_scope.isdigit() else int(config.salt_scope)
                    blocks = scope_blocks(scope, len(members), config.group_size, generator)
                    reweighted = reweight(gram, advantages[members], blocks, config.salt, alpha=config.alpha, entropy=entropy,
                                          entropy_range=entropy_range, rank_scale=config.rank_scale,
                                          rank_max=config.rank_max, below_full=config.rank_below_full, generator=generator)
                    coefficients[members] = reweighted.coefficients                                       # Eq. 18
            if config.diagnostics == "on":
                with clock("diagnostics"):
                    geometry.append(geometry_metrics(gram, advantages[members], config.group_size, coefficients[members],
                                                 reweighted))
                grams.append(gram)

        # ---- loss, backward, clip, step: one update per mini-batch
        checked = config.model == "tiny" and config.diagnostics == "on" and not head.tied and config.regularizer != "clip-cov"
        losses = []
        with clock("update"):
            for index, members in enumerate(mini_batches):
                losses.append(update(config, model, optimizer, rollouts.select(members.tolist()), coefficients[members],
                                     old[members], None if frozen is None else frozen[members],
                                     seed=stable_seed(config.seed, "clip-cov", step, index), first=index == 0,
                                     head_check=checked and index == 0))
        if checked and torch.isfinite(grams[0]).all():
            members = mini_batches[0]
            predicted = head_gradient_norm(grams[0], coefficients[members], scored.lengths[members],
                                           aggregation=config.aggregation, length_norm=config.length_norm)
            losses[0]["head_gradient_error"] = abs(losses[0]["head_gradient"] - predicted) / max(predicted, 1e-12)

        # ---- sync, log, save
        with clock("sync"):
            sampler.sync(model)
        correct = (rewards > 0).float()
        record = {"step": step, "epoch": stream.state()["epoch"], "prompts": stream.taken,
                  "reward": rewards.mean().item(), "pass_rate": sum(drawn) / len(drawn),
                  "all_right": (correct.mean(1) == 1).float().mean().item(), "all_wrong": (correct.mean(1) == 0).float().mean().item(),
                  "length": scored.lengths.float().mean().item(), "entropy": entropy,
                  "truncated": 1 - sum(rollouts.finished) / len(rollouts.finished),
                  "generation_batches": len(drawn) // (needed * config.group_size)} | mean_of(losses) | mean_of(geometry)
        if config.model == "tiny":
            check_theory(step, record)
        if config.eval_every and (step % config.eval_every == 0 or step == total):
            with clock("evaluate"):
                record |= evaluate(step)
        record["system"] = {"seconds": clock.seconds | {"total": round(time.perf_counter() - started, 4)},
                            "reward_restarts": pool.restarts, "reward_timeouts": pool.timeouts}
        run_directory.log(record)
        if step % config.save_every == 0 or step == total:
            checkpoint.save(run_directory.checkpoints, step, {
                "config": dataclasses.asdict(config), "step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                "stream": stream.state(), "entropy_range": entropy_range,
                "leftover": (dataclasses.astuple(leftover[0]), leftover[1])})
            run_directory.draw()
        shown = {key: f"{record[key]:.2f}" for key in ("pass_rate", "length", "entropy", "alpha", "rank") if key in record}
        bar.set_postfix(shown)
        bar.update()

    bar.close()
    model.save_pretrained(run_directory.final)
    tokenizer.save_pretrained(run_directory.final)
    run_directory.draw()
    return run_directory


def report(run_directory: RunDirectory) -> None:
    """Before and after, as the run's own evaluations have it."""
    evaluated = [record for record in run_directory.records() if "eval_pass@1" in record]
    if evaluated:
        before, after = evaluated[0], evaluated[-1]
        for key in (key for key in before if key.startswith("eval_pass@") and not key.endswith("_se")):
            print(f"{key[5:]:8} {100 * before[key]:5.1f} % (step {before['step']}) -> {100 * after[key]:5.1f} % "
                  f"(step {after['step']})")
    print(f"log {run_directory.path}/metrics.jsonl, figure {run_directory.path}/curves.png, model {run_directory.final}")


def main(argv: list[str] | None = None, pool=None) -> int:
    config, resume = parse(argv)
    if config.model == "tiny" and resume is None:
        print(f"tiny model: its own sizes instead of Table 4's ({', '.join(f'{k} {getattr(config, k)}' for k in TINY)})")
    if config.output is None:
        name = "-".join(filter(None, (Path(config.model).name, Path(config.dataset).stem, config.algo, config.salt)))
        config.output = f"runs/{name}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    with contextlib.ExitStack() as stack:
        pool = pool or stack.enter_context(RewardPool("math", config.workers, config.reward_timeout))
        report(train(config, resume, pool))
    return 0


if __name__ == "__main__":
    run(main)
