"""--plan: parameter counts of real models, memory by hand, what more GPUs or smaller batches change, refusals."""
import dataclasses
import re
import resource

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, T5Config

from salt import models
from salt import plan as planning
from salt.config import settle
from salt.errors import UserError
from salt.plan import GIB, PHASES, VLLM_WORK, Shape, measure, memory, needed, plan, refuse_what_does_not_fit, shortfall
from toy.arithmetic import WarmStart, make_model, make_tokenizer

# "total" of the safetensors metadata that each model's page on huggingface.co shows.
PUBLISHED = {"deepseek-1.5b": 1_777_088_000, "deepseek-7b": 7_615_616_512, "qwen3-8b": 8_190_735_360,
             "llama-3.1-8b": 8_030_261_248, "qwen2.5-math-1.5b": 1_543_714_304, "deepseek-math-7b": 6_910_365_696}


def asked(model="deepseek-7b", **given):
    return settle({"model": model, "dataset": "math", "salt": "salt"} | given)


@pytest.fixture(scope="module")
def shapes():
    return {name: measure(preset.config()) for name, preset in models.PRESETS.items()}


# -------------------------------------------------------------------------------------------------------------- counts


def test_parameter_counts_are_the_published_ones(shapes):
    assert {name: shapes[name].parameters for name in PUBLISHED} == PUBLISHED


def test_the_tiny_preset_is_the_model_that_is_made(shapes):
    real = make_model(WarmStart(), len(make_tokenizer()))
    assert shapes["tiny"].parameters == sum(p.numel() for p in real.parameters())
    assert models.PRESETS["tiny"].context == real.config.max_position_embeddings


def test_shape_of_the_7b_model_by_hand(shapes):
    shape = shapes["deepseek-7b"]
    # q and o 3584² each, k and v 512 · 3584 each, biases 3584 + 2 · 512, MLP 3 · 3584 · 18944, two norms
    assert shape.layer == 2 * 3584 ** 2 + 2 * 512 * 3584 + 3584 + 2 * 512 + 3 * 3584 * 18944 + 2 * 3584
    assert shape.outside == 2 * 152064 * 3584 + 3584                    # embedding, head, last norm
    assert shape.parameters == 28 * shape.layer + shape.outside
    # in + out: q, o 7168 each; k, v 4096 each; gate, up, down 22528 each
    assert shape.adapter == 28 * (2 * 7168 + 2 * 4096 + 3 * 22528)
    assert shape.cache == 2 * 28 * 4 * 128                              # keys and values, 28 layers, 4 heads of 128


def test_a_tied_head_is_counted_once(shapes):
    assert shapes["qwen2.5-math-1.5b"].outside == 151936 * 1536 + 1536
    assert shapes["deepseek-1.5b"].outside == 2 * 151936 * 1536 + 1536


def test_nothing_is_allocated():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss                 # KiB; the weights would be 28 GiB
    assert measure(models.PRESETS["deepseek-7b"].config()).parameters == PUBLISHED["deepseek-7b"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


# -------------------------------------------------------------------------------------------------------------- memory

SMALL = Shape(parameters=1000, layer=300, outside=400, adapter=20, layers=2, hidden=10, intermediate=30, vocabulary=50,
              cache=16)
STEP = {"batch_size": 4, "mini_batch": 2, "group_size": 3, "micro_batch": 2, "max_prompt": 5, "max_response": 15}


def test_every_part_by_hand():
    parts = memory(asked(**STEP), SMALL, 4, 10.0)
    always = {"master weights": 1000, "Adam's two moments": 2000, "reference": 500,           # 4, 8, 2 · 1000 / 4
              "CUDA, NCCL, fragments": planning.OVERHEAD}
    for name, size in always.items():
        assert parts.pop(name) == dict.fromkeys(PHASES, size), name
    tokens, response = 2 * (5 + 15), 2 * 15 * 10                                # of a micro-batch; bytes of its states
    assert parts == {
        "vLLM: weights and work": {"sample": 2000 + VLLM_WORK},
        "vLLM: cache": {"sample": 4 * GIB - 2000 - VLLM_WORK},                                # 0.4 of 10 GiB together
        "gathered weights": {"score": 2000, "update": 2000},                                  # 2 (400 + 2 · 300)
        "layer inputs": {"update": 2 * tokens * 10 * 2},
        "one layer": {"score": tokens * (80 + 180), "update": tokens * (240 + 420)},
        "logits chunk": {"score": 16 * 2 * 15 * 50, "update": 24 * 2 * 15 * 50},              # fewer than a chunk
        # 4 GPUs: ⌈6 / 4⌉ = 2 responses of each of the two mini-batches, one of them three times
        "hidden states for K": {"score": 8 * response, "gram": 4 * response},
        "Gram": {"gram": (2 * 6 + 2) * response + planning.DEVICE_BUDGET},
        "gradients, sharded": {"update": 1000}, "gradients, largest unit": {"update": 6 * 400}}


def test_lora_trains_the_adapters_only_and_is_its_own_reference():
    parts = memory(asked(**STEP, lora_rank=8), SMALL, 4, 10.0)
    assert "reference" not in parts
    assert parts["master weights"]["update"] == 160                             # 4 · (8 · 20) / 4
    assert parts["frozen base"]["update"] == 500
    assert parts["Adam's two moments"]["update"] == 320
    assert parts["gradients, largest unit"]["update"] == 6 * 8 * 20 / 2


def test_what_is_not_used_takes_nothing():
    parts = memory(asked(**STEP, kl_coef=0.0, salt=None, diagnostics="off", rollout="transformers"), SMALL, 4, 10.0)
    assert not {"reference", "Gram", "hidden states for K", "vLLM: cache"} & set(parts)
    assert parts["keys and values"] == {"sample": 2 * 3 * 16 * 20}              # one prompt's three responses
    assert parts["gathered weights"]["sample"] == 2000
    assert "Gram" in memory(asked(**STEP, salt=None), SMALL, 4, 10.0)           # the diagnostics need K too


def test_without_checkpointing_every_layer_is_kept():
    kept, again = (memory(asked(**STEP, checkpoint_layers=on), SMALL, 4, 10.0) for on in (False, True))
    assert "layer inputs" not in kept and kept["all layers"]["update"] == 2 * again["one layer"]["update"]
    assert kept["all layers"]["score"] == again["one layer"]["score"]           # without gradients nothing is kept


def test_float32_products_take_twice_the_room():
    half, full = (memory(asked(**STEP, precision=name), SMALL, 4, 10.0) for name in ("bfloat16", "float32"))
    assert memory(asked(**STEP), SMALL, 4, 10.0) == half
    for name in ("reference", "gathered weights", "layer inputs", "one layer", "hidden states for K"):
        assert all(full[name][phase] == 2 * size for phase, size in half[name].items()), name
    assert full["master weights"] == half["master weights"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_more_gpus_never_need_more_memory_each(shapes, name):
    sizes = [needed(memory(asked(name), shapes[name], gpus, 80.0)) for gpus in (1, 2, 3, 8, 16, 32)]
    for fewer, more in zip(sizes, sizes[1:]):
        assert all(more[phase] <= fewer[phase] for phase in PHASES)
    assert all(sizes[-1][phase] < sizes[0][phase] for phase in PHASES)


@pytest.mark.parametrize("less, phase", [
    ({"micro_batch": 4}, "update"), ({"micro_batch": 4}, "score"), ({"max_response": 4096}, "gram"),
    ({"max_response": 4096}, "update"), ({"mini_batch": 16}, "gram"), ({"kl_coef": 0.0}, "sample"),
    ({"lora_rank": 32}, "update"), ({"batch_size": 32}, "gram"), ({"max_prompt": 512}, "update"),
    ({"vllm_memory": 0.3}, "sample")])
def test_asking_for_less_needs_less(shapes, less, phase):
    default, smaller = (needed(memory(asked(**given), shapes["deepseek-7b"], 8, 80.0)) for given in ({}, less))
    assert smaller[phase] < default[phase]
    assert all(smaller[other] <= default[other] for other in PHASES)


def test_table_4_fits_eight_gpus_of_80_gib_for_every_preset(shapes):
    for name in models.PRESETS:
        assert shortfall(asked(name), shapes[name], 8, 80.0) is None, name


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_what_autograd_saves_of_a_layer_is_within_the_plan(family):
    """Bytes of every tensor that one decoder layer in bfloat16 keeps for its backward pass, parameters left out."""
    d, inner, tokens = 64, 160, 96
    preset = dataclasses.replace(models.PRESETS["deepseek-1.5b"], family=family, hidden=d, intermediate=inner, layers=1,
                                 heads=4, kv_heads=2, vocabulary=32)
    model = AutoModelForCausalLM.from_config(preset.config(), dtype=torch.bfloat16)
    parameters, saved = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in parameters:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes(), tensor   # alive: no reuse
        return tensor

    inputs = torch.randn(1, tokens, d, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(tokens).unsqueeze(0)
    rotary = model.model.rotary_emb(inputs, positions)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model.layers[0](inputs, attention_mask=None, position_embeddings=rotary, position_ids=positions)
    measured, planned = sum(size for size, _ in saved.values()), tokens * (24 * d + 14 * inner)
    assert 0.5 * planned < measured <= planned


# ---------------------------------------------------------------------------------------------------- what does not fit


def flags_in(line: str) -> list[tuple[dict, int | None]]:
    """The ways out that a line names: changed fields, or a number of GPUs."""
    ways = []
    for way in line.partition("would fit with ")[2].split(", or with "):
        gpus = re.fullmatch(r"(\d+) GPUs", way)
        fields = {name.replace("-", "_"): float(value) if name in ("kl-coef", "vllm-memory") else int(value)
                  for name, value in re.findall(r"--([a-z-]+) (\S+)", way)}
        assert bool(gpus) != bool(fields), way
        ways.append((fields, int(gpus[1]) if gpus else None))
    return ways


@pytest.mark.parametrize("name, gpus, size", [("deepseek-7b", 8, 48.0), ("deepseek-7b", 1, 80.0), ("qwen3-8b", 4, 80.0),
                                             ("deepseek-1.5b", 1, 40.0), ("llama-3.1-8b", 2, 100.0)])
def test_every_way_out_that_is_named_does_fit(shapes, name, gpus, size):
    config = asked(name)
    line = shortfall(config, shapes[name], gpus, size)
    assert line.startswith(f"{name} does not fit on {gpus} GPU(s) of {size:g} GiB: ") and "\n" not in line
    ways = flags_in(line)
    assert ways
    for fields, number in ways:
        assert shortfall(dataclasses.replace(config, **fields), shapes[name], number or gpus, size) is None, fields


def test_the_phases_named_are_those_that_are_too_large(shapes):
    config, shape = asked(), shapes["deepseek-7b"]
    sizes = {phase: size / GIB for phase, size in needed(memory(config, shape, 8, 80.0)).items()}
    limit = max(sizes.values()) - 0.1                                           # the largest phase alone is above it
    line = shortfall(config, shape, 8, limit)
    worst = max(sizes, key=sizes.get)
    assert f"{worst} needs {sizes[worst]:.1f} GiB" in line
    assert not any(f"{phase} needs" in line for phase in PHASES if phase != worst)


def test_a_hopeless_case_says_so(shapes):
    assert "no single flag helps" in shortfall(asked(), shapes["deepseek-7b"], 1, 4.0)


def test_what_does_not_fit_is_refused_in_one_line_before_loading():
    with pytest.raises(UserError, match=r"deepseek-7b does not fit on 1 GPU\(s\) of 80 GiB: .*--plan") as error:
        refuse_what_does_not_fit(asked(), gpus=1, gpu_memory=80.0)
    assert "\n" not in str(error.value)
    refuse_what_does_not_fit(asked("tiny"), gpus=1, gpu_memory=16.0)


# ---------------------------------------------------------------------------------------------------------- the report


def test_the_report_of_the_papers_run():
    text = plan(asked())
    for part in ("deepseek-7b (deepseek-ai/DeepSeek-R1-Distill-Qwen-7B): 7,615,616,512 parameters",
                 "8 GPU(s) of 80 GiB", "64 prompts x 8 responses, 2 optimizer update(s), at most 4,718,592 tokens",
                 # 7500 / 64 = 117.19; 2 · 7500 / 64 = 234.4; 7500 · 8 · 8192 = 491,520,000; ⌊15000 / 64⌋ = 234
                 "7,500 problems (published size), 117.2 steps and 234.4 updates, at most 491,520,000 sampled tokens",
                 "2 epoch(s), 234 steps and 468 updates", "64 prompts sampled at a time over 8 GPU(s): 8 each",
                 "host memory: 28.4 GiB per process while it reads the model, 227 GiB for 8",        # 4 · 7.616e9 bytes
                 "256 responses of an update over 8 GPU(s): 32 each", "micro-batches of 8: 4 pass(es)"):
        assert part in text, part
    assert text.endswith("it fits")
    rows = re.findall(r"^(master weights|together|left) +(.*)$", text, re.MULTILINE)
    sizes = {name: [float(value) for value in values.split()] for name, values in rows}
    assert sizes["master weights"] == [3.5] * 4                        # 4 · 7.616e9 / 8 bytes = 3.55 GiB
    assert all(abs(a + b - 80) < 0.11 for a, b in zip(sizes["together"], sizes["left"]))


def test_adapters_need_less_host_memory():
    """Half of 28.37 GiB: the frozen base is read in bfloat16."""
    assert "14.2 GiB per process while it reads the model, 57 GiB for 4" in plan(asked(lora_rank=8), gpus=4)
    assert "host memory: 28.4 GiB" in plan(asked(lora_rank=8, precision="float32"), gpus=4)


def test_the_columns_add_up():
    lines = plan(asked()).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("GiB per GPU"))
    end = next(i for i, line in enumerate(lines) if line.startswith("----"))
    columns = [line[32:].replace("-", "0").split() for line in lines[start + 1:end]]
    sums = [sum(float(row[phase]) for row in columns) for phase in range(4)]
    assert all(abs(total - float(said)) < 0.06 * len(columns) for total, said in zip(sums, lines[end + 1][32:].split()))


def test_a_known_number_of_problems_counts_and_an_unknown_one_is_said():
    assert "epoch: 100 problems, 1.6 steps" in plan(asked(), 100)
    assert "epoch: 50 problems, 0.8 steps" in plan(asked(limit=50), 100)
    assert "1 steps and 2 updates" in plan(asked(steps=1))
    assert "epoch: unknown, own.jsonl is not at hand" in plan(asked(dataset="own.jsonl"))
    assert "at most 234 steps" in plan(asked(algo="dapo"))


def test_uneven_shares_and_idle_gpus_are_named():
    assert "64 prompts sampled at a time over 6 GPUs: 4 take 11, the others 10 and wait" in plan(asked(), gpus=6)
    assert "would have none, take fewer GPUs" in plan(asked(batch_size=4, mini_batch=4), gpus=8)


def test_vllms_cache_holds_what_is_left(shapes):
    text = plan(asked())
    # 57,344 bytes · 9,216 tokens = 0.492 GiB; 0.4 · 80 − 14.19 (weights) − 2 = 15.81 GiB, ⌊15.81 / 0.492⌋ = 32
    # 64 prompts · 8 / 8 GPUs = 64 responses of a GPU; 1 − (3.55 + 7.09 + 1.77 + 3) / 80 = 0.807
    assert ("0.49 GiB per response at full length; room for 32 of a GPU's 64 at a time (--vllm-memory may go up to 0.8)"
            in text)
    assert "room for 64 of a GPU's 64 at a time\n" in plan(asked(vllm_memory=0.8))
    assert "vLLM" not in plan(asked(rollout="transformers"))


def test_a_share_too_small_for_vllm_is_named_and_a_larger_one_that_fits(shapes):
    # 14.19 GiB of weights, 2 of work, 0.49 for one response: 16.68 of 0.2 · 80 = 16
    line = shortfall(asked(vllm_memory=0.2), shapes["deepseek-7b"], 8, 80.0)
    assert "vLLM needs 16.7 GiB of its 16.0; would fit with --vllm-memory 0.25" in line
    crowded = shortfall(asked(vllm_memory=0.9), shapes["deepseek-7b"], 8, 80.0)
    assert "sample needs 87.4 GiB; would fit with --vllm-memory 0.8" in crowded  # 0.9 · 80 + 15.41


def test_a_folder_is_planned_from_its_config_alone(r1_folder, tmp_path):
    (tmp_path / "config.json").write_text((r1_folder / "config.json").read_text())
    # 2 · 151936 · 64 + 64 outside; a layer: q, o 64² each, k, v 32 · 64 each, biases 64 + 2 · 32, MLP 3 · 64 · 128,
    # two norms
    expected = 2 * 151936 * 64 + 64 + 2 * (2 * 64 ** 2 + 2 * 32 * 64 + 128 + 3 * 64 * 128 + 128)
    assert f": {expected:,} parameters" in plan(asked(str(tmp_path)))


def test_a_short_context_shortens_the_response_and_says_so(r1_folder, capsys):
    text = plan(asked(str(r1_folder)))                                          # its config holds 4,096 tokens
    assert "responses shortened from 8,192 to 3,072 tokens" in text
    assert "at most 2,097,152 tokens" in text                                   # 512 · 4096
    assert "shortened" not in plan(asked()) and capsys.readouterr().out == ""
    assert "at most 2,097,152 tokens" in plan(asked("qwen2.5-math-1.5b"))       # a preset's is shortened by `settle`
    assert "--max-response 3072 instead of 8192" in capsys.readouterr().out
    with pytest.raises(UserError, match="leaves no room"):
        plan(asked("deepseek-math-7b", max_prompt=4096))


def test_models_that_cannot_be_planned(tmp_path):
    GPT2Config(n_layer=2, n_embd=16, n_head=2).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no plan for gpt2"):
        plan(asked(str(tmp_path)))
    with pytest.raises(UserError, match="unknown model 'deepsek'"):
        plan(asked("deepsek"))
    T5Config(num_layers=1, d_model=16).save_pretrained(tmp_path)                         # not a causal language model
    with pytest.raises(UserError, match="no plan for t5"):
        plan(asked(str(tmp_path)))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="cannot load the model"):
        plan(asked(str(tmp_path)))
