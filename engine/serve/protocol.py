"""What the engine's process and its clients say to each other.

msgpack frames (msgspec, never pickle) over a private socket pair; a frame is a 4-byte little-endian length and one message.
A client numbers its commands; each gets exactly one ``Reply``. Everything else flows from host to client unasked::

        client                                host
          ── OpenLab(seq 1) ─────────────────▶
          ◀───────────────── Reply(1, LabInfo)
          ── Send(seq 2, lab, "Why …") ──────▶
          ◀──────────── Reply(2, request ids)
          ◀──── LabUpdate(steps, tokens, …) ──   after each step, merged when the client is slow
          ◀──── HostState(loading 40 %) ──────   when something about the model changes
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from engine.core.config import EngineConfig
from engine.core.model_info import ModelInfo
from engine.core.outputs import ClosedRequest, EngineStats, OpenedRequest, TokenEvent
from engine.core.trace import DeviceSample, StepTrace
from engine.workload.traffic import TrafficReport

MAX_FRAME = 64 * 1024 * 1024
"""Bytes; a longer frame is refused and ends the connection."""
TOKEN_VARIABLE = "INFERENCE_LAB_TOKEN"
"""Environment variable with the word by which a host shows who started it."""


class HostOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the host process, given to it when it starts."""

    threads: int | None = None
    """Threads of the forward pass. None: what the environment says, else torch's default."""
    attention_backend: Literal["auto", "sdpa", "triton"] = "auto"
    """What computes attention: the fastest that its check at start finds right, torch, or Triton."""
    enforce_eager: bool = False
    """No CUDA graphs."""
    max_labs: int = 32
    """Labs that can be open at once."""
    kv_quota_bytes: int | None = None
    """Most bytes of all KV pools together. None: of the memory that is free once the model is loaded 40 %, or
    90 % on a GPU."""
    backlog_units: int = 2_000_000
    """Numbers that the unsent news of one lab may hold (about 20 bytes each) before older steps are left out."""


class HostState(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The state of the host process and its model."""

    state: Literal["starting", "loading", "ready", "failed", "stopped"]
    """'failed': the model could not be loaded (the host lives and takes another LoadModel).
    'stopped': the process is gone."""
    stage: str = ""
    """What it is doing, for people: 'converting the embedded model (first use only)'."""
    progress: float | None = None
    """0 to 1, or None where it can't be told."""
    model: ModelInfo | None = None
    error: str = ""
    """What went wrong and what to do about it."""


class GpuNews(msgspec.Struct, frozen=True, tag=True):
    """What the GPU says of itself, rounded for a header; sent when it changed. None: nothing (any more)."""

    sample: DeviceSample | None


class BackendFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What computes a lab's steps, for people."""

    name: str
    """Of the attention backend."""
    fused: bool = False
    """Whether elementwise work runs in fused kernels."""
    graphs: bool = False
    """Whether decode steps replay CUDA graphs."""
    reason: str = ""
    """Why something fast is not in use; '' when everything is."""
    graph_bytes: int = 0
    """Device memory of the graphs."""
    checks: tuple[str, ...] = ()
    """What the check at start found, a line each."""

    def words(self) -> str:
        """On one line: 'Triton paged attention, fused kernels, CUDA graphs (0.41 GiB)'."""
        graphs = f"CUDA graphs ({self.graph_bytes / 2**30:,.2f} GiB)"
        return ", ".join([self.name, *["fused kernels"] * self.fused, *[graphs] * self.graphs])


class LabInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One lab on the host."""

    lab: str
    config: EngineConfig
    mode: Literal["running", "paused"]
    rate: float | None
    """Slow motion: steps a second; None at full speed."""
    generation: int
    """Counts engine restarts of this lab: traces of different generations don't belong together."""
    kv_pool_bytes: int
    backend: BackendFacts | None = None
    """None where a script computes."""


class LabUpdate(msgspec.Struct, tag=True, kw_only=True):
    """What happened in a lab since the last update, oldest first. Lists grow when updates are merged."""

    lab: str
    generation: int
    info: LabInfo | None = None
    """Present when configuration, mode or rate changed."""
    opened: list[OpenedRequest] = []
    steps: list[StepTrace] = []
    tokens: list[TokenEvent] = []
    closed: list[ClosedRequest] = []
    stats: EngineStats | None = None
    now: float = 0.0
    """The lab's engine clock, seconds."""
    notice: str = ""
    """Something a person should read: a step failed, the lab was closed …"""
    traffic: TrafficReport | None = None
    """How the newest workload of the lab stands; None: there was none, or nothing changed."""


class Reply(msgspec.Struct, frozen=True, tag=True):
    """The answer to one command. ``error`` is for people; '' means it worked."""

    seq: int
    error: str = ""
    result: Any = None


class LoadModel(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Load (or change) the model; all labs are closed first. Reply: None once it is loaded."""

    seq: int
    model: str = "smollm2"
    device: str = "auto"
    dtype: str = "auto"


class OpenLab(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Create a lab, or find the one of this name. ``config``: engine settings by name. Reply: LabInfo as a dict."""

    seq: int
    lab: str
    config: dict[str, Any] = {}
    paused: bool = False
    generation: int = 1
    """The number of its first engine. A client that opens a lab again after a crash continues its count."""


class CloseLab(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Abort all requests of a lab and free its pool. Unknown labs are no error. Reply: None."""

    seq: int
    lab: str


class Reconfigure(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Restart a lab's engine with changed settings; weights stay loaded, its requests are aborted. Reply: LabInfo as a dict.

    When the new settings are refused the old engine goes on, untouched.
    """

    seq: int
    lab: str
    config: dict[str, Any]


class Send(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Add requests. Reply: list of request ids. Either all ``copies`` enter or, on an error, none."""

    seq: int
    lab: str
    prompt: str | list[int]
    chat: bool = True
    """Apply the model's chat template to a text."""
    params: dict[str, Any] = {}
    """SamplingParams by name."""
    copies: int = 1
    priority: int = 0
    cache_salt: str | None = None


class Abort(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Stop one request, or all of a lab when ``request_id`` is None. Reply: how many were stopped."""

    seq: int
    lab: str
    request_id: str | None = None


class Control(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Run, pause, or take ``steps`` single steps (which implies pause).

    ``rate``: steps a second while running, None: full speed.
    Reply: LabInfo as a dict, at once; the steps follow as updates. Stepping is refused when nothing waits or runs.
    """

    seq: int
    lab: str
    action: Literal["run", "pause", "step"]
    steps: int = 1
    rate: float | None = None


class StartTraffic(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Run a workload on a lab, in the place of one that may be running there. Reply: None.

    Latency counts from when a request was due. The report comes with the lab's updates.
    """

    seq: int
    lab: str
    spec: dict[str, Any]
    """A ``WorkloadSpec`` as plain data."""


class ChangeTraffic(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Change the rate of a lab's workload, or end it (``rate`` None): requests under way run on. Reply: None."""

    seq: int
    lab: str
    rate: float | None = None
    """Requests a second, or a step."""


class Lease(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Give a lab the host for itself (``on``) or give it back: no other lab steps; updates come twice a second only.

    An experiment measures under a lease. A second lab's lease is refused. It ends with its lab. Reply: names of the labs
    that had work to do when it began.
    """

    seq: int
    lab: str
    on: bool


class Shutdown(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """End the process after replying None."""

    seq: int


Command = (
    LoadModel | OpenLab | CloseLab | Reconfigure | Send | Abort | Control | StartTraffic | ChangeTraffic | Lease | Shutdown
)
Message = Reply | HostState | GpuNews | LabUpdate
