"""One rank of tests/test_distributed.py, started by torchrun: `distributed_worker.py FOLDER SCENARIO`.

Reads FOLDER/cases.pt, writes FOLDER/rank<r>.pt. Asserts nothing: the test compares what the ranks wrote.
"""
import datetime
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from salt import distributed
from salt.advantages import reweight

PER_TOKEN = ("hidden", "tokens", "logsumexp", "delta_norms")


def own(case: dict, counts: list[int]) -> dict:
    """This rank's responses, of which there are counts[rank]."""
    rank = dist.get_rank()
    first, last = sum(counts[:rank]), sum(counts[:rank + 1])
    begin, end = int(case["lengths"][:first].sum()), int(case["lengths"][:last].sum())
    return case | {name: case[name][begin:end] for name in PER_TOKEN} | {"lengths": case["lengths"][first:last]}


def attempt(call) -> object:
    try:
        return call()
    except Exception as error:
        return type(error).__name__, str(error)


def grams(cases: dict) -> dict:
    found = {}
    for name, (case, options, counts) in cases["grams"].items():
        gram, bound = distributed.vocabulary_parallel_gram(**own(case, counts), **options, return_bound=True)
        advantages = torch.linspace(-1, 1, len(gram))
        found[name] = gram, bound, distributed.compute_once(
            lambda: reweight(gram, advantages, [torch.arange(len(gram))]))
    return found


def refusals(cases: dict) -> dict:
    """A wrong argument on one rank; the ranks must still be in step for the next case."""
    found = {}
    for name, (case, counts, culprit, change) in cases["refusals"].items():
        arguments = own(case, counts)
        if dist.get_rank() == culprit:
            arguments |= change
        found[name] = attempt(lambda: distributed.vocabulary_parallel_gram(**arguments))
    return found


def gathered(cases: dict) -> dict:
    rank = dist.get_rank()
    found = distributed.gather_packed({name: parts[rank] for name, parts in cases["columns"].items()})

    def fails_on_rank_0():
        raise KeyError("only rank 0 knows")

    return {"columns": found, "once": distributed.compute_once(lambda: ("from", rank)),
            "once raises": attempt(lambda: distributed.compute_once(fails_on_rank_0))}


def sharded(cases: dict) -> dict:
    """The head of a Qwen2 that FSDP2 shards: unsharded as the forward pass leaves it, and resharded."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor
    found = {}
    for name, (model, low_precision, sequences, counts, options) in cases["models"].items():
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if low_precision else MixedPrecisionPolicy()
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        first = sum(counts[:dist.get_rank()])
        mine = sequences[first:first + counts[dist.get_rank()]]
        states = []
        model.lm_head.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
        with torch.no_grad():                              # every rank calls the model equally often
            outputs = [model(input_ids=ids.unsqueeze(0), use_cache=False)
                       for ids in mine + [torch.tensor([0])] * (max(counts) - len(mine))]
        none = slice(0)                                    # of a dummy call: keeps d and the dtype
        shown = [slice(-1)] * len(mine) + [none] * (len(outputs) - len(mine))
        hidden = torch.cat([state[0, rows] for state, rows in zip(states, shown)])
        logits = torch.cat([out.logits[0, rows] for out, rows in zip(outputs, shown)])
        logits = logits if logits.dtype == torch.float64 else logits.float()
        arguments = dict(hidden=hidden, tokens=torch.cat([ids[1:] for ids in mine] + [torch.tensor([]).long()]),
                         lengths=torch.tensor([len(ids) - 1 for ids in mine], dtype=torch.long),
                         logsumexp=(logits / options["temperature"]).logsumexp(-1))
        model.reshard()
        weight = model.lm_head.weight
        whole = weight.full_tensor()
        dtype = hidden.dtype
        rows, start = distributed.vocabulary_share(weight)
        found[name] = {"is sharded": isinstance(weight, DTensor), "hidden": hidden, "share": (rows, start),
                       "arguments": arguments, "whole": whole,
                       "sharded": distributed.vocabulary_parallel_gram(**arguments, weight=weight, **options),
                       "plain": distributed.vocabulary_parallel_gram(**arguments, weight=whole.to(dtype), **options)}
    return found


def alone(cases: dict, scenario: str) -> dict:
    """Rank 1 dies, or never comes; how the others end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)          # torchrun would end the survivors before they can say how
    case, options, counts = next(iter(cases["grams"].values()))
    dist.barrier()
    if dist.get_rank() == 1:
        if scenario == "dies":
            os._exit(3)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(300)
    begin = time.time()                                    # rank 1 is lost about now
    outcome = attempt(lambda: distributed.vocabulary_parallel_gram(**own(case, counts), **options))
    return {"outcome": outcome, "lost": begin, "seconds": time.time() - begin}


def main(folder: Path, scenario: str) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=5 if scenario != "all" else 120))
    cases = torch.load(folder / "cases.pt", weights_only=False)
    if scenario == "all":
        found = {part.__name__: part(cases) for part in (grams, refusals, gathered, sharded)}
        found["after"] = grams(cases)
    else:
        found = alone(cases, scenario)
    torch.save(found, folder / f"rank{dist.get_rank()}.pt")
    if scenario != "all":
        os._exit(1)                                        # a group that lost a member cannot be left in good order
    distributed.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
