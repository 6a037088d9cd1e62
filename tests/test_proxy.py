"""salt/proxy.py: the fast Gram against its autograd twin, the certificates, the sketch, and bad input."""
import math
import subprocess
import sys

import pytest
import torch

from conftest import ROOT
from salt import proxy
from salt.proxy import lm_head_gram, lm_head_gram_naive, naive_features, token_statistics


def problem(lengths, d=12, vocabulary=41, seed=0, dtype=torch.float64, sharpness=1.0, bias=False):
    """Random hidden states, tokens and head; sharpness scales the logits, so that more tokens are near-certain."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(lengths)
    n = int(lengths.sum())
    hidden = torch.randn(n, d, generator=generator, dtype=torch.float64) * sharpness
    weight = torch.randn(vocabulary, d, generator=generator, dtype=torch.float64)
    offset = torch.randn(vocabulary, generator=generator, dtype=torch.float64) if bias else None
    logits = hidden @ weight.T if offset is None else hidden @ weight.T + offset
    tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1) if n else torch.zeros(0).long()
    return dict(hidden=hidden.to(dtype), tokens=tokens, lengths=lengths, weight=weight.to(dtype),
                bias=None if offset is None else offset.to(dtype))


def as_float64(case):
    return {name: value.double() if value is not None and value.is_floating_point() else value
            for name, value in case.items()}


def distance(left, right):
    return float((left - right).norm() / right.norm())


RAGGED = [5, 1, 0, 17, 40, 38, 9, 0, 1, 23]


# ---- exact ----

def test_hand_computed():
    # W = 0: p = (1/2, 1/2). g_0 = (1/2, -1/2)·2 = (1, -1); g_1 = mean or sum of (-1/2, 1/2)·2 and (-1/2, 1/2)·4
    #   mean: (-3/2, 3/2) -> K = 1/2 [[2, -3], [-3, 9/2]];  sum: (-3, 3) -> K = 1/2 [[2, -6], [-6, 18]]
    args = (torch.tensor([[2.0], [2.0], [4.0]]), torch.tensor([0, 1, 1]), torch.tensor([1, 2]), torch.zeros(2, 1))
    mean = torch.tensor([[1.0, -1.5], [-1.5, 2.25]], dtype=torch.float64)
    total = torch.tensor([[1.0, -3.0], [-3.0, 9.0]], dtype=torch.float64)
    for gram in (lm_head_gram, lm_head_gram_naive):
        assert torch.allclose(gram(*args), mean)
        assert torch.allclose(gram(*args, length_norm="sum"), total)
        assert torch.allclose(gram(*args, temperature=2.0), mean / 4)          # 1/τ in each feature


@pytest.mark.parametrize("block", [None, 1, 7, 41, 1000])
@pytest.mark.parametrize("length_norm", ["mean", "sum"])
@pytest.mark.parametrize("temperature, bias", [(1.0, False), (0.6, True), (1.7, True)])
def test_equals_twin(temperature, bias, length_norm, block):
    case = problem(RAGGED, bias=bias)
    options = dict(temperature=temperature, length_norm=length_norm)
    assert distance(lm_head_gram(**case, **options, block=block), lm_head_gram_naive(**case, **options)) < 1e-12


@pytest.mark.parametrize("lengths", [[4], [0], [0, 0], [1] * 30, [3, 3, 3], list(range(60)), [200, 1, 1]])
def test_shapes_of_the_packing(lengths):
    case = problem(lengths)
    gram, twin = lm_head_gram(**case), lm_head_gram_naive(**case)
    assert gram.shape == (len(lengths),) * 2 and gram.dtype == torch.float64 and gram.device.type == "cpu"
    assert (gram - twin).norm() <= 1e-12 * twin.norm()


def test_groups_split_by_tokens(monkeypatch):
    case = problem(RAGGED)
    whole = lm_head_gram(**case)
    monkeypatch.setattr(proxy, "HOST_TOKENS", 30)                              # smaller than one response
    monkeypatch.setattr(proxy, "HOST_BUDGET", 2000)                             # one vocabulary row, chunks of 6 tokens
    assert distance(lm_head_gram(**case), whole) < 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_accumulates_in_float32(dtype):
    case = problem([300, 7, 150, 0, 290], d=64, vocabulary=200, dtype=dtype, sharpness=0.5, bias=True)
    twin = lm_head_gram_naive(**as_float64(case), temperature=0.6)
    assert distance(lm_head_gram(**case, temperature=0.6), twin) < 1e-5


def test_float32_does_not_lose_the_small_terms_of_a_long_sum():
    # <g_i, g_i> has V·d = 4 million terms, a few of them large: one float32 sum over a block is off by 7e-5.
    case = problem([40, 25], d=256, vocabulary=16000, dtype=torch.float32, sharpness=0.02)
    assert distance(lm_head_gram(**case), lm_head_gram(**as_float64(case))) < 2e-6


def test_given_logsumexp_is_used():
    case = problem(RAGGED)
    statistics = token_statistics(case["hidden"], case["tokens"], case["weight"], temperature=0.7)
    given = lm_head_gram(**case, temperature=0.7, logsumexp=statistics["logsumexp"])
    assert distance(given, lm_head_gram(**case, temperature=0.7)) < 1e-13
    assert distance(lm_head_gram(**case, temperature=0.7, logsumexp=statistics["logsumexp"] + 1), given) > 1e-2


def test_properties():
    case = problem([6, 6, 3, 9], bias=True)
    gram = lm_head_gram(**case)
    assert torch.equal(gram, gram.T)
    assert torch.linalg.eigvalsh(gram).min() > -1e-12 * gram.norm()
    order = [2, 0, 3, 1]
    parts = case["hidden"].split([6, 6, 3, 9]), case["tokens"].split([6, 6, 3, 9])
    moved = dict(case, hidden=torch.cat([parts[0][i] for i in order]), tokens=torch.cat([parts[1][i] for i in order]),
                 lengths=case["lengths"][order])
    assert torch.allclose(lm_head_gram(**moved), gram[order][:, order], rtol=1e-12)
    twice = dict(case, hidden=torch.cat([case["hidden"], parts[0][2]]), tokens=torch.cat([case["tokens"], parts[1][2]]),
                 lengths=torch.tensor([6, 6, 3, 9, 3]))
    double = lm_head_gram(**twice)
    assert torch.allclose(double[4], double[2], rtol=1e-12) and torch.allclose(double[:4, :4] * 5, gram * 4, rtol=1e-12)


def test_mean_and_sum_differ_by_lengths():
    case = problem([2, 5, 4])
    scale = case["lengths"].double()
    assert torch.allclose(lm_head_gram(**case) * scale * scale[:, None], lm_head_gram(**case, length_norm="sum"))


@pytest.mark.parametrize("options", [{}, {"tolerance": 0.3}, {"method": "sketch", "sketch_dim": 8}])
def test_pure_and_deterministic(options):
    case = problem(RAGGED, dtype=torch.float32, sharpness=3.0, bias=True)
    case["weight"].requires_grad_()
    case["hidden"].requires_grad_()
    before = {name: value.detach().clone() for name, value in case.items()}
    state = torch.get_rng_state()
    first = lm_head_gram(**case, **options)
    torch.rand(3)
    second = lm_head_gram(**case, **options)
    torch.set_rng_state(state)
    lm_head_gram(**case, **options)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, second) and not first.requires_grad
    assert case["weight"].grad is None and all(torch.equal(case[name], value) for name, value in before.items())


# ---- the scoring pass's numbers ----

@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_token_statistics(temperature):
    case = problem([50], bias=True)
    found = token_statistics(case["hidden"], case["tokens"], case["weight"], bias=case["bias"], temperature=temperature)
    logits = (case["hidden"] @ case["weight"].T + case["bias"]) / temperature
    logprobs = logits.log_softmax(-1)
    onehot = torch.nn.functional.one_hot(case["tokens"], 41)
    expected = {"logprobs": logprobs.gather(1, case["tokens"][:, None])[:, 0],
                "entropy": -(logprobs.exp() * logprobs).sum(-1),
                "logsumexp": logits.logsumexp(-1),
                "delta_norms": (logprobs.exp() - onehot).norm(dim=-1)}
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-12, atol=1e-14), name


def test_delta_norm_of_a_certain_token_has_relative_accuracy():
    # logits (0, -20): 1 - p = 2.0611536e-9, far below float32's unit 6e-8; ‖(−(1−p), 1−p)‖ = √2 (1 − p)
    found = token_statistics(torch.tensor([[1.0]]), torch.tensor([0]), torch.tensor([[0.0], [-20.0]]))
    assert found["delta_norms"].item() == pytest.approx(math.sqrt(2) * 2.0611536e-9, rel=1e-5)
    assert found["logprobs"].dtype == torch.float32


def test_token_statistics_of_extreme_logits_are_finite():
    hidden, weight = torch.tensor([[1.0], [1.0]]), torch.tensor([[0.0], [3e4], [-3e4]])
    found = token_statistics(hidden, torch.tensor([2, 1]), weight)
    assert found["logprobs"].tolist() == [-6e4, 0.0] and found["entropy"].tolist() == [0.0, 0.0]
    assert found["delta_norms"].tolist() == [pytest.approx(math.sqrt(2)), 0.0]


# ---- the certified filter ----

def certain(seed, dtype=torch.float64, lengths=(30, 12, 0, 44, 1, 25)):
    """A head that is certain of most tokens: token v's state is a multiple of W_v, the multiple log-uniform."""
    generator = torch.Generator().manual_seed(seed)
    n, vocabulary, d = sum(lengths), 33, 16
    weight = torch.randn(vocabulary, d, generator=generator, dtype=torch.float64)
    tokens = torch.randint(vocabulary, (n,), generator=generator)
    margin = 3 * torch.rand(n, 1, generator=generator, dtype=torch.float64) ** 0.5
    return dict(hidden=(margin * weight[tokens]).to(dtype), tokens=tokens, lengths=torch.tensor(lengths),
                weight=weight.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tolerance", [1e-6, 1e-3, 0.01, 0.1, 0.5, 0.99])
def test_bound_on_the_gram_is_never_violated(tolerance, dtype):
    for seed in range(8):
        case = certain(seed, dtype)
        options = dict(temperature=1.3, length_norm=("mean", "sum")[seed % 2])
        gram, bound = lm_head_gram(**case, **options, tolerance=tolerance, return_bound=True)
        for exact in (lm_head_gram(**case, **options), lm_head_gram_naive(**as_float64(case), **options)):
            difference = float((gram - exact).norm())
            if bound > 0:
                assert difference <= bound
                if dtype == torch.float64:                                      # and it is not vacuous
                    assert bound <= exact.norm() * (2 * tolerance + tolerance ** 2) * len(exact) ** 0.5
            else:                                          # nothing left out: float32 rounds p − 1 of certain tokens
                assert difference <= 1e-4 * exact.norm()


@pytest.mark.parametrize("tolerance", [1e-3, 0.01, 0.1, 0.5])
def test_bound_on_each_feature_is_never_violated(tolerance):
    dropped = 0
    for seed in range(8):
        case = certain(seed)
        full = naive_features(**case)                                           # (m, V·d)
        keep, errors = filtered(case, tolerance)
        kept = case | {"hidden": case["hidden"] * keep[:, None]}
        head = token_statistics(case["hidden"], case["tokens"], case["weight"])
        part = features_of(kept["hidden"], case, head["logsumexp"])
        gap = (full - part).norm(dim=1)
        assert (gap <= errors).all() or keep.all()
        assert (gap <= tolerance * full.norm(dim=1) + 1e-12).all()           # 1e-12: the twin rounds too
        dropped += int((~keep).sum())
    assert dropped > 8


def filtered(case, tolerance):
    """Which tokens the filter keeps, and its bounds on the features, through the functions that lm_head_gram calls."""
    sizes, scale = case["lengths"], 1 / case["lengths"].clamp_min(1).double()
    head = {"weight": case["weight"], "bias": None, "temperature": 1.0}
    statistics = token_statistics(case["hidden"], case["tokens"], case["weight"])

    def walk(keep):
        return proxy.exact_gram(case["hidden"], case["tokens"], sizes, scale, head, statistics["logsumexp"], None,
                                keep)

    terms, rounding = proxy.filter_terms(case["hidden"], sizes, scale, statistics["logsumexp"],
                                         statistics["delta_norms"])
    _, keep, errors = proxy.filtered_gram(walk, terms, rounding, sizes, tolerance)
    return keep, errors


def features_of(hidden, case, logsumexp):
    """(m, V·d) of states that are 0 where a token was dropped, with the residuals of the full states."""
    residual = (case["hidden"] @ case["weight"].T - logsumexp[:, None]).exp()
    residual[torch.arange(len(residual)), case["tokens"]] -= 1
    sizes = case["lengths"].tolist()
    parts = zip(residual.split(sizes), hidden.split(sizes))
    return torch.stack([(-p.T @ h / max(len(h), 1)).flatten() for p, h in parts])


def test_filter_redoes_a_response_whose_large_terms_cancel():
    # W = 0, all tokens alike: the states 1 and −1 cancel, so g_0 = δ·0.02/4 while each large term is 50 times as long.
    # The orthogonal guess (√2/2) would drop the small states at tolerance 0.5; the check must put them back.
    hidden = torch.tensor([[1.0], [-1.0], [0.01], [0.01], [1.0], [1.0], [0.01]], dtype=torch.float64)
    case = dict(hidden=hidden, tokens=torch.zeros(7).long(), lengths=torch.tensor([4, 3]),
                weight=torch.zeros(2, 1, dtype=torch.float64))
    keep, errors = filtered(case, 0.1)
    assert keep.tolist() == [True] * 6 + [False]
    assert errors[0] < 1e-12 < errors[1]
    gram, bound = lm_head_gram(**case, tolerance=0.1, return_bound=True)
    # δ = (−1/2, 1/2): g_0 = (∓ .01/4)/… so K_00 = 2·(0.02/8)²/2 = 6.25e-6
    assert gram[0, 0].item() == pytest.approx(6.25e-6, rel=1e-9)
    assert 0 < (gram - lm_head_gram(**case)).norm() <= bound


def test_filter_drops_smallest_first_within_its_budget():
    terms = torch.tensor([0.001, 1.0, 0.002, 1.0, 0.5, 0.5, 7.0])
    # budgets at tolerance 0.01: 0.01/1.01·√(1+1+…)/2 = 0.0070 for the first response: 0.001 + 0.002 go
    sizes = torch.tensor([4, 0, 2, 1])
    keep, errors = proxy.tokens_worth_keeping(terms, torch.zeros(4, dtype=torch.float64), sizes, 0.01)
    assert keep.tolist() == [False, True, False, True, True, True, True]
    assert errors.tolist() == [pytest.approx(0.003), 0.0, 0.0, 0.0]


def test_filter_with_given_statistics_equals_without():
    case = certain(3)
    statistics = token_statistics(case["hidden"], case["tokens"], case["weight"])
    given = lm_head_gram(**case, tolerance=0.2, return_bound=True, logsumexp=statistics["logsumexp"],
                         delta_norms=statistics["delta_norms"])
    found = lm_head_gram(**case, tolerance=0.2, return_bound=True)
    assert torch.allclose(given[0], found[0], rtol=1e-13) and given[1] == pytest.approx(found[1]) and found[1] > 0


def test_exact_has_bound_zero():
    assert lm_head_gram(**problem([3, 4]), return_bound=True)[1] == 0.0
    assert lm_head_gram(**problem([0, 0]), tolerance=0.5, return_bound=True)[1] == 0.0


# ---- the sketch ----

def test_sketch_is_unbiased_and_shrinks_with_its_dimension():
    case = problem([6, 11, 3], bias=True)
    exact = lm_head_gram(**case, temperature=0.8)

    def draws(sketch_dim):
        return torch.stack([lm_head_gram(**case, temperature=0.8, method="sketch", sketch_dim=sketch_dim,
                                         generator=torch.Generator().manual_seed(seed)) for seed in range(200)])

    small, large = draws(8), draws(128)
    for sample in (small, large):
        assert ((sample.mean(0) - exact).abs() <= 4.5 * sample.std(0) / 200 ** 0.5).all()   # 4.5 standard errors
    ratio = small.var(0).sum() / large.var(0).sum()                            # variance goes as 1/k: 16
    assert 8 < ratio < 32


def test_sketch_is_seeded_and_blockwise():
    case = problem(RAGGED)
    first = lm_head_gram(**case, method="sketch", sketch_dim=20)
    assert torch.equal(first, lm_head_gram(**case, method="sketch", sketch_dim=20))
    assert torch.allclose(first, lm_head_gram(**case, method="sketch", sketch_dim=20, block=7), rtol=1e-12)
    other = lm_head_gram(**case, method="sketch", sketch_dim=20, generator=torch.Generator().manual_seed(9))
    assert distance(other, first) > 1e-3
    assert lm_head_gram(**case, method="sketch", return_bound=True)[1] == math.inf


def test_sketch_equals_sketched_features():
    case = problem([4, 2])
    sketch = proxy.count_sketch(41, 6, torch.Generator().manual_seed(3))
    dense = torch.zeros(6, 41, dtype=torch.float64)
    dense[sketch.buckets, torch.arange(41)] = sketch.signs.double()
    features = torch.stack([(dense @ g.view(41, 12)).flatten() for g in naive_features(**case)])
    gram = lm_head_gram(**case, method="sketch", sketch_dim=6, generator=torch.Generator().manual_seed(3))
    assert distance(gram, features @ features.T / 2) < 1e-12


# ---- bad input ----

@pytest.mark.parametrize("change, error, message", [
    (dict(lengths=torch.tensor([3, 3])), ValueError, "lengths sum to 6, but there are 7"),
    (dict(lengths=torch.tensor([8, -1])), ValueError, "no negative entry"),
    (dict(lengths=torch.tensor([3.0, 4.0])), TypeError, "must be integers"),
    (dict(lengths=torch.tensor([], dtype=torch.int64)), ValueError, "m ≥ 1"),
    (dict(tokens=torch.tensor([0, 1, 2, 3, 4, 41, 0])), ValueError, "response 1 has a token outside .* at its token 2"),
    (dict(tokens=torch.tensor([0, -1, 2, 3, 4, 5, 0])), ValueError, "response 0 has a token outside"),
    (dict(tokens=torch.zeros(6).long()), ValueError, "tokens has shape"),
    (dict(weight=torch.zeros(41, 12)), TypeError, "float64 and weight torch.float32"),
    (dict(weight=torch.zeros(41, 12, dtype=torch.float64, device="meta")), ValueError, "weight on meta"),
    (dict(weight=torch.zeros(41, 13, dtype=torch.float64)), ValueError, r"must be \(N, d\) and \(V, d\)"),
    (dict(bias=torch.zeros(40)), ValueError, r"bias \(40,\)"),
    (dict(method="fast"), ValueError, "'exact' or 'sketch'"),
    (dict(length_norm="max"), ValueError, "'mean' or 'sum'"),
    (dict(temperature=0.0), ValueError, "temperature is 0.0"),
    (dict(temperature=math.nan), ValueError, "temperature is nan"),
    (dict(tolerance=1.0), ValueError, "tolerance is 1.0"),
    (dict(tolerance=0.1, method="sketch"), ValueError, "sketch has no bound"),
    (dict(block=0), ValueError, "block 0"),
    (dict(logsumexp=torch.zeros(3)), ValueError, "logsumexp has shape"),
    (dict(logsumexp=torch.tensor([0.0] * 6 + [math.nan])), ValueError, "response 1 has a NaN or infinite logsumexp"),
])
def test_bad_input(change, error, message):
    with pytest.raises(error, match=message):
        lm_head_gram(**problem([3, 4]) | change)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_hidden_state_names_the_response(value):
    case = problem([3, 0, 4])
    case["hidden"][5, 2] = value
    with pytest.raises(ValueError, match="response 2 has a NaN or infinite hidden state at its token 2"):
        lm_head_gram(**case)


def test_non_finite_head_names_a_response():
    case = problem([3, 4])
    case["weight"][7, 0] = math.nan
    with pytest.raises(ValueError, match="gradient of response 0 is not finite"):
        lm_head_gram(**case)


# ---- memory ----

@pytest.mark.slow
@pytest.mark.parametrize("m, length, d", [(64, 32, 512), (1, 4096, 16)])
def test_memory_does_not_grow_with_the_vocabulary(m, length, d):
    # m·V·d = 64·32,000·512 float32 = 3.9 GiB and N·V = 0.5 GiB at the other shape; the walk may hold its budget of
    # 128 MiB and N·d (4 MiB) a few times over.
    code = f"""
import resource, torch
from salt.proxy import lm_head_gram
torch.manual_seed(0)
hidden, weight = torch.randn({m * length}, {d}), torch.randn(32000, {d})
tokens, lengths = torch.randint(32000, ({m * length},)), torch.full(({m},), {length})
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
hidden[:64] @ weight[:640].T
before = peak()
gram = lm_head_gram(hidden, tokens, lengths, weight)
assert gram.isfinite().all()
print((peak() - before) / 1024)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(run.stdout) < 320                                              # MiB
