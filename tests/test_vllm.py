"""The real vLLM engine (its CPU build, in the environment of .ci/vllm-env) is the model that is trained, and no other.

One engine serves the whole file; a test that changes weights starts from those it pushes itself.
"""
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM

from salt.errors import UserError
from salt.models import forward_logprobs, load, logprobs_only
from salt.rollout import (GAP_LIMIT, VLLM_VERSION, TransformersSampler, check_sampler_gap, choose_backend, make_sampler,
                          sampler_gap)
from toy.arithmetic import WarmStart, make_model, make_tokenizer

TEMPERATURE, LIMIT = 0.6, GAP_LIMIT[torch.float32]


def new_model(tied: bool = False, seed: int = 0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model(WarmStart(hidden=128, layers=2), len(make_tokenizer()))
        if tied:
            model.config.tie_word_embeddings = True
            model.tie_weights()
        for parameter in model.parameters():                     # far from uniform, so that a wrong weight shows
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.12)
    return model.eval()


def weights(model):
    return ((name, parameter.detach()) for name, parameter in model.named_parameters())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Hostile to the sampler: its generation_config shapes the distribution and knows an end token of its own."""
    folder, model = tmp_path_factory.mktemp("vllm") / "model", new_model()
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"do_sample": true, "top_p": 0.3, "top_k": 2, "temperature": 5.0, '
                                                   '"repetition_penalty": 3.0, "eos_token_id": [1, 5]}')
    return folder


@pytest.fixture(scope="module")
def started(folder):
    """(sampler, model, tokenizer), and what its start did to this process."""
    model, tokenizer = load(str(folder))
    torch.manual_seed(3)
    before = torch.get_rng_state(), torch.get_num_threads(), torch.set_num_threads, os.sched_getaffinity(0)
    sampler = make_sampler("vllm", model, tokenizer, str(folder), context=256)
    after = torch.get_rng_state(), torch.get_num_threads(), torch.set_num_threads, os.sched_getaffinity(0)
    return sampler, model, tokenizer, before, after


@pytest.fixture
def engine(started, folder):
    """The engine with the folder's own weights, and a model of those weights."""
    sampler, _, tokenizer, *_ = started
    model = load(str(folder))[0]
    sampler.sync(weights(model))
    return sampler, model, tokenizer


def prompts_of(tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text) for text in ("1+2=", "345+67=", "9+9=", "88+1234=")]


def gap_of(sampler, model, tokenizer, seed: int = 0, temperature: float = TEMPERATURE) -> dict[str, float]:
    drawn = sampler.generate(prompts_of(tokenizer), 8, temperature=temperature, max_tokens=24, seed=seed)
    return sampler_gap(drawn, logprobs_only(model, drawn, temperature))


def train_a_step(model, optimizer, drawn) -> None:
    """Makes what was drawn less likely or more, row by row."""
    signs = torch.tensor([(-1.0) ** row for row, response in enumerate(drawn.responses) for _ in response])
    optimizer.zero_grad()
    (signs * forward_logprobs(model, drawn, TEMPERATURE)[0]).mean().backward()
    optimizer.step()


def test_its_log_probabilities_are_the_trainers_at_every_temperature(engine):
    for temperature in (0.6, 1.0, 2.0):
        gap = gap_of(*engine, temperature=temperature)
        assert 0 < gap["sampler_gap_max"] <= 1e-4, (temperature, gap)


def test_three_steps_with_a_sync_after_each_and_the_skipped_sync_is_caught(engine):
    """AdamW at the tiny model's learning rate. The gap without the sync is what one step of training does."""
    sampler, model, tokenizer = engine
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(3):
        drawn = sampler.generate(prompts_of(tokenizer), 8, temperature=TEMPERATURE, max_tokens=24, seed=step)
        train_a_step(model, optimizer, drawn)
        stale = gap_of(sampler, model, tokenizer, seed=100 + step)
        with pytest.raises(SystemExit, match="samples from stale weights"):
            check_sampler_gap(stale, LIMIT)
        sampler.sync(weights(model))
        fresh = gap_of(sampler, model, tokenizer, seed=100 + step)
        print(f"step {step}: without the sync {stale}, after it {fresh}")
        assert fresh["sampler_gap_max"] <= 1e-4 and stale["sampler_gap"] > 10 * fresh["sampler_gap_max"]
        check_sampler_gap(fresh, LIMIT)


def test_the_engine_holds_a_copy_not_the_trainers_tensors(engine):
    sampler, model, tokenizer = engine
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    assert gap_of(sampler, model, tokenizer)["sampler_gap"] > LIMIT


def test_the_prefix_cache_does_not_outlive_the_weights(engine):
    """The same prompts, longer than a block of the cache, before and after a sync."""
    sampler, model, tokenizer = engine
    block = sampler.engine.llm_engine.vllm_config.cache_config.block_size
    prompts = [tokenizer.encode("1+" * (block // 2 + 10) + "1=")]
    assert block < len(prompts[0]) < 2 * block
    sampler.generate(prompts, 2, temperature=TEMPERATURE, max_tokens=4, seed=0)
    other = new_model(seed=9)
    sampler.sync(weights(other))
    drawn = sampler.generate(prompts, 2, temperature=TEMPERATURE, max_tokens=4, seed=0)
    assert sampler_gap(drawn, logprobs_only(other, drawn, TEMPERATURE))["sampler_gap_max"] <= 1e-4


def test_frequencies_follow_the_softmax_at_the_temperature(engine):
    """χ² of 4,000 first tokens, although the folder's generation_config asks for top-p, top-k and a penalty."""
    sampler, model, tokenizer = engine
    draws, prompt = 4_000, tokenizer.encode("1+2=")
    drawn = sampler.generate([prompt], draws, temperature=TEMPERATURE, max_tokens=1, seed=7)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
    expected = draws * (logits / TEMPERATURE).softmax(-1)
    observed = torch.bincount(torch.tensor([response[0] for response in drawn.responses]), minlength=len(expected))
    common = expected >= 5                                                     # χ² needs it; the rest is one cell
    cells = [(observed[common], expected[common]), (observed[~common].sum()[None], expected[~common].sum()[None])]
    chi2 = sum(((o - e) ** 2 / e.clamp_min(1e-9)).sum().item() for o, e in cells)
    freedom = int(common.sum())
    assert freedom > 5 and chi2 < freedom + 4 * (2 * freedom) ** 0.5          # mean + 4 standard deviations of χ²


def test_same_seed_same_responses_whatever_was_drawn_before(engine):
    sampler, _, tokenizer = engine
    prompts = prompts_of(tokenizer)

    def draw(seed):
        return sampler.generate(prompts, 4, temperature=1.0, max_tokens=16, seed=seed)

    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, other = draw(5), draw(6)
    sampler.generate(prompts[:1], 3, temperature=1.0, max_tokens=9, seed=1)
    assert draw(5) == first and first.responses != other.responses
    assert torch.equal(torch.get_rng_state(), before)
    assert first.prompts == [prompt for prompt in prompts for _ in range(4)]
    assert all(len({tuple(r) for r in first.responses[i:i + 4]}) > 1 for i in range(0, 16, 4))


def test_the_end_tokens_are_kept_and_nothing_behind_them(engine):
    """The folder's own end token (5) and the tokenizer's (1)."""
    sampler, _, tokenizer = engine
    drawn = sampler.generate(prompts_of(tokenizer), 50, temperature=2.0, max_tokens=9, seed=1)
    assert any(drawn.finished) and not all(drawn.finished)
    assert {response[-1] for response, end in zip(drawn.responses, drawn.finished) if end} == {1, 5}
    for response, finished, logprobs in zip(drawn.responses, drawn.finished, drawn.logprobs):
        assert not {1, 5} & set(response[:-1]) and len(logprobs) == len(response)
        assert finished or len(response) == 9


def test_greedy_agrees_with_transformers(engine):
    sampler, model, tokenizer = engine
    greedy = {"temperature": 0, "max_tokens": 12, "seed": 0}
    drawn = sampler.generate(prompts_of(tokenizer), 2, **greedy)
    expected = TransformersSampler(model, tokenizer).generate(prompts_of(tokenizer), 2, **greedy)
    assert (drawn.responses, drawn.texts, drawn.finished) == (expected.responses, expected.texts, expected.finished)
    assert drawn.logprobs == [None] * 8


def test_what_exceeds_the_context_is_refused(engine):
    sampler, _, tokenizer = engine
    with pytest.raises(UserError, match="a prompt of 7 tokens and 250 for the response exceed .* context of 256"):
        sampler.generate([tokenizer.encode("345+67=")], 2, temperature=1.0, max_tokens=250, seed=0)
    drawn = sampler.generate([tokenizer.encode("345+67=")], 2, temperature=1.0, max_tokens=249, seed=0)
    assert all(finished or len(response) == 249 for response, finished in zip(drawn.responses, drawn.finished))
    assert sampler.generate([], 2, temperature=1.0, max_tokens=5, seed=0).responses == []


def test_weights_that_are_not_finite_are_a_divergence_not_a_sample(engine):
    sampler, model, tokenizer = engine
    with torch.no_grad():
        model.get_output_embeddings().weight[3] = torch.nan
    sampler.sync(weights(model))
    with pytest.raises(UserError, match="training has diverged"):
        sampler.generate(prompts_of(tokenizer), 2, temperature=1.0, max_tokens=5, seed=0)


def test_starting_an_engine_leaves_the_process_alone(started):
    *_, before, after = started
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1                              # vLLM's CPU worker takes it away
    torch.set_num_threads(threads)


def test_tied_embeddings(tmp_path_factory):
    """The head's weight comes once, under the embedding's name. A second engine in the same process."""
    folder, model = tmp_path_factory.mktemp("tied"), new_model(tied=True)
    tokenizer = make_tokenizer()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert AutoModelForCausalLM.from_pretrained(folder).lm_head.weight is not None
    sampler = make_sampler("vllm", model, tokenizer, str(folder), context=64)
    trained = new_model(tied=True, seed=1)
    assert "lm_head.weight" not in dict(trained.named_parameters())
    assert gap_of(sampler, model, tokenizer)["sampler_gap_max"] <= 1e-4
    with pytest.raises(SystemExit):
        check_sampler_gap(gap_of(sampler, trained, tokenizer), LIMIT)
    sampler.sync(weights(trained))
    assert gap_of(sampler, trained, tokenizer)["sampler_gap_max"] <= 1e-4


def test_auto_takes_the_cpu_build_only_when_asked_for_by_name():
    said = []
    assert choose_backend("auto", gpu=False, say=said.append) == "transformers" and len(said) == 1
    assert choose_backend("vllm", gpu=False, say=said.append) == "vllm" and len(said) == 1
    import vllm
    assert vllm.__version__.split("+")[0] == VLLM_VERSION


def test_a_folder_that_vllm_cannot_serve_is_one_line(folder, started):
    _, model, tokenizer, *_ = started
    with pytest.raises(UserError, match="vLLM cannot start with") as refused:
        make_sampler("vllm", model, tokenizer, str(folder), context=1_000_000)     # the model's own context is 256
    assert "\n" not in str(refused.value)


def test_two_ranks_have_an_engine_each_and_are_quiet(folder):
    """torchrun, gloo, uneven numbers of prompts; gradients summed over ranks, weights pushed on each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--rdzv-backend", "c10d",
               "--rdzv-endpoint", "localhost:0", "--nproc-per-node", "2", str(ROOT / "tests" / "vllm_worker.py"),
               str(folder.parent)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300,
                         env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert run.returncode == 0, run.stderr[-4000:]
    found = [torch.load(folder.parent / f"rank{rank}.pt") for rank in range(2)]
    for rank in found:
        assert all(gap["sampler_gap_max"] <= 1e-4 for gap in rank["gaps"]), rank["gaps"]
        assert rank["threads"] == 1 and rank["cores"] == len(os.sched_getaffinity(0))
    assert [len(rank["responses"]) for rank in found] == [8, 12]
    assert all(torch.equal(found[0]["weights"][name], value) for name, value in found[1]["weights"].items())
    said = run.stdout + run.stderr
    assert "INFO" not in said and "it/s" not in said and "%|" not in said, said
