"""Fixtures shared by the tests: where the real data lie, and two small models."""
import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# Their tests run where .ci/run has made an environment for them, and there in full; elsewhere they do not exist.
OPTIONAL = {"vllm": ["test_vllm.py", "test_vllm_training.py"], "trl": ["test_trl_hook.py"],
            "verl": ["test_verl_hook.py"]}
collect_ignore = [file for package, files in OPTIONAL.items() if not importlib.util.find_spec(package)
                  for file in files]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets. Not part of the project: a run without it fails here and says so."""
    folder = Path(os.environ.get("SALT_DATA_DIR", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.fail(f"no real data at {folder}: set SALT_DATA_DIR, or leave these tests out with -m 'not data'")
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A warm start cut short: the architecture and the format of the real one, and few right answers."""
    from toy.arithmetic import WarmStart, warm_start
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SALT_CACHE", str(tmp_path_factory.mktemp("cache")))
        return warm_start(WarmStart(steps=40))


@pytest.fixture(scope="session")
def r1_folder(shared_data, tmp_path_factory) -> Path:
    """Random weights, two layers, the real tokenizer and chat template of the R1 distillates."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    folder = tmp_path_factory.mktemp("r1")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(
            vocab_size=151936, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=False, bos_token_id=151643,
            eos_token_id=151643))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shared_data / "tokenizer" / name, folder)
    return folder
