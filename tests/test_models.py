"""The two passes over responses, prompts in a model's own format, and models that are refused."""
import pytest
import torch
from transformers import (AutoTokenizer, CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM, Qwen2Config,
                          Qwen2ForCausalLM, Qwen2Model)

from salt import models
from salt.data import INSTRUCTION
from salt.errors import UserError
from salt.rollout import Rollouts
from toy.arithmetic import WarmStart, make_model, make_tokenizer

RAGGED = Rollouts(prompts=[[4, 5, 6], [7], [8, 9, 10, 11, 12], [5, 5]],
                  responses=[[13, 14, 1], [15, 16, 17, 18, 19, 20], [1], []],
                  finished=[True, False, True, False], texts=[""] * 4)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return make_model(WarmStart(hidden=32, layers=2), 23).double().eval()


def one_by_one(model, rollouts, temperature):
    """log-probabilities and entropies of each response from a plain forward over that row alone."""
    logprobs, entropies = [], []
    for prompt, response in zip(rollouts.prompts, rollouts.responses):
        if not response:
            continue
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1:-1] / temperature
        distribution = torch.distributions.Categorical(logits=logits)
        logprobs.append(distribution.log_prob(torch.tensor(response)))
        entropies.append(distribution.entropy())
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize("micro_batch", [1, 2, 3, None])
def test_score_equals_a_plain_forward_of_each_row(model, micro_batch):
    with torch.no_grad():
        logprobs, entropies = one_by_one(model, RAGGED, 0.6)
    scored = models.score(model, RAGGED, 0.6, micro_batch=micro_batch, keep_hidden=True)
    assert scored.lengths.tolist() == [3, 6, 1, 0]
    assert torch.allclose(scored.logprobs, logprobs, atol=1e-12)
    assert torch.allclose(scored.entropy, entropies, atol=1e-12)
    assert scored.hidden.shape == (10, 32)
    head = models.lm_head(model)
    probabilities = (scored.hidden @ head.weight.T / 0.6).softmax(-1)
    error = probabilities - torch.nn.functional.one_hot(scored.tokens, 23)
    assert torch.allclose(scored.delta_norms, error.norm(dim=-1), atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_gradients_of_the_chunked_pass_equal_those_of_a_plain_forward(model, monkeypatch, chunk):
    monkeypatch.setattr(models, "CHUNK_ELEMENTS", 23 * chunk)
    weights = torch.arange(1.0, 11.0, dtype=torch.float64)
    gradients = []
    for values in (one_by_one(model, RAGGED, 0.6), models.forward_logprobs(model, RAGGED, 0.6, with_entropy=True)):
        model.zero_grad()
        (weights * values[0] + values[1]).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.allclose(*gradients, rtol=1e-10, atol=1e-12)


def test_select_takes_responses_out_of_the_packed_columns(model):
    scored = models.score(model, RAGGED, 1.0, keep_hidden=True)
    part = scored.select(torch.tensor([2, 0]))
    assert part.tokens.tolist() == [1, 13, 14, 1] and part.lengths.tolist() == [1, 3]
    assert torch.equal(part.hidden, scored.hidden[[9, 0, 1, 2]])


def test_unpack_and_mask():
    lengths = torch.tensor([2, 0, 1])
    grid = models.unpack(torch.tensor([1.0, 2.0, 3.0]), lengths)
    assert grid.tolist() == [[1, 2], [0, 0], [3, 0]]
    assert models.response_mask(lengths).tolist() == [[True, True], [False, False], [True, False]]


def test_micro_batches_cover_every_row_once_longest_first():
    batches = list(models.micro_batches([3, 9, 1, 9, 4], 2))
    assert batches == [[1, 3], [4, 0], [2]]
    assert list(models.micro_batches([3, 9], None)) == [[1, 0]]


def test_the_chat_template_gives_one_bos_and_an_open_think(shared_data):
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizer")
    ids = models.encode_prompt(tokenizer, "What is 1+1?", INSTRUCTION)
    text = tokenizer.decode(ids)
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    assert text.endswith("\\boxed{}.<｜Assistant｜><think>\n")
    assert text.startswith("<｜begin▁of▁sentence｜><｜User｜>What is 1+1?\nPlease reason")


def test_a_prompt_that_the_tokenizer_cannot_spell_is_refused():
    with pytest.raises(UserError, match="cannot spell"):
        models.encode_prompt(make_tokenizer(), "What is 1+1?")
    assert len(models.encode_prompt(make_tokenizer(), "12+3=")) == 5


SMALL = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}


def test_heads_of_another_form_are_refused_and_plain_ones_are_not():
    torch.manual_seed(0)
    capped = Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=0.05)).eval()
    scaled = CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.0625)).eval()
    for model in (capped, scaled):
        with pytest.raises(UserError, match="soft-capping or scaling"):
            models.check_head(model, "it")
    with pytest.raises(UserError, match="no output projection"):
        models.check_head(Qwen2Model(Qwen2Config(**SMALL)), "it")
    for tied in (True, False):
        plain = Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=tied)).eval()
        models.check_head(plain)
        assert models.lm_head(plain).tied is tied


@pytest.mark.parametrize("name", ["deepseek", "./absent", "/absent/folder", "a/b/c"])
def test_unknown_models_are_refused_before_anything_is_loaded(name):
    with pytest.raises(UserError, match="unknown model"):
        models.resolve(name)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(UserError, match="config.json"):
        models.resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="cannot load"):
        models.load(models.resolve(str(tmp_path)))
