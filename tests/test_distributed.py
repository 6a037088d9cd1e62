"""salt/distributed.py: the Gram of 1, 2 and 3 gloo ranks against one process, FSDP2, refusals, and lost ranks."""
import math
import os
import subprocess
import sys
import time

import pytest
import torch

from conftest import ROOT
from salt import distributed
from salt.distributed import compute_once, gather_packed, vocabulary_parallel_gram, vocabulary_share
from salt.proxy import lm_head_gram, lm_head_gram_naive, token_statistics
from test_proxy import RAGGED, certain, distance, problem

WORLDS = (1, 2, 3)


def scored(case, temperature=1.0):
    """The case with what the scoring pass would know."""
    found = token_statistics(case["hidden"], case["tokens"], case["weight"], bias=case.get("bias"),
                             temperature=temperature)
    return case | {"logsumexp": found["logsumexp"], "delta_norms": found["delta_norms"]}


def cancelling():
    """The states 1 and −1 cancel: the filter drops too much of response 0 at first and must put it back."""
    hidden = torch.tensor([[1.0], [-1.0], [0.01], [0.01], [1.0], [1.0], [0.01]], dtype=torch.float64)
    return dict(hidden=hidden, tokens=torch.zeros(7).long(), lengths=torch.tensor([4, 3]),
                weight=torch.zeros(2, 1, dtype=torch.float64))


SHARES = {1: ([10],), 2: ([7, 3], [0, 10]), 3: ([4, 0, 6], [1, 8, 1], [0, 0, 10])}
FEW = {1: ([2],), 2: ([1, 1], [2, 0]), 3: ([1, 0, 1],)}
SIX = {1: ([6],), 2: ([2, 4],), 3: ([3, 3, 0],)}
KINDS = {                                                  # name: case, options, responses per rank
    "plain": (problem(RAGGED), {}, SHARES),
    "bias, sum": (problem(RAGGED, bias=True, seed=1), dict(temperature=0.6, length_norm="sum"), SHARES),
    "bias, mean, blocks": (problem(RAGGED, bias=True, seed=2), dict(temperature=1.7, block=5), SHARES),
    "a rank without rows": (problem(RAGGED, vocabulary=4, seed=3), {}, SHARES),    # 3 ranks: rows 2, 2, 0
    "empty responses": (problem([0, 0]), {}, FEW),
    "duplicated": (problem([4, 4]) | {"hidden": problem([4])["hidden"].repeat(2, 1),
                                      "tokens": problem([4])["tokens"].repeat(2)}, {}, FEW),
    "filter": (certain(3), dict(tolerance=0.2), SIX),
    "filter, sum": (certain(4), dict(tolerance=0.5, temperature=1.3, length_norm="sum"), SIX),
    "filter, redone": (cancelling(), dict(tolerance=0.1), FEW),
    "float32": (problem(RAGGED, dtype=torch.float32), {}, SHARES),
    "bfloat16": (problem(RAGGED, dtype=torch.bfloat16), {}, SHARES),
}


def gram_cases(world):
    cases = {}
    for name, (case, options, shares) in KINDS.items():
        case = scored({"bias": None} | case, options.get("temperature", 1.0))
        for counts in shares[world]:
            cases[f"{name} {counts}"] = case, options, counts
    return cases


# ---- one process, no process group ----

@pytest.mark.parametrize("name", KINDS)
def test_one_process_equals_lm_head_gram(name):
    case, options, _ = KINDS[name]
    case = scored({"bias": None} | case, options.get("temperature", 1.0))
    gram, bound = vocabulary_parallel_gram(**case, **options, return_bound=True)
    expected, expected_bound = lm_head_gram(**case, **options, return_bound=True)
    assert torch.equal(gram, expected) and bound == expected_bound
    assert torch.equal(vocabulary_parallel_gram(**case, **options), expected)


def test_one_process_helpers():
    assert (distributed.world_size(), distributed.rank()) == (1, 0)
    weight = torch.arange(10.0).view(5, 2)
    rows, start = vocabulary_share(weight)
    assert start == 0 and torch.equal(rows, weight)
    assert gather_packed({"tokens": torch.tensor([3, 4])})["tokens"].tolist() == [3, 4]
    assert compute_once(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        compute_once(lambda: 1 / 0)


@pytest.mark.parametrize("change, error, message", [
    (dict(temperature=0.0), ValueError, "^temperature is 0.0"),
    (dict(length_norm="max"), ValueError, "'mean' or 'sum'"),
    (dict(tolerance=0.1, delta_norms=None), ValueError, "needs delta_norms"),
    (dict(lengths=torch.tensor([3, 3])), ValueError, "lengths sum to 6, but there are 7"),
    (dict(tokens=torch.tensor([0, 1, 2, 3, 4, 41, 0])), ValueError, "response 1 has a token outside .* at its token 2"),
    (dict(logsumexp=torch.full((7,), math.nan, dtype=torch.float64)), ValueError, "response 0 .* logsumexp"),
    (dict(delta_norms=torch.full((7,), math.inf), tolerance=0.1), ValueError, "response 0 .* delta_norms"),
    (dict(weight=torch.zeros(41, 12)), TypeError, "weight torch.float32"),
    (dict(bias=torch.zeros(40)), ValueError, r"bias \(40,\)"),
    (dict(block=0), ValueError, "block 0"),
    (dict(weight=torch.full((41, 12), math.nan, dtype=torch.float64)), ValueError, "gradient of response 0"),
])
def test_bad_input_in_one_process(change, error, message):
    with pytest.raises(error, match=message):
        vocabulary_parallel_gram(**scored(problem([3, 4])) | change)


def test_no_response_anywhere():
    empty = scored(problem([3])) | dict(hidden=torch.zeros(0, 12, dtype=torch.float64), lengths=torch.tensor([]).long(),
                                        tokens=torch.tensor([]).long(), logsumexp=torch.zeros(0),
                                        delta_norms=torch.zeros(0))
    with pytest.raises(ValueError, match="there is no response"):
        vocabulary_parallel_gram(**empty)


# ---- ranks under torchrun ----

def torchrun(world, folder, scenario, timeout):
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--rdzv-backend", "c10d",
               "--rdzv-endpoint", "localhost:0", "--nproc-per-node", str(world),
               str(ROOT / "tests" / "distributed_worker.py"), str(folder), scenario]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


def qwen2(vocabulary, dtype):
    from transformers import Qwen2Config, Qwen2ForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(vocabulary)
        model = Qwen2ForCausalLM(Qwen2Config(
            vocab_size=vocabulary, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=False, initializer_range=0.5, bos_token_id=None,
            eos_token_id=None, pad_token_id=None))
    return model.to(dtype).eval()


def model_cases(world):
    """name: model, bfloat16 compute, sequences, how many of them each rank has, options."""
    counts = {1: [5], 2: [2, 3], 3: [4, 0, 1]}[world]
    generator = torch.Generator().manual_seed(5)
    cases = {}
    for name, vocabulary, dtype, low_precision in (("41 rows", 41, torch.float64, False),
                                                   ("4 rows", 4, torch.float64, False),
                                                   ("bfloat16", 41, torch.float32, True)):
        sequences = [torch.randint(vocabulary, (n,), generator=generator) for n in (9, 2, 17, 1, 6)]
        cases[name] = qwen2(vocabulary, dtype), low_precision, sequences, counts, dict(temperature=0.7)
    return cases


def refusal_cases(world):
    """name: case, responses per rank, which rank is wrong, what it passes."""
    case, counts = scored(problem([3, 2, 4, 1, 5])), {2: [3, 2], 3: [3, 0, 2]}[world]
    last = world - 1                                       # it holds responses 3 and 4: 1 + 5 tokens
    hidden = case["hidden"][9:].clone()
    hidden[4, 0] = math.nan
    none = {"hidden": torch.zeros(0, 13, dtype=torch.float64), "weight": torch.zeros(41, 13, dtype=torch.float64)}
    return {
        "nan": (case, counts, last, {"hidden": hidden}),
        "token": (case, counts, last, {"tokens": torch.tensor([0, 0, 41, 0, 0, 0])}),
        "d": (case, counts, 1, none if world == 3 else {"hidden": torch.zeros(6, 13).double(),
                                                        "weight": torch.zeros(41, 13).double()}),
        "dtype": (case, counts, last, {"hidden": case["hidden"][9:].float(), "weight": case["weight"].float()}),
        "logsumexp dtype": (case, counts, last, {"logsumexp": case["logsumexp"][9:].float()}),
        "lengths": (case, counts, 0, {"lengths": torch.tensor([3, 2, 5])}),
        "weight": (case, counts, 0, {"weight": case["weight"].float()}),
        "weight nan": (case, counts, last, {"weight": case["weight"] * math.nan}),
        "temperature": (case, counts, 1, {"temperature": 0.9}),
        "bias": (case, counts, 0, {"bias": torch.zeros(41).double()}),
    }


def column_cases(world):
    """name: one tensor per rank."""
    counts = {1: [3], 2: [0, 5], 3: [2, 0, 3]}[world]
    odd = torch.tensor([[math.nan, -0.0], [math.inf, 1e-40]])
    return {
        "hidden": [odd.repeat(n, 1).bfloat16() for n in counts],
        "float32": [odd.repeat(n, 1) for n in counts],
        "float16": [odd.repeat(n, 1).half() for n in counts],
        "tokens": [torch.arange(n) - 2 ** 40 * rank for rank, n in enumerate(counts)],
        "rewards": [torch.full((n,), rank + 0.1, dtype=torch.float64) for rank, n in enumerate(counts)],
    }


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world} ranks")
def ranks(request, tmp_path_factory):
    """What each rank wrote, and the cases: (list over ranks, cases)."""
    world, folder = request.param, tmp_path_factory.mktemp("ranks")
    cases = {"grams": gram_cases(world), "columns": column_cases(world), "models": model_cases(world),
             "refusals": refusal_cases(world) if world > 1 else {}}
    torch.save(cases, folder / "cases.pt")
    run = torchrun(world, folder, "all", timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world)], cases


@pytest.mark.slow
def test_ranks_equal_one_process(ranks):
    written, cases = ranks
    for name, (case, options, _) in cases["grams"].items():
        expected, bound = lm_head_gram(**case, **options, return_bound=True)
        gram, found_bound, _ = written[0]["grams"][name]
        allowed = 1e-10 if case["hidden"].dtype == torch.float64 else 1e-6
        assert gram.dtype == torch.float64 and gram.shape == expected.shape
        assert float((gram - expected).norm()) <= allowed * float(expected.norm()), name
        assert found_bound == pytest.approx(bound, rel=1e-10), name
        if not options.get("tolerance") and case["hidden"].dtype == torch.float64:
            options = {key: value for key, value in options.items() if key != "block"}
            inputs = {key: case[key] for key in ("hidden", "tokens", "lengths", "weight", "bias")}
            twin = lm_head_gram_naive(**inputs, **options)
            assert float((gram - twin).norm()) <= 1e-10 * float(twin.norm()), name


@pytest.mark.slow
def test_the_filter_leaves_tokens_out_on_ranks(ranks):
    """Otherwise the cases above would only show that an idle filter is exact."""
    written, cases = ranks
    bounds = {name: written[0]["grams"][name][1] for name in cases["grams"] if name.startswith("filter")}
    assert len(bounds) >= 3 and all(bound > 0 for bound in bounds.values())


@pytest.mark.slow
def test_every_rank_holds_the_same_bits(ranks):
    written, cases = ranks
    assert cases["grams"].keys() == written[0]["grams"].keys()
    for name, (gram, bound, reweighted) in written[0]["grams"].items():
        for other in written[1:]:
            other_gram, other_bound, other_reweighted = other["grams"][name]
            assert torch.equal(other_gram, gram) and other_bound == bound
            for field, value in vars(reweighted).items():
                assert torch.equal(getattr(other_reweighted, field), value), (name, field)


@pytest.mark.slow
def test_gathered_columns_are_all_rows_in_rank_order(ranks):
    written, cases = ranks
    for rank in written:
        for name, parts in cases["columns"].items():
            found, expected = rank["gathered"]["columns"][name], torch.cat(parts)
            assert found.dtype == expected.dtype and found.shape == expected.shape
            assert found.numpy(force=True).tobytes() == expected.numpy().tobytes() if name != "hidden" else \
                torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.slow
def test_rank_0_alone_computes(ranks):
    for rank in ranks[0]:
        assert rank["gathered"]["once"] == ("from", 0)
        assert rank["gathered"]["once raises"] == ("KeyError", "'only rank 0 knows'")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["41 rows", "4 rows", "bfloat16"])
def test_head_sharded_by_fsdp2(ranks, name):
    written, cases = ranks
    model, low_precision, sequences, _, options = cases["models"][name]
    parts = [rank["sharded"][name] for rank in written]
    whole = {key: torch.cat([part["arguments"][key] for part in parts]) for key in parts[0]["arguments"]}
    weight = model.lm_head.weight.detach()
    expected = lm_head_gram(**whole, weight=weight.to(whole["hidden"].dtype), **options)
    for part in parts:
        assert part["is sharded"] and torch.equal(part["whole"], weight)
        rows, start = part["share"]
        assert torch.equal(rows, weight[start:start + len(rows)])
        for way in ("sharded", "plain"):
            assert torch.equal(part[way], parts[0][way])
            assert distance(part[way], expected) < (1e-6 if low_precision else 1e-10)
    assert sum(len(part["share"][0]) for part in parts) == len(weight)
    if not low_precision:                                  # and the states are those of the model in one process
        with torch.no_grad():
            states = [model.model(input_ids=ids.unsqueeze(0), use_cache=False).last_hidden_state[0, :-1]
                      for ids in sequences]
        assert distance(whole["hidden"], torch.cat(states)) < 1e-12


REFUSALS = {
    "nan": ("NotFinite", "response 4 has a NaN or infinite hidden state at its token 3"),
    "token": ("ValueError", "response 4 has a token outside the vocabulary of 41 at its token 1"),
    "d": ("ValueError", "the LM head's shape differs between ranks: (41, 12) on rank 0, (41, 13) on 1"),
    "dtype": ("ValueError", "the dtype differs between ranks: torch.float64 on rank 0, torch.float32 on {last}"),
    "logsumexp dtype": ("ValueError", "layout differs between ranks"),
    "lengths": ("ValueError", "rank 0: lengths sum to 10, but there are 9 hidden states"),
    "weight": ("TypeError", "rank 0: hidden is torch.float64 and weight torch.float32"),
    "weight nan": ("NotFinite", "gradient of response 0 is not finite"),
    "temperature": ("ValueError", "temperature differs between ranks: 1.0 on rank 0, 0.9 on 1"),
    "bias": ("ValueError", "its bias differs between ranks: True on rank 0, False on 1"),
}


@pytest.mark.slow
def test_what_is_wrong_on_one_rank_is_raised_on_all(ranks):
    written, cases = ranks
    for rank in written:
        assert rank["refusals"].keys() == cases["refusals"].keys()
        for name, (kind, message) in rank["refusals"].items():
            expected_kind, part = REFUSALS[name]
            assert kind == expected_kind and part.format(last=len(written) - 1) in message, (name, message)
        for name, (gram, bound, _) in rank["after"].items():                    # the ranks are still in step
            assert torch.equal(gram, rank["grams"][name][0]) and bound == rank["grams"][name][1]


@pytest.mark.slow
def test_processes_that_end_after_a_collective_end_well(tmp_path):
    """gloo's threads drop its tensors when they can have Python's lock: here the main thread hands it over unwillingly,
    and has nothing left to do. Without the wait in `stop` a third of these pairs ends with SIGABRT."""
    (tmp_path / "worker.py").write_text(ENDS_AT_ONCE)
    for _ in range(4):
        run = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                              str(tmp_path / "worker.py")], capture_output=True, text=True, timeout=120,
                             env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
        assert run.returncode == 0, run.stderr[-2000:]


ENDS_AT_ONCE = """
import sys
import torch
from salt import distributed

distributed.start()
model = torch.nn.Linear(800, 800)
model._no_split_modules = []
weight = distributed.place(model, torch.device("cpu")).weight
sys.setswitchinterval(1000)
weight.full_tensor()
distributed.stop()
"""


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["dies", "stays away"])
def test_a_lost_rank_ends_the_others_within_the_timeout(scenario, tmp_path):
    """The worker's process group has a timeout of 5 s."""
    torch.save({"grams": gram_cases(2)}, tmp_path / "cases.pt")
    run = torchrun(2, tmp_path, scenario, timeout=300)
    survivor = torch.load(tmp_path / "rank0.pt", weights_only=False)
    assert run.returncode != 0 and time.time() - survivor["lost"] < 60          # the whole job, seen from outside
    assert not (tmp_path / "rank1.pt").exists()
    kind, message = survivor["outcome"]
    assert kind in ("RuntimeError", "DistBackendError", "DistNetworkError") and message
    assert survivor["seconds"] < 5 + 10                    # the timeout, and what a loaded machine adds to it
    if scenario == "stays away":
        assert survivor["seconds"] > 4
