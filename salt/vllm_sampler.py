"""Prompts → responses with vLLM: an engine in the training process, one per rank, fed with weights after every update.

Glossary
    paper             name         shape     equation
    q                 prompts      m lists   1     token ids
    o_i               responses    m lists   1     token ids, the EOS included when it was sampled
    log π(o_t)        logprobs     m lists   1     of logits / τ, the very distribution that was sampled from
    τ                 temperature  ()        –     one value for sampler, loss and proxy

The only file that imports vLLM. It works the same on vLLM's CPU build, which is how it is tested.

Departures from the paper
    1. The engine computes with kernels of its own, so its log-probabilities differ from the trainer's by rounding.
       Old log-probabilities are the trainer's; the difference is logged (`sampler_gap`) and can be corrected for
       (`loss.sampling_correction`).
"""
import contextlib
import math
import os
import random
import warnings
from collections.abc import Iterable, Iterator

import numpy
import torch
from torch import Tensor

from salt.data import stable_seed
from salt.errors import UserError
from salt.rollout import DIVERGED, Rollouts, end_tokens

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",         # the engine in this process: weights are handed over, not sent
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",                 # GiB, on a CPU
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",         # on a CPU: binding would tie the trainer to the engine's cores
}


def torch_generators_left_alone():
    """Of the CPU and of this rank's GPU: asking for more would open a context on every GPU of the machine."""
    return torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else [])


@contextlib.contextmanager
def process_left_alone() -> Iterator[None]:
    """Starting an engine seeds every generator of the process; the CPU build also takes torch.set_num_threads away."""
    states = random.getstate(), numpy.random.get_state()
    threads, setter = torch.get_num_threads(), torch.set_num_threads
    with torch_generators_left_alone(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            yield
        finally:
            random.setstate(states[0])
            numpy.random.set_state(states[1])
            torch.set_num_threads = setter
            torch.set_num_threads(threads)


def repack_head(worker) -> None:
    """On a CPU the LM head multiplies with a packed copy, which vLLM 0.32 forgets to renew when the head is tied."""
    head = worker.get_model().lm_head
    head.quant_method.process_weights_after_loading(head)


def generation_config(source: str):
    """What the model's folder says of generation; only its end tokens are used."""
    from transformers import AutoConfig, GenerationConfig
    try:
        return GenerationConfig.from_pretrained(source)
    except OSError:
        return GenerationConfig.from_model_config(AutoConfig.from_pretrained(source))


class VLLMSampler:
    """Samples with vLLM, from weights that `sync` copies into its engine.

    Every response has a random generator of its own, seeded by the call's seed and the response's place in the call,
    so what is drawn does not depend on earlier calls.
    """

    def __init__(self, source: str, tokenizer, *, context: int, dtype: torch.dtype = torch.float32,
                 memory_share: float = 0.4, seed: int = 0):
        """source: folder or hub id. context: tokens of prompt and response at most. memory_share: of the GPU's memory,
        for the engine's weights and cache together."""
        self.tokenizer, self.context, self.asleep = tokenizer, context, False
        self.gpu = torch.cuda.is_available()
        self.eos = end_tokens(generation_config(source), tokenizer)
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from vllm import LLM
        try:
            with process_left_alone():
                self.engine = LLM(
                    source, skip_tokenizer_init=True, max_model_len=context, dtype=str(dtype).removeprefix("torch."),
                    gpu_memory_utilization=memory_share, seed=seed, tensor_parallel_size=1,
                    distributed_executor_backend="external_launcher" if ranks > 1 else "uni",
                    generation_config="vllm", logprobs_mode="processed_logprobs", enable_sleep_mode=self.gpu,
                    enforce_eager=not self.gpu, use_tqdm_on_load=False, disable_log_stats=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"vLLM cannot start with {source}: {str(error).strip().splitlines()[0]} (its share of the "
                            f"memory is {memory_share}, its context {context} tokens)") from error

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Push trained weights into the engine, one at a time, under their Hugging Face names; wakes it up.

        Every rank pushes into its own engine; gathering a sharded tensor is the iterator's business.
        """
        if self.asleep:
            self.engine.wake_up(tags=["weights"])
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        if not self.gpu:
            self.engine.collective_rpc(repack_head)
        if self.asleep:
            self.engine.wake_up(tags=["kv_cache"])
        self.asleep = False

    def sleep(self) -> None:
        """Give the GPU's memory back, weights included, until the next `sync`. A CPU build cannot."""
        if self.gpu and not self.asleep:
            self.engine.sleep(level=2)
            self.asleep = True

    def close(self) -> None:
        """End the engine. It leaves every process group on its way, so this comes last."""
        self.engine.llm_engine.engine_core.shutdown()

    def generate(self, prompts: list[list[int]], samples: int, *, temperature: float, max_tokens: int,
                 seed: int) -> Rollouts:
        """`samples` responses to each prompt, in the order of the prompts. temperature 0: greedy, without logprobs."""
        from vllm import SamplingParams
        if self.asleep:
            raise RuntimeError("the engine sleeps and has no weights: call sync first")
        rows = [prompt for prompt in prompts for _ in range(samples)]
        longest = max(map(len, rows), default=0)
        if longest + max_tokens > self.context:
            raise UserError(f"a prompt of {longest} tokens and {max_tokens} for the response exceed the sampler's "
                            f"context of {self.context} tokens")
        # Every knob named. The end tokens go in as stop tokens, so that one list holds for all of them.
        params = [SamplingParams(temperature=temperature, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0,
                                 presence_penalty=0.0, frequency_penalty=0.0, min_tokens=0, max_tokens=max_tokens,
                                 ignore_eos=True, stop_token_ids=self.eos, seed=stable_seed(seed, row), logprobs=0,
                                 flat_logprobs=True, detokenize=False) for row in range(len(rows))]
        # Kept keys and values would be those of older weights, and would tie the draw to earlier calls by rounding.
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not clear its prefix cache: requests are still running")
        # On a CPU it would compile, with a C++ compiler, the rank of the sampled token, which nobody asked for.
        with torch_generators_left_alone(), torch.compiler.set_stance("default" if self.gpu else "force_eager"):
            outputs = self.engine.generate([{"prompt_token_ids": row} for row in rows], params, use_tqdm=False)
        responses = [list(output.outputs[0].token_ids) for output in outputs]
        logprobs = [list(output.outputs[0].logprobs.logprobs) for output in outputs]
        if not all(math.isfinite(value) for row in logprobs for value in row):
            raise UserError(DIVERGED)
        return Rollouts(rows, responses, [bool(r) and r[-1] in self.eos for r in responses],
                        self.tokenizer.batch_decode(responses, skip_special_tokens=True),
                        logprobs if temperature > 0 else None)
