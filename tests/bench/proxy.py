"""What the LM-head Gram costs, and how exact it is.

Side by side on the same tensors: the exact walk, the certified filter, the sketch, the ghost inner product (token
pairs), per-sample gradients by torch.func, materialised features, and the floor: 4·N·d·V + 2·m²·V·d flops at the rate
of a 4096³ matrix product measured just before and after each method. Time, peak memory, relative error. Then growth
exponents in N, m and V, the filter's gain by tolerance and share of certain tokens, the sketch's error by dimension.

    python tests/bench/proxy.py                                        minutes on 2 idle cores; Linux
    python tests/bench/proxy.py --quick                                small shapes: a check that it runs
    python tests/bench/proxy.py --device cuda --shape deepseek-1.5b    the Gram's share of a training step
"""
import argparse
import ctypes
import gc
import json
import math
import os
import platform
import re
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from salt.advantages import salt_advantages
from salt.geometry import dominant_rank, dominant_subspace
from salt.metrics import command_line
from salt.proxy import lm_head_gram, token_statistics

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
clock_name = "wall"
SHAPES = {  # (layers, hidden, intermediate, heads, key-value heads, vocabulary): the Qwen2 architecture
    "smoke": (2, 32, 64, 2, 2, 200),
    "deepseek-1.5b": (28, 1536, 8960, 12, 2, 151936),
    "deepseek-7b": (28, 3584, 18944, 28, 4, 152064),
}


# ---- measuring ----

def measure(function, repeat: int = 1, device: str = "cpu"):
    """(result, best seconds, peak bytes above what was held before)."""
    best, cuda = math.inf, device == "cuda"
    gc.collect()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")                          # resets the peak, VmHWM (Linux)
        before = resident("VmRSS")
    for _ in range(repeat):
        start = clock(cuda)
        result = function()
        best = min(best, clock(cuda) - start)
    return result, best, (torch.cuda.max_memory_allocated() if cuda else resident("VmHWM")) - before


def clock(cuda: bool = False) -> float:
    if cuda:
        torch.cuda.synchronize()
    return CLOCKS[clock_name]()


def resident(field: str) -> int:
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def available_memory() -> int:
    return int(re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())[1]) * 1024


def product_rate(size: int) -> float:
    """Flops per second of a size³ float32 matrix product."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    out = left @ right
    start = clock()
    torch.mm(left, right, out=out)
    return 2 * size ** 3 / (clock() - start)


# ---- the tensors ----

def make_case(m: int, length: int, d: int, vocabulary: int, certain: float = 0.0, seed: int = 0) -> dict:
    """m responses of `length` tokens; of a share `certain` of them 1 − p is log-uniform in 1e-8 … 1e-2.

    Responses of a group of 8 share a direction, so that K has structure. A certain token's state leans on its head row
    by as much as its 1 − p asks for, found by a fixed-point iteration on the actual log-odds.
    """
    generator = torch.Generator().manual_seed(seed)
    n = m * length
    weight = torch.nn.functional.normalize(torch.randn(vocabulary, d, generator=generator), dim=1)
    topic = torch.randn(-(-m // 8), d, generator=generator).repeat_interleave(8, 0)[:m].repeat_interleave(length, 0)
    hidden = 2.5 * torch.randn(n, d, generator=generator) + 1.5 * topic
    tokens = torch.empty(n, dtype=torch.int64)
    sure = torch.rand(n, generator=generator) < certain
    doubt = 10 ** (-8 + 6 * torch.rand(n, generator=generator))                # 1 − p
    for part in torch.arange(n).split(1024):
        logits = hidden[part] @ weight.T
        tokens[part] = (logits - torch.empty_like(logits).exponential_(generator=generator).log()).argmax(1)
        lean = part[sure[part]]
        for _ in range(4):
            logits = hidden[lean] @ weight.T
            own = logits.gather(1, tokens[lean, None])
            odds = own - logits.scatter(1, tokens[lean, None], -math.inf).logsumexp(1, keepdim=True)
            hidden[lean] += (torch.logit(1 - doubt[lean].double())[:, None] - odds).float() * weight[tokens[lean]]
    case = dict(hidden=hidden, tokens=tokens, lengths=torch.full((m,), length), weight=weight)
    parts = [token_statistics(h, t, weight) for h, t in zip(hidden.split(1024), tokens.split(1024))]
    return case | {name: torch.cat([part[name] for part in parts]) for name in ("logsumexp", "delta_norms")}


# ---- the methods, each (case) -> K (m, m) ----

def exact(case):
    return lm_head_gram(**case)


def exact_alone(case):
    return lm_head_gram(**{name: case[name] for name in ("hidden", "tokens", "lengths", "weight")})


def filtered(case, tolerance=0.01):
    return lm_head_gram(**case, tolerance=tolerance)


def sketch(case, sketch_dim=1024):
    return lm_head_gram(**case, method="sketch", sketch_dim=sketch_dim)


def residuals(case, start, stop):
    delta = (case["hidden"] @ case["weight"][start:stop].T).sub_(case["logsumexp"][:, None]).exp_()
    mine = ((case["tokens"] >= start) & (case["tokens"] < stop)).nonzero().squeeze(1)
    delta[mine, case["tokens"][mine] - start] -= 1
    return delta


def ghost(case, block=1024):
    """Σ <δ_t, δ_s><h_t, h_s> over token pairs of each pair of responses i ≤ j; equal lengths, V in blocks."""
    m, length = len(case["lengths"]), int(case["lengths"][0])
    n, vocabulary = m * length, len(case["weight"])
    pairs = torch.zeros(n, n)
    for start in range(0, vocabulary, block):
        delta = residuals(case, start, min(start + block, vocabulary))
        for i in range(m):                                                     # row i against every j ≥ i
            rows = slice(i * length, (i + 1) * length)
            pairs[rows, i * length:].addmm_(delta[rows], delta[i * length:].T)
    gram = torch.zeros(m, m, dtype=torch.float64)
    for i in range(m):
        rows = slice(i * length, (i + 1) * length)
        inner = pairs[rows, i * length:].mul_(case["hidden"][rows] @ case["hidden"][i * length:].T)
        gram[i, i:] = inner.sum(0, dtype=torch.float64).view(m - i, length).sum(1)
    return (gram + gram.triu(1).T) / (m * length ** 2)


def materialised(case):
    """G (m, V·d) held whole, one matrix product per response."""
    m, length, d = len(case["lengths"]), int(case["lengths"][0]), case["hidden"].shape[1]
    features = torch.empty(m, len(case["weight"]), d)
    for i in range(m):
        rows = slice(i * length, (i + 1) * length)
        one = dict(case, **{name: case[name][rows] for name in ("hidden", "tokens", "logsumexp")})
        torch.mm(residuals(one, 0, len(case["weight"])).T, case["hidden"][rows], out=features[i])
    features = features.flatten(1)
    return (features @ features.T).double() / (m * length ** 2)


def per_sample(case):
    """torch.func: vmap of grad over the responses (equal lengths)."""
    m = len(case["lengths"])

    def score(weight, states, labels):
        return (states @ weight.T).log_softmax(-1).gather(1, labels[:, None]).mean()

    hidden, tokens = case["hidden"].view(m, -1, case["hidden"].shape[1]), case["tokens"].view(m, -1)
    features = torch.func.vmap(torch.func.grad(score), in_dims=(None, 0, 0))(case["weight"], hidden, tokens).flatten(1)
    return (features @ features.T).double() / m


METHODS = {"exact": exact, "exact, own logsumexp": exact_alone, "filtered 0.01": filtered, "sketch 1024": sketch,
           "ghost": ghost, "torch.func": per_sample, "materialised": materialised}


def memory_needed(name: str, m: int, length: int, d: int, vocabulary: int) -> float:
    """Bytes, for the methods that hold much."""
    features, logits = 4 * m * vocabulary * d, 4 * m * length * vocabulary
    return {"torch.func": features + 3 * logits, "materialised": features + 8 * length * vocabulary,
            "ghost": 8 * (m * length) ** 2}.get(name, 2 ** 30)


# ---- the tables ----

def side_by_side(shape: tuple, names: list, quick: bool, certain: float) -> list[dict]:
    """Every method on one shape; the floor and the errors beside."""
    m, length, d, vocabulary = shape
    case = make_case(*shape, certain=certain)
    flops = 4 * m * length * d * vocabulary + 2 * m ** 2 * vocabulary * d
    reference, rows, size = None, [], 1024 if quick else 4096
    print(f"\nm = {m}, T = {length}, d = {d}, V = {vocabulary}, {certain:.0%} of the tokens certain")
    print(f"{'method':22}{'seconds':>9}{'/ floor':>9}{'/ exact':>9}{'peak MiB':>10}{'error':>10}")
    for name in names:
        if memory_needed(name, *shape) > 0.7 * available_memory():
            print(f"{name:22} needs {memory_needed(name, *shape) / 2 ** 30:.1f} GiB: left out")
            continue
        before = product_rate(size)
        gram, seconds, peak = measure(lambda: METHODS[name](case), repeat=2 if name.startswith("exact") else 1)
        rate = max(before, product_rate(size))
        reference = gram if reference is None else reference
        row = dict(method=name, m=m, length=length, d=d, vocabulary=vocabulary, certain=certain, seconds=seconds,
                   floor=flops / rate, over_floor=seconds * rate / flops, peak_bytes=peak, gflops_4096=rate / 1e9,
                   error=float((gram - reference).norm() / reference.norm()))
        rows.append(row)
        row["over_exact"] = row["over_floor"] / rows[0]["over_floor"]          # each at its own moment's speed
        print(f"{name:22}{seconds:9.2f}{row['over_floor']:9.2f}{row['over_exact']:9.2f}{peak / 2 ** 20:10.0f}"
              f"{row['error']:10.1e}", flush=True)
    return rows


def growth(quick: bool) -> list[dict]:
    """Exponents of time and memory in N (m fixed), m (T fixed) and V, by least squares in logarithms."""
    base = dict(m=16, length=64, d=64, vocabulary=2000) if quick else dict(m=16, length=128, d=256, vocabulary=8192)
    factors, rows = (1, 2, 4), []
    print(f"\ngrowth exponents (seconds, memory) around {base}\n{'method':22}{'N':>14}{'m':>14}{'V':>14}")
    for name in METHODS:
        row = dict(method=name, base=base)
        for axis, label in (("length", "N"), ("m", "m"), ("vocabulary", "V")):
            points = []
            for factor in factors:
                shape = base | {axis: base[axis] * factor}
                if memory_needed(name, **shape) > 0.5 * available_memory():
                    continue
                case = make_case(**shape, certain=0.8)
                _, seconds, peak = measure(lambda: METHODS[name](case), repeat=2)
                points.append((shape[axis], seconds, max(peak, 2 ** 20)))
            row[label] = dict(points=points, seconds=slope(points, 1), memory=slope(points, 2))
        rows.append(row)
        print(f"{name:22}" + "".join(f"{row[x]['seconds']:8.2f},{row[x]['memory']:5.2f}" for x in "NmV"), flush=True)
    return rows


def slope(points: list, column: int) -> float:
    x = torch.tensor([math.log(p[0]) for p in points])
    y = torch.tensor([math.log(p[column]) for p in points])
    return float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())


def compare(gram: Tensor, reference: Tensor) -> dict:
    """Relative Gram error, overlap of the dominant subspaces, cosine of a'."""
    m, rank = len(gram), dominant_rank(reference)
    advantages = torch.randn(m, generator=torch.Generator().manual_seed(1))
    basis, other = dominant_subspace(reference, rank), dominant_subspace(gram, rank)
    kept, found = (salt_advantages(k, advantages).coefficients.double() for k in (reference, gram))
    return dict(gram_error=float((gram - reference).norm() / reference.norm()), rank=rank,
                overlap=float((basis.T @ other).square().sum() / rank),
                coefficient_cosine=float(torch.cosine_similarity(kept, found, dim=0)))


def approximations(quick: bool) -> list[dict]:
    """The filter by tolerance and share of certain tokens; the sketch by dimension."""
    shape = (16, 32, 32, 500) if quick else (64, 256, 256, 8192)
    rows = []
    print(f"\n{'what':34}{'speed-up':>9}{'K error':>10}{'bound':>10}{'overlap':>9}{'cos a′':>9}   rank")
    for certain in (0.5, 0.8, 0.95):
        case = make_case(*shape, certain=certain)
        runs = [(f"filter {tolerance:g}, {certain:.0%} certain", dict(tolerance=tolerance))
                for tolerance in (1e-3, 3e-3, 0.01, 0.03, 0.1)]
        if certain == 0.8:
            runs += [(f"sketch {k}, {certain:.0%} certain", dict(method="sketch", sketch_dim=k))
                     for k in (256, 1024, 4096)]
        for label, options in runs:
            reference, slow, _ = measure(lambda: lm_head_gram(**case), repeat=2)
            (gram, bound), fast, _ = measure(lambda: lm_head_gram(**case, **options, return_bound=True), repeat=2)
            row = dict(what=label, **options, certain=certain, speedup=slow / fast, **compare(gram, reference),
                       bound=bound / float(reference.norm()) if math.isfinite(bound) else None)
            rows.append(row)
            shown = f"{row['bound']:10.1e}" if row["bound"] is not None else f"{'none':>10}"
            print(f"{label:34}{row['speedup']:9.2f}{row['gram_error']:10.1e}{shown}"
                  f"{row['overlap']:9.4f}{row['coefficient_cosine']:9.5f}{row['rank']:7}", flush=True)
    return rows


# ---- the share of a training step ----

def step_share(shape: str, device: str, m: int, longest: int) -> dict:
    """Scoring, forward, backward, optimizer and the Gram; random weights, one response per micro-batch."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    layers, d, intermediate, heads, kv_heads, vocabulary = SHAPES[shape]
    config = Qwen2Config(num_hidden_layers=layers, hidden_size=d, intermediate_size=intermediate, use_cache=False,
                         num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocabulary,
                         max_position_embeddings=longest, tie_word_embeddings=False)
    torch.manual_seed(0)
    cuda, seconds = device == "cuda", {}
    with torch.device(device):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=cuda)
    lengths = torch.randint(longest // 8, longest + 1, (m,))
    responses = [torch.randint(vocabulary, (1, int(length)), device=device) for length in lengths]
    weight, hidden, statistics = model.lm_head.weight, [], []

    start = clock(cuda)
    with torch.no_grad():
        for ids in responses:
            hidden.append(model.model(ids).last_hidden_state[0])
            statistics += [token_statistics(h, t, weight) for h, t in zip(hidden[-1].split(2048), ids[0].split(2048))]
    seconds["scoring"] = clock(cuda) - start
    case = dict(hidden=torch.cat(hidden), tokens=torch.cat([ids[0] for ids in responses]), lengths=lengths,
                weight=weight.detach(), logsumexp=torch.cat([part["logsumexp"] for part in statistics]))
    hidden.clear()
    # Random weights are certain of nothing: for the filter's time 80 % of the ‖δ‖ are drawn from 1e-8 … 1e-2.
    norms = torch.where(torch.rand(len(case["tokens"])) < 0.8, 10 ** (-8 + 6 * torch.rand(len(case["tokens"]))), 1.0)
    extra = {}
    for name, options in (("exact", {}), ("filtered 0.01", dict(tolerance=0.01, delta_norms=norms)),
                          ("sketch 1024", dict(method="sketch"))):
        _, seconds[name], extra[name] = measure(lambda: lm_head_gram(**case, **options), device=device)

    start = clock(cuda)
    for ids in responses:
        states = model.model(ids).last_hidden_state[0]
        (torch.nn.functional.cross_entropy(model.lm_head(states).float(), ids[0]) / m).backward()
    seconds["forward and backward"] = clock(cuda) - start
    start = clock(cuda)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    seconds["optimizer"] = clock(cuda) - start
    step = seconds["scoring"] + seconds["forward and backward"] + seconds["optimizer"]
    share = {name: seconds[name] / (step + seconds[name]) for name in extra}
    print(f"\n{shape} on {device}: m = {m}, {len(case['tokens'])} tokens, generation not counted")
    print("\n".join(f"{name:22}{value:9.2f} s" for name, value in seconds.items()))
    print("\n".join(f"share of {name:13}{share[name]:9.2%}{extra[name] / 2 ** 20:9.0f} MiB extra" for name in share))
    return dict(shape=shape, m=m, longest=longest, tokens=len(case["tokens"]), seconds=seconds, share=share,
                extra_bytes=extra, gram_flops=4 * len(case["tokens"]) * d * vocabulary + 2 * m ** 2 * vocabulary * d)


def machine(device: str) -> dict:
    """Hardware and versions, for the JSON."""
    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return dict(cpu=model[1] if model else platform.machine(), cores=os.cpu_count(), threads=torch.get_num_threads(),
                load=os.getloadavg(), gpu=torch.cuda.get_device_name() if device == "cuda" else None,
                python=platform.python_version(), torch=torch.__version__, system=platform.system())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small shapes, a minute: checks that everything runs")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="for --shape only")
    parser.add_argument("--shape", choices=SHAPES, help="measure the Gram's share of a training step of this model")
    parser.add_argument("--responses", type=int, default=256, help="m of --shape")
    parser.add_argument("--longest", type=int, default=8192, help="longest response of --shape")
    parser.add_argument("--output", type=Path, help="JSON file; default tests/bench/results/proxy*.json")
    parser.add_argument("--busy", action="store_true",
                        help="one thread, and processor time instead of wall time: for a machine that is shared")
    args = parser.parse_args()
    if args.busy:
        global clock_name
        clock_name = "processor"
        torch.set_num_threads(1)
    results = dict(argv=command_line(sys.argv[1:]), clock=clock_name, machine=machine(args.device))
    if args.shape:
        results["step"] = step_share(args.shape, args.device, args.responses, args.longest)
    else:
        for method in METHODS.values():                                        # first calls load and compile things
            method(make_case(2, 4, 8, 64))
        many = (8, 32, 32, 500) if args.quick else (64, 256, 512, 32000)
        long = (4, 128, 32, 500) if args.quick else (8, 1024, 512, 32000)
        fits = many                                                            # the largest m that torch.func can hold
        while memory_needed("torch.func", *fits) > 0.7 * available_memory():
            fits = (fits[0] // 2, *fits[1:])
        lean = [name for name in METHODS if name not in ("ghost", "torch.func")]
        results["side_by_side"] = [side_by_side(many, lean, args.quick, 0.8),
                                   side_by_side(fits, ["exact", "torch.func"], args.quick, 0.8),
                                   side_by_side(long, list(METHODS), args.quick, 0.8)]
        results["approximations"] = approximations(args.quick)
        results["growth"] = growth(args.quick)
    flags = (args.shape, "quick" if args.quick else None, "busy" if args.busy else None)
    name = "-".join(["proxy", *filter(None, flags)])
    output = args.output or Path(__file__).parent / "results" / f"{name}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nwritten: {output}")


if __name__ == "__main__":
    main()
