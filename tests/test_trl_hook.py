"""salt/trl_hook.py in the real TRL, on a CPU. In TRL's own environment (requirements-trl.txt, see .ci/run)."""
import copy
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM
from trl import GRPOTrainer
from trl_worker import InterleavedSalt, RecordedSalt, RecordedStock, reward, train

from salt.advantages import Reweighted, reweight, salt_advantages, scope_blocks
from salt.errors import UserError
from salt.hooks import check_head, whole_head
from salt.proxy import lm_head_gram_naive
from salt.trl_hook import SaltGRPOTrainer, check_groups

ROOT = Path(__file__).resolve().parents[1]


def unpadded(rows: dict, part: str) -> list[list[int]]:
    return [ids[mask.bool()].tolist() for ids, mask in zip(rows[f"{part}_ids"], rows[f"{part}_mask"])]


def merged(*parts: list[dict]) -> dict:
    """The responses of one generation batch, over all of its slices and ranks."""
    rows = [row for part in parts for row in part]
    return {"prompts": [ids for row in rows for ids in unpadded(row, "prompt")],
            "completions": [ids for row in rows for ids in unpadded(row, "completion")],
            "used": torch.cat([row["advantages"] for row in rows])}


@torch.no_grad()
def states_of(backbone, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """One response at a time, without padding, mask or cache."""
    found = backbone(input_ids=torch.tensor([prompt + completion]), use_cache=False).last_hidden_state[0]
    return found[len(prompt) - 1:len(prompt) - 1 + len(completion)]


def grpo_advantages(prompts: list[list[int]], completions: list[list[int]]) -> torch.Tensor:
    """(r − mean) / (std + 1e-4) over the responses to one prompt, from the tokens alone."""
    rewards, advantages = torch.tensor(reward(completions), dtype=torch.float64), torch.zeros(len(prompts)).double()
    for prompt in set(map(tuple, prompts)):
        group = [i for i, other in enumerate(prompts) if tuple(other) == prompt]
        advantages[group] = (rewards[group] - rewards[group].mean()) / (rewards[group].std() + 1e-4)
    return advantages


def independent(backbone, head: torch.Tensor, rows: dict, temperature: float = 0.8) -> tuple:
    """K by autograd in float64, and a: what SALT has to be made of."""
    backbone = copy.deepcopy(backbone).eval().double()
    hidden = [states_of(backbone, *pair) for pair in zip(rows["prompts"], rows["completions"])]
    tokens = torch.tensor(sum(rows["completions"], []))
    lengths = torch.tensor([len(ids) for ids in rows["completions"]])
    gram = lm_head_gram_naive(torch.cat(hidden), tokens, lengths, head.double(), temperature=temperature)
    return gram, grpo_advantages(rows["prompts"], rows["completions"])


def largest_error(batch: dict, parts: list[list[dict]], size: int) -> float:
    rows = merged(*parts)
    assert len(rows["used"]) == size and len(batch["logged"]) == size
    gram, advantages = independent(batch["backbone"], batch["head"], rows)
    expected = salt_advantages(gram, advantages).coefficients
    assert (expected - advantages).abs().max() > 0.1                 # SALT does something to this batch
    torch.testing.assert_close(torch.tensor(batch["logged"]).sort().values, rows["used"].sort().values, rtol=0, atol=0)
    return float((rows["used"] - expected).abs().max())


@pytest.fixture
def model(tiny_folder):
    """The tiny model in float64, so that what is left of an error is a mistake."""
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)


LORA = partial(peft.LoraConfig, r=4, lora_alpha=64, init_lora_weights=False)      # adapters that are not 0 at first


@pytest.mark.parametrize("changes", [
    {},
    {"beta": 0.04},
    {"gradient_accumulation_steps": 2},
    {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
    {"steps_per_generation": 3},
    {"steps_per_generation": 3, "num_iterations": 2, "max_steps": 12},
    {"generation_batch_size": 16, "beta": 0.04, "max_steps": 4},
], ids=str)
def test_the_loss_uses_salt_of_the_batch(model, tiny_folder, tmp_path, changes):
    """Three steps of the real trainer: the advantages in the loss are those of a Gram formed independently."""
    if "beta" in changes:                                  # TRL loads the reference from a folder, in the model's type
        model.config._name_or_path = str(tiny_folder)
    trainer = train(RecordedSalt, model, tmp_path, **changes)
    slices, updates = trainer.args.steps_per_generation, trainer.args.gradient_accumulation_steps
    assert len(trainer.batches) == trainer.args.max_steps * updates / slices / trainer.num_iterations
    for batch in trainer.batches:
        assert largest_error(batch, [batch["rows"][:slices]], 8 * slices) < 2e-6        # a is float32 in TRL


def test_float32(tiny_folder, tmp_path):
    """In the type people train in; K from the same states to rounding."""
    trainer = train(RecordedSalt, str(tiny_folder), tmp_path)
    assert len(trainer.batches) == 3
    for batch in trainer.batches:
        assert largest_error(batch, [batch["rows"]], 8) < 1e-5


def test_bfloat16_autocast(tiny_folder, tmp_path):
    """Eight significant bits: a' within a few percent of float64's, and not a."""
    trainer = train(RecordedSalt, str(tiny_folder), tmp_path, bf16=True)
    for batch in trainer.batches:
        assert largest_error(batch, [batch["rows"]], 8) < 0.1


@pytest.mark.parametrize("changes", [{}, {"beta": 0.04}, {"steps_per_generation": 2}, {"beta": 0.04,
                                     "steps_per_generation": 2}], ids=str)
def test_peft_states_are_those_of_the_adapted_policy(model, tmp_path, changes):
    """With beta > 0 TRL's reference is the same model without its adapter; its scoring pass must not be taken."""
    trainer = train(RecordedSalt, peft.get_peft_model(model, LORA(target_modules=["q_proj", "down_proj"])), tmp_path,
                    max_steps=2, **changes)
    for batch in trainer.batches:
        slices = trainer.args.steps_per_generation
        rows = merged(batch["rows"][:slices])
        assert largest_error(batch, [batch["rows"][:slices]], 8 * slices) < 2e-6        # a is float32 in TRL
        with torch.no_grad():
            for module in batch["backbone"].modules():
                if hasattr(module, "lora_B"):
                    module.lora_B["default"].weight.zero_()
        gram, advantages = independent(batch["backbone"], batch["head"], rows)
        assert (salt_advantages(gram, advantages).coefficients - rows["used"]).abs().max() > 1e-2


def identity(gram, advantages):
    return Reweighted(advantages, advantages, torch.zeros_like(advantages), 0.0, 0, 0.0, 0.0, torch.zeros(0, 0), True)


@pytest.mark.parametrize("changes", [{}, {"beta": 0.04, "steps_per_generation": 2}], ids=str)
def test_identity_coefficients_give_stock_trl(tiny_folder, tmp_path, changes):
    stock = train(RecordedStock, str(tiny_folder), tmp_path / "stock", **changes)
    hooked = train(RecordedSalt, str(tiny_folder), tmp_path / "salt", options={"reweighting": identity}, **changes)
    losses = [[line["loss"] for line in trainer.state.log_history if "loss" in line] for trainer in (stock, hooked)]
    assert losses[0] == losses[1] and len(losses[0]) == 3 and len(set(losses[0])) > 1
    gradients = [[line["grad_norm"] for line in trainer.state.log_history if "loss" in line]
                 for trainer in (stock, hooked)]
    assert gradients[0] == gradients[1]
    for ours, theirs in zip(hooked.model.parameters(), stock.model.parameters()):
        assert torch.equal(ours, theirs)


def test_salt_changes_the_run(tiny_folder, tmp_path):
    """The other side of the test above: without the identity the weights differ, and the figures are logged."""
    stock = train(GRPOTrainer, str(tiny_folder), tmp_path / "stock")
    hooked = train(SaltGRPOTrainer, str(tiny_folder), tmp_path / "salt")
    assert not torch.equal(hooked.model.lm_head.weight, stock.model.lm_head.weight)
    line = next(line for line in hooked.state.log_history if "salt/rank" in line)
    assert 1 <= line["salt/rank"] <= 8 and 0 <= line["salt/alpha"] <= 1
    assert line["salt/alpha"] == pytest.approx(max(0, 1 - line["salt/n_eff"]))
    assert 1 <= line["salt/participation_ratio"] <= 8


def test_evaluation_is_left_alone(tiny_folder, tmp_path):
    """With a learning rate of 0 both trainers hold the same weights; their evaluations must be equal to the bit."""
    found = {}
    for kind in (GRPOTrainer, SaltGRPOTrainer):
        trainer = train(kind, str(tiny_folder), tmp_path / kind.__name__, learning_rate=0.0, max_steps=1)
        torch.manual_seed(0)
        metrics = trainer.evaluate()
        found[kind] = ({name: value for name, value in metrics.items() if "runtime" not in name
                        and "per_second" not in name}, list(trainer._logs["advantages"]))
    assert found[GRPOTrainer] == found[SaltGRPOTrainer]
    assert "eval_reward" in found[SaltGRPOTrainer][0] and not any("salt" in name for name in found[SaltGRPOTrainer][0])


def test_variants_and_scopes(model, tmp_path):
    """Only-main within groups: a Gram and a formula per prompt."""
    def within_groups(gram, advantages):
        return reweight(gram, advantages, scope_blocks("group", len(advantages), 4), "only-main")

    trainer = train(RecordedSalt, model, tmp_path, options={"reweighting": within_groups, "length_norm": "sum"},
                    max_steps=1)
    rows = merged(trainer.batches[0]["rows"])
    gram, advantages = independent(trainer.batches[0]["backbone"], trainer.batches[0]["head"], rows)
    lengths = torch.tensor([len(ids) for ids in rows["completions"]]).double()
    gram = gram * lengths * lengths.unsqueeze(1)
    for prompt in set(map(tuple, rows["prompts"])):
        group = torch.tensor([i for i, other in enumerate(rows["prompts"]) if tuple(other) == prompt])
        expected = salt_advantages(gram[group][:, group], advantages[group], "only-main").coefficients
        assert (rows["used"][group] - expected).abs().max() < 1e-5


def test_tokens_of_tools_do_not_count(model, tmp_path):
    """Every second token is somebody else's: masked in the loss, and so out of the feature."""
    seen = {}

    class Masked(SaltGRPOTrainer):
        def _gram(self, output, states):
            output = output | {"tool_mask": torch.arange(states.shape[1]).remainder(2).expand(states.shape[:2])}
            seen.update(output=output, gram=super()._gram(output, states), states=states)
            return seen["gram"]

    train(Masked, model, tmp_path, max_steps=1, learning_rate=0.0)
    keep = (seen["output"]["completion_mask"] * seen["output"]["tool_mask"]).bool()
    expected = lm_head_gram_naive(seen["states"][keep], seen["output"]["completion_ids"][keep], keep.sum(1),
                                  model.lm_head.weight, temperature=0.8)
    torch.testing.assert_close(seen["gram"], expected, rtol=1e-8, atol=1e-12)


def test_masked_truncated_completions_have_feature_zero(tiny_folder, tmp_path):
    trainer = train(RecordedSalt, str(tiny_folder), tmp_path, max_completion_length=3, mask_truncated_completions=True)
    rows = merged(*(batch["rows"] for batch in trainer.batches))
    assert any(not ids for ids in rows["completions"]) and rows["used"].isfinite().all()


# Two processes

@pytest.mark.slow
def test_two_processes_make_one_gram(model, tmp_path):
    """Groups of 8 lie across two ranks of 4 × 2 slices; one Gram of all 16. A broken order is refused on both."""
    changes = {"per_device_train_batch_size": 4, "num_generations": 8, "steps_per_generation": 2,
               "gradient_accumulation_steps": 2, "ddp_backend": "gloo"}
    torch.save({"model": model, "changes": changes}, tmp_path / "case.pt")
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--rdzv-backend", "c10d",
               "--rdzv-endpoint", "localhost:0", "--nproc-per-node", "2", str(ROOT / "tests" / "trl_worker.py"),
               str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | {
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert run.returncode == 0, run.stderr[-3000:]
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    assert len(ranks[0]["batches"]) == 3
    for first, second in zip(ranks[0]["batches"], ranks[1]["batches"]):
        assert torch.equal(first["head"], second["head"]) and first["logged"] == second["logged"]
        assert largest_error(first, [first["rows"], second["rows"]], 16) < 1e-5
    for rank in ranks:
        assert "in rank order, are not groups of num_generations = 8" in rank["refused"]


# Refusals

def random_model(kind, settings):
    torch.manual_seed(0)
    return kind(settings(vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
                         pad_token_id=0, bos_token_id=1, eos_token_id=1, tie_word_embeddings=False))


def test_a_plain_head_passes(tiny_folder):
    check_head(AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.bfloat16))


def test_a_soft_capped_head_is_refused_by_name():
    model = random_model(Gemma2ForCausalLM, Gemma2Config)
    with pytest.raises(UserError, match=r"soft-capped at 30\.0"):
        check_head(model)
    model.config.final_logit_softcapping = None
    check_head(model)


def test_a_scaled_head_is_refused():
    with pytest.raises(UserError, match=r"CohereForCausalLM does more to its logits than W h \+ b"):
        check_head(random_model(CohereForCausalLM, CohereConfig))


def test_an_adapted_head_is_refused_by_name(tiny_folder, tmp_path):
    """As a copy that PEFT trains, refused by the hook; with a LoRA adapter on it, by TRL itself."""
    for settings, kind, message in (({"modules_to_save": ["lm_head"]}, UserError, r"adapted \(ModulesToSaveWrapper\)"),
                                    ({"target_modules": ["q_proj", "lm_head"]}, ValueError, "adapter to `lm_head`")):
        model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
        with pytest.raises(kind, match=message):
            train(SaltGRPOTrainer, model, tmp_path, options={"peft_config": LORA(**settings)})


def test_a_head_that_is_not_here_is_refused(tiny_folder):
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    model.lm_head.weight = torch.nn.Parameter(torch.empty(0))        # what DeepSpeed ZeRO-3 leaves between its passes
    with pytest.raises(UserError, match="ZeRO-3 or FSDP1"):
        whole_head(model)


def test_broken_groups_are_refused(tiny_folder, tmp_path):
    with pytest.raises(UserError, match="not groups of num_generations = 4 with one prompt each"):
        train(InterleavedSalt, str(tiny_folder), tmp_path)
    check_groups(["a", "a", "b", "b", "a", "a"], 2)
    check_groups([[{"role": "user", "content": "a"}]] * 2, 2)
    for prompts in (["a", "b", "a", "b"], ["a", "a", "b"], ["a", "b", "b", "a"]):
        with pytest.raises(UserError, match="not groups of num_generations = 2"):
            check_groups(prompts, 2)


@pytest.mark.parametrize("found", ["1.15.4", "1.17.0"])
def test_another_trl_is_refused_by_name(found, tmp_path):
    """The version is read from the package's metadata before TRL is imported."""
    folder = tmp_path / f"trl-{found}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: trl\nVersion: {found}\n")
    run = subprocess.run([sys.executable, "-c", "import salt.trl_hook"], capture_output=True, text=True, cwd=ROOT,
                         env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert run.returncode == 1
    assert f"made for trl 1.16.x, found {found}: pip install 'trl==1.16.0'" in run.stderr.splitlines()[-1]


def test_images_are_refused(model, tmp_path):
    class WithImages(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            return super()._generate_and_score_completions(inputs) | {"num_images": [1] * len(inputs)}

    class Hooked(SaltGRPOTrainer, WithImages):
        pass

    with pytest.raises(UserError, match="text only"):
        train(Hooked, model, tmp_path)


# The example

@pytest.mark.slow
def test_the_example_runs(tiny_folder, tmp_path):
    run = subprocess.run([sys.executable, "toy/trl_example.py", "--steps", "3", "--model", str(tiny_folder)], cwd=ROOT,
                         capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr[-3000:]
    lines = run.stdout.splitlines()
    for name in ("stock TRL", "TRL with SALT"):
        assert any(line.startswith(name) for line in lines), run.stdout
