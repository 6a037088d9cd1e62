"""One rank of tests/test_verl_hook.py: verl's FSDP2 engine on a CPU. `torchrun ... verl_worker.py FOLDER`.

verl has no CPU platform, but an interface for new ones. Reads FOLDER/case.pt and the models beside it, writes
FOLDER/rank<r>.pt. Asserts nothing.
"""
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import verl                                                                            # noqa: F401
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


class OnCpu(PlatformCUDA):
    device_name, vendor_name, device_module = "cpu", "salt", torch.cpu

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"

    def communication_backend_name(self):
        return "gloo"


set_platform(OnCpu())
from salt.errors import UserError                                                      # noqa: E402
from salt.verl_hook import SaltEngine                                                  # noqa: E402
from verl.trainer.config import CheckpointConfig                                       # noqa: E402
from verl.utils import tensordict_utils as tu                                          # noqa: E402
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig   # noqa: E402


def make_engine(folder: Path, padded: bool, **model) -> SaltEngine:
    engine = SaltEngine(
        HFModelConfig(path=str(folder), use_remove_padding=not padded, enable_gradient_checkpointing=False,
                      override_config={"attn_implementation": "sdpa"}, **model),
        FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, use_remove_padding=not padded,
                         mixed_precision={"param_dtype": "fp32"}),
        FSDPOptimizerConfig(lr=1e-3, total_training_steps=10), CheckpointConfig())
    engine.initialize()
    return engine


def nested(rows: list[list[int]]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def scored(engine: SaltEngine, case: dict, padded: bool, dynamic: bool, **facts) -> dict:
    """What verl's scoring pass returns for this rank's share of the sequences."""
    share = len(case["prompts"]) // dist.get_world_size()
    own = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    prompts, responses = case["prompts"][own], case["responses"][own]
    data = tu.get_tensordict(
        {"input_ids": nested([p + r for p, r in zip(prompts, responses)]),
         "position_ids": nested([list(range(len(p) + len(r))) for p, r in zip(prompts, responses)]),
         "response_mask": nested(case["masks"][own]), "loss_mask": nested(case["masks"][own])},
        {"temperature": case["temperature"], "calculate_entropy": True, "use_remove_padding": not padded,
         "use_dynamic_bsz": dynamic, "max_token_len_per_gpu": 40, "micro_batch_size_per_gpu": 2, **facts})
    with engine.eval_mode():
        output = engine.infer_batch(data)["model_output"]
    return {name: list(value.unbind()) for name, value in output.items()}


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    case, found = torch.load(folder / "case.pt"), {}
    for padded in (True, False):
        engine = make_engine(folder / "model", padded)
        for dynamic in (True, False):
            found[padded, dynamic] = scored(engine, case, padded, dynamic)
    found["reference"] = scored(engine, case, False, False, calculate_entropy=False)
    for name in case["refused"]:
        try:
            found[name] = scored(make_engine(folder / name, True), case, True, False) and "not refused"
        except UserError as error:
            found[name] = str(error)
    torch.save(found, folder / f"rank{os.environ['RANK']}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
