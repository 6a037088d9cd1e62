"""Run by torchrun: a sharded model with adapters beside one in a single piece, trained alike."""
import sys
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from salt import distributed, models
from salt.lora import add_adapters, merged_weights, without_adapters
from salt.rollout import Rollouts

ROLLOUTS = Rollouts(prompts=[[4, 5, 6], [7, 8]], responses=[[9, 10, 11, 1], [12, 13]], finished=[True, False],
                    texts=["", ""])


def train(dtype: torch.dtype, tied: bool, device: torch.device, sharded: bool):
    """Three steps, with the reference's pass in between -> merged weights, log-probabilities, the reference's."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=1, pad_token_id=0, tie_word_embeddings=tied)).to(dtype).eval()
    add_adapters(model, 3, seed=1)
    if sharded:
        model = distributed.place(model, device, compute_dtype=dtype, checkpoint_layers=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        with without_adapters(model):
            reference = models.logprobs_only(model, ROLLOUTS, 0.6)
        optimizer.zero_grad()
        models.forward_logprobs(model, ROLLOUTS, 0.6)[0].sum().backward()
        optimizer.step()
    return dict(merged_weights(model)), models.logprobs_only(model, ROLLOUTS, 0.6), reference


def main() -> None:
    device = distributed.start()
    for dtype, tied, tolerance in ((torch.float64, True, 1e-12), (torch.float64, False, 1e-12),
                                   (torch.bfloat16, False, 2e-2)):
        (weights, scores, reference), (expected, *others) = (train(dtype, tied, device, s) for s in (True, False))
        assert list(weights) == list(expected)
        assert all(weights[name].dtype == dtype for name in weights)
        for name in weights:
            torch.testing.assert_close(weights[name], expected[name], atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(scores, others[0], atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(reference, others[1], atol=tolerance, rtol=tolerance)
        print(f"{str(dtype).removeprefix('torch.')} tied={tied}: equal", flush=True)
    distributed.stop()


if __name__ == "__main__":
    main()
