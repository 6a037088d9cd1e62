"""How faithful the LM-head proxy is: Sec. 3.2 and App. E (Tables 1 and 5 and their figure), measured.

    python toy/fidelity.py                # a few minutes on two cores; --quick: half a minute
    python toy/fidelity.py --model runs/NAME            # a run of train.py, or any small Hugging Face model

SALT sees K of the LM head only. Here K of every other parameter stands beside it: per response the gradient of its mean
log-probability with respect to all parameters, by autograd, in parts whose Grams add up to the whole model's. Rollouts
are the model's own, rewards the verifier's. Both at a matched temperature (sampled and scored at 0.6) and at a
mismatched one (the same responses scored at 1.0). Results that contradict the paper are printed as they are.

Glossary
    paper            name                  shape    equation
    p_i              (salt.proxy)          (V, d)   19, 55   the proxy's feature
    g_i              features              (m, P)   55       the reference's, a slice of columns at a time
    K^p, K^g         proxy, reference      (m, m)   4, 55
    K̃^p, K̃^g         cosines               (m, m)   55
    PR               participation_ratio   ()       56
    V_k^p, V_k^g     dominant_subspace     (m, k)   13
    a'_proxy, a'_ref coefficients          (m,)     57

Departures from the paper
    1. What App. E leaves open: high-magnitude pairs are the fifth with the largest |cosine| in the reference; k_t match
       is the share of mini-batches with equal k_t; the aggregate is the sum of the Grams of the early, middle, late and
       random blocks; ± is the standard deviation over checkpoints and mini-batches; nulls are held against the full
       gradient.
    2. Subspace overlap: the mean singular value of (V_k^p)ᵀ V_k^g at k = 8, the figure's k. Two random subspaces then
       have 0.15 at m = 256, the paper's null level; the mean square would have k/m = 0.03. Ours beside it: k = k_t.
    3. A block is a decoder layer. Models of less than five layers are cut into half layers (the attention, and the rest
       of the layer), or else the four blocks would coincide; the last block is the whole last layer all the same.
    4. Ours: the full gradient without the LM head (the paper's contains the proxy), and a' = a as a baseline.
    5. The noise null's random vectors have the dimension V·d, but at most 65,536: from there on K is I within 0.4 %.
"""
import argparse
import csv
import sys
import time
from pathlib import Path
from statistics import fmean, pstdev
from typing import Iterator

import torch
from torch import Tensor
from torch.nn import ModuleList, Parameter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from salt.advantages import group_advantages, salt_advantages                                           # noqa: E402
from salt.data import INSTRUCTION                                                                       # noqa: E402
from salt.errors import Parser, UserError, run                                                          # noqa: E402
from salt.geometry import dominant_rank, dominant_subspace, participation_ratio                         # noqa: E402
from salt.loss import policy_loss                                                                       # noqa: E402
from salt.models import (encode_prompt, forward_logprobs, lm_head, load, resolve, response_mask, score,     # noqa: E402
                         unpack)
from salt.proxy import lm_head_gram                                                                     # noqa: E402
from salt.reward import math_reward                                                                     # noqa: E402
from salt.rollout import Rollouts, TransformersSampler                                                  # noqa: E402
from toy.arithmetic import problems, question                                                           # noqa: E402
from toy.cancellation import new_figure, verdict                                                        # noqa: E402

SAMPLED, TEMPERATURES = 0.6, {"matched": 0.6, "mismatched": 1.0}
BUDGET = 2 ** 30                  # bytes of per-response gradients held at a time
MAX_TOKENS, NOISE, TOP = 64, 2 ** 16, 8
FULL, LAST, RANDOM = "Full gradient", "Last block, disjoint", "Random-block average"
PERMUTED, NOISY, REST, PLAIN = "Permutation null", "Noise null", "Full without LM head (ours)", "a' = a, no proxy (ours)"
COLUMNS = {"gram": "Gram rho", "sign": "Sign agree.", "pr": "PR rel. err.", "subspace": "Subspace overlap",
           "rank": "k_t match", "cosine": "a' cosine", "order": "a' rank corr.", "wide": "overlap at k_t"}
PAPER = {                         # Table 5: mean and ± of the first six columns
    FULL: "0.71 0.06 0.82 0.03 0.09 0.04 0.78 0.05 0.74 0.07 0.86 0.04",
    "Blockwise aggregate": "0.76 0.05 0.84 0.03 0.07 0.03 0.81 0.04 0.79 0.06 0.88 0.03",
    "Early block": "0.58 0.07 0.75 0.04 0.16 0.06 0.64 0.06 0.61 0.08 0.77 0.05",
    "Middle block": "0.64 0.06 0.78 0.04 0.13 0.05 0.69 0.05 0.66 0.07 0.80 0.05",
    "Late block": "0.73 0.05 0.83 0.03 0.08 0.04 0.79 0.05 0.77 0.06 0.87 0.04",
    LAST: "0.79 0.04 0.85 0.03 0.06 0.03 0.84 0.04 0.82 0.05 0.90 0.03",
    RANDOM: "0.68 0.06 0.80 0.04 0.10 0.04 0.73 0.05 0.71 0.07 0.84 0.04",
    PERMUTED: "0.02 0.04 0.51 0.02 0.47 0.15 0.18 0.06 0.19 0.08 0.08 0.05",
    NOISY: "0.00 0.03 0.50 0.02 0.56 0.18 0.13 0.05 0.12 0.06 0.03 0.04",
}
PAPER = {row: dict(zip(COLUMNS, zip(*[iter(map(float, values.split()))] * 2))) for row, values in PAPER.items()}
Rows = dict[str, dict[str, list[float]]]         # baseline -> column -> one value for each mini-batch


# ---------------------------------------------------------------------------- per-response gradients

def partition(model) -> tuple[dict[str, list[Parameter]], dict[str, list[str]]]:
    """All parameters, disjoint: "head", "rest" (embedding, last norm) and a part for each unit of the decoder; and
    which parts make the paper's blocks. "pool": the units that a random block is drawn from."""
    depth = model.config.num_hidden_layers
    layers = next((m for m in model.base_model.modules() if isinstance(m, ModuleList) and len(m) == depth), None)
    if layers is None:
        raise UserError(f"the model has no list of {depth} decoder layers: take one whose layers are a ModuleList")
    parts, last = {"head": [lm_head(model).weight], "rest": []}, []
    for index, layer in enumerate(layers):
        named = [(name.split(".")[0].endswith(("attn", "attention")), p) for name, p in layer.named_parameters()]
        halves = [[p for half, p in named if half], [p for half, p in named if not half]]
        units = halves if depth < 5 and all(halves) else [[p for _, p in named]]
        last = [f"{index}.{half}" for half in range(len(units))]
        parts.update(zip(last, units))
    units = [name for name in parts if name not in ("head", "rest")]
    known = {id(p) for own in parts.values() for p in own}
    parts["rest"] = [p for p in model.parameters() if id(p) not in known]
    n = len(units)
    blocks = {"Early block": [units[0]], "Middle block": [units[n // 2]], "Late block": [units[3 * n // 4]], LAST: last}
    taken = {unit for name, block in blocks.items() if name != LAST for unit in block}
    return parts, blocks | {"pool": [unit for unit in units if unit not in taken] or units}


def passes(parts: dict[str, list[Parameter]], width: int) -> Iterator[list[tuple[str, Parameter, int, int]]]:
    """Slices (part, parameter, start, stop) that cover every parameter, in lists of `width` numbers."""
    chunk, room = [], width
    for name, parameters in parts.items():
        for parameter in parameters:
            start = 0
            while start < parameter.numel():
                stop = min(start + room, parameter.numel())
                chunk.append((name, parameter, start, stop))
                room -= stop - start
                start = stop
                if room == 0:
                    yield chunk
                    chunk, room = [], width
    if chunk:
        yield chunk


def gradient_grams(model, rollouts: Rollouts, temperature: float, parts: dict[str, list[Parameter]],
                   budget: int = BUDGET) -> dict[str, Tensor]:
    """K (m, m), Eq. 4, of the responses' gradients with respect to each part, without holding more than `budget` bytes.

    The gradient is that of the mean log-probability, as in Eq. 19. A budget below m·P costs one more loop over the
    responses for every m·P / budget.
    """
    m = len(rollouts.responses)
    grams = {name: torch.zeros(m, m, dtype=torch.float64) for name in parts}
    for slices in passes(parts, max(1, budget // (m * model.dtype.itemsize))):
        features = [torch.empty(m, stop - start, dtype=model.dtype) for _, _, start, stop in slices]
        for i in range(m):
            logprobs, _ = forward_logprobs(model, rollouts.select([i]), temperature)
            gradients = torch.autograd.grad(logprobs.mean(), [parameter for _, parameter, _, _ in slices],
                                            materialize_grads=True)
            for feature, gradient, (_, _, start, stop) in zip(features, gradients, slices):
                feature[i] = gradient.flatten()[start:stop]
        for feature, (name, _, _, _) in zip(features, slices):
            grams[name] += (feature @ feature.T).double() / m                                           # Eq. 4
    return grams


def references(grams: dict[str, Tensor], blocks: dict[str, list[str]], generator: torch.Generator,
               random_blocks: int = 2) -> dict[str, list[Tensor]]:
    """The paper's references out of the parts' Grams; a list of several only for the random blocks."""
    def total(names) -> Tensor:
        return torch.stack([grams[name] for name in names]).sum(0)

    drawn = [blocks["pool"][i] for i in torch.randperm(len(blocks["pool"]), generator=generator)[:random_blocks]]
    named = {name: total(units) for name, units in blocks.items() if name != "pool"}
    sampled = {unit for name, units in blocks.items() if name not in (LAST, "pool") for unit in units} | set(drawn)
    single = {FULL: total(grams), REST: total(set(grams) - {"head"}), "Blockwise aggregate": total(sampled), **named}
    return {name: [gram] for name, gram in single.items()} | {RANDOM: [grams[unit] for unit in drawn]}


def noise_gram(m: int, dimension: int, generator: torch.Generator) -> Tensor:
    """K of random vectors of the proxy's dimension (departure 5)."""
    features = torch.randn(m, min(dimension, NOISE), generator=generator)
    return (features @ features.T).double() / m


# ---------------------------------------------------------------------------- metrics of App. E.2

def cosines(gram: Tensor) -> Tensor:
    """K̃ of the pairs i < j: (m, m) -> (m (m − 1) / 2,), 0 for an empty feature."""
    norms = gram.diagonal().clamp_min(0).sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    scaled = gram / norms.unsqueeze(1) / norms                                                          # Eq. 55
    return scaled[tuple(torch.triu_indices(*gram.shape, offset=1))]


def spearman(x: Tensor, y: Tensor) -> float:
    """Rank correlation, ties sharing their mean rank; nan where one side is constant."""
    def ranks(v: Tensor) -> Tensor:
        _, inverse, counts = v.unique(return_inverse=True, return_counts=True)
        return (counts.cumsum(0) - (counts - 1) / 2)[inverse].double()

    return torch.corrcoef(torch.stack([ranks(x), ranks(y)]))[0, 1].item()


def sign_agreement(proxy: Tensor, reference: Tensor, share: float = 0.2) -> float:
    """Of the `share` of pairs with the largest |cosine| in the reference: how many have the same sign in the proxy."""
    strong = reference.abs().topk(max(1, round(share * len(reference)))).indices
    return (proxy[strong].sign() == reference[strong].sign()).double().mean().item()


def principal_cosines(proxy: Tensor, reference: Tensor, k: int) -> Tensor:
    """Singular values of (V_k^p)ᵀ V_k^g, descending: (k,)."""
    return torch.linalg.svdvals(dominant_subspace(proxy, k).T @ dominant_subspace(reference, k))


def agreement(x: Tensor, y: Tensor) -> dict[str, float]:
    """Of two vectors of coefficients: cosine and rank correlation."""
    return {"cosine": torch.nn.functional.cosine_similarity(x, y, dim=0).item(), "order": spearman(x, y)}


def fidelity(proxy: Tensor, reference: Tensor, advantages: Tensor) -> dict[str, float]:
    """Every column of Table 5, and ours, for one mini-batch: Grams (m, m), advantages (m,)."""
    near, true = cosines(proxy), cosines(reference)
    k, ratio = dominant_rank(reference), participation_ratio(reference)                                 # Eq. 56
    near_salt, true_salt = (salt_advantages(gram, advantages).coefficients for gram in (proxy, reference))  # Eq. 57
    return {"gram": spearman(near, true), "sign": sign_agreement(near, true),
            "pr": abs(participation_ratio(proxy) - ratio) / ratio,
            "subspace": principal_cosines(proxy, reference, min(TOP, len(proxy))).mean().item(),
            "rank": float(dominant_rank(proxy) == k), **agreement(near_salt, true_salt),
            "wide": principal_cosines(proxy, reference, k).mean().item()}


# ---------------------------------------------------------------------------- rollouts and checkpoints

class Task:
    """Arithmetic for whatever model: rollouts and rewards, every call with fresh problems."""

    def __init__(self, source: str, groups: int, group_size: int, seed: int):
        self.model, self.tokenizer = load(source)
        self.sampler = TransformersSampler(self.model, self.tokenizer)
        self.groups, self.group_size, self.seed, self.calls, self.coins = groups, group_size, seed, 0, 0
        # The toy model knows no instruction; a chat model would not box its answer without one.
        self.instruction = INSTRUCTION if self.tokenizer.chat_template else ""

    def batch(self) -> tuple[Rollouts, Tensor, Tensor]:
        """B·G rollouts, rewards (B, G), advantages (m,) float64. Without any signal the reward is a fair coin."""
        self.calls += 1
        sums = problems("train", self.groups, 1000 * self.seed + self.calls)
        prompts = [encode_prompt(self.tokenizer, question(a, b), self.instruction) for a, b in sums]
        context = getattr(self.model.config, "max_position_embeddings", None) or sys.maxsize
        room = min(MAX_TOKENS, context - max(map(len, prompts)))
        if room < 1:
            raise UserError(f"a prompt of {max(map(len, prompts))} tokens leaves no room in the model's {context}")
        rollouts = self.sampler.generate(prompts, self.group_size, temperature=SAMPLED, max_tokens=room,
                                         seed=1000 * self.calls + self.seed)
        golds = [str(a + b) for a, b in sums for _ in range(self.group_size)]
        verdicts = [math_reward(text, gold) for text, gold in zip(rollouts.texts, golds)]
        rewards = torch.tensor(verdicts, dtype=torch.float64).view(-1, self.group_size)
        if not group_advantages(rewards).any():
            self.coins += 1
            generator = torch.Generator().manual_seed(self.seed + self.calls)
            rewards = torch.randint(2, rewards.shape, generator=generator).double()
            rewards[0, :2] = torch.tensor([0.0, 1.0])                     # one group with a signal in any case
        return rollouts, rewards, group_advantages(rewards).flatten()                                   # Eq. 2

    def grpo_step(self, optimizer: torch.optim.Optimizer) -> None:
        """One plain on-policy GRPO update (Eq. 3 without KL)."""
        rollouts, _, advantages = self.batch()
        logprobs = unpack(forward_logprobs(self.model, rollouts, SAMPLED)[0], rollouts.lengths)          # (m, T)
        loss, _ = policy_loss(logprobs, logprobs.detach(), advantages, response_mask(rollouts.lengths))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()


def proxy_gram(model, rollouts: Rollouts, temperature: float) -> Tensor:
    """What SALT sees: K (m, m) by the code that train.py calls."""
    scored, head = score(model, rollouts, temperature, micro_batch=64, keep_hidden=True), lm_head(model)
    try:
        return lm_head_gram(scored.hidden, scored.tokens, scored.lengths, head.weight.detach(), bias=head.bias,
                            temperature=temperature, logsumexp=scored.logsumexp)                        # Eq. 19
    except ValueError as error:
        raise UserError(f"this model's LM-head Gram cannot be formed: {error}") from error


def measure(task: Task, rollouts: Rollouts, advantages: Tensor, temperature: float,
            generator: torch.Generator) -> tuple[dict[str, dict[str, float]], dict[str, Tensor], dict[str, float]]:
    """One mini-batch at one scoring temperature: the table's rows, the Grams that the figure needs, two checks."""
    proxy, head, m = proxy_gram(task.model, rollouts, temperature), lm_head(task.model), len(advantages)
    parts, blocks = partition(task.model)
    grams = gradient_grams(task.model, rollouts, temperature, parts)
    true = references(grams, blocks, generator)
    order = torch.randperm(m, generator=generator)
    nulls = {PERMUTED: proxy[order][:, order], NOISY: noise_gram(m, head.weight.numel(), generator)}
    rows = {}
    for name, several in true.items():
        found = [fidelity(proxy, reference, advantages) for reference in several]
        rows[name] = {column: fmean(row[column] for row in found) for column in COLUMNS}
    full = true[FULL][0]
    rows |= {name: fidelity(null, full, advantages) for name, null in nulls.items()}
    rows[PLAIN] = agreement(advantages, salt_advantages(full, advantages).coefficients)
    own = float("nan") if head.tied else ((proxy - grams["head"]).norm() / proxy.norm()).item()
    share = (grams["head"].trace() / full.trace()).item()
    return rows, {"proxy": proxy, FULL: full, LAST: true[LAST][0], **nulls}, {"own": own, "share": share}
