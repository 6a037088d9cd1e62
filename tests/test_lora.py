"""LoRA: where the adapters are, what is trained, and that merged weights are the model that is trained.

All but one of these tests need peft (requirements-optional.txt) and are marked slow, so that CI runs them.
"""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from salt import models
from salt.errors import UserError
from salt.lora import add_adapters, merged_weights, without_adapters
from salt.proxy import lm_head_gram
from salt.rollout import Rollouts, TransformersSampler
from training import resume, run

SHAPE = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
TOKENS = torch.tensor([[4, 5, 6, 7, 8, 9]])
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def make(tied=False, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=tied)).to(dtype).eval()


def train(model, steps=3):
    """A few steps that move every adapter."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        optimizer.step()


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


def test_without_peft_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match="--lora-rank 4 needs the package peft: pip install -r requirements-optional"):
        add_adapters(make(), 4)


def test_a_model_without_adapters_gives_its_own_weights():
    model = make(tied=True)
    state = model.state_dict()
    merged = dict(merged_weights(model))
    assert set(state) - set(merged) == {"lm_head.weight"}                       # tied: the embedding, once
    assert all(torch.equal(merged[name], state[name]) for name in merged)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_only_adapters_on_the_layers_projections_are_trained(tied):
    model = make(tied)
    before = logits(model)
    add_adapters(model, 3)
    adapted = {name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert adapted == PROJECTIONS
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    # in + out of each projection, times the rank: q, o 32, k, v 24, MLP 40 each; two layers
    assert sum(p.numel() for p in trained.values()) == 3 * 2 * (2 * 32 + 2 * 24 + 3 * 40)
    assert torch.equal(logits(model), before)                                   # B = 0
    head = models.lm_head(model)
    assert head.weight.shape == (40, 16) and not head.weight.requires_grad and head.tied is tied


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_merged_weights_are_the_trained_model_under_the_base_models_names(tied):
    plain, model = make(tied), make(tied)
    add_adapters(model, 3)
    train(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merged = dict(merged_weights(model))
    assert list(merged) == [name for name, _ in plain.named_parameters()]
    plain.load_state_dict(merged, strict=not tied)
    assert torch.allclose(logits(plain), logits(model), atol=1e-12)
    assert not torch.allclose(logits(make(tied)), logits(model), atol=1e-3)     # training did move it
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.slow
def test_handing_out_weights_between_steps_changes_no_later_step():
    disturbed, alone = make(), make()
    for model in (disturbed, alone):
        add_adapters(model, 2)
    for _ in range(3):
        train(disturbed, 1)
        for _, tensor in merged_weights(disturbed):
            assert not tensor.requires_grad
        train(alone, 1)
    assert torch.equal(logits(disturbed), logits(alone))


@pytest.mark.slow
def test_the_reference_is_the_model_before_training():
    model = make()
    before = logits(model)
    add_adapters(model, 3)
    train(model)
    after = logits(model)
    with without_adapters(model):
        assert torch.equal(logits(model), before)
        assert all(p.requires_grad for name, p in model.named_parameters() if ".lora_" in name)
    with pytest.raises(KeyError), without_adapters(model):
        raise KeyError
    assert torch.equal(logits(model), after) and not torch.allclose(after, before, atol=1e-3)


@pytest.mark.slow
def test_the_scoring_passes_the_sampler_and_the_gram_know_the_adapted_model(tiny_folder):
    """K in closed form is that of the gradients with respect to the head of the merged model, by autograd."""
    model, tokenizer = models.load(str(tiny_folder), dtype=torch.float64)
    plain, _ = models.load(str(tiny_folder), dtype=torch.float64)
    add_adapters(model, 4)
    rollouts = Rollouts(prompts=[[4, 5, 6], [7], [8, 9]], responses=[[13, 14, 1], [15, 16, 17, 18], [9]],
                        finished=[True, False, False], texts=[""] * 3)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    logprobs, _ = models.forward_logprobs(model, rollouts, 0.6)
    logprobs.sum().backward()
    optimizer.step()
    plain.load_state_dict(dict(merged_weights(model)))

    scored = models.score(model, rollouts, 0.6, keep_hidden=True)
    head = models.lm_head(model)
    gram = lm_head_gram(scored.hidden, scored.tokens, scored.lengths, head.weight, temperature=0.6)
    rows = []
    for i in range(3):
        values, _ = models.forward_logprobs(plain, rollouts.select([i]), 0.6)
        rows.append(torch.autograd.grad(values.mean(), plain.get_output_embeddings().weight)[0].flatten())
    features = torch.stack(rows)
    assert torch.allclose(gram, features @ features.T / 3, rtol=1e-8)

    drawn = [TransformersSampler(m, tokenizer).generate([[4, 5, 6]], 4, temperature=1.0, max_tokens=6, seed=3)
             for m in (model, plain)]
    assert drawn[0].responses == drawn[1].responses


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_the_final_folder_is_an_ordinary_model(tied, tmp_path):
    model = make(tied, torch.float32)
    add_adapters(model, 3)
    train(model)
    model.save_pretrained(tmp_path, state_dict=dict(merged_weights(model)))
    assert not list(tmp_path.glob("adapter*"))
    loaded, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    assert not [name for name, _ in loaded.named_parameters() if "lora" in name or "base_layer" in name]
    assert torch.allclose(logits(loaded), logits(model), atol=1e-5)


@pytest.mark.slow
def test_a_base_in_bfloat16_has_adapters_in_float32_and_rounds_once():
    model = make(dtype=torch.bfloat16)
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    add_adapters(model, 3)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    train(model)
    name = "model.layers.0.mlp.up_proj"
    layer = model.get_submodule(name)
    exact = base[f"{name}.weight"].double() + 2.0 * (layer.lora_B["default"].weight.double()
                                                     @ layer.lora_A["default"].weight.double())
    merged = dict(merged_weights(model))[f"{name}.weight"]
    assert merged.dtype == torch.bfloat16
    assert ((merged.double() - exact).abs() <= 2 ** -8 * exact.abs() + 1e-6).all()      # half a unit in the last place


@pytest.mark.slow
def test_adapters_are_drawn_from_the_seed_and_leave_the_global_generator_alone():
    drawn = []
    for seed, noise in ((5, 1), (5, 2), (6, 1)):
        model = make()
        torch.manual_seed(noise)
        expected = torch.random.get_rng_state()
        add_adapters(model, 3, seed=seed)
        assert torch.equal(torch.random.get_rng_state(), expected)
        drawn.append(torch.cat([p.flatten() for name, p in model.named_parameters() if ".lora_A." in name]))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


@pytest.mark.slow
def test_two_processes_hand_out_the_weights_of_one():
    """FSDP2 shards base and adapters; merged weights, scores and reference are those of the model in one piece."""
    worker = Path(__file__).with_name("lora_worker.py")
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
                           worker], capture_output=True, text=True, timeout=300,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["float64 tied=True: equal", "float64 tied=False: equal",
                                        "bfloat16 tied=False: equal"]


@pytest.mark.slow
def test_a_run_trains_resumes_and_ends_in_an_ordinary_folder(tiny_folder, tmp_path):
    flags = ["--salt", "--lora-rank", "4", "--kl-coef", "0.01", "--save-every", "1"]
    whole = run(tiny_folder, tmp_path / "whole", *flags, "--steps", "3")
    run(tiny_folder, tmp_path / "parts", *flags, "--steps", "2")
    assert resume(tmp_path / "parts", "--steps", "3") == whole
    assert whole[1]["kl"] > 0                                                   # to the base, which has not moved
    before, after = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in
                     (tiny_folder, tmp_path / "whole" / "final"))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys()
    assert {name.split(".")[-2] for name in moved} == PROJECTIONS


@pytest.mark.slow
def test_llama_too():
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**SHAPE)).double().eval()
    model = LlamaForCausalLM(plain.config).double().eval()
    model.load_state_dict(plain.state_dict())
    add_adapters(model, 2)
    train(model)
    plain.load_state_dict(dict(merged_weights(model)))
    assert torch.allclose(logits(plain), logits(model), atol=1e-12)
