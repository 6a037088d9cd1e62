"""What a run can be asked for: every flag of train.py, its default (Table 4 of the paper) and what is refused.

Departures from the paper
    1. The tiny model has sizes of its own (TINY); it says so when it starts.
    2. top-p and top-k are refused in training: Eq. 3's ratio would be taken to a distribution nobody sampled from.
    3. DAPO has no KL term, as in Eq. 69 (Table 4 has one coefficient for both). What Table 4 does not say: weight decay
       0.01, gradients clipped at norm 1, an entropy bonus of 1e-3 where it is asked for.
    4. KL-Cov clips no ratio, as its authors do, though Table 4 gives it 0.2: --clip-low and --clip-high do nothing.
"""
import argparse
import dataclasses
import math
import os
import time
import typing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from salt import models
from salt.advantages import VARIANTS
from salt.data import NAMES, SUFFIXES
from salt.errors import Parser, UserError, WrongFlag
from salt.loss import AGGREGATIONS
from salt.metrics import RunDirectory


def option(default, help: str, choices=None):
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass
class Config:
    """Table 4's values are the defaults. None: decided by --algo, --salt-preset or the model (see `settle`)."""
    model: str = option("tiny", f"{', '.join(models.PRESETS)}, a Hugging Face folder or a hub id")
    dataset: str = option("arith", f"{', '.join(NAMES)}, or a file ({', '.join(SUFFIXES)}) with prompt and answer; "
                          "math for the presets")
    split: str = option("train", "split to train on; a file has only one")
    data_dir: str | None = option(None, "folder with local copies of the data sets (default: the hub)")
    limit: int | None = option(None, "train on the first N problems only")
    output: str | None = option(None, "run directory (default: a new one below runs/)")
    seed: int = option(0, "decides every random draw of a run, the tiny model's warm start included")

    algo: str = option("grpo", "the base algorithm", ("grpo", "dapo"))
    salt: str | None = option(None, "reweight the advantages; --salt alone means --salt salt", tuple(VARIANTS))
    salt_preset: str | None = option(None, "the paper's, or the authors' released code's scope, feature length, rank "
                                     "rule and aggregation together", ("paper", "released-code"))
    salt_scope: str | int | None = option(None, "responses that form one K: mini-batch, group, or a number")
    salt_signal_only: bool = option(False, "leave groups whose rewards are all equal out of K; their a' is then 0")
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
    rollout: str = option("auto", "the sampler; auto: vllm where it and a GPU are there, else transformers",
                          ("auto", "transformers", "vllm"))
    vllm_memory: float = option(0.4, "share of a GPU's memory that vLLM takes while it samples")
    sampler_gap_limit: float | None = option(None, "mean distance in nats of the sampler's log-probabilities from the "
                                             "trainer's at which a run ends (default 1e-4, in bfloat16 0.05)")
    tis_cap: float | None = option(None, "weigh each token by min(cap, pi_trainer / pi_sampler), for --rollout vllm")
    temperature: float = option(0.6, "of the sampler, and of the logits in loss and proxy")
    top_p: float = option(1.0, "refused below 1: the ratio of Eq. 3 would be biased")
    top_k: int = option(0, "refused above 0, for the same reason")
    max_prompt: int = option(1024, "tokens; longer prompts are dropped and counted")
    max_response: int = option(8192, "tokens")
    gen_batch: int = option(128, "DAPO: prompts per generation batch")
    max_gen_batches: int = option(10, "DAPO: generation batches per step at most")

    precision: str | None = option(None, "of the products in sharded training: bfloat16 on a GPU, float32 on a CPU; "
                                   "master weights are float32", ("bfloat16", "float32"))
    checkpoint_layers: bool = option(True, "keep only the inputs of the layers for the backward pass")
    lora_rank: int = option(0, "train adapters of this rank instead of all weights; 0: all weights")
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
    eval_dataset: str | None = option(None, "its test split is evaluated (default: that of --dataset)")
    eval_limit: int = option(128, "test problems per evaluation")
    eval_samples: int = option(8, "responses per test problem")
    eval_temperature: float = option(0.6, "temperature of the evaluation")
    save_every: int = option(10, "steps between checkpoints")
    diagnostics: str = option("on", "geometry and theory checks, also in runs without SALT", ("on", "off"))
    tracker: str | None = option(None, "also log to wandb, tensorboard, ... by way of Accelerate")
    samples_every: int = option(20, "steps between tables of sampled responses in the run directory; 0: none")
    workers: int = option(2, "reward processes, of each training process")
    allow_weak_sandbox: bool = option(False, "run programs for the code reward even where they cannot be isolated well")
    reward_timeout: int = option(5, "seconds per verdict")


TINY = {"batch_size": 32, "mini_batch": 16, "micro_batch": 128, "gen_batch": 48, "max_prompt": 16, "max_response": 48,
        "steps": 60, "lr": 1e-4, "eval_every": 20, "gram_tolerance": 0.0, "checkpoint_layers": False}
RELEASED_CODE = {"salt_scope": 8, "length_norm": "sum", "rank_max": 64, "rank_below_full": True,
                 "aggregation": "token-mean"}
PAPER = {"salt_scope": "mini-batch", "length_norm": "mean", "rank_below_full": False}
MAY_CHANGE = ("steps", "save_every", "workers", "tracker", "samples_every", "vllm_memory",
              "sampler_gap_limit")                                     # on --resume
READ_WITH = {"alpha": ("salt", "fixed-alpha"), "entropy_coef": ("regularizer", "entropy")} | dict.fromkeys(
    ("clip_cov_ratio", "clip_cov_low", "clip_cov_high"), ("regularizer", "clip-cov")) | dict.fromkeys(
    ("kl_cov_ratio", "kl_cov_coef"), ("regularizer", "kl-cov"))        # flags that one setting of another reads
GEOMETRY = ("salt_preset", "salt_scope", "salt_signal_only", "length_norm", "rank_scale", "rank_max",
            "rank_below_full")
MAY_BE_ZERO = ("seed", "top_k", "eval_every", "lora_rank", "samples_every")
MAY_BE_INFINITE = ("max_grad_norm", "clip_high")


def scope(text: str) -> str | int:
    return int(text) if text.isdecimal() else text


def parse(argv: list[str] | None) -> tuple[Config, Path | None, SimpleNamespace]:
    """The settled configuration, the run directory to go on with (--resume), and what is asked for instead of training:
    `plan`, the hardware to plan for or None, and `diagnose`."""
    parser = Parser(description="GRPO and DAPO with SALT. Defaults are Table 4 of the paper; the tiny model has its "
                    f"own: {', '.join(f'{name} {value}' for name, value in TINY.items())}.")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with this run directory")
    parser.add_argument("--plan", action="store_true", help="print what the run needs, and load nothing")
    parser.add_argument("--diagnose", action="store_true", help="draw one batch, say what SALT would do, and stop")
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help="to plan for (default 8)")
    parser.add_argument("--gpu-memory", type=float, default=80.0, metavar="GIB", help="of each (default 80)")
    for item in dataclasses.fields(Config):
        kind = scope if item.name == "salt_scope" else next(
            t for t in (bool, str, float, int) if t.__name__ in str(item.type))
        extra = {"action": argparse.BooleanOptionalAction} if kind is bool else {
            "type": kind, "metavar": item.name[0].upper()}
        if item.name == "salt":
            extra |= {"nargs": "?", "const": "salt"}
        default = "" if item.default is None else f" (default {item.default})"
        parser.add_argument(flag(item.name), default=argparse.SUPPRESS, **extra,
                            help=(item.metadata["help"] + default).replace("%", "%%"))
    given = vars(parser.parse_args(argv))
    resume, hardware = given.pop("resume"), {name: given.pop(name) for name in ("gpus", "gpu_memory")}
    planned, diagnose = given.pop("plan"), given.pop("diagnose")
    if diagnose and resume:
        raise UserError(f"--diagnose looks at a model, not at a run: --model {resume}/final")
    if min(hardware.values()) <= 0:
        raise UserError(f"--gpus {hardware['gpus']} and --gpu-memory {hardware['gpu_memory']}: more than 0")
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
    if not resume:
        refuse_unread(given, config, diagnose)
    return config, resume, SimpleNamespace(plan=hardware if planned else None, diagnose=diagnose)


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def say(line: str) -> None:
    """Once, not by each process of a run: they have not met yet."""
    if os.environ.get("RANK", "0") == "0":
        print(line)


def refuse_unread(given: dict, config: Config, diagnose: bool) -> None:
    """WrongFlag for what was asked for and nothing reads; one line where only the diagnostics do."""
    for name in sorted(given.keys() & READ_WITH.keys()):
        other, value = READ_WITH[name]
        if getattr(config, other) != value:
            raise WrongFlag(f"{flag(name)}: only --{other} {value} reads it")
    geometry = [flag(name) for name in GEOMETRY if name in given]
    if not geometry or config.salt or diagnose:
        return
    if config.diagnostics == "off":
        raise WrongFlag(f"{geometry[0]}: without --salt only the diagnostics read it, and they are off")
    say(f"no --salt: the advantages stay {config.algo.upper()}'s; {' and '.join(geometry)} "
        f"{'decides' if len(geometry) == 1 else 'decide'} what the diagnostics measure")


def settle(given: dict) -> Config:
    """What was not asked for follows from the model, the preset and the algorithm, in this order."""
    preset = RELEASED_CODE if given.get("salt_preset") == "released-code" else PAPER
    dapo = given.get("algo") == "dapo"
    regularizer = given.get("regularizer")
    clip = {"clip_low": 1.0, "clip_high": 1.0} if regularizer == "clip-cov" else {
        "clip_low": 0.2, "clip_high": 0.28 if dapo else 0.2}
    derived = {"kl_coef": 0.0 if dapo else 0.001, "aggregation": "token-mean" if dapo else "sequence-mean"} | clip
    name = given.get("model", "tiny")
    sizes = TINY if name == "tiny" else {"gram_tolerance": 0.1}
    if name != "tiny" and name in models.PRESETS:
        sizes = sizes | {"dataset": "math"}
    if given.get("dataset", "").endswith(SUFFIXES) and "eval_dataset" not in given:
        sizes = sizes | {"eval_every": 0}                                        # a file has no test split
    config = Config(**derived | preset | sizes | given)
    if name in models.PRESETS:
        asked, context = config.max_response, models.PRESETS[name].context
        config.max_response = models.fit_context(config.max_prompt, asked, context)
        if config.max_response < asked:
            say(f"--max-response {config.max_response} instead of {asked}: {name} holds {context} tokens in all")
    if config.output is None:
        names = Path(config.model).name, Path(config.dataset).stem, config.algo, config.salt
        config.output = f"runs/{'-'.join(filter(None, names))}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    return config


def validate(config: Config) -> None:
    """One line for every configuration that cannot mean anything."""
    for item in dataclasses.fields(config):
        name, value, choices = item.name, getattr(config, item.name), item.metadata["choices"]
        asked, least = f"{flag(name)} {value}", 0 if name in MAY_BE_ZERO else 1
        if not isinstance(value, typing.get_type_hints(Config)[name]):
            raise WrongFlag(f"config.json: {name} is {value!r}, not of the type {item.type}")
        if choices and value is not None and value not in choices:
            raise WrongFlag(f"{asked}: one of {', '.join(choices)}")
        if type(value) is int and name != "salt_scope" and value < least:
            raise WrongFlag(f"{asked}: at least {least}")
        if type(value) is float and not (0 <= value < math.inf or value == math.inf and name in MAY_BE_INFINITE):
            raise WrongFlag(f"{asked}: a finite number that is not negative")
    if config.seed >= 2 ** 63:
        raise WrongFlag(f"--seed {config.seed}: below 2 ** 63")
    if config.alpha > 1 or config.gram_tolerance >= 1 or not 0 < config.vllm_memory < 1:
        raise WrongFlag(f"--alpha {config.alpha}, --gram-tolerance {config.gram_tolerance} and --vllm-memory "
                        f"{config.vllm_memory}: shares, at most 1")
    if config.tis_cap == 0:
        raise WrongFlag("--tis-cap 0 would take every token out: a positive number, or leave it away")
    if config.batch_size % config.mini_batch:
        raise WrongFlag(f"--batch-size {config.batch_size} is not a multiple of --mini-batch {config.mini_batch}")
    if config.algo == "dapo" and config.gen_batch * config.max_gen_batches < config.batch_size:
        raise WrongFlag(f"--max-gen-batches {config.max_gen_batches} of --gen-batch {config.gen_batch} prompts cannot "
                        f"fill --batch-size {config.batch_size}")
    if config.temperature <= 0:
        raise WrongFlag(f"--temperature {config.temperature}: training needs a positive one (greedy responses "
                        "of a group are all the same)")
    if config.top_p != 1.0 or config.top_k != 0:
        raise WrongFlag("--top-p and --top-k are refused in training: responses from a cut distribution bias the ratio "
                        "pi / pi_old (Eq. 3); leave them out")
    if config.eval_every and config.dataset.endswith(SUFFIXES) and config.eval_dataset is None:
        raise WrongFlag(f"--eval-every {config.eval_every}: {config.dataset} has no test split, name one with "
                        "--eval-dataset")
    size = config.mini_batch * config.group_size
    one_k = config.salt_scope
    if one_k not in ("mini-batch", "group") and (not isinstance(one_k, int) or one_k < 1 or size % one_k):
        raise WrongFlag(f"--salt-scope {one_k}: mini-batch, group, or a number that divides the mini-batch's {size} "
                        "responses")
