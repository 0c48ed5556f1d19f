"""A lab as a link: what its address says of settings, traffic and scene, and how such an address is read.

::

    ?scene=small-pool                                  a scene, its settings and its traffic
    ?engine=num_kv_blocks:24,max_num_seqs:4            settings that differ from the lab's defaults (or the scene's)
    ?traffic={"arrivals":{"rate":2.0},"stop":{…}}      a workload as JSON, without what has its default
    &selected=w0-A&step=12&scale=root&view=projector   how the sender looked at it (read by the page itself)

The token of the sender's lab is not part of it. What can't be used is told, and left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import msgspec

from engine.core.config import ConfigError, EngineConfig, build_config
from engine.workload.datafile import plain
from engine.workload.scenes import Scene
from engine.workload.spec import WorkloadSpec, check_fits

MAX_PART = 16_000
"""Characters of one part of a link."""
_AT = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`")
FindScene = Callable[[str], Scene | None]


class WorkloadRefused(ValueError):
    """A workload that can't be used. ``field``: where in the workload, or ''."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class Setup:
    """What a link sets up, and what was wrong with it."""

    config: EngineConfig
    workload: WorkloadSpec | None = None
    scene: Scene | None = None
    problems: tuple[str, ...] = ()


def read_workload(data: Any) -> WorkloadSpec:
    """A workload from plain data.

    Raises:
        WorkloadRefused: saying what is wrong and where.
    """
    try:
        return msgspec.convert(data, WorkloadSpec, strict=True)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        text = str(error)
        where = _AT.search(text)
        raise WorkloadRefused(_AT.sub("", text), where.group(1) if where else "") from None


def parse(query: Mapping[str, str], defaults: EngineConfig, find_scene: FindScene) -> Setup:
    """What an address sets up, on top of ``defaults``. Never fails: problems are sentences."""
    problems: list[str] = []
    scene, config, workload = None, defaults, None
    name = query.get("scene", "")
    if name:
        scene = find_scene(name[:60])
        if scene is None:
            problems.append(f"The link names the scene {name[:60]!r}, which this lab does not have.")
        else:
            config, workload = scene.engine_config(), scene.workload
    try:
        config = _engine_part(query.get("engine", ""), config)
    except ValueError as error:
        problems.append(f"The link's engine settings can't be used: {error}. The defaults are used instead.")
    try:
        workload = _traffic_part(query.get("traffic", ""), config) or workload
    except ValueError as error:
        problems.append(f"The link's traffic can't be used: {error}.")
    return Setup(config, workload, scene, tuple(problems))


def _engine_part(text: str, base: EngineConfig) -> EngineConfig:
    if not text:
        return base
    if len(text) > MAX_PART:
        raise ValueError(f"they have {len(text):,} characters, at most {MAX_PART:,} are read")
    fields: dict[str, Any] = msgspec.structs.asdict(base)
    for item in text.split(","):
        name, colon, value = item.partition(":")
        if not colon:
            raise ValueError(f"{item[:60]!r} is not name:value")
        fields[name.strip()[:60]] = _value(value.strip()[:60])
    try:
        return build_config(fields)
    except TypeError as error:
        raise ConfigError(str(error)) from None


def _traffic_part(text: str, config: EngineConfig) -> WorkloadSpec | None:
    if not text:
        return None
    if len(text) > MAX_PART:
        raise ValueError(f"it has {len(text):,} characters, at most {MAX_PART:,} are read")
    try:
        data = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise ValueError("it is not valid JSON") from None
    workload = read_workload(data)
    check_fits(workload, config)
    return workload


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"-?\d{1,12}", text) else text


def settings_part(config: EngineConfig, base: EngineConfig) -> str:
    """The settings that differ from ``base``, as the link has them."""
    shown = []
    for name in config.__struct_fields__:
        if name in ("max_num_queued_requests", "gpu_memory_utilization"):  # a quota, and a share of this machine's memory
            continue
        value = getattr(config, name)
        if value != getattr(base, name) and value is not None:
            shown.append(f"{name}:{str(value).lower() if isinstance(value, bool) else value}")
    return ",".join(shown)


def query_of(config: EngineConfig, defaults: EngineConfig, workload: WorkloadSpec | None, scene: Scene | None) -> str:
    """The part of an address that sets up the same lab: what ``parse`` reads back to equal settings and traffic."""
    parts: dict[str, str] = {}
    if scene is not None:
        parts["scene"] = scene.id
    settings = settings_part(config, scene.engine_config() if scene is not None else defaults)
    if settings:
        parts["engine"] = settings
    if workload is not None and (scene is None or workload != scene.workload):
        parts["traffic"] = msgspec.json.encode(plain(workload)).decode()
    return urlencode(parts)
