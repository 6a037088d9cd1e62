"""One rank of tests/test_vllm.py, started by torchrun: `vllm_worker.py FOLDER`.

Trains the model in FOLDER/model on batches that both ranks know, samples other prompts on each rank, and writes
FOLDER/rank<r>.pt. Asserts nothing: the test compares what the ranks wrote.
"""
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from salt import distributed
from salt.models import forward_logprobs, load, logprobs_only
from salt.rollout import make_sampler, sampler_gap

TEMPERATURE = 0.6


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, tokenizer = load(str(folder / "model"))
    began = time.perf_counter()
    sampler = make_sampler("vllm", model, tokenizer, str(folder / "model"), context=64)
    found = {"start": time.perf_counter() - began, "threads": torch.get_num_threads(),
             "cores": len(os.sched_getaffinity(0)), "gaps": []}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    prompts = [tokenizer.encode(text) for text in (("1+2=", "34+5="), ("678+9=", "7+7=", "10+20="))[rank]]
    for step in range(2):
        drawn = sampler.generate(prompts, 4, temperature=TEMPERATURE, max_tokens=20, seed=10 * step + rank)
        found["gaps"].append(sampler_gap(drawn, logprobs_only(model, drawn, TEMPERATURE)))
        optimizer.zero_grad()
        forward_logprobs(model, drawn, TEMPERATURE)[0].mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        sampler.sync((name, p.detach()) for name, p in model.named_parameters())
    drawn = sampler.generate(prompts, 4, temperature=TEMPERATURE, max_tokens=20, seed=100 + rank)
    found["gaps"].append(sampler_gap(drawn, logprobs_only(model, drawn, TEMPERATURE)))
    torch.save(found | {"responses": drawn.responses, "weights": model.state_dict()}, folder / f"rank{rank}.pt")
    distributed.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
