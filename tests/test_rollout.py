"""The sampler draws from exactly the distribution that the loss scores."""
import pytest
import torch
from transformers import GenerationConfig

from salt.models import load, score
from salt.rollout import Rollouts, TransformersSampler
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


def test_load_gives_float32_master_weights(tmp_path, tiny):
    model, tokenizer = tiny
    folder = tmp_path / "bf16"
    make_model(WarmStart(hidden=32, layers=1), len(tokenizer)).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert load(str(folder))[0].dtype == torch.float32
