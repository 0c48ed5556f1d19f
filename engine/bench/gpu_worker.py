"""Measures run in a process of their own, so that a crash, a hang or a GPU gone wrong costs one measure and not the check.

::

    gpu_check ── job.json ─▶ gpu_worker:  measure, measure, measure …
        ▲                        │ a line each, when it starts and when it is done
        └────── results.jsonl ◀──┘

A measure that takes far too long is stopped with its worker; a worker that ends too early takes one measure with it. Either
way that measure counts as failed, and a fresh worker gets the rest. An illegal access leaves a process's GPU context
useless: then the worker reports the measure and ends itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec
import torch

from engine.bench.gpu_bench import Bench
from engine.bench.gpu_measures import MEASURES, Measure
from engine.bench.gpu_report import NotHere, Result, gpu_state
from engine.bench.gpu_shapes import QUICK, Sizes

ROOT = Path(__file__).resolve().parents[2]
HANGS = 40.0
"""Seconds beyond its own budget after which a measure is stopped: compiling for the first time may be slow."""
GRACE = 20.0
"""Seconds after the end of the time for everything at which whatever still runs is stopped."""
START_UP = 120.0
"""Seconds that a worker may take until it starts its first measure."""
LEAST = 0.4
"""Share of a measure's budget that must be left for it to be started."""
GPU_LOST = 3
"""Exit code of a worker whose GPU context is of no use any more."""
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
"""Environment of everything the check starts: no downloads, no chatter."""


class Job(msgspec.Struct, kw_only=True):
    """What a worker is to do."""

    measures: list[str]
    device: str
    quick: bool = False
    seconds: float = 1e9
    """For all measures together."""
    known: list[Result] = []
    """Results of earlier workers: later measures stand beside them."""


class Started(msgspec.Struct, tag="started"):
    """A measure has begun."""

    name: str


Message = Started | Result
BY_NAME = {measure.name: measure for measure in MEASURES}


# ---------------------------------------------------------------------- in the worker


def work(job: Job, emit: Callable[[Message], object]) -> bool:
    """Run the job's measures in this process; False when the GPU became useless and the rest needs another process."""
    bench = Bench(torch.device(job.device), QUICK if job.quick else Sizes(), tiny=job.quick, known=job.known)
    end = time.perf_counter() + job.seconds
    for name in job.measures:
        measure = BY_NAME[name]
        if job.quick:  # nobody set goals for tiny shapes
            measure = replace(measure, goal=None)
        left = end - time.perf_counter()
        if left < LEAST * measure.seconds:
            emit(late(measure, left))
            continue
        emit(Started(name))
        bench.deadline = time.perf_counter() + min(left, measure.seconds)
        bench.known[name] = result = take(bench, measure)
        emit(result)
        if not usable(bench):
            return False
    return True


def take(bench: Bench, measure: Measure) -> Result:
    """Run one measure; whatever it raises becomes part of its result."""
    result = blank(measure, "measured")
    start = time.perf_counter()
    bench.backend = ""
    try:
        result.reading = measure.run(bench)
        if bench.backend:
            result.reading.details["backend"] = bench.backend
    except NotHere as reason:
        result.status, result.reason = "skipped", str(reason)
    except Exception as error:  # one broken measure must not hide the others' results
        result.status, result.reason = "failed", f"{type(error).__name__}: {error}".strip()[:500]
        result.traceback = traceback.format_exc(limit=-12)
    result.seconds = time.perf_counter() - start
    if bench.device.type == "cuda":
        result.gpu = gpu_state()
    return result


def usable(bench: Bench) -> bool:
    """Whether the device still answers. Frees what a measure left behind."""
    try:
        bench.synchronise()
        bench.sweep()
    except RuntimeError:
        return False
    return True


def blank(measure: Measure, status: Literal["measured", "failed", "skipped"], reason: str = "", text: str = "") -> Result:
    """A result without a reading; ``text`` is what is known about a failure."""
    return Result(
        name=measure.name,
        title=measure.title,
        unit=measure.unit,
        goal=measure.goal,
        status=status,
        reason=reason,
        traceback=text,
    )


def late(measure: Measure, left: float) -> Result:
    """A result for a measure that is not started because only ``left`` seconds are left for everything."""
    return blank(measure, "skipped", f"it may take {measure.seconds:.0f} s, and {max(0.0, left):.0f} s were left")


def main(arguments: Sequence[str]) -> int:
    """``gpu_worker JOB RESULTS``: do the job in the first file, append what happens to the second."""
    job_file, results_file = map(Path, arguments)
    job = msgspec.json.decode(job_file.read_bytes(), type=Job)
    job.seconds -= max(0.0, time.time() - job_file.stat().st_mtime)  # importing torch took a part of them
    with results_file.open("ab", buffering=0) as out:
        return 0 if work(job, lambda message: out.write(msgspec.json.encode(message) + b"\n")) else GPU_LOST


# ---------------------------------------------------------------------- outside of it


class _Worker:
    """A worker process and what it has said so far."""

    def __init__(self, job: Job, folder: Path, command: Sequence[str]) -> None:
        job_file, results_file, log_file = (folder / f"gpu_check.{kind}" for kind in ("job", "results", "log"))
        job_file.write_bytes(msgspec.json.encode(job))
        results_file.write_bytes(b"")
        self._log = log_file.open("w+b")
        self._results = results_file.open("rb")
        self._rest = b""
        self.since = time.perf_counter()
        self._end = self.since + job.seconds
        self.under_way = ""
        """The measure it is at; '' between two."""
        self.process = subprocess.Popen(
            [*command, str(job_file), str(results_file)],
            cwd=ROOT,
            env={**os.environ, **QUIET},
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def hear(self) -> list[Result]:
        """Results that came since the last call."""
        *lines, self._rest = (self._rest + self._results.read()).split(b"\n")
        results = []
        for line in lines:
            message = msgspec.json.decode(line, type=Message)
            self.since = time.perf_counter()
            self.under_way = message.name if isinstance(message, Started) else ""
            if isinstance(message, Result):
                results.append(message)
        return results

    def overdue(self) -> bool:
        """Whether what it is at takes too long, or the time for everything is over."""
        allowed = BY_NAME[self.under_way].seconds + HANGS if self.under_way else START_UP
        return time.perf_counter() > min(self.since + allowed, self._end + GRACE)

    def end(self) -> str:
        """Stop it if it still runs; returns the end of what it printed."""
        stop(self.process)
        self._log.seek(0)
        printed = self._log.read().decode(errors="replace")
        self._log.close()
        self._results.close()
        return printed[-4000:]


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started in a session of its own, and whatever it started.

    One that hangs inside the driver can't be ended; it is left behind then.
    """
    if process.poll() is None:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)


def supervise(job: Job, folder: Path, tell: Callable[[Result], object], command: Sequence[str] = ()) -> list[Result]:
    """Have workers do a job; returns one result a measure, in order, whatever happens to the workers.

    Args:
        job: what to measure.
        folder: for the files that workers and check exchange, and the workers' log.
        tell: hears of each result as it comes.
        command: starts a worker; two file names are appended.
    """
    command = command or [sys.executable, "-m", "engine.bench.gpu_worker"]
    folder.mkdir(parents=True, exist_ok=True)
    end = time.perf_counter() + job.seconds
    results: list[Result] = []
    while left := [name for name in job.measures if name not in {result.name for result in results}]:
        seconds = end - time.perf_counter()
        if seconds <= 0:  # a worker would only take its time to say so
            skipped = [late(BY_NAME[name], seconds) for name in left]
            for result in skipped:
                tell(result)
            return results + skipped
        rest = Job(
            measures=left,
            device=job.device,
            quick=job.quick,
            seconds=seconds,
            known=job.known + results,
        )
        for result in _watch(rest, folder, command):
            results.append(result)
            tell(result)
    return results


def _watch(job: Job, folder: Path, command: Sequence[str]) -> Iterator[Result]:
    """One worker's results, and failures for what it should have measured and could not."""
    worker = _Worker(job, folder, command)
    came = 0
    stopped = False
    try:
        while worker.process.poll() is None and not stopped:
            for result in worker.hear():
                came += 1
                yield result
            stopped = worker.overdue()
            time.sleep(0.02)
        for result in worker.hear():
            came += 1
            yield result
    finally:
        printed = worker.end()
    code = worker.process.returncode
    if stopped:
        reason = f"stopped after {time.perf_counter() - worker.since:.0f} s"
    else:
        reason = f"the process that measured ended with code {code}"
    if worker.under_way:
        yield blank(BY_NAME[worker.under_way], "failed", reason, printed)
    elif not came:
        # A worker that can't even start would fail the next time, too.
        for name in job.measures:
            yield blank(BY_NAME[name], "failed", reason, printed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
