"""A lab's settings as a ``vllm serve`` command: only flags that vLLM has, and a comment line for what it has no flag for."""

from __future__ import annotations

import shlex

from engine.core.config import EngineConfig


def vllm_command(config: EngineConfig, model: str) -> str:
    """The matching command, one flag a line. Settings without a counterpart are said in comment lines above it.

    Flags as in the argument list of vLLM 0.32 (``vllm/engine/arg_utils.py``).
    """
    flags = [
        f"--max-model-len {config.max_model_len}",
        f"--max-num-batched-tokens {config.token_budget}",
        f"--max-num-seqs {config.max_num_seqs}",
        f"--block-size {config.block_size}",
        f"--num-gpu-blocks-override {config.num_kv_blocks}"
        if config.gpu_memory_utilization is None
        else f"--gpu-memory-utilization {config.gpu_memory_utilization:g}",
        f"--{'' if config.chunked_prefill else 'no-'}enable-chunked-prefill",
        f"--{'' if config.prefix_caching else 'no-'}enable-prefix-caching",
        f"--scheduling-policy {config.scheduling_policy}",
        f"--{'' if config.async_scheduling else 'no-'}async-scheduling",
    ]
    if config.long_prefill_token_threshold:
        flags.append(f"--long-prefill-token-threshold {config.long_prefill_token_threshold}")
    if config.seed is not None:
        flags.append(f"--seed {config.seed}")
    command = " \\\n  ".join([f"vllm serve {shlex.quote(model)}", *flags])
    return "".join(f"# {line}\n" for line in without_counterpart(config)) + command


def without_counterpart(config: EngineConfig) -> list[str]:
    """What these settings do that vLLM has no flag for, a sentence each."""
    found = []
    if config.batching == "static":
        found.append("batching='static' is a teaching baseline: vLLM always batches continuously.")
    if config.kv_layout == "contiguous":
        found.append(f"kv_layout='contiguous' (reserve='{config.reserve}') is a teaching baseline: vLLM's KV is paged.")
    if not config.use_kv_cache:
        found.append("use_kv_cache=False is a teaching baseline: vLLM always keeps K and V.")
    if config.block_size % 16:
        found.append(f"block_size={config.block_size} may be refused: vLLM's attention kernels take multiples of 16.")
    return found
