"""What a GPU check found: one record a measure, a description of the machine, JSON for programs and a page for people."""

from __future__ import annotations

import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import msgspec

from engine.doctor import cpu_name

Unit = Literal["tokens/s", "FLOP/s", "B/s", "share", "times", "kernels"]
PACKAGES = ("torch", "triton", "transformers", "numpy", "msgspec")
QUERY = {
    "name": "name",
    "driver": "driver_version",
    "memory_mib": "memory.total",
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "most_sm_mhz": "clocks.max.sm",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
}
"""What nvidia-smi is asked for, by our names."""


class NotHere(Exception):
    """A measure that this machine, or this version of the engine, has no means for. The message says what is missing."""


class Goal(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a measure is to reach, at least (or at most, where ``lower`` is better).

    ``of`` is "value", or the name of a ceiling that the value is to reach that share of.
    """

    bound: float
    of: str = "value"
    stretch: float | None = None
    lower: bool = False


class Reading(msgspec.Struct):
    """What a measure measured. All numbers in the measure's unit."""

    repeats: list[float]
    """One value a repeat; the median counts."""
    ceilings: dict[str, float] = {}
    """What the value could be at best, by what would bind then; only names with a number."""
    notes: list[str] = []
    """Sentences for people."""
    details: dict[str, Any] = {}
    """Numbers for programs, and for whoever looks for what is slow."""

    @property
    def value(self) -> float:
        """The median."""
        return statistics.median(self.repeats)

    @property
    def spread(self) -> float:
        """(largest − smallest) / median."""
        return (max(self.repeats) - min(self.repeats)) / self.value if self.value else 0.0

    @property
    def binding(self) -> str:
        """The name of the lowest ceiling; '' without one."""
        return min(self.ceilings, key=self.ceilings.__getitem__, default="")


class Result(msgspec.Struct, kw_only=True, tag="result"):
    """How one measure went."""

    name: str
    title: str
    unit: Unit
    status: Literal["measured", "failed", "skipped"]
    goal: Goal | None = None
    reading: Reading | None = None
    reason: str = ""
    """Why it was skipped or failed, in a sentence."""
    traceback: str = ""
    seconds: float = 0.0
    gpu: dict[str, float] = {}
    """Clocks, power and temperature right after it."""

    @property
    def reached(self) -> float | None:
        """What the goal speaks of: the value, or its share of the goal's ceiling; None without one."""
        if self.reading is None or self.goal is None:
            return None
        if self.goal.of == "value":
            return self.reading.value
        ceiling = self.reading.ceilings.get(self.goal.of)
        return self.reading.value / ceiling if ceiling else None

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None where there is none, or nothing to judge it by."""
        if self.goal is None or self.reached is None:
            return None
        return self.reached <= self.goal.bound if self.goal.lower else self.reached >= self.goal.bound


class Suite(msgspec.Struct):
    """How tests/cuda went."""

    status: Literal["passed", "failed", "skipped"]
    summary: str = ""
    failures: list[str] = []
    """Names of failed tests, each with the first line of its message."""
    output: str = ""
    """End of pytest's output where something failed."""
    seconds: float = 0.0


class Document(msgspec.Struct, kw_only=True):
    """Everything one run found."""

    machine: dict[str, Any]
    tests: Suite
    results: list[Result]
    quick: bool = False
    """Tiny shapes: shows that everything runs, says nothing about speed."""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether a test or a measure failed; a goal that was missed is no failure."""
        return self.tests.status == "failed" or any(result.status == "failed" for result in self.results)


# ---------------------------------------------------------------------- the machine


def ask_gpu(fields: Mapping[str, str] = QUERY) -> dict[str, Any]:
    """Figures of the first GPU from nvidia-smi, numbers as numbers; empty where there is none or it does not answer."""
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_gpu(done.stdout, fields)


def parse_gpu(text: str, fields: Mapping[str, str] = QUERY) -> dict[str, Any]:
    """One line of comma-separated values; what the GPU doesn't support ("[N/A]") is left out."""
    values = [value.strip() for value in text.strip().split("\n")[0].split(",")]
    if len(values) != len(fields):
        return {}
    said = {name: value for name, value in zip(fields, values, strict=True) if not value.startswith("[")}
    return {name: value if name in ("name", "driver") else float(value) for name, value in said.items()}


def gpu_state() -> dict[str, float]:
    """Clocks in MHz, power in watts and temperature in °C now."""
    names = ("sm_mhz", "memory_mhz", "power_w", "temperature_c")
    return ask_gpu({name: QUERY[name] for name in names})


def describe_machine(device: str) -> dict[str, Any]:
    """What the numbers depend on: GPU, driver, libraries, processor, date, and the revision of this repository."""
    import torch

    machine: dict[str, Any] = {
        "device": device,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "cpu_cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "cuda": torch.version.cuda or "none",
        "revision": _revision(),
    }
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        machine |= {
            "gpu": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "cudnn": torch.backends.cudnn.version(),
            "nvidia_smi": ask_gpu(),
        }
    return machine


def slug(machine: Mapping[str, Any]) -> str:
    """A file name for results of this kind of machine: "NVIDIA H200" → "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", str(machine.get("gpu") or machine["device"]).lower()).strip("-")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _revision() -> str:
    """Short commit id, with a "+" where files differ from it; '' outside a git checkout."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


# ---------------------------------------------------------------------- the page


def show(value: float, unit: Unit) -> str:
    """A number with its unit, in three or four digits."""
    if unit == "share":
        return f"{100 * value:.1f} %"
    if unit == "times":
        return f"{value:.2f}×"
    if unit == "kernels":
        return f"{value:,.0f} kernels"
    if unit == "tokens/s":
        return f"{value:,.0f} tokens/s" if value >= 100 else f"{value:.1f} tokens/s"
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {prefix}{unit}" if value < 100 * scale else f"{value / scale:.0f} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def show_goal(result: Result) -> str:
    """The goal in short, such as "≥ 75.0 % of bandwidth (stretch 85.0 %)"; empty without one."""
    goal = result.goal
    if goal is None:
        return ""
    unit: Unit = result.unit if goal.of == "value" else "share"
    text = f"{'≤' if goal.lower else '≥'} {show(goal.bound, unit)}"
    if goal.of != "value":
        text += f" of {goal.of}"
    return text + (f" (stretch {show(goal.stretch, unit)})" if goal.stretch is not None else "")


def verdict(result: Result) -> str:
    """Whether the goal is met, in a word or two."""
    if result.status != "measured":
        return result.status
    if result.goal is None:
        return ""
    if result.met is None:
        return "no ceiling measured"
    stretch = result.goal.stretch
    if result.met and stretch is not None and result.reached is not None:
        beyond = result.reached <= stretch if result.goal.lower else result.reached >= stretch
        return "met, stretch too" if beyond else "met"
    return "met" if result.met else "not met"


def table_row(result: Result) -> str:
    """A line of the table."""
    reading = result.reading
    if reading is None:
        return f"| {result.title} | {result.status} | | | {show_goal(result)} | |"
    value = show(reading.value, result.unit)
    if len(reading.repeats) > 1:
        value += f" (spread {100 * reading.spread:.1f} %)"
    bound = reading.binding
    ceiling = f"{show(reading.ceilings[bound], result.unit)} ({bound})" if bound else ""
    share = f"{100 * reading.value / reading.ceilings[bound]:.0f} %" if bound else ""
    return f"| {result.title} | {value} | {ceiling} | {share} | {show_goal(result)} | {verdict(result)} |"


def page(document: Document) -> str:
    """The results as Markdown."""
    machine = document.machine
    name = str(machine.get("gpu") or machine["device"])
    lines = [f"# GPU check: {name}", ""]
    if document.quick:
        lines += ["Tiny shapes and short runs: this shows that everything runs, and says nothing about speed.", ""]
    lines += [
        *_machine_lines(machine),
        *_backend_lines(document.results),
        "",
        f"Tests (tests/cuda): {document.tests.status}. {document.tests.summary}".rstrip(),
    ]
    lines += [f"- {failure}" for failure in document.tests.failures]
    lines += [
        "",
        "| measure | value | ceiling (what binds) | share | goal | met |",
        "| --- | ---: | ---: | ---: | --- | --- |",
    ]
    lines += [table_row(result) for result in document.results]
    lines += ["", "Values are medians of repeats after a warm-up; spread is (largest − smallest) / median.", ""]
    for result in document.results:
        lines += _section(result)
    if document.tests.output:
        lines += ["## Output of the tests", "", *_block(document.tests.output)]
    return "\n".join(lines).rstrip() + "\n"


def _machine_lines(machine: Mapping[str, Any]) -> list[str]:
    smi = machine.get("nvidia_smi") or {}
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    lines = [f"{machine['date']}; revision {machine['revision'] or 'unknown'}", ""]
    if "gpu" in machine:
        facts = [
            f"{machine['gpu']}, compute capability {machine['compute_capability']}",
            f"{machine['multiprocessors']} multiprocessors, {machine['memory_bytes'] / 2**30:.0f} GiB",
            f"driver {smi.get('driver', 'unknown')}",
        ]
        if "most_sm_mhz" in smi and "power_limit_w" in smi:
            facts.append(f"up to {smi['most_sm_mhz']:.0f} MHz and {smi['power_limit_w']:.0f} W")
        lines.append(f"- {'; '.join(facts)}")
    lines.append(f"- {machine['cpu']}, {machine['cpu_cores']} cores; {machine['system']}")
    lines.append(f"- Python {machine['python']}, {versions}, CUDA {machine['cuda']}")
    return lines


def _backend_lines(results: Sequence[Result]) -> list[str]:
    """What computed, and why nothing faster, with the measures it did it for."""
    users: dict[str, list[str]] = {}
    for result in results:
        if result.reading and "backend" in result.reading.details:
            users.setdefault(result.reading.details["backend"], []).append(result.name)
    return [f"- Computed with {backend}: {', '.join(names)}" for backend, names in users.items()]


def _section(result: Result) -> list[str]:
    """What the table has no room for: notes, what the ceilings are, why a measure failed."""
    notes = list(result.reading.notes) if result.reading else []
    if result.reading and len(result.reading.ceilings) > 1:
        others = [f"{name} {show(value, result.unit)}" for name, value in result.reading.ceilings.items()]
        notes.append(f"Ceilings: {', '.join(others)}.")
    if result.gpu:
        names = {
            "sm_mhz": "{:.0f} MHz",
            "memory_mhz": "memory {:.0f} MHz",
            "power_w": "{:.0f} W",
            "temperature_c": "{:.0f} °C",
        }
        said = [text.format(result.gpu[name]) for name, text in names.items() if name in result.gpu]
        notes.append(f"The GPU right after it: {', '.join(said)}.")
    if result.reason:
        notes.append(f"{result.status.capitalize()}: {result.reason}")
    if not notes:
        return []
    lines = [f"## {result.title}", "", *(f"- {note}" for note in notes), ""]
    return lines + (_block(result.traceback) if result.traceback else [])


def _block(text: str) -> list[str]:
    return ["```text", *text.strip().replace("```", "'''").split("\n"), "```", ""]


def write(document: Document, folder: Path, name: str) -> list[Path]:
    """Store the results as ``name``.json and ``name``.md in ``folder``; returns both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, text = folder / f"{name}.json", folder / f"{name}.md"
    data.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    text.write_text(page(document), encoding="utf-8")
    return [data, text]


def one_line(result: Result) -> str:
    """A line for the terminal while the check runs."""
    if result.reading is None:
        return f"  {result.title}: {result.status}: {result.reason}"
    bound = result.reading.binding
    share = f", {100 * result.reading.value / result.reading.ceilings[bound]:.0f} % of {bound}" if bound else ""
    goal = f"; {show_goal(result)}: {verdict(result)}" if result.goal else ""
    return f"  {result.title}: {show(result.reading.value, result.unit)}{share}{goal} [{result.seconds:.0f} s]"


def tell(message: str) -> None:
    """Say something now, also where the output is a file."""
    print(message, flush=True, file=sys.stdout)
