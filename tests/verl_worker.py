"""verl on a CPU, for tests/test_verl_hook.py. Asserts nothing.

    torchrun ... verl_worker.py FOLDER      a rank of the FSDP2 engine: FOLDER/case.pt and models there to rank<r>.pt
    verl_worker.py FOLDER advantages        the trainer's step between scoring and update, through Ray and
                                            TransferQueue: FOLDER/rows.pt to coefficients.pt

verl has no CPU platform, but an interface for new ones.
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
from salt import distributed
from salt.errors import UserError
from salt.verl_hook import SaltEngine, SaltTrainer
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig


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


def advantages(folder: Path) -> None:
    """verl's `_compute_advantage` with SALT's after it, on a trainer that has a configuration and nothing else."""
    import ray
    import transfer_queue
    from omegaconf import OmegaConf
    case = torch.load(folder / "rows.pt")
    ray.init(num_cpus=32, include_dashboard=False, log_to_driver=False)        # the queue's actors ask for so many
    transfer_queue.init()
    fields = tu.get_tensordict({
        "response_mask": nested(case["masks"]), "salt_gram": case["gram"], "uid": [key[:2] for key in case["keys"]],
        "rm_scores": nested([[0.0] * (len(m) - 1) + [reward] for m, reward in zip(case["masks"], case["rewards"])]),
        "old_log_probs": nested([[-0.5] * len(mask) for mask in case["masks"]])})
    batch = transfer_queue.kv_batch_put(keys=case["keys"], partition_id="train", fields=fields,
                                        tags=[{} for _ in case["keys"]])
    trainer, metrics = SaltTrainer.__new__(SaltTrainer), {}
    trainer.config = OmegaConf.create(case["config"])
    batch = trainer._compute_advantage(batch, metrics)
    found = transfer_queue.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["advantages", "returns"])
    torch.save({"metrics": metrics} | {name: list(found[name].unbind()) for name in ("advantages", "returns")},
               folder / "coefficients.pt")
    transfer_queue.close()
    ray.shutdown()


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
    distributed.stop()


if __name__ == "__main__":
    (advantages if sys.argv[2:] else main)(Path(sys.argv[1]))
