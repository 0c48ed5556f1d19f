"""Scenes: a known story as one small data file: settings, traffic, what to look at, and what it must show.

A file in ``assets/scenes`` (or in a teacher's own folder)::

    id: small-pool                     # also the file's name
    title: The pool is too small
    look: Watch … the first sentence. Then … the second.
    config: {num_kv_blocks: 24}        # engine settings by name; what is left out has its default
    workload:                          # see engine.workload.spec
      arrivals: {unit: steps}
      requests:
        - {at: 0, copies: 6, prompt_tokens: 48, output_tokens: 64}
    view: pool                         # which picture to open
    shows:                             # counted after the run; see engine.workload.claims
      - {measure: preemptions, at_least: 1}
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from engine.core.config import ConfigError, EngineConfig, build_config
from engine.workload.check import WorkloadError, assets, label, whole
from engine.workload.claims import Claim
from engine.workload.datafile import DataFileError, parse, read_file
from engine.workload.spec import WorkloadSpec, check_fits, listed

View = Literal["batch", "timelines", "pool", "latency", "requests"]
_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,47}")
MAX_SCENES = 200


class Scene(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One scene, validated when built.

    Raises:
        WorkloadError: naming the field, its value and the limit. ConfigError: the settings can't work.
    """

    id: str
    title: str
    look: str
    """What to look at, in two sentences."""
    config: dict[str, Any] = {}
    """Engine settings by name."""
    workload: WorkloadSpec
    view: View = "batch"
    """The picture that shows it best."""
    order: int = 100
    """Place in the list; equal ones by title."""
    shows: tuple[Claim, ...] = ()
    """What the run must show, by counting."""

    def __post_init__(self) -> None:
        check_id(self.id)
        label("title", self.title, 80)
        label("look", self.look, 400)
        whole("order", self.order, 0, 10_000)
        check_fits(self.workload, self.engine_config())
        names = {item.name for item in listed(self.workload)} if self.workload.kind != "generated" else None
        for claim in self.shows:
            if claim.request and names is not None and claim.request not in names:
                raise WorkloadError(
                    f"shows is about request={claim.request!r}, but the workload has no request of this id; "
                    f"it has {', '.join(sorted(names)[:8])}"
                )

    def engine_config(self) -> EngineConfig:
        """The settings as a configuration."""
        return engine_config(self.config)


class Catalogue(msgspec.Struct, frozen=True):
    """Scenes in their order, and what is wrong with the files that could not be read."""

    scenes: tuple[Scene, ...]
    problems: tuple[str, ...]

    def find(self, scene_id: str) -> Scene | None:
        """The scene of this id."""
        return next((scene for scene in self.scenes if scene.id == scene_id), None)


def check_id(value: object) -> None:
    """Demand an id as scenes and experiments have it: it is part of links and file names.

    Raises:
        WorkloadError: it is none.
    """
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise WorkloadError(
            f"id={value!r} must be small letters, digits and hyphens, at most 48, and not begin with a hyphen"
        )


def engine_config(settings: dict[str, Any]) -> EngineConfig:
    """Build a configuration from a data file's settings.

    Raises:
        ConfigError: an unknown setting, a wrong kind of value, or a combination that can't work.
    """
    try:
        return build_config(settings)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the engine settings can't be used: {error}") from None


def parse_scene(text: str, name: str) -> Scene:
    """A scene from the text of a file.

    Raises:
        DataFileError: naming file, line and field.
    """
    return parse(text, name, Scene)


def load_scenes(folders: Iterable[Path] = ()) -> Catalogue:
    """The project's scenes and those of more folders. A file that can't be used is left out, and told.

    Args:
        folders: a teacher's own; files ending in .yaml, .yml or .json.
    """
    scenes: dict[str, Scene] = {}
    problems: list[str] = []
    for folder in (assets("scenes"), *folders):
        if not folder.is_dir():
            problems.append(f"{folder.name}: there is no such folder of scenes")
            continue
        paths = sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml", ".json") and path.is_file())
        for path in paths:
            try:
                scene = read_file(path, Scene)
                if scene.id != path.stem:
                    raise DataFileError(path.name, f"id={scene.id!r} must be the file's name without ending, {path.stem!r}")
                if scene.id in scenes:
                    raise DataFileError(path.name, f"there is a scene {scene.id!r} already: choose another id and file name")
                if len(scenes) >= MAX_SCENES:
                    raise DataFileError(path.name, f"there are {MAX_SCENES} scenes already: remove some")
            except DataFileError as error:
                problems.append(str(error))
            else:
                scenes[scene.id] = scene
    ordered = sorted(scenes.values(), key=lambda scene: (scene.order, scene.title))
    return Catalogue(tuple(ordered), tuple(problems))
