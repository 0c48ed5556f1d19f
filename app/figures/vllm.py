"""A lab's settings as a ``vllm serve`` line: only the flags that vLLM has."""

from __future__ import annotations

import shlex

from engine.core.config import EngineConfig


def vllm_command(config: EngineConfig, model: str) -> str:
    """The matching command. Teaching baselines (static batching, contiguous memory, no KV cache) have no counterpart."""
    flags = [
        f"--max-model-len {config.max_model_len}",
        f"--max-num-batched-tokens {config.token_budget}",
        f"--max-num-seqs {config.max_num_seqs}",
        f"--block-size {config.block_size}",
        f"--num-gpu-blocks-override {config.num_kv_blocks}",
        f"--{'' if config.chunked_prefill else 'no-'}enable-chunked-prefill",
        f"--{'' if config.prefix_caching else 'no-'}enable-prefix-caching",
        f"--scheduling-policy {config.scheduling_policy}",
    ]
    if config.long_prefill_token_threshold:
        flags.append(f"--long-prefill-token-threshold {config.long_prefill_token_threshold}")
    return " ".join(["vllm serve", shlex.quote(model), *flags])
