"""How faithful the LM-head proxy is: Sec. 3.2 and App. E (Tables 1 and 5 and their figure), measured.

    python toy/fidelity.py                # two or three minutes on two cores; --quick: a quarter of one
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
from statistics import fmean
from typing import Iterator

import torch
from torch import Tensor
from torch.nn import ModuleList, Parameter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from salt.advantages import group_advantages, salt_advantages
from salt.data import INSTRUCTION
from salt.errors import Parser, UserError, run
from salt.geometry import dominant_rank, dominant_subspace, participation_ratio
from salt.loss import policy_loss
from salt.models import (encode_prompt, forward_logprobs, lm_head, load, resolve, response_mask, score,
                         unpack)
from salt.proxy import lm_head_gram
from salt.reward import math_reward
from salt.rollout import Rollouts, TransformersSampler
from toy.arithmetic import problems, question
from toy.cancellation import claim, new_figure, verdict

SAMPLED, SCORED = 0.6, {"matched": 0.6, "mismatched": 1.0}
BUDGET = 2 ** 30                  # bytes of per-response gradients held at a time
MAX_TOKENS, NOISE, TOP, DRAWS = 64, 2 ** 16, 8, 4
FULL, LAST, RANDOM = "Full gradient", "Last block, disjoint", "Random-block average"
PERMUTED, NOISY = "Permutation null", "Noise null"
REST, PLAIN = "Full without LM head (ours)", "a' = a, no proxy (ours)"
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

Table = dict[str, dict[str, tuple[float, float]]]                # baseline -> column -> (mean, deviation)
Measured = tuple[dict[str, dict[str, float]], dict[str, Tensor], dict[str, float]]   # rows, Grams, facts

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


def references(grams: dict[str, Tensor], blocks: dict[str, list[str]],
               generator: torch.Generator) -> dict[str, list[Tensor]]:
    """The paper's references out of the parts' Grams; a list of several only for the two random blocks."""
    def total(names) -> Tensor:
        return torch.stack([grams[name] for name in names]).sum(0)

    drawn = [blocks["pool"][i] for i in torch.randperm(len(blocks["pool"]), generator=generator)[:2]]
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
        self.groups, self.group_size, self.seed, self.calls, self.coin = groups, group_size, seed, 0, False
        # The toy model knows no instruction; a chat model would not box its answer without one.
        self.instruction = INSTRUCTION if self.tokenizer.chat_template else ""

    def rollouts(self) -> tuple[Rollouts, Tensor]:
        """B·G responses and the verifier's rewards (B, G)."""
        self.calls += 1
        sums = problems("train", self.groups, 1000 * self.seed + self.calls)
        prompts = [encode_prompt(self.tokenizer, question(a, b), self.instruction) for a, b in sums]
        context = getattr(self.model.config, "max_position_embeddings", None) or sys.maxsize
        room = min(MAX_TOKENS, context - max(map(len, prompts)))
        if room < 1:
            raise UserError(f"a prompt of {max(map(len, prompts))} tokens leaves no room in the model's {context}")
        drawn = self.sampler.generate(prompts, self.group_size, temperature=SAMPLED, max_tokens=room,
                                      seed=1000 * self.calls + self.seed)
        golds = [str(a + b) for a, b in sums for _ in range(self.group_size)]
        rewards = torch.tensor([math_reward(text, gold) for text, gold in zip(drawn.texts, golds)])
        return drawn, rewards.double().view(-1, self.group_size)

    def batch(self) -> tuple[Rollouts, Tensor, Tensor]:
        """Rollouts, rewards (B, G), advantages (m,); after three batches without any signal, the coin for good."""
        for _ in range(1 if self.coin else 3):
            drawn, rewards = self.rollouts()
            if rewards.std(1).any() and not self.coin:
                return drawn, rewards, group_advantages(rewards).flatten()                              # Eq. 2
        self.coin = True
        rewards = torch.randint(2, rewards.shape, generator=torch.Generator().manual_seed(self.calls)).double()
        rewards[0, :2] = torch.tensor([0.0, 1.0])                         # one group has a signal in any case
        return drawn, rewards, group_advantages(rewards).flatten()

    def grpo_step(self, optimizer: torch.optim.Optimizer) -> None:
        """One plain on-policy GRPO update (Eq. 3 without KL)."""
        drawn, _, advantages = self.batch()
        logprobs = unpack(forward_logprobs(self.model, drawn, SAMPLED)[0], drawn.lengths)                # (m, T)
        loss, _ = policy_loss(logprobs, logprobs.detach(), advantages, response_mask(drawn.lengths))
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


def measure(model, rollouts: Rollouts, advantages: Tensor, temperature: float, generator: torch.Generator) -> Measured:
    """One mini-batch at one scoring temperature: the table's rows, Grams for the figure, facts that explain both."""
    proxy, head, m = proxy_gram(model, rollouts, temperature), lm_head(model), len(advantages)
    parts, blocks = partition(model)
    grams = gradient_grams(model, rollouts, temperature, parts)
    true = references(grams, blocks, generator)
    full, orders = true[FULL][0], [torch.randperm(m, generator=generator) for _ in range(DRAWS)]
    nulls = {PERMUTED: [proxy[order][:, order] for order in orders],
             NOISY: [noise_gram(m, head.weight.numel(), generator) for _ in range(DRAWS)]}
    pairs = {name: [(proxy, reference) for reference in several] for name, several in true.items()}
    pairs |= {name: [(null, full) for null in several] for name, several in nulls.items()}
    rows = {}
    for name, several in pairs.items():
        found = [fidelity(*pair, advantages) for pair in several]
        rows[name] = {column: fmean(row[column] for row in found) for column in COLUMNS}
    rows[PLAIN] = agreement(advantages, salt_advantages(full, advantages).coefficients)
    facts = {"difference": 0.0 if head.tied else ((proxy - grams["head"]).norm() / proxy.norm()).item(),
             "share": (grams["head"].trace() / full.trace()).item()}
    for name, gram in (("proxy", proxy), (FULL, full)):
        salt = salt_advantages(gram, advantages)
        facts |= {f"{name} pr": salt.participation_ratio, f"{name} rank": salt.rank, f"{name} alpha": salt.alpha,
                  f"{name} largest": (gram.diagonal().max() / gram.trace()).item()}
    return rows, {"proxy": proxy, FULL: full, LAST: true[LAST][0], **{name: nulls[name][0] for name in nulls}}, facts


# ---------------------------------------------------------------------------- table and verdicts

def summarise(measured: list[Measured]) -> Table:
    """Mean and standard deviation over mini-batches: baseline -> column -> (mean, deviation)."""
    def moments(name: str, column: str) -> tuple[float, float]:
        values = torch.tensor([rows[name].get(column, float("nan")) for rows, _, _ in measured])
        return values.mean().item(), values.std(correction=0).item()

    return {name: {column: moments(name, column) for column in COLUMNS} for name in [*PAPER, REST, PLAIN]}


def table_lines(table: Table, columns: list[str]) -> list[list[str]]:
    """Heading and rows of text: measured mean ± deviation, the paper's mean in brackets."""
    def cell(name: str, column: str) -> str:
        mean, deviation = table[name][column]
        paper = PAPER.get(name, {}).get(column)
        return "-" if mean != mean else f"{mean:.2f} ± {deviation:.2f}" + (f" [{paper[0]:.2f}]" if paper else "")

    return [["", *(COLUMNS[column] for column in columns)]] + [[n, *(cell(n, c) for c in columns)] for n in table]


def judge(table: Table, measured: list[Measured]) -> str:
    """Prints what one table says about the paper's claims; returns the verdict on a'."""
    mean = {name: {column: value for column, (value, _) in row.items()} for name, row in table.items()}
    full, permuted, noise = mean[FULL], mean[PERMUTED], mean[NOISY]
    fact = {key: fmean(facts[key] for _, _, facts in measured) for key in measured[0][2]}
    for name in ("proxy", FULL):
        verdict("measured", f"{name.lower()}: PR {fact[name + ' pr']:.1f}, k_t {fact[name + ' rank']:.1f}, alpha_t "
                f"{fact[name + ' alpha']:.2f}; one response holds {fact[name + ' largest']:.0%} of tr K")
    verdict("measured", f"the LM head holds {fact['share']:.0%} of the full gradient's energy")
    gains = {c: full[c] - max(permuted[c], noise[c]) for c in ("gram", "sign", "subspace", "cosine")}
    gains |= {"pr": noise["pr"] - full["pr"], "rank": full["rank"] - noise["rank"]}       # no permutation changes these
    lost = [COLUMNS[c] for c, gain in gains.items() if gain <= 0.02]
    claim(not lost, "the proxy beats the nulls in every column" + (f", except {', '.join(lost)}" if lost else ""))
    close = [COLUMNS[c] for c, (paper, deviation) in PAPER[FULL].items() if abs(full[c] - paper) <= 2 * deviation]
    claim(len(close) == len(PAPER[FULL]), f"full gradient within twice the paper's ±: {', '.join(close) or 'none'}")
    depth = [mean[name]["gram"] for name in ("Early block", "Middle block", "Late block", LAST)]
    claim(depth == sorted(depth), f"Gram rho grows from early to last block: {', '.join(f'{x:.2f}' for x in depth)}")
    reliable, parts = True, []
    for c, what in (("order", "rank correlation"), ("cosine", "cosine")):
        wins = sum(all(rows[FULL][c] > rows[rival][c] for rival in (PERMUTED, NOISY, PLAIN)) for rows, _, _ in measured)
        reliable &= wins >= 0.9 * len(measured)
        parts.append(f"{what} {table[FULL][c][0]:.2f} ± {table[FULL][c][1]:.2f} with the full gradient (permutation "
                     f"{permuted[c]:.2f}, noise {noise[c]:.2f}, a itself {mean[PLAIN][c]:.2f}; above all three in "
                     f"{wins} of {len(measured)} mini-batches)")
    return f"the LM-head proxy {'preserves' if reliable else 'does NOT reliably preserve'} a': {'; '.join(parts)}"


def write(tables: dict[str, Table], notes: list[str], folder: Path) -> None:
    """fidelity.md and fidelity.csv."""
    text = ["# How faithful the LM-head proxy is\n", *(f"- {note}" for note in notes)]
    flat = [["temperature", "baseline", "metric", "mean", "deviation", "paper mean", "paper ±"]]
    for kind, table in tables.items():
        text.append(f"\n## Sampled at {SAMPLED}, scored at {SCORED[kind]} ({kind})\n\nMean ± standard deviation over "
                    "checkpoints and mini-batches [the paper's mean, Table 5].\n")
        heading, *rest = table_lines(table, list(COLUMNS))
        text += ["| " + " | ".join(line) + " |" for line in [heading, ["---"] * len(heading), *rest]]
        flat += [[kind, name, COLUMNS[column], *value, *PAPER.get(name, {}).get(column, ())]
                 for name, row in table.items() for column, value in row.items()]
    (folder / "fidelity.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    with open(folder / "fidelity.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(flat)


def draw(batches: list[dict[str, Tensor]], path: Path) -> None:
    """The paper's four panels for the disjoint last block: cosines, signs, PR, principal angles."""
    figure, ((pairs, sign), (ratio, angle)) = new_figure(2, 2, (10, 8))
    styles = {"proxy": ("LM-head proxy", "o-"), PERMUTED: ("permutation null", "s--"), NOISY: ("noise null", "^:")}
    shares, top = [0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0], min(TOP, len(batches[0]["proxy"]))
    first = cosines(batches[0]["proxy"]), cosines(batches[0][LAST])
    pairs.hexbin(*first, gridsize=60, bins="log", mincnt=1, linewidths=0)
    for name, (label, style) in styles.items():
        both = [(batch[name], batch[LAST]) for batch in batches]
        signs = [fmean(sign_agreement(cosines(x), cosines(y), share) for x, y in both) for share in shares]
        rho = fmean(spearman(cosines(x), cosines(y)) for x, y in both)
        pairs.plot([], [], " ", label=f"{label}: rho {rho:.2f}")
        sign.plot(shares, signs, style, label=label)
        angles = torch.stack([principal_cosines(x, y, top) for x, y in both]).mean(0)
        angle.plot(range(1, top + 1), angles, style, label=label)
    for name, label in (("proxy", "LM-head proxy"), (LAST, "last block"), (FULL, "full gradient")):
        ratio.plot([*range(1, len(batches) + 1)], [participation_ratio(b[name]) for b in batches], "o-", label=label)
    sign.axvline(0.2, color="k", lw=0.8)
    pairs.set(title="(a) pairs of the first mini-batch", xlabel="cosine, LM head", ylabel="cosine, last block")
    sign.set(title="(b) sign agreement", xscale="log", ylim=(0, 1.05),
             xlabel="share of pairs, largest |cosine| first (table: 0.2)")
    ratio.set(title="(c) participation ratio", yscale="log", xlabel="mini-batch, checkpoint after checkpoint")
    angle.set(title=f"(d) principal cosines of the top-{top} eigenspaces", ylim=(0, 1.05), xlabel="principal direction")
    for axis, place in ((pairs, "upper left"), (sign, "lower left"), (ratio, "best"), (angle, "best")):
        axis.legend(loc=place)
    figure.savefig(path, dpi=130)


# ---------------------------------------------------------------------------- program

def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description="Sec. 3.2 and App. E of the SALT paper, measured: how faithful the LM-head proxy is.")
    parser.add_argument("--model", help="a model folder, a run of train.py or a hub id, measured as it is (default: "
                        "the tiny model's warm start, and the same after 10 and 20 GRPO updates)")
    parser.add_argument("--quick", action="store_true", help="8 groups, 1 mini-batch, 2 checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/fidelity"), help="folder of tables and figure")
    parser.add_argument("--groups", type=int, help="prompts in a mini-batch (default 32)")
    parser.add_argument("--group-size", type=int, default=8, help="responses to each prompt")
    parser.add_argument("--mini-batches", type=int, help="at each checkpoint (default 3)")
    options = parser.parse_args(argv)
    options.groups = (8 if options.quick else 32) if options.groups is None else options.groups
    options.mini_batches = (1 if options.quick else 3) if options.mini_batches is None else options.mini_batches
    for flag, least in (("groups", 2), ("group_size", 2), ("mini_batches", 1), ("seed", 0)):
        if not least <= getattr(options, flag) < 2 ** 20:
            raise UserError(f"--{flag.replace('_', '-')} {getattr(options, flag)} is not between {least} and 2^20 - 1")
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {options.output}: {error.strerror}; choose another --output") from error
    return options


def main(argv: list[str] | None = None) -> None:
    options, began, notes = parse(argv), time.perf_counter(), []

    def note(text: str) -> None:
        notes.append(text)
        print(f"  {text}", flush=True)

    name = options.model or "tiny"
    final = Path(name) / "final"
    task = Task(resolve(str(final) if final.is_dir() else name), options.groups, options.group_size, options.seed)
    gaps = [0] if options.model else [0, 2] if options.quick else [0, 10, 10]    # GRPO updates before each checkpoint
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-4)              # train.py's for the tiny model
    size, m = sum(p.numel() for p in task.model.parameters()), options.groups * options.group_size
    loops = -(-m * size * task.model.dtype.itemsize // BUDGET)
    note(f"{name}: {size:,} parameters; {options.groups} x {options.group_size} responses, {len(gaps)} x "
         f"{options.mini_batches} mini-batches, {loops} pass(es) over each")
    generator, measured = torch.Generator().manual_seed(options.seed), {kind: [] for kind in SCORED}
    for checkpoint, gap in enumerate(gaps):
        for _ in range(gap):
            task.grpo_step(optimizer)
        rewards = []
        for _ in range(options.mini_batches):
            rollouts, reward, advantages = task.batch()
            rewards.append(reward)
            for kind, temperature in SCORED.items():
                measured[kind].append(measure(task.model, rollouts, advantages, temperature, generator))
        reward = torch.cat(rewards)
        here = summarise(measured["matched"][-options.mini_batches:])[FULL]
        note(f"after {sum(gaps[:checkpoint + 1])} GRPO updates: reward {reward.mean():.2f}, "
             f"{reward.std(1).gt(0).double().mean():.0%} of the groups with a signal; full gradient: Gram rho "
             f"{here['gram'][0]:.2f}, a' cosine {here['cosine'][0]:.2f}, a' rank correlation {here['order'][0]:.2f}"
             + (" - STAND-IN REWARD, a fair coin: the verifier gave no group a signal" if task.coin else ""))
    if not lm_head(task.model).tied:
        worst = max(facts["difference"] for rows in measured.values() for _, _, facts in rows)
        note(f"K of the proxy and autograd's K of the LM head differ by {worst:.0e}")

    tables, verdicts = {kind: summarise(rows) for kind, rows in measured.items()}, []
    for kind, table in tables.items():
        print(f"\nSampled at {SAMPLED}, scored at {SCORED[kind]} ({kind}): mean ± deviation [paper]\n")
        for columns in (list(COLUMNS)[:4], list(COLUMNS)[4:]):                   # or else no terminal would hold them
            for first, *cells in table_lines(table, columns):
                print("  " + first.ljust(27) + "".join(cell.rjust(21) for cell in cells))
            print()
        verdicts.append(f"{kind} temperature: {judge(table, measured[kind])}")
    print()
    noise, plain = (tables["matched"][row]["cosine"][0] for row in (NOISY, PLAIN))
    for text in ("cannot be: the permutation null's PR error 0.47 and k_t match 0.19. A permutation keeps every "
                 "eigenvalue, so both cells equal the full-gradient row's",
                 "cannot be: the noise null's a' cosine 0.03. Random vectors are nearly orthogonal, so k_t is near m "
                 f"and a' near a (here {noise:.2f}, a itself {plain:.2f})", *verdicts):
        note(text)
    draw([grams for _, grams, _ in measured["matched"]], options.output / "fidelity.png")
    write(tables, notes, options.output)
    print(f"\nfidelity.md, fidelity.csv, fidelity.png in {options.output} ({time.perf_counter() - began:.0f} s)")


if __name__ == "__main__":
    run(main)
