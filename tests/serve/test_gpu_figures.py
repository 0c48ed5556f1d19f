"""A GPU's own figures: found by name, asked in the background, silent where they can't be had. With a fake NVML."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from engine.core.trace import DeviceSample
from engine.serve import host as host_module
from engine.serve.client import EngineClient
from engine.serve.gpu_figures import GIVE_UP_AFTER, GpuName, NoFigures, NvmlReader, Sampler, as_shown, watch
from engine.serve.host import Host
from engine.serve.protocol import GpuNews, HostOptions, HostState, LoadModel
from engine.serve.scripted import ScriptedModel

pytestmark = pytest.mark.timeout(30)
UUID = "12345678-90ab-cdef-1234-567890abcdef"
BUS = "00000000:3B:00.0"


class FakeNvml:
    """The part of pynvml that is used. Two GPUs; ``silent`` names questions that raise, as without rights."""

    class NVMLError(Exception):
        """As in pynvml."""

    def __init__(self, silent: tuple[str, ...] = (), mig: bool | None = False) -> None:
        self.silent, self.mig = silent, mig
        self.handles = {f"GPU-{UUID}": 1, BUS: 1, "GPU-other": 0}
        self.opened = 0

    def nvmlInit(self) -> None:
        self._answer("init")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        self._answer("driver")
        return b"580.65.06"

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        return self._find(name)

    def nvmlDeviceGetHandleByPciBusId(self, name: str) -> int:
        return self._find(name)

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        if self.mig is None:
            raise self.NVMLError("Not Supported")
        return [int(self.mig), 0]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self._answer("utilisation")
        return SimpleNamespace(gpu=[5, 43][handle], memory=7)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self._answer("memory")
        return SimpleNamespace(total=80 * 2**30, used=[2**30, 12 * 2**30][handle], free=0)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._answer("power")
        return [50_000, 312_500][handle]

    def _find(self, name: str) -> int:
        if name not in self.handles:
            raise self.NVMLError("Not Found")
        return self.handles[name]

    def _answer(self, question: str) -> None:
        if question in self.silent:
            raise self.NVMLError("Insufficient Permissions")


@pytest.mark.parametrize("gpu", [GpuName(UUID), GpuName(f"GPU-{UUID}"), GpuName("", BUS), GpuName("not known to NVML", BUS)])
def test_the_gpu_is_found_by_its_names(gpu: GpuName) -> None:
    sample = NvmlReader(gpu, FakeNvml()).read()
    assert (sample.utilisation, sample.memory_used, sample.power) == (0.43, 12 * 2**30, 312.5)
    assert sample.memory_total == 80 * 2**30
    assert sample.time > 1e9


@pytest.mark.parametrize(
    ("gpu", "nvml", "why"),
    [
        (GpuName("another"), FakeNvml(), "does not find the GPU.*GPU-another"),
        (GpuName(), FakeNvml(), "CUDA does not name it"),
        (GpuName(UUID), FakeNvml(mig=True), "MIG"),
        (GpuName(f"MIG-{UUID}"), FakeNvml(), "does not find"),
        (GpuName(UUID), FakeNvml(silent=("init",)), "can't start"),
    ],
)
def test_no_figures_where_they_would_be_wrong_or_are_missing(gpu: GpuName, nvml: FakeNvml, why: str) -> None:
    with pytest.raises(NoFigures, match=why):
        NvmlReader(gpu, nvml)
    assert nvml.opened == 0, "what was opened is closed"


def test_the_drivers_version_is_told_as_text() -> None:
    assert NvmlReader(GpuName(UUID), FakeNvml()).driver_version() == "580.65.06"
    assert NvmlReader(GpuName(UUID), FakeNvml(silent=("driver",))).driver_version() == ""


def test_each_figure_stands_alone() -> None:
    sample = NvmlReader(GpuName(UUID), FakeNvml(silent=("power",), mig=None)).read()
    assert (sample.power, sample.utilisation) == (None, 0.43)
    with pytest.raises(NoFigures, match="neither"):
        NvmlReader(GpuName(UUID), FakeNvml(silent=("power", "memory", "utilisation"))).read()


class FakeReader:
    """Answers from a list; an exception in it is raised. Ends the sampler when the list is used up."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers = iter(answers)
        self.asked = 0
        self.closed = threading.Event()
        self.sampler: Sampler | None = None

    def read(self) -> DeviceSample:
        self.asked += 1
        answer = next(self.answers, None)
        if answer is None:
            assert self.sampler is not None
            self.sampler.stop()
            raise NoFigures("the end")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.closed.set()


def sampled(answers: list[Any]) -> tuple[list[DeviceSample | None], FakeReader]:
    news: list[DeviceSample | None] = []
    reader = FakeReader(answers)
    reader.sampler = Sampler(reader, news.append, every=0.0)
    reader.sampler.start()
    assert reader.closed.wait(10)
    assert reader.sampler.latest() is None
    return news, reader


def test_only_what_a_header_would_show_anew_is_news() -> None:
    first = DeviceSample(time=1.0, utilisation=0.431, memory_used=2**30, memory_total=2**31, power=311.0)
    same = DeviceSample(time=2.0, utilisation=0.434, memory_used=2**30 + 7, memory_total=2**31, power=308.0)
    other = DeviceSample(time=3.0, utilisation=0.5, memory_used=2**30, memory_total=2**31, power=311.0)
    news, _ = sampled([first, same, other, other])
    assert news == [as_shown(first), as_shown(other)]
    assert as_shown(first) == DeviceSample(time=0.0, utilisation=0.43, memory_used=2**30, memory_total=2**31, power=310.0)


def test_a_gpu_that_stops_answering_is_left_alone() -> None:
    """One failure is forgotten at the next answer; after some in a row nobody asks any more, and the header empties."""
    answers: list[Any] = [DeviceSample(time=1.0, power=10.0), OSError(), DeviceSample(time=2.0, power=10.0)]
    news, reader = sampled([*answers, *[OSError()] * 50])
    assert news == [DeviceSample(time=0.0, power=10.0), None, DeviceSample(time=0.0, power=10.0), None]
    assert reader.asked == len(answers) + GIVE_UP_AFTER


def test_without_a_gpu_or_with_one_that_says_nothing_nothing_is_sampled() -> None:
    def broken(gpu: GpuName) -> Any:
        raise NoFigures("no library")

    assert watch(None) is None
    assert watch(GpuName(UUID), make=broken) is None


@pytest.fixture
def two_sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_the_host_passes_figures_on_until_its_model_changes(
    two_sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = DeviceSample(time=5.0, utilisation=0.5)
    asked: list[GpuName | None] = []

    class OneWord:
        stopped = False

        def latest(self) -> DeviceSample | None:
            return sample

        def stop(self) -> None:
            self.stopped = True

    word = OneWord()

    def fake_watch(gpu: GpuName | None, on_news: Any) -> Any:
        asked.append(gpu)
        on_news(as_shown(sample))
        return word

    monkeypatch.setattr(host_module, "watch", fake_watch)
    model = ScriptedModel("scripted", lambda stage, fraction: None)
    model.gpu = GpuName(UUID)
    host = Host(two_sockets[0], HostOptions())
    host._loaded(LoadModel(seq=1, model="scripted"), model)
    assert asked == [GpuName(UUID)]
    heard = [host._outbox.take() for _ in range(3)]
    assert GpuNews(as_shown(sample)) in heard
    labs = host._labs
    assert labs is not None
    labs.open("a", {}, paused=False, generation=1)
    assert labs.get("a")._new_sample() == sample
    host._stop_gpu()
    assert word.stopped and host._gpu is None


def test_the_client_knows_the_newest_figures_of_the_host_that_runs() -> None:
    client = EngineClient("scripted")
    client._hear(None, GpuNews(DeviceSample(time=0.0, power=10.0)))  # type: ignore[arg-type]
    assert client.gpu == DeviceSample(time=0.0, power=10.0)
    client._set_state(HostState(state="ready"))
    assert client.gpu is not None
    client._set_state(HostState(state="loading"))
    assert client.gpu is None
