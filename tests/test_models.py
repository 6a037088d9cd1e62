"""The two passes over responses, prompts in a model's own format, and models that are refused."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (AutoTokenizer, CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM,
                          GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Model)

from salt import models
from salt.data import INSTRUCTION
from salt.errors import UserError
from salt.rollout import Rollouts, end_tokens
from toy.arithmetic import WarmStart, make_model, make_tokenizer

ROOT = Path(__file__).resolve().parents[1]
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


TURN = "<|im_start|>{role}\\n{text}<|im_end|>\\n"
SYSTEM = TURN.format(role="system", text=INSTRUCTION.replace("\\", "\\\\"))
OPENING = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
USER = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"


def with_template(shared_data, template):
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizer")
    tokenizer.chat_template = template
    return tokenizer


def test_a_template_that_asks_for_the_box_itself_is_not_asked_twice(shared_data):
    """Qwen2.5-Math's template: a system turn with the instruction where the conversation has none."""
    tokenizer = with_template(shared_data, "{{ '" + SYSTEM + "' }}" + USER + OPENING)
    text = tokenizer.decode(models.encode_prompt(tokenizer, "What is 1+1?", INSTRUCTION))
    assert text.count(INSTRUCTION) == 1
    assert text.endswith("<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n")
    other = tokenizer.decode(models.encode_prompt(tokenizer, "What is 1+1?", "Answer in one word."))
    assert "What is 1+1?\nAnswer in one word.<|im_end|>" in other


def test_templates_are_told_to_think_and_on_which_day(shared_data):
    """Qwen3's switch, and the date in Llama's system header."""
    tokenizer = with_template(
        shared_data, "{% if not date_string is defined %}{% set date_string = 'today' %}{% endif %}"
        "{{ date_string }} " + USER + OPENING + "{% if enable_thinking is defined and not enable_thinking %}"
        "{{ '<think>\\n\\n</think>' }}{% endif %}")
    text = tokenizer.decode(models.encode_prompt(tokenizer, "q", "i"))
    assert text == "26 Jul 2024 <|im_start|>user\nq\ni<|im_end|>\n<|im_start|>assistant\n"


def test_no_system_prompt_is_made_up(shared_data):
    tokenizer = with_template(shared_data,
                              "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:")
    assert tokenizer.decode(models.encode_prompt(tokenizer, "q", "i")) == "user: q\ni\nassistant:"


def test_the_end_of_a_turn_ends_a_response(shared_data):
    plain = AutoTokenizer.from_pretrained(shared_data / "tokenizer")
    assert end_tokens(GenerationConfig(), plain) == [plain.eos_token_id]
    assert end_tokens(GenerationConfig(eos_token_id=[7, plain.eos_token_id]), plain) == [7, plain.eos_token_id]
    chat = with_template(shared_data, USER + OPENING)
    chat.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    assert end_tokens(GenerationConfig(eos_token_id=chat.eos_token_id), chat) == sorted(
        [chat.eos_token_id, chat.convert_tokens_to_ids("<|im_end|>")])


def test_presets_say_all_that_is_known_of_them():
    assert {"tiny", "deepseek-1.5b", "deepseek-7b", "qwen3-8b", "llama-3.1-8b", "qwen2.5-math-1.5b",
            "deepseek-math-7b"} == set(models.PRESETS)
    assert [name for name, preset in models.PRESETS.items() if preset.context == 4096] == [
        "qwen2.5-math-1.5b", "deepseek-math-7b"]
    assert [name for name, preset in models.PRESETS.items() if preset.gated] == ["llama-3.1-8b"]
    for name, preset in models.PRESETS.items():
        assert preset.chat and (models.resolve(name) == preset.hub if preset.hub else name == "tiny")


@pytest.mark.parametrize("prompt, response, context, left", [
    (1024, 8192, 4096, 3072), (1024, 8192, 9216, 8192), (1024, 8192, 9215, 8191), (1, 1, 2, 1), (4095, 10, 4096, 1)])
def test_a_response_is_shortened_to_what_the_context_leaves(prompt, response, context, left):
    assert models.fit_context(prompt, response, context) == left


@pytest.mark.parametrize("prompt", [4096, 5000])
def test_a_prompt_that_fills_the_context_is_refused(prompt):
    with pytest.raises(UserError, match=f"--max-prompt {prompt} leaves no room"):
        models.fit_context(prompt, 8192, 4096)


@pytest.mark.slow
@pytest.mark.parametrize("name, gated", [("llama-3.1-8b", True), ("someone/model", False)])
def test_without_network_one_line_says_where_it_looked_and_how_a_gated_model_is_got(tmp_path, name, gated):
    code = ("from salt import models\nfrom salt.errors import run\n"
            f"run(lambda: print(models.load(models.resolve({name!r}))))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT,
                          env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)})
    source = models.resolve(name)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f"looked for {tmp_path}/models--{source.replace('/', '--')} (HF_HOME)" in done.stderr
    assert (f"accept its terms at https://huggingface.co/{source}" in done.stderr) == gated


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
        with pytest.raises(UserError, match="soft-capped|soft-capping or scaling"):
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
