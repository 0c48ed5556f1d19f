"""Loading a model: find it, choose device and dtype, bring the weights there, say what was loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from engine.core.model_info import ModelInfo
from engine.model.backend import describe_backend
from engine.model.checkpoint import Checkpoint, Progress, eos_ids, find_checkpoint, silent
from engine.model.errors import ModelError
from engine.model.spec import ModelSpec, read_spec
from engine.model.tokenizer import Tokenizer, load_tokenizer
from engine.model.transformer import Transformer
from engine.model.weights import load_weights

DTYPES = {
    "float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float16": torch.float16, "fp16": torch.float16, "half": torch.float16,
}  # fmt: skip


@dataclass(slots=True)
class LoadedModel:
    """A model ready to run. Several engines can share it."""

    transformer: Transformer
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    info: ModelInfo
    attention_backend: str = "auto"
    """What was asked to compute attention; see ``engine.model.backend``."""

    @property
    def context_limit(self) -> int:
        """Longest sequence it computes exactly, tokens."""
        return self.transformer.spec.context_limit


def load_model(
    name: str | os.PathLike[str],
    device: str = "auto",
    dtype: str = "auto",
    progress: Progress | None = None,
    attention_backend: str = "auto",
) -> LoadedModel:
    """Load a model.

    Args:
        name: "smollm2", "tiny", a path, or a name on the hub; see ``find_checkpoint``.
        device: "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:N".
        dtype: "auto" (float32 on a CPU, the checkpoint's own on CUDA), "float32", "bfloat16" or "float16".
        progress: told what is being done.
        attention_backend: "auto", "sdpa" or "triton". On a GPU the check of the kernels runs here, once.

    Raises:
        ModelError: (a ``ValueError``) it can't be found, read, or is not supported; the message says what to do.
    """
    tell = progress or silent
    where = choose_device(device)
    tell("looking for the model", None)
    checkpoint = find_checkpoint(name, tell)
    spec = read_spec(checkpoint.config, f"model={checkpoint.name!r}")
    kind = choose_dtype(dtype, where, checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    tell("loading the weights", None)
    try:
        weights = load_weights(checkpoint, spec, where, kind)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ModelError(
            f"model={checkpoint.name!r} doesn't fit into the memory of {where} ({error}); choose a smaller one"
        ) from None
    transformer = Transformer(spec, weights)
    stops = eos_ids(checkpoint, tokenizer.raw.token_to_id)
    if where.type == "cuda" and attention_backend != "sdpa":
        tell("checking the fast kernels on this GPU", None)
    attention = str(describe_backend(transformer, attention_backend=attention_backend))
    info = _facts(checkpoint, spec, transformer, tokenizer, attention)
    return LoadedModel(transformer, tokenizer, stops, info, attention_backend)


def choose_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        ModelError: it is not there, or not supported.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdigit()):
        raise ModelError(f"device={name!r} is not supported; choose 'auto', 'cpu' or 'cuda'")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(number or 0)
    if index >= count:
        raise ModelError(
            f"device={name!r}: this PyTorch ({torch.__version__}) sees {count} CUDA devices; use device='cpu', "
            "or install a CUDA build of PyTorch and the driver"
        )
    return torch.device("cuda", index)


def choose_dtype(name: str, device: torch.device, checkpoint: Checkpoint) -> torch.dtype:
    """The dtype of that name; "auto" is float32 on a CPU and the checkpoint's own elsewhere.

    Raises:
        ModelError: the name is not known.
    """
    if name != "auto":
        if name.removeprefix("torch.") not in DTYPES:
            raise ModelError(f"dtype={name!r} is not supported; choose 'auto', 'float32', 'bfloat16' or 'float16'")
        return DTYPES[name.removeprefix("torch.")]
    if device.type == "cpu":
        return torch.float32
    stored = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    if stored in DTYPES:
        return DTYPES[stored]
    return next((t.dtype for t in checkpoint.tensors.values() if t.dtype in DTYPES.values()), torch.float32)


def omp_wait() -> str:
    """How OpenMP's threads wait for work, in words, from the environment they were started with."""
    spin = os.environ.get("GOMP_SPINCOUNT")
    if spin:
        return f"spin {int(spin):,}" if spin.isdigit() else f"spin {spin}"
    policy = os.environ.get("OMP_WAIT_POLICY")
    return policy.lower() if policy else "libgomp's default"


def _facts(checkpoint: Checkpoint, spec: ModelSpec, model: Transformer, tokenizer: Tokenizer, attention: str) -> ModelInfo:
    device = str(model.device)
    if model.device.type == "cuda":
        device = f"{device} {torch.cuda.get_device_name(model.device)}"
    return ModelInfo(
        name=checkpoint.name,
        title=checkpoint.title,
        weights=checkpoint.weights,
        architecture=spec.architecture,
        device=device,
        dtype=str(model.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        omp_wait=omp_wait(),
        attention=attention,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        max_position=spec.max_position,
        num_parameters=model.weights.num_parameters,
        weight_bytes=model.weight_bytes,
        kv_bytes_per_token=model.kv_bytes_per_token,
        has_chat_template=tokenizer.has_chat_template,
        versions={
            name: found for name in ("torch", "tokenizers", "safetensors", "transformers") if (found := _version(name))
        },
    )


def _version(package: str) -> str:
    if package == "torch":
        return str(torch.__version__)
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
