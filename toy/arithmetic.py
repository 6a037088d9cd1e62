"""The tiny task: column addition with a written-out calculation, and a small model that half knows it.

    prompt    385+47=            (two to four digits each)
    response  5+7=12 8+4+1=13 3+1=4 \\boxed{432}<eos>

The real verifier scores the box. The warm start imitates a careless pupil who forgets each carry with probability
`forget`; a sum without a carry is easy, one with three is nearly always wrong. So pass@1 starts near a third, groups
of responses are all right, all wrong and mixed side by side, and reinforcement learning has something to find: the
model knows both habits, only the reward says which one is right.

Departures from the paper: the task is not the paper's; it is what a laptop trains in a minute.
"""
import dataclasses
import hashlib
import json
import os
import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from salt.errors import UserError

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = " +0123456789=\\bdeox{}"


@dataclass(frozen=True)
class WarmStart:
    """Everything that decides the warm start's weights: the cache is keyed by it."""
    seed: int = 0
    digits: tuple[int, ...] = (2, 3, 4)      # levels of difficulty: how many digits the longer number has
    forget: float = 0.65                     # probability of a forgotten carry in the demonstrations
    hidden: int = 128
    layers: int = 3
    steps: int = 500
    batch: int = 32
    learning_rate: float = 3e-3
    version: int = 1                         # raise it when the code below changes what comes out


HARD = WarmStart(digits=(4, 5, 6), steps=700)                # of toy/study.py, for the data set arith-hard


def draw_problem(rng: random.Random, digits: tuple[int, ...]) -> tuple[int, int]:
    length = rng.choice(digits)
    a = rng.randrange(10 ** (length - 1), 10 ** length)
    b = rng.randrange(10, 10 ** length)
    return (a, b) if rng.random() < 0.5 else (b, a)


def question(a: int, b: int) -> str:
    return f"{a}+{b}="


def write_out(a: int, b: int, forget: float, rng: random.Random) -> str:
    """The calculation column by column, lowest first; each carry is forgotten with probability `forget`."""
    columns, digits, carry = [], [], 0
    for place in range(max(len(str(a)), len(str(b)))):
        terms = [number // 10 ** place % 10 for number in (a, b) if number >= 10 ** place]
        total = sum(terms) + carry
        columns.append("+".join(map(str, terms + [1] * carry)) + f"={total}")
        digits.append(str(total % 10))
        carry = total // 10
        last_carry = carry
        if rng.random() < forget:
            carry = 0
    leading = "1" if last_carry else ""
    return f"{' '.join(columns)} \\boxed{{{leading}{''.join(reversed(digits))}}}"


def problems(split: str, count: int, seed: int = 0,
             digits: tuple[int, ...] = WarmStart.digits) -> list[tuple[int, int]]:
    """`count` different sums of the split "train" or "test". A sum belongs to one split for good, whatever the seed."""
    rng, found = random.Random(f"{split}-{seed}-{digits}"), {}
    while len(found) < count:
        a, b = draw_problem(rng, digits)
        if _is_test(a, b) == (split == "test"):
            found[a, b] = None
    return list(found)


def _is_test(a: int, b: int) -> bool:
    return hashlib.sha256(f"{a}+{b}".encode()).digest()[0] < 26                       # one in ten


def make_tokenizer():
    """One token per character: the byte-level tokenizer that libraries pick for a Qwen2 model, without merges."""
    from transformers import Qwen2Tokenizer

    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *CHARACTERS.replace(" ", "Ġ")])}
    return Qwen2Tokenizer(vocab=vocabulary, merges=[], pad_token=PAD, eos_token=EOS, unk_token=None,
                          model_max_length=256)


def make_model(config: WarmStart, vocabulary: int):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=vocabulary, hidden_size=config.hidden, intermediate_size=2 * config.hidden,
        num_hidden_layers=config.layers, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256,
        rope_theta=1000.0, tie_word_embeddings=False, bos_token_id=None, eos_token_id=1, pad_token_id=0))


def _demonstrations(config: WarmStart, tokenizer, rng: random.Random) -> tuple[Tensor, Tensor]:
    """Prompts with a pupil's answers: token ids (batch, L) and labels (batch, L), −100 on prompt and padding."""
    rows, prompts = [], []
    while len(rows) < config.batch:
        a, b = draw_problem(rng, config.digits)
        if not _is_test(a, b):
            prompts.append(len(question(a, b)))
            text = question(a, b) + write_out(a, b, config.forget, rng)
            rows.append(tokenizer.encode(text) + [tokenizer.eos_token_id])
    width = max(map(len, rows))
    tokens = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    position = torch.arange(width)
    answer = (position >= torch.tensor(prompts)[:, None]) & (position < torch.tensor([len(r) for r in rows])[:, None])
    return tokens, tokens.masked_fill(~answer, -100)


def _train(config: WarmStart, folder: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        tokenizer = make_tokenizer()
        model = make_model(config, len(tokenizer))
    rng = random.Random(config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(config.steps):
        optimizer.param_groups[0]["lr"] = config.learning_rate * min(1, (step + 1) / 30, 1.05 - step / config.steps)
        tokens, labels = _demonstrations(config, tokenizer, rng)
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    from transformers.utils import logging
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "warm_start.json").write_text(json.dumps(dataclasses.asdict(config)))


def warm_start(config: WarmStart = WarmStart(), say=print) -> Path:
    """The folder of the warm-started model, trained now if it is not cached (SALT_CACHE, or ~/.cache/salt)."""
    cache = Path(os.environ.get("SALT_CACHE", Path.home() / ".cache" / "salt"))
    key = hashlib.sha256(json.dumps(dataclasses.asdict(config)).encode()).hexdigest()[:12]
    folder = cache / f"tiny-{key}"
    if folder.is_dir():
        return folder
    say(f"warm start: teaching the tiny model sloppy addition ({config.steps} steps, about 30 seconds; kept for later)")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix="tiny-", suffix=".tmp", dir=cache))
    except OSError as error:
        raise UserError(f"cannot keep the tiny model in {cache}: {error.strerror}; set SALT_CACHE") from error
    try:
        _train(config, temporary)
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():                    # not the harmless case that another process was quicker
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder
