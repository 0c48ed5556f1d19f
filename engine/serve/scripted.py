"""A model without weights: the engine's real scheduling, with a script in place of the forward pass.

For tests of everything around the model, and for lessons that count steps and blocks. Its name may carry settings::

    scripted                                  answers at once
    scripted:seconds=0.02                     each step takes 20 ms
    scripted:seconds=0.02,load=1,kv_bytes=64  … loading takes a second, a token's K and V count as 64 bytes

A text is its UTF-8 bytes, one token each. The answer is the alphabet, over and over. A prompt that holds ``FAILS`` (given as
token ids: the byte never occurs in a text) makes its step fail, as a device out of memory would.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable

import psutil

from engine.core.config import EngineConfig, require_gpu
from engine.core.model_info import ModelInfo
from engine.core.outputs import IncrementalDecoder, TextCodec
from engine.core.request import Request
from engine.core.runner import Runner, ScriptedRunner, StepBatch, StepResult
from engine.serve.gpu_figures import GpuName

FAILS = 255
"""A prompt that holds this token makes its step fail."""
VOCABULARY = 256
_SETTINGS = ("seconds", "load", "kv_bytes")


def is_scripted(name: str) -> bool:
    """Whether a model name means the scripted model."""
    return name == "scripted" or name.startswith("scripted:")


def alphabet(request: Request) -> int:
    """The next token of the script: a to z, over and over."""
    return ord("a") + request.num_output_tokens % 26


class _Bytes:
    """Bytes to text; an incomplete character is held back."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def append(self, token_id: int) -> str:
        """One more byte."""
        return self._decoder.decode(bytes([token_id]))

    def finish(self) -> str:
        """What was held back."""
        return self._decoder.decode(b"", final=True)


class ByteCodec:
    """A tokenizer whose tokens are bytes."""

    def decoder(self, prompt_token_ids: list[int], skip_special_tokens: bool) -> IncrementalDecoder:
        """A decoder for the tokens that follow."""
        return _Bytes()

    def token_text(self, token_id: int) -> str:
        """One byte as text."""
        return bytes([token_id]).decode("utf-8", errors="replace")


class PacedRunner(ScriptedRunner):
    """The script, at a given pace.

    Args:
        seconds: how long a step takes, by sleeping.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(alphabet)
        self.seconds = seconds

    def execute(self, batch: StepBatch) -> StepResult:
        """Sleep, then ask the script; fail where a prompt says so."""
        start = time.perf_counter()
        if any(FAILS in work.token_ids for work in batch.work):
            raise MemoryError(f"the script says that token {FAILS} makes a step fail")
        if self.seconds:
            time.sleep(self.seconds)
        result = super().execute(batch)
        result.forward_time = time.perf_counter() - start
        return result


class ScriptedModel:
    """The scripted model as the labs see it.

    Raises:
        ValueError: the name carries settings that it doesn't know.
    """

    def __init__(self, name: str, progress: Callable[[str, float | None], None]) -> None:
        settings = _settings(name)
        self._seconds, self._kv_bytes = settings["seconds"], int(settings["kv_bytes"])
        self.codec: TextCodec = ByteCodec()
        self.eos_token_ids: frozenset[int] = frozenset()
        self.gpu: GpuName | None = None
        self.info = _info(name, self._kv_bytes)
        self.context_limit = self.info.max_position
        _pretend_to_load(settings["load"], progress)

    def encode(self, text: str, *, chat: bool) -> list[int]:
        """The text's bytes."""
        return list(text.encode())

    def fit(self, config: EngineConfig) -> EngineConfig:
        """The settings: the script runs without a GPU, so nothing is sized by one."""
        require_gpu(config, "a script")
        return config

    def runner(self, config: EngineConfig) -> Runner:
        """A runner at the model's pace."""
        return PacedRunner(self._seconds)

    def pool_bytes(self, config: EngineConfig) -> int:
        """What a pool would take."""
        return (config.num_kv_blocks + 1) * config.block_size * self._kv_bytes if config.use_kv_cache else 0

    def release(self, runner: Runner) -> None:
        """Nothing is held."""

    def free_bytes(self) -> int:
        """Free memory of the machine."""
        return int(psutil.virtual_memory().available)


def _settings(name: str) -> dict[str, float]:
    settings = dict.fromkeys(_SETTINGS, 0.0)
    for item in filter(None, name.partition(":")[2].split(",")):
        key, _, value = item.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if key not in settings or not 0 <= number < 1e9:
            raise ValueError(
                f"the scripted model can't read {item!r}; it knows {'=…, '.join(_SETTINGS)}=… with numbers from 0"
            )
        settings[key] = number
    return settings


def _pretend_to_load(seconds: float, progress: Callable[[str, float | None], None]) -> None:
    rounds = int(seconds * 20)
    for done in range(rounds):
        progress("waiting, as the script says", done / rounds)
        time.sleep(seconds / rounds)


def _info(name: str, kv_bytes: int) -> ModelInfo:
    return ModelInfo(
        name=name,
        title="Scripted model",
        weights="no weights (its text is a script)",
        architecture="script",
        device="cpu",
        dtype="none",
        threads=1,
        omp_wait="not used",
        attention="none",
        num_layers=0,
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        hidden_size=0,
        vocab_size=VOCABULARY,
        max_position=2**20,
        num_parameters=0,
        weight_bytes=0,
        kv_bytes_per_token=kv_bytes,
        has_chat_template=False,
        versions={},
    )
