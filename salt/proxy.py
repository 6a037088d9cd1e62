"""The LM-head gradient proxy: hidden states, tokens and the LM head give K, and no V x d gradient is ever held.

g_i is the gradient of response i's log-probability with respect to the LM head, a (V, d) matrix: 233 million numbers at
1.5B. K needs only the inner products <g_i, g_j>, and these add up over slices of the vocabulary. For each block b of V:

    P_b = exp(H W_bᵀ / τ − lse) − onehot_b      (N, |b|)      a matrix product
    F_b = P_iᵀ H_i for every response i         (m, |b|, d)   a batched matrix product per group of similar lengths
    K  += F_b F_bᵀ                              (m, m)        a matrix product

Exact, in 4·N·d·V + 2·m²·V·d flops; memory m·|b|·d + N·d whatever V is. (The other exact order, token pairs
<p_t − e_t, p_s − e_s><h_t, h_s>, costs N²·(V + d) and pays only for responses shorter than about √d tokens.)

Glossary
    paper          name            shape          equation
    h_t            hidden          (N, d)         19   the state that predicts response token t, packed over responses
    o_t            tokens          (N,)           19   the sampled tokens
    |o_i|, T_i     lengths         (m,)           19
    W_out, b_out   weight, bias    (V, d), (V,)   19
    p_t            (blockwise)     (N, |b|)       19   softmax of logits / temperature
    p_t − e_{o_t}  residual        (N, |b|)       19   called δ_t below
    ‖δ_t‖          delta_norms     (N,)                √(Σ p² − 2 p_o + 1)
    K              gram            (m, m)         4    GᵀG / m

Certified filter (tolerance > 0). A token on which the model is certain has ‖δ_t‖ ≈ 0. Leaving tokens out changes
feature i by at most ε_i = Σ_dropped ‖δ_t‖‖h_t‖ / (τ T_i), known beforehand. Per response the smallest terms are dropped
while ε_i fits a budget guessed from √(Σ ‖δ_t‖²‖h_t‖²) (what ‖g_i‖ would be if its terms were orthogonal); then
ε_i ≤ tolerance·(‖ĝ_i‖ − ε_i) is checked with the ‖ĝ_i‖ found, which proves ‖g_i − ĝ_i‖ ≤ tolerance·‖g_i‖, and responses
that fail are redone with all their tokens. With Ê = (ε_1, …, ε_m), ‖K − K̂‖_F ≤ (2‖Ĝ‖₂‖Ê‖ + ‖Ê‖²) / m. Both bounds
carry an allowance for rounding: a few units in the last place of each logit, times Σ‖h_t‖. (bfloat16 on CUDA also
rounds residuals and features to bfloat16 on the way into the tensor cores; the bounds do not count that.)
How much may go: on rollouts of the tiny model (8 mini-batches of 256, before and after training) the cosine of a' with
the exact one is at least 0.9999 at tolerance 0.03, 0.9995 at 0.1, 0.998 at 0.3 and 0.965 at 0.5. So 0.3 is the
largest that moves a' by less than 1 %; train.py takes 0.1 for larger models, a step below, and 0 for the tiny one.

Sketch (method="sketch"). A seeded CountSketch S (k, V) has one random sign per column; <S δ_t, S δ_s> is an unbiased
estimate of <δ_t, δ_s>, so features (k, d) replace (V, d). It is applied while a chunk's logits are at hand
(`token_statistics`), so there is no second walk over the vocabulary. Its error is random: no bound is returned.

Departures from the paper
    1. The logits are divided by the sampler's temperature (the paper does not say); g_i then carries 1/τ.
    2. length_norm="sum" leaves out Eq. 19's 1/|o_i|, as the authors' released code does.
    3. The authors' code forms one backward pass and one (V, d) gradient per response; here K is the same matrix to
       rounding, by the walk above.
    4. The global sign of g_i (log-probability or its negative) does not matter to K.
    5. The filter and the sketch are not in the paper. Both are off unless asked for.
    6. A response without tokens has feature 0.
"""
import math
from dataclasses import dataclass
from functools import partial
from typing import Callable

import torch
from torch import Tensor

HOST_BUDGET = 2 ** 27         # bytes of features and residuals held at a time on the CPU
DEVICE_BUDGET = 2 ** 30       # and on an accelerator, whose matrix products want wider blocks
HOST_TOKENS = 2 ** 12         # tokens of a batch of responses on the CPU: its residuals should stay in the cache
DEVICE_TOKENS = 2 ** 16       # and on an accelerator, where launches cost more than memory traffic
PADDING = 1 / 8               # a batch's shortest response is shorter than its longest by at most this share
SLICE = 2 ** 12               # longest inner product in float32 on the way to K; longer sums go on in float64
NORM_ROWS = 4096              # tokens whose norms are taken at once
ROUNDING = 4                  # allowance of the certified bounds, in units of eps·(1 + |lse|) per token


@dataclass(frozen=True)
class CountSketch:
    """S (k, V): column v has signs[v] in row buckets[v] and 0 elsewhere."""
    buckets: Tensor           # (V,) in [0, k)
    signs: Tensor             # (V,) ±1
    size: int                 # k


@dataclass(frozen=True)
class _Group:
    """Responses of similar length as one batch, the shorter ones padded."""
    responses: Tensor         # (g,) which columns of G these are
    rows: Tensor              # (g, T) positions in the packed tensors, −1 for padding
    hidden: Tensor            # (g, T, d) in the dtype of the products, 0 for padding

    def gather(self, values: Tensor, padding: float) -> Tensor:
        """Packed values (N,) -> (g, T)."""
        return torch.where(self.rows < 0, padding, values[self.rows.clamp_min(0)])


def count_sketch(vocabulary: int, sketch_dim: int, generator: torch.Generator | None = None,
                 device: torch.device | str = "cpu") -> CountSketch:
    """Draw a CountSketch of `vocabulary` columns and `sketch_dim` rows; without a generator, always the same one."""
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    draw = {"generator": generator, "device": generator.device}
    buckets = torch.randint(sketch_dim, (vocabulary,), **draw)
    signs = torch.randint(2, (vocabulary,), **draw) * 2 - 1
    return CountSketch(buckets.to(device), signs.to(device), sketch_dim)


@torch.no_grad()
def token_statistics(hidden: Tensor, tokens: Tensor, weight: Tensor, *, bias: Tensor | None = None,
                     temperature: float = 1.0, sketch: CountSketch | None = None) -> dict[str, Tensor]:
    """What the scoring pass needs of a chunk of tokens, without autograd. Holds two (n, V) buffers.

    hidden (n, d), tokens (n,), weight (V, d), bias (V,) -> logprobs, entropy (nats), logsumexp and delta_norms, each
    (n,) and of logits / temperature, in float32 (float64 for float64 input); with a sketch also "sketch" (n, k): Sδ.
    """
    shifted = _product(_computable(hidden), _computable(weight).T)                                     # (n, V)
    if bias is not None:
        shifted += bias
    shifted /= temperature
    peak = shifted.amax(dim=1, keepdim=True)
    shifted -= peak
    chosen = tokens.to(shifted.device, torch.int64).unsqueeze(1)                                       # (n, 1)
    chosen_shifted = shifted.gather(1, chosen)
    exponentials = shifted.exp()                                                                       # (n, V)
    dot = torch.linalg.vecdot(exponentials, shifted).unsqueeze(1)
    others = exponentials.scatter_(1, chosen, 0).sum(dim=1, keepdim=True)    # 1 − p from the others: no cancellation
    total = others + chosen_shifted.exp()
    residual = exponentials.scatter_(1, chosen, -others)                     # (p − e_o) · total
    log_total = total.log()
    statistics = {"logprobs": chosen_shifted - log_total,                                              # Eq. 1
                  "entropy": log_total - dot / total,                                                  # Eq. 70
                  "logsumexp": peak + log_total,
                  "delta_norms": torch.linalg.vector_norm(residual, dim=1, keepdim=True) / total}
    statistics = {name: value.squeeze(1) for name, value in statistics.items()}
    if sketch is not None:
        signed = residual.mul_(sketch.signs).div_(total)
        statistics["sketch"] = signed.new_zeros(len(signed), sketch.size).index_add_(1, sketch.buckets, signed)
    return statistics


@torch.no_grad()
def lm_head_gram(hidden: Tensor, tokens: Tensor, lengths: Tensor, weight: Tensor, *, bias: Tensor | None = None,
                 temperature: float = 1.0, length_norm: str = "mean", method: str = "exact", tolerance: float = 0.0,
                 sketch_dim: int = 1024, generator: torch.Generator | None = None, block: int | None = None,
                 logsumexp: Tensor | None = None, delta_norms: Tensor | None = None,
                 return_bound: bool = False) -> Tensor | tuple[Tensor, float]:
    """K = GᵀG / m of the responses' LM-head gradients (Eq. 4, Eq. 19).

    hidden (N, d) and tokens (N,) are packed over responses in order, lengths (m,) sum to N, weight (V, d), bias (V,).
    length_norm: "mean" divides a response's gradient by its length (Eq. 19), "sum" does not. method: "exact", with the
    certified filter when tolerance > 0, or "sketch" with sketch_dim rows drawn from generator. block: vocabulary rows
    (for the sketch: sketch rows) per step, None for as many as the memory budget holds. logsumexp (N,) of
    logits / temperature and delta_norms (N,) come from `token_statistics`; what is needed and absent is computed here.

    Returns K (m, m), float64 on the CPU; with return_bound also a bound on ‖K − K̂‖_F: 0 where nothing was left out,
    inf for a sketch. bfloat16 and float32 accumulate in float32, float64 in float64. Deterministic
    (a sketch on CUDA up to the order of its additions), without autograd.
    Raises ValueError or TypeError for shapes, dtypes, tokens or lengths that do not fit, and ValueError naming the
    response where a hidden state or its gradient is NaN or infinite.
    """
    check_options(temperature, length_norm, method, tolerance, sketch_dim, block)
    sizes = check_layout(hidden, tokens, lengths, weight, bias, logsumexp, delta_norms)                # (m,)
    check_values(peaks(hidden), tokens, sizes, len(weight), logsumexp, delta_norms)
    tokens = tokens.to(hidden.device, torch.int64)
    scale = feature_scale(sizes, temperature, length_norm)
    head = {"weight": weight, "bias": bias, "temperature": temperature}
    if method == "sketch":
        sketch = count_sketch(len(weight), sketch_dim, generator, hidden.device)
        gram = _sketched_gram(hidden, sizes, scale, _statistics(hidden, tokens, head, sketch)["sketch"], block)
        bound = math.inf
    else:
        if logsumexp is None or (tolerance > 0 and delta_norms is None):
            statistics = _statistics(hidden, tokens, head)
            logsumexp, delta_norms = statistics["logsumexp"], statistics["delta_norms"]
        walk = partial(exact_gram, hidden, tokens, sizes, scale, head, logsumexp.to(hidden.device), block)
        if tolerance > 0:
            terms, rounding = filter_terms(hidden, sizes, scale, logsumexp, delta_norms)
            gram, _, errors = filtered_gram(walk, terms, rounding, sizes, tolerance)
            bound = gram_bound(gram, errors) if return_bound else None
        else:
            gram, bound = walk(None), 0.0
    check_finite(gram)
    return (gram, bound) if return_bound else gram


def lm_head_gram_naive(hidden: Tensor, tokens: Tensor, lengths: Tensor, weight: Tensor, *, bias: Tensor | None = None,
                       temperature: float = 1.0, length_norm: str = "mean") -> Tensor:
    """The same K (m, m) as `lm_head_gram`, from gradients (m, V·d) that autograd forms one by one. Small sizes only."""
    features = naive_features(hidden, tokens, lengths, weight, bias=bias, temperature=temperature,
                              length_norm=length_norm).double()
    return (features @ features.T / len(features)).cpu()                                               # Eq. 4


def naive_features(hidden: Tensor, tokens: Tensor, lengths: Tensor, weight: Tensor, *, bias: Tensor | None = None,
                   temperature: float = 1.0, length_norm: str = "mean") -> Tensor:
    """Gᵀ (m, V·d): the gradient of each response's mean (or summed) log-probability with respect to the LM head."""
    leaf = weight.detach().requires_grad_()
    rows = []
    for states, labels in zip(hidden.detach().split(lengths.tolist()), tokens.split(lengths.tolist())):
        logits = torch.nn.functional.linear(states, leaf, bias) / temperature
        logprobs = logits.log_softmax(-1).gather(1, labels.unsqueeze(1).long())
        score = logprobs.sum() / max(len(labels), 1) if length_norm == "mean" else logprobs.sum()
        rows.append(torch.autograd.grad(score, leaf)[0].flatten())                                     # Eq. 19
    return torch.stack(rows)


# ---- the walk over the vocabulary ----

def exact_gram(hidden: Tensor, tokens: Tensor, sizes: Tensor, scale: Tensor, head: dict, logsumexp: Tensor,
               block: int | None, keep: Tensor | None) -> Tensor:
    """K (m, m) of the packed tokens, or of those that keep (N,) marks.

    A token outside the weight's rows has no one-hot, so shares of the rows, each with tokens − its first row, give
    matrices that add up to K.
    """
    weight, bias, temperature = head["weight"], head["bias"], head["temperature"]
    groups = _groups(hidden, sizes, keep)
    labels = [group.gather(tokens, -1) for group in groups]                                            # (g, T)
    shifts = [-group.gather(logsumexp, math.inf).flatten().unsqueeze(1) for group in groups]           # (g·T, 1)

    def residual(index: int, start: int, stop: int) -> Tensor:
        states = groups[index].hidden
        logits = _product(states.flatten(0, 1), _computable(weight[start:stop]).T)                     # (g·T, |b|)
        if bias is not None:
            logits += bias[start:stop]
        probabilities = torch.add(shifts[index], logits, alpha=1 / temperature, out=logits).exp_()
        rows, columns = _hits(labels[index].flatten(), start, stop)
        probabilities[rows, columns] -= 1                                      # p − e_o, the residual of Eq. 19
        return probabilities.view(*states.shape[:2], -1)

    return _accumulate(groups, residual, scale, len(weight), block)


def _sketched_gram(hidden: Tensor, sizes: Tensor, scale: Tensor, sketched: Tensor, block: int | None) -> Tensor:
    """K̂ (m, m) of the residuals' sketches (N, k)."""
    groups = _groups(hidden, sizes, None)

    def residual(index: int, start: int, stop: int) -> Tensor:
        rows = groups[index].rows                                              # padding meets hidden states that are 0
        return sketched[:, start:stop][rows.clamp_min(0)]

    return _accumulate(groups, residual, scale, sketched.shape[1], block)


def _accumulate(groups: list[_Group], residual: Callable[[int, int, int], Tensor], scale: Tensor, width: int,
                block: int | None) -> Tensor:
    """Σ over blocks of F_b F_bᵀ / m, F_b = residualᵀ · hidden; residual(group, start, stop): (g, T, stop − start)."""
    m = len(scale)
    gram = torch.zeros(m, m, dtype=torch.float64)
    if not groups or width == 0:
        return gram
    order = torch.cat([group.responses for group in groups])                   # (m',) responses that have tokens
    states = groups[0].hidden
    d, budget = states.shape[2], DEVICE_BUDGET if states.is_cuda else HOST_BUDGET
    column = len(order) * d + max(group.rows.numel() for group in groups)      # numbers held per vocabulary row
    block = min(width, block or max(1, budget // (2 * states.element_size() * column)))
    depth = min(block, max(1, SLICE // d))
    block -= block % depth
    features = states.new_zeros(len(order), block, d)
    slices = features.view(len(order), block // depth, depth * d).transpose(0, 1)                      # (c, m', ·)
    total = torch.zeros(len(order), len(order), dtype=torch.float64, device=states.device)
    for start in range(0, width, block):
        stop, first = min(start + block, width), 0
        for index, group in enumerate(groups):
            last = first + len(group.responses)
            deltas = residual(index, start, stop).to(states.dtype)
            torch.bmm(deltas.mT, group.hidden, out=features[first:last, :stop - start])                # Eq. 19
            first = last
        features[:, stop - start:] = 0                                         # the last block may be narrower
        total += _batched_product(slices, slices.mT).sum(0, dtype=torch.float64)
    gram[order.unsqueeze(1), order] = (total + total.T).cpu() / (2 * m)                                # Eq. 4
    return gram * scale.unsqueeze(1) * scale


def feature_scale(sizes: Tensor, temperature: float, length_norm: str) -> Tensor:
    """What Eq. 19 multiplies a response's summed outer products by: 1/(τ T_i), or 1/τ; (m,) float64."""
    return (1 / temperature) / (sizes.clamp_min(1) if length_norm == "mean" else torch.ones_like(sizes)).double()


def _groups(hidden: Tensor, sizes: Tensor, keep: Tensor | None) -> list[_Group]:
    """Batches of responses of nearly equal length, the longest first; empty responses are in none."""
    counts, positions = sizes, torch.arange(len(hidden))
    if keep is not None:
        positions = keep.nonzero().squeeze(1)
        counts = torch.bincount(torch.arange(len(sizes)).repeat_interleave(sizes)[keep], minlength=len(sizes))
    starts = counts.cumsum(0) - counts
    limit = DEVICE_TOKENS if hidden.is_cuda else HOST_TOKENS
    plans, longest = [], 0
    for response in counts.argsort(descending=True, stable=True).tolist():
        length = int(counts[response])
        if length == 0:
            break
        if not plans or longest - length > max(longest * PADDING, 8) or (len(plans[-1]) + 1) * longest > limit:
            plans.append([])
            longest = length
        plans[-1].append(response)
    return [_pack(hidden, positions, starts[plan], counts[plan], torch.tensor(plan)) for plan in plans]


def _pack(hidden: Tensor, positions: Tensor, starts: Tensor, counts: Tensor, responses: Tensor) -> _Group:
    """Gather the responses' tokens from the packed states into one padded batch."""
    steps = torch.arange(int(counts.max()))
    outside = steps >= counts.unsqueeze(1)                                                             # (g, T)
    rows = positions[(starts.unsqueeze(1) + steps).masked_fill(outside, 0)]
    outside, on_device = outside.to(hidden.device), rows.to(hidden.device)
    states = _computable(hidden[on_device]).masked_fill_(outside.unsqueeze(2), 0)
    return _Group(responses, on_device.masked_fill(outside, -1), states)


def _hits(labels: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of the residual's block at which a row's own token lies."""
    rows = ((labels >= start) & (labels < stop)).nonzero().squeeze(1)
    return rows, labels[rows] - start


def _statistics(hidden: Tensor, tokens: Tensor, head: dict, sketch: CountSketch | None = None) -> dict[str, Tensor]:
    """`token_statistics` of all tokens, in chunks within the memory budget."""
    budget = DEVICE_BUDGET if hidden.is_cuda else HOST_BUDGET
    chunk = max(1, budget // (8 * len(head["weight"])))                    # two float32 buffers of (chunk, V)
    parts = [token_statistics(states, labels, sketch=sketch, **head)
             for states, labels in zip(hidden.split(chunk), tokens.split(chunk))]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _computable(values: Tensor) -> Tensor:
    """Half precision stays so only where a matrix product can take it and return float32: bfloat16 on CUDA."""
    if values.dtype in (torch.float32, torch.float64) or (values.is_cuda and values.dtype == torch.bfloat16):
        return values
    return values.float()


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, accumulated and returned in float32 at least."""
    if left.dtype == torch.bfloat16:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left @ right


class WideProduct(torch.autograd.Function):
    """hidden @ weightᵀ as `_product` has it, in float32 for half precision, for the loss: (n, d), (V, d) -> (n, V).

    What F.linear returns in half precision is rounded to 8 bits, so π / π_old would not be 1 where π is π_old.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return _product(_computable(hidden), _computable(weight).T)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        gradient, wanted = gradient.to(hidden.dtype), ctx.needs_input_grad
        return gradient @ weight if wanted[0] else None, gradient.T @ hidden if wanted[1] else None


def _batched_product(left: Tensor, right: Tensor) -> Tensor:
    """The same for batches of matrices."""
    if left.dtype == torch.bfloat16:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left, right)


# ---- the certified filter ----

def filtered_gram(walk: Callable[[Tensor], Tensor], terms: Tensor, rounding: Tensor, sizes: Tensor,
                  tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """K̂ (m, m) without near-certain tokens, which tokens were kept (N,), and the proven bounds on ‖g_i − ĝ_i‖ (m,).

    walk(keep) is the exact Gram of the kept tokens; terms (N,) bound a token's share of its feature; rounding (m,) is
    the allowance for the arithmetic. Every response ends with bound ≤ tolerance · ‖g_i‖, or with all its tokens.
    """
    keep, errors = tokens_worth_keeping(terms, rounding, sizes, tolerance)
    gram = walk(keep)
    norms = (gram.diagonal() * len(gram)).clamp_min(0).sqrt()                                          # ‖ĝ_i‖
    failed = (errors > 0) & (errors + rounding > tolerance * (norms - errors - rounding))
    if failed.any():
        keep = keep | failed.repeat_interleave(sizes)
        errors = errors.masked_fill(failed, 0)
        gram = walk(keep)
    return gram, keep, errors + rounding if not keep.all() else torch.zeros_like(errors)


def tokens_worth_keeping(terms: Tensor, rounding: Tensor, sizes: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Drop each response's smallest terms within its budget -> keep (N,) bool, the sum of what was dropped (m,)."""
    inside = torch.arange(int(sizes.max())) < sizes.unsqueeze(1)                                       # (m, T)
    table = torch.full(inside.shape, math.inf, dtype=torch.float64)
    table[inside] = terms.double()
    guess = table.where(inside, 0).square().sum(1).sqrt() / 2                  # half of ‖g_i‖ if terms were orthogonal
    budget = tolerance * guess / (1 + tolerance) - rounding
    ascending, order = table.sort(dim=1, stable=True)
    dropped = torch.zeros_like(inside).scatter_(1, order, ascending.cumsum(1) <= budget.unsqueeze(1))
    return ~dropped[inside], table.where(dropped, 0).sum(1)


def filter_terms(hidden: Tensor, sizes: Tensor, scale: Tensor, logsumexp: Tensor,
                 delta_norms: Tensor) -> tuple[Tensor, Tensor]:
    """‖δ_t‖‖h_t‖ / (τ T_i) (N,), and the allowance for rounding of each feature (m,); float64 on the CPU."""
    unit = torch.finfo(torch.float64 if hidden.dtype == torch.float64 else torch.float32).eps
    norms = torch.cat([torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).cpu()      # float64 copies, in parts
                       for rows in hidden.split(NORM_ROWS)]) * scale.repeat_interleave(sizes)
    noise = ROUNDING * unit * (1 + logsumexp.cpu().double().abs())
    responses = torch.arange(len(sizes)).repeat_interleave(sizes)
    rounding = torch.zeros_like(scale).index_add_(0, responses, norms * noise)
    return delta_norms.cpu().double() * (1 + noise) * norms, rounding


def gram_bound(gram: Tensor, errors: Tensor) -> float:
    """A bound on ‖K − K̂‖_F given K̂ (m, m) and bounds (m,) on ‖g_i − ĝ_i‖: (2‖Ĝ‖₂‖ε‖ + ‖ε‖²) / m."""
    m, size, error = len(gram), float(torch.linalg.matrix_norm(gram)), float(errors.norm())
    if size == 0:
        return error ** 2 / m
    power = torch.linalg.matrix_power(gram / size, 8)                          # λ_max ≤ ‖K⁸‖^(1/8), without eigenvalues
    spectral = math.sqrt(m * size * float(torch.linalg.matrix_norm(power)) ** 0.125)                   # ≥ ‖Ĝ‖₂
    return (2 * spectral * error + error ** 2) / m


# ---- what can be wrong with the arguments ----

def check_options(temperature: float, length_norm: str, method: str, tolerance: float, sketch_dim: int,
                   block: int | None) -> None:
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature is {temperature}: it must be positive and finite")
    if length_norm not in ("mean", "sum"):
        raise ValueError(f"length_norm is {length_norm!r}: it must be 'mean' or 'sum'")
    if method not in ("exact", "sketch"):
        raise ValueError(f"method is {method!r}: it must be 'exact' or 'sketch'")
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance is {tolerance}: it must lie in [0, 1)")
    if method == "sketch" and tolerance > 0:
        raise ValueError("tolerance certifies the exact method; a sketch has no bound: leave one of them out")
    if sketch_dim < 1 or (block is not None and block < 1):
        raise ValueError(f"sketch_dim is {sketch_dim} and block {block}: both must be at least 1")


def check_layout(hidden: Tensor, tokens: Tensor, lengths: Tensor, weight: Tensor, bias: Tensor | None,
                 logsumexp: Tensor | None, delta_norms: Tensor | None, fewest: int = 1) -> Tensor:
    """Shapes, dtypes and devices, and at least `fewest` responses; returns the lengths (m,) as int64 on the CPU."""
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be (N, d) and (V, d)")
    if not hidden.is_floating_point() or weight.dtype != hidden.dtype:
        raise TypeError(f"hidden is {hidden.dtype} and weight {weight.dtype}: both must be the same floating type")
    if weight.device != hidden.device:
        raise ValueError(f"hidden is on {hidden.device} and weight on {weight.device}: move one to the other")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.device != weight.device):
        raise ValueError(f"bias {tuple(bias.shape)} on {bias.device} must be ({len(weight)},) on {weight.device}")
    if tokens.is_floating_point() or lengths.is_floating_point():
        raise TypeError(f"tokens are {tokens.dtype} and lengths {lengths.dtype}: both must be integers")
    sizes = lengths.detach().to("cpu", torch.int64)
    if sizes.ndim != 1 or len(sizes) < fewest or bool((sizes < 0).any()):
        raise ValueError(f"lengths {tuple(lengths.shape)} must be (m,) with m ≥ {fewest} and no negative entry")
    if int(sizes.sum()) != len(hidden):
        raise ValueError(f"lengths sum to {int(sizes.sum())}, but there are {len(hidden)} hidden states")
    packed = {"tokens": tokens, "logsumexp": logsumexp, "delta_norms": delta_norms}
    for name, values in packed.items():
        if values is not None and values.shape != hidden.shape[:1]:
            raise ValueError(f"{name} has shape {tuple(values.shape)}, the hidden states need ({len(hidden)},)")
    return sizes


def peaks(hidden: Tensor) -> Tensor:
    """The largest magnitude in each hidden state (N,): NaN or infinite where the state is."""
    return torch.linalg.vector_norm(hidden, math.inf, dim=1)


def check_values(peak: Tensor, tokens: Tensor, sizes: Tensor, vocabulary: int, logsumexp: Tensor | None,
                 delta_norms: Tensor | None) -> None:
    """Refuse tokens outside the vocabulary and what is not finite, naming the response; peak (N,) from `peaks`."""
    _refuse((tokens < 0) | (tokens >= vocabulary), sizes, f"a token outside the vocabulary of {vocabulary}", ValueError)
    _refuse(~peak.isfinite(), sizes, "a NaN or infinite hidden state")
    for name, values in {"logsumexp": logsumexp, "delta_norms": delta_norms}.items():
        if values is not None:
            _refuse(~values.isfinite(), sizes, f"a NaN or infinite {name}")


class NotFinite(ValueError):
    """A gradient has no value: the model has overflowed, the call was right."""


def check_finite(gram: Tensor) -> None:
    """Refuse K (m, m) with NaN or infinite entries, naming the response to which most of them belong."""
    if not gram.isfinite().all():
        worst = int(gram.isfinite().sum(dim=1).argmin())
        raise NotFinite(f"the gradient of response {worst} is not finite: look at the LM head and the logsumexp")


def _refuse(bad: Tensor, sizes: Tensor, what: str, kind: type[ValueError] = NotFinite) -> None:
    """Raise naming the first response that holds a bad token; bad is (N,)."""
    if bad.any():
        row = int(bad.nonzero()[0])
        response = int(torch.searchsorted(sizes.cumsum(0), row, right=True))
        raise kind(f"response {response} has {what} at its token {row - int(sizes[:response].sum())}")
