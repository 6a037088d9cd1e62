"""salt/verl_hook.py against verl's own code, on a CPU. In verl's own environment: requirements-verl.txt, .ci/run."""
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.workers.engine import EngineRegistry

from salt.advantages import group_advantages, salt_advantages
from salt.errors import UserError
from salt.proxy import lm_head_gram_naive
from salt.verl_hook import SaltEngine, check_run, response_parts, salt_coefficients

ROOT = Path(__file__).resolve().parents[1]
WORLD = 2


def nested(rows) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)


# The engine, on two ranks

@pytest.fixture(scope="module")
def case() -> dict:
    """Eight sequences of different lengths; in two of them not every token counts, in one none does."""
    random = torch.Generator().manual_seed(0)

    def draw(low, high):
        return [torch.randint(3, 20, (int(n),), generator=random).tolist()
                for n in torch.randint(low, high, (8,), generator=random)]

    responses = draw(2, 12)
    masks = [[1] * len(response) for response in responses]
    masks[2][0] = masks[5][1] = 0
    masks[6] = [0] * len(responses[6])
    return {"prompts": draw(1, 6), "responses": responses, "masks": masks, "temperature": 0.7,
            "refused": ["capped", "scaled"]}


def random_model(kind, settings, **changes):
    torch.manual_seed(0)
    return kind(settings(vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=1, head_dim=8,
                         num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
                         bos_token_id=1, eos_token_id=1, tie_word_embeddings=False, **changes))


@pytest.fixture(scope="module")
def ranks(case, tiny_folder, tmp_path_factory) -> list[dict]:
    from transformers import AutoTokenizer
    folder = tmp_path_factory.mktemp("verl")
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    models = {"model": AutoModelForCausalLM.from_pretrained(tiny_folder),
              "capped": random_model(Gemma2ForCausalLM, Gemma2Config),
              "scaled": random_model(CohereForCausalLM, CohereConfig, logit_scale=20.0)}
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    torch.save(case, folder / "case.pt")
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--rdzv-backend", "c10d",
               "--rdzv-endpoint", "localhost:0", "--nproc-per-node", str(WORLD), str(ROOT / "tests" / "verl_worker.py"),
               str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | {
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert run.returncode == 0, run.stderr[-3000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(WORLD)]


@torch.no_grad()
def states_of(model, prompt: list[int], response: list[int], mask: list[int]) -> torch.Tensor:
    found = model.model(input_ids=torch.tensor([prompt + response]), use_cache=False).last_hidden_state[0]
    return found[len(prompt) - 1:-1][torch.tensor(mask).bool()]


@pytest.mark.slow
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("dynamic", [True, False])
def test_the_engine_returns_the_rows_of_k(ranks, case, tiny_folder, padded, dynamic):
    """Against autograd on one sequence at a time, in float64; verl's engine runs in float32, sharded over two ranks."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64).eval()
    hidden = [states_of(model, *row) for row in zip(case["prompts"], case["responses"], case["masks"])]
    tokens = torch.tensor([token for response, mask in zip(case["responses"], case["masks"])
                           for token, counts in zip(response, mask) if counts])
    lengths = torch.tensor([sum(mask) for mask in case["masks"]])
    expected = lm_head_gram_naive(torch.cat(hidden), tokens, lengths, model.lm_head.weight, temperature=0.7)
    found = torch.stack([row for rank in ranks for row in rank[padded, dynamic]["salt_gram"]])
    assert found.dtype == torch.float64 and found.shape == (8, 8)
    assert (found - expected).norm() < 1e-5 * expected.norm()
    assert (found[6] == 0).all() and (found.diagonal()[[0, 1, 2, 3, 4, 5, 7]] > 0).all()


@pytest.mark.slow
def test_the_reference_pass_forms_no_gram(ranks):
    for rank in ranks:
        assert set(rank["reference"]) == {"log_probs"} and "salt_gram" in rank[False, False]


@pytest.mark.slow
def test_heads_that_are_not_plain_are_refused_by_name(ranks):
    for rank in ranks:
        assert "soft-capped at 30.0" in rank["capped"]
        assert "CohereForCausalLM does more to its logits than W h + b" in rank["scaled"]


def test_the_engine_is_found_by_its_vendor(monkeypatch):
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "salt")
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is SaltEngine
    assert EngineRegistry.get_engine_cls("value_model", "fsdp2") is not SaltEngine
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "nvidia")
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is not SaltEngine


# The trainer's side

def gram_of(m: int) -> torch.Tensor:
    features = torch.randn(m, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return features @ features.T / m


def verl_advantages(rewards: list[list[float]], masks: list[list[int]]) -> torch.Tensor:
    """What verl's own GRPO makes of them, as a nested tensor like its trainer stores it."""
    width, flat = max(map(len, masks)), [reward for group in rewards for reward in group]
    mask = torch.tensor([row + [0] * (width - len(row)) for row in masks])
    token_rewards = torch.zeros(mask.shape)
    token_rewards[:, 0] = torch.tensor(flat)
    index = np.array([str(prompt) for prompt, group in enumerate(rewards) for _ in group], dtype=object)
    advantages, _ = compute_grpo_outcome_advantage(token_rewards, mask, index)
    return nested([row[:len(m)] for row, m in zip(advantages, masks)])


def test_verls_advantages_become_coefficients():
    """verl's GRPO (ddof 1, eps 1e-6) is Eq. 2 as salt/advantages.py has it; a' stands on every counted token."""
    rewards, masks = [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]], [[1, 1], [1], [1, 0, 1], [0, 1], [1, 1, 1], [0, 0]]
    advantages = group_advantages(torch.tensor(rewards)).flatten()
    advantages[5] = 0                                      # its response has no token that counts
    expected = salt_advantages(gram_of(6), advantages, "interpolated")
    values, found = salt_coefficients(verl_advantages(rewards, masks), nested(masks), gram_of(6), "interpolated")
    assert found.rank == expected.rank and found.alpha == pytest.approx(expected.alpha)
    for row, mask, coefficient in zip(values.unbind(), masks, expected.coefficients):
        torch.testing.assert_close(row, coefficient * torch.tensor(mask), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_trainer_puts_coefficients_where_its_update_looks_for_them(tmp_path):
    """verl's own step, with Ray and TransferQueue: what the actor's update will read is a'; the returns stay verl's."""
    rewards, masks = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0], [[1] * length for length in (3, 2, 4, 1, 2, 3)]
    torch.save({"keys": [f"u{row // 3}_{row % 3}_0" for row in range(6)], "masks": masks, "rewards": rewards,
                "gram": gram_of(6), "config": {"algorithm": {
                    "adv_estimator": "grpo", "gamma": 1.0, "lam": 1.0, "use_kl_in_reward": False,
                    "norm_adv_by_std_in_grpo": True, "salt_variant": "interpolated"},
                    "actor_rollout_ref": {"rollout": {"n": 3}}}}, tmp_path / "rows.pt")
    run = subprocess.run([sys.executable, str(ROOT / "tests" / "verl_worker.py"), str(tmp_path), "advantages"],
                         capture_output=True, text=True, timeout=600, env=os.environ | {
                             "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "RAY_AUTH_MODE": "disabled"})
    assert run.returncode == 0, run.stderr[-3000:]
    found = torch.load(tmp_path / "coefficients.pt")
    advantages = group_advantages(torch.tensor(rewards).view(2, 3)).flatten()
    expected = salt_advantages(gram_of(6), advantages, "interpolated")
    for index, mask in enumerate(masks):
        torch.testing.assert_close(found["advantages"][index], expected.coefficients[index].expand(len(mask)))
        torch.testing.assert_close(found["returns"][index], advantages[index].expand(len(mask)))
    assert found["metrics"]["salt/rank"] == expected.rank
    assert found["metrics"]["salt/n_eff"] == pytest.approx(expected.n_eff)


def test_token_level_advantages_are_refused():
    with pytest.raises(UserError, match="differ between the tokens of a response"):
        salt_coefficients(nested([[0.5, 0.4], [0.1, 0.1]]), nested([[1, 1], [1, 1]]), gram_of(2))


@pytest.mark.parametrize("packed", [True, False])
def test_positions_of_a_micro_batch(packed):
    """States are numbered by their place: sequences of 3 and 5 tokens, responses of 2 and 3."""
    ids, masks = nested([[7, 8, 9], [1, 2, 3, 4, 5]]), nested([[1, 1], [1, 0, 1]])
    numbers = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 99]]) if packed else torch.tensor([[0, 1, 2, 99, 99],
                                                                                        [3, 4, 5, 6, 7]])
    (first, states_1, tokens_1), (second, states_2, tokens_2) = response_parts(
        numbers.unsqueeze(-1), ids, masks, torch.tensor([4, 1]))
    assert (first, second) == (4, 1)
    assert states_1.flatten().tolist() == [0, 1] and tokens_1.tolist() == [8, 9]
    assert states_2.flatten().tolist() == [4, 6] and tokens_2.tolist() == [3, 5]


GOOD = {"actor_rollout_ref": {"actor": {"strategy": "fsdp2"}}, "algorithm": {"adv_estimator": "grpo"}}


@pytest.mark.parametrize("change, environment, message", [
    ({"actor_rollout_ref": {"actor": {"strategy": "fsdp"}}}, {}, "needs fsdp2"),
    ({"actor_rollout_ref": {"actor": {"strategy": "megatron"}}}, {}, "megatron"),
    ({"algorithm": {"adv_estimator": "gae"}}, {}, "adv_estimator is gae"),
    ({"algorithm": {"rollout_correction": {"bypass_mode": True}}}, {}, "bypass_mode"),
    ({}, {"VERL_ENGINE_VENDOR": "nvidia"}, "VERL_ENGINE_VENDOR is not salt"),
])
def test_configurations_without_a_right_gram_are_refused(change, environment, message):
    check_run(OmegaConf.create(GOOD), {"VERL_ENGINE_VENDOR": "salt"})
    with pytest.raises(UserError, match=message):
        check_run(OmegaConf.merge(GOOD, change), {"VERL_ENGINE_VENDOR": "salt"} | environment)


def test_verl_finds_the_trainer_by_its_mode():
    """As a user starts it: verl itself imports the hook."""
    run = subprocess.run(
        [sys.executable, "-c", "import verl\nfrom verl.trainer.ppo.v1 import get_trainer_cls\n"
         "print(get_trainer_cls('salt_sync').__module__)"], capture_output=True, text=True, cwd=ROOT,
        env=os.environ | {"VERL_USE_EXTERNAL_MODULES": "salt.verl_hook"})
    assert run.stdout.strip() == "salt.verl_hook", run.stderr[-3000:]


def test_another_verl_is_refused_by_name(tmp_path):
    folder = tmp_path / "verl-0.7.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.7.0\n")
    run = subprocess.run([sys.executable, "-c", "import salt.verl_hook"], capture_output=True, text=True, cwd=ROOT,
                         env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert run.returncode == 1
    assert "made for verl 0.9.x, found 0.7.0: pip install 'verl==0.9.1'" in run.stderr.splitlines()[-1]
