"""A torch model as the labs see it. Imported by the host's loader only: this is where torch comes in."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from engine.core.config import EngineConfig
from engine.core.outputs import TextCodec
from engine.core.runner import Runner
from engine.model.loader import load_model
from engine.model.memory import CudaProbe, fit_pool
from engine.model.runner import ModelRunner, available_bytes
from engine.serve.detokenizer import Codec
from engine.serve.gpu_figures import GpuName
from engine.serve.protocol import HostOptions, LoadModel


class TorchModel:
    """Weights, tokenizer and codec; makes runners that share them.

    Args:
        command: what to load, where, and in which dtype.
        options: the host's; threads, what computes attention, graphs.
        progress: told what is being done.

    Raises:
        ModelError: (a ``ValueError``) it can't be loaded; the message says what to do.
    """

    def __init__(self, command: LoadModel, options: HostOptions, progress: Callable[[str, float | None], None]) -> None:
        torch.set_num_threads(options.threads or default_threads())
        self._loaded = load_model(command.model, command.device, command.dtype, progress, options.attention_backend)
        self._enforce_eager = options.enforce_eager
        self.codec: TextCodec = Codec(self._loaded.tokenizer)
        self.eos_token_ids = self._loaded.eos_token_ids
        self.info = self._loaded.info
        self.context_limit = self._loaded.context_limit
        self.gpu = gpu_name(self._loaded.transformer.device)

    def encode(self, text: str, *, chat: bool) -> list[int]:
        """Token ids of a text: as the user's turn of a chat, or plain with the model's usual special tokens."""
        tokenizer = self._loaded.tokenizer
        if chat and tokenizer.has_chat_template:
            return tokenizer.encode_chat([{"role": "user", "content": text}])
        return tokenizer.encode(text)

    def fit(self, config: EngineConfig) -> EngineConfig:
        """The settings with the pool that ``gpu_memory_utilization`` asks for, by measuring; unchanged without it."""
        return fit_pool(self._loaded.transformer, config, CudaProbe(self._loaded.transformer, self.runner))

    def runner(self, config: EngineConfig) -> Runner:
        """A runner with a KV pool of its own."""
        return ModelRunner(
            self._loaded.transformer,
            config,
            self.codec,
            attention_backend=self._loaded.attention_backend,
            enforce_eager=self._enforce_eager,
        )

    def pool_bytes(self, config: EngineConfig) -> int:
        """Bytes of the pool of such a runner, the null block included."""
        return (config.num_kv_blocks + 1) * config.block_size * self.info.kv_bytes_per_token if config.use_kv_cache else 0

    def release(self, runner: Runner) -> None:
        """Free a runner's pool."""
        assert isinstance(runner, ModelRunner)
        runner.close()

    def free_bytes(self) -> int:
        """Bytes that are free now where pools live; half a terabyte where the system doesn't say."""
        free = available_bytes(self._loaded.transformer.device)
        return free if free is not None else 2**39


def gpu_name(device: torch.device) -> GpuName | None:
    """The names of a CUDA device that don't depend on which devices this process sees; None for a CPU."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    place = [getattr(found, name, -1) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    bus = "{:08X}:{:02X}:{:02X}.0".format(*place) if min(place) >= 0 else ""  # older builds of torch don't tell
    return GpuName(str(getattr(found, "uuid", "")), bus)


def default_threads() -> int:
    """All cores but one, which serves and draws the pages; what ``OMP_NUM_THREADS`` says if it is set.

    On two cores that is one thread. Two are faster while nothing else runs (SmolLM2, one sequence: by half), but a page that
    draws beside them is something else that runs, and threads that wait for a third party lose more than they gain.
    """
    cores = torch.get_num_threads()
    return cores if "OMP_NUM_THREADS" in os.environ else max(1, cores - 1)
