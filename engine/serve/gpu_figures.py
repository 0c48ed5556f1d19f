"""What the GPU says of itself: utilisation, memory and power from NVML, at most once a second, on a thread of its own.

::

    NvmlReader ──▶ Sampler's thread ──▶ latest() ──▶ the next step's record (``StepTrace.device``)
                                  └──▶ on_news(…) ──▶ the page's header, when what it shows changes

Optional throughout: without the library, the driver or the permission, and on a GPU that is split into instances (MIG),
where NVML knows only the whole, there are no figures and nothing is said about it. The GPU is found by its UUID or its
place on the PCI bus: NVML counts all GPUs of the machine, CUDA only those that CUDA_VISIBLE_DEVICES leaves.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from engine.core.trace import DeviceSample

SAMPLE_EVERY = 1.0
"""Seconds between two samples: NVML's own figures are averages over about as long."""
MEMORY_SHOWN = 2**27
"""Bytes to which a header rounds memory: an eighth of a GiB."""
GIVE_UP_AFTER = 5
"""Failures in a row after which the GPU is not asked any more."""


@dataclass(frozen=True, slots=True)
class GpuName:
    """Which GPU: as CUDA names it. One of the two is enough."""

    uuid: str = ""
    """With or without the prefix 'GPU-'."""
    pci_bus_id: str = ""
    """'00000000:3B:00.0'."""


class GpuReader(Protocol):
    """Reads one GPU's figures."""

    def read(self) -> DeviceSample:
        """The figures now.

        Raises:
            Exception: they can't be had.
        """
        ...

    def close(self) -> None:
        """Give back what reading needs."""
        ...


class NoFigures(Exception):
    """The figures of a GPU can't be had; the message says why."""


class NvmlReader:
    """Reads one GPU through NVML.

    Args:
        gpu: which one.
        nvml: the module ``pynvml``; None imports it.

    Raises:
        NoFigures: the library or the driver is missing, the GPU isn't found, may not be asked, or is split (MIG).
    """

    def __init__(self, gpu: GpuName, nvml: Any = None) -> None:
        self._nvml = nvml or _import_nvml()
        try:
            self._nvml.nvmlInit()
        except Exception as error:
            raise NoFigures(f"NVML can't start: {error}") from None
        try:
            self._handle = self._find(gpu)
            self._refuse_split()
        except BaseException:
            self.close()
            raise

    def _find(self, gpu: GpuName) -> Any:
        nvml, reason = self._nvml, "CUDA does not name it"
        uuid = gpu.uuid if not gpu.uuid or gpu.uuid.startswith(("GPU-", "MIG-")) else f"GPU-{gpu.uuid}"
        for name, find in (
            (uuid, nvml.nvmlDeviceGetHandleByUUID),
            (gpu.pci_bus_id, nvml.nvmlDeviceGetHandleByPciBusId),
        ):
            if name:
                try:
                    return find(name)
                except Exception as error:
                    reason = f"{name}: {error}"
        raise NoFigures(f"NVML does not find the GPU ({reason})")

    def _refuse_split(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):  # GPUs that can't be split don't know the question
            if self._nvml.nvmlDeviceGetMigMode(self._handle)[0]:
                raise NoFigures("the GPU is split into instances (MIG), and NVML tells only of the whole")

    def read(self) -> DeviceSample:
        """The figures now; None for each that the GPU does not tell.

        Raises:
            NoFigures: it told none.
        """
        nvml, handle = self._nvml, self._handle
        use = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        milliwatts = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        if use is None and memory is None and milliwatts is None:
            raise NoFigures("the GPU tells neither utilisation nor memory nor power")
        return DeviceSample(
            time=time.time(),
            utilisation=None if use is None else use.gpu / 100,
            memory_used=None if memory is None else int(memory.used),
            memory_total=None if memory is None else int(memory.total),
            power=None if milliwatts is None else milliwatts / 1000,
        )

    def driver_version(self) -> str:
        """Version of the NVIDIA driver; '' where it isn't told."""
        try:
            found = self._nvml.nvmlSystemGetDriverVersion()
        except self._nvml.NVMLError:
            return ""
        return found.decode() if isinstance(found, bytes) else str(found)

    def _ask(self, question: Callable[[Any], Any], handle: Any) -> Any:
        try:
            return question(handle)
        except self._nvml.NVMLError:
            return None

    def close(self) -> None:
        """Shut NVML down."""
        with contextlib.suppress(Exception):
            self._nvml.nvmlShutdown()


def _import_nvml() -> Any:
    try:
        import pynvml
    except Exception as error:  # not installed, or something else of this name that breaks
        raise NoFigures(f"the package nvidia-ml-py is not installed ({error})") from None
    return pynvml


class Sampler:
    """Asks a GPU for its figures in the background.

    Args:
        reader: what to ask.
        on_news: called on the sampler's thread when the figures changed as far as people see them.
        every: seconds between two samples.
    """

    def __init__(
        self, reader: GpuReader, on_news: Callable[[DeviceSample | None], None] | None = None, every: float = SAMPLE_EVERY
    ) -> None:
        self._reader = reader
        self._on_news = on_news
        self._every = every
        self._latest: DeviceSample | None = None
        self._told: DeviceSample | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="gpu figures")

    def start(self) -> Sampler:
        """Begin to sample."""
        self._thread.start()
        return self

    def latest(self) -> DeviceSample | None:
        """The newest sample; None before the first, and once the GPU does not answer any more. Never waits."""
        return self._latest

    def stop(self) -> None:
        """End sampling; returns at once."""
        self._ended.set()

    def _run(self) -> None:
        failures = 0
        while failures < GIVE_UP_AFTER and not self._ended.is_set():
            try:
                self._latest = self._reader.read()
                failures = 0
            except Exception:
                self._latest = None
                failures += 1
            self._tell()
            self._ended.wait(self._every)
        self._latest = None
        self._reader.close()

    def _tell(self) -> None:
        shown = as_shown(self._latest)
        if self._on_news is not None and shown != as_shown(self._told) and not self._ended.is_set():
            self._told = self._latest
            self._on_news(shown)


def as_shown(sample: DeviceSample | None) -> DeviceSample | None:
    """A sample without its time, rounded to what a header shows, so that a quiet GPU is no news."""
    if sample is None:
        return None
    return DeviceSample(
        time=0.0,
        utilisation=None if sample.utilisation is None else round(sample.utilisation, 2),
        memory_used=None if sample.memory_used is None else round(sample.memory_used / MEMORY_SHOWN) * MEMORY_SHOWN,
        memory_total=sample.memory_total,
        power=None if sample.power is None else round(sample.power, -1),
    )


def watch(
    gpu: GpuName | None,
    on_news: Callable[[DeviceSample | None], None] | None = None,
    make: Callable[[GpuName], GpuReader] = NvmlReader,
) -> Sampler | None:
    """Begin to sample a GPU; None where there is none, or where its figures can't be had."""
    if gpu is None:
        return None
    try:
        return Sampler(make(gpu), on_news).start()
    except Exception:
        return None
