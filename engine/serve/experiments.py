"""Runs an experiment on the engine's host, with the care of a benchmark.

::

    warm-up        A  B                 every variant once, left out of the result
    repetition 1   A  B
    repetition 2   B  A                 each order as often as the other, shuffled, so that what drifts or comes and
    …                                   goes meets both alike

It works through ``EngineClient``, from pages, lessons and the terminal alike: the host gives the experiment's own lab the
machine for itself (a lease; other labs wait and viewers hear of it twice a second only), and every run starts on a fresh
engine with an empty prefix cache. A cancel ends the requests, gives the lease back and closes the lab.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

import msgspec
import psutil

from engine import __version__
from engine.core.config import EngineConfig
from engine.core.outputs import ClosedRequest, OpenedRequest
from engine.observe.archive import model_facts
from engine.observe.log import MAX_FINISHED, MAX_STEPS, TraceLog
from engine.observe.metrics import Objectives, measure, outcome
from engine.serve.client import EngineClient, HostError, HostGone
from engine.workload.check import WorkloadError
from engine.workload.experiment import Experiment, Variant, turns
from engine.workload.results import ExperimentResult, RunRecords, RunValues, counts, thinned
from engine.workload.spec import WorkloadSpec, listed

POLL = 0.2
"""Seconds between two looks at whether the experiment is to end."""
GRACE = 15.0
"""Seconds that a page may be gone (a reload takes one or two) before its experiment is cancelled."""
NOTICEABLE = 10.0
"""Percent of the processor that other programs may use before the result mentions them."""

State = Literal["waiting", "running", "done", "cancelled", "failed"]


class Cancelled(Exception):
    """The experiment was told to end."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far an experiment is."""

    state: State = "waiting"
    text: str = ""
    """What it is doing, or why it ended."""
    done: int = 0
    total: int = 0
    """Runs, those of the warm-up included."""
    seconds_left: float | None = None
    """An estimate from the runs so far; None before the first."""
    others: str = ""

    @property
    def share(self) -> float:
        """0 to 1."""
        return self.done / self.total if self.total else 0.0


class Place(Protocol):
    """Where runs happen. ``HostPlace`` is the engine's host."""

    model: dict[str, Any]

    def open(self) -> str:
        """Take the place for this experiment alone; returns what else uses the machine, in words ('' for nothing)."""
        ...

    def run(self, variant: Variant, spec: WorkloadSpec, going: Callable[[], None]) -> RunRecords:
        """One run on a fresh engine. ``going`` is called every now and then, and raises ``Cancelled`` when it is to end."""
        ...

    def close(self) -> None:
        """Give everything back; works in any state."""
        ...


class HostPlace:
    """A lab of its own on a client's host, under a lease.

    Args:
        client: started; the model may still be loading.
    """

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.lab = f"experiment-{secrets.token_urlsafe(12)}"
        self.model: dict[str, Any] = {}
        self._open = False

    def open(self) -> str:
        """Open the lab with a small pool, take the lease, and look at what else runs."""
        state = self.client.state
        if state.state != "ready" or state.model is None:
            raise HostError(f"no model is ready yet ({state.stage or state.error or state.state}): wait until it is loaded")
        self.model = model_facts(state.model)
        self.client.open_lab(self.lab, {"num_kv_blocks": 8, "max_model_len": 128})
        self._open = True
        waiting = self.client.lease(self.lab, True)
        found = []
        if waiting:
            labs = "another lab" if len(waiting) == 1 else f"{len(waiting)} other labs"
            found.append(f"{labs} had work to do and waited")
        busy = busy_percent()
        if busy >= NOTICEABLE:
            found.append(f"other programs used {busy:.0f} % of the processor")
        return "; ".join(found)

    def run(self, variant: Variant, spec: WorkloadSpec, going: Callable[[], None]) -> RunRecords:
        """Restart the lab with the variant's settings, run the workload, read the records."""
        info = self.client.reconfigure(self.lab, self._settings(variant))
        log = self.client.log(self.lab)
        generation = info.generation
        self.client.start_traffic(self.lab, spec)
        while not log.wait_until(lambda log: _over(log, generation), POLL):
            going()
            if self.client.pid is None:
                raise HostGone(self.client.state.error or "the engine's process ended during the experiment")
        if log.generation != generation:
            raise HostError(f"the engine broke down during a run of {variant.name!r}: {_last_notice(log)}")
        if log.steps_let_go or log.finished_let_go:
            raise HostError(
                f"a run of {variant.name!r} took more than {MAX_STEPS:,} steps or {MAX_FINISHED:,} requests, more than are "
                f"kept for measuring: shorten the workload (stop.requests, or count of a trace)"
            )
        return records(log, variant.name)

    def _settings(self, variant: Variant) -> dict[str, Any]:
        """All settings by name, so that nothing of the variant before is left; a model's shorter context is respected."""
        config = variant.engine_config()
        limit = int(self.model.get("max_position") or config.max_model_len)
        if "max_model_len" not in variant.config and limit < config.max_model_len:
            config = EngineConfig(**{**variant.config, "max_model_len": limit})
        return msgspec.structs.asdict(config)

    def close(self) -> None:
        """Close the lab: its requests end and the lease with it."""
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(HostError, HostGone):
            self.client.close_lab(self.lab)
        self.client.forget(self.lab)


def busy_percent(seconds: float = 0.3) -> float:
    """How much of the processor is in use while we do nothing, percent of all cores."""
    return float(psutil.cpu_percent(interval=seconds))


def _over(log: TraceLog, generation: int) -> bool:
    if log.generation > generation:
        return True
    report = log.traffic
    return log.generation == generation and report is not None and report.ended and report.in_flight == 0


def _last_notice(log: TraceLog) -> str:
    notices = log.snapshot(0, 0).notices
    return notices[-1].text if notices else "no reason was given"


def records(log: TraceLog, variant: str) -> RunRecords:
    """Everything that a log holds, as one run's records."""
    snapshot = log.snapshot(last_steps=MAX_STEPS, max_finished=MAX_FINISHED)
    return RunRecords(
        variant=variant,
        opened=tuple(OpenedRequest(view.trace, view.prompt, view.prompt_token_ids) for view in snapshot.requests),
        closed=tuple(ClosedRequest(view.trace, view.text) for view in snapshot.requests if view.closed),
        tokens=tuple(sorted((t for view in snapshot.requests for t in view.tokens), key=lambda t: (t.step, t.request_id))),
        steps=snapshot.steps,
    )


def run_values(found: RunRecords, experiment: Experiment, repetition: int) -> RunValues:
    """The numbers of one run (``engine.workload.results.NUMBERS``)."""
    requests = found.requests
    limits = experiment.objectives
    asked = Objectives(ttft=limits.ttft, tpot=limits.tpot, e2e=limits.e2e)
    metrics = measure(requests, found.steps, objectives=None if asked == Objectives() else asked)
    latency = metrics.latency
    values: dict[str, float | None] = {
        "duration": metrics.window.length if metrics.window else None,
        "output_throughput": metrics.output_throughput,
        "user_speed": latency["user_tokens_per_second"].p50,
        "ttft_p50": latency["ttft"].p50,
        "ttft_p95": latency["ttft"].p95,
        "tpot_p50": latency["tpot"].p50,
        "itl_p95": latency["itl"].p95,
        "itl_max": latency["itl"].max,
        "e2e_p50": latency["e2e"].p50,
        "e2e_p95": latency["e2e"].p95,
        "attainment": metrics.goodput.attainment if metrics.goodput else None,
        "gpu_idle_share": metrics.device.gpu_idle_share,
        **counts(requests, found.steps),
    }
    samples = {
        "ttft": [r.ttft for r in requests if r.ttft is not None],
        "tpot": [r.tpot for r in requests if r.tpot is not None],
        "itl": [gap for r in requests for gap in r.itl],
        "e2e": [r.e2e_latency for r in requests if r.e2e_latency is not None],
    }
    return RunValues(
        variant=found.variant,
        repetition=repetition,
        values=values,
        samples={name: thinned(latencies) for name, latencies in samples.items()},
        prompt_tokens=sum(r.prompt_tokens for r in requests),
        output_tokens=sum(r.output_tokens for r in requests),
        requests=len(requests),
        trouble=_trouble(found),
    )


def _trouble(found: RunRecords) -> tuple[str, ...]:
    ends = [outcome(request) for request in found.requests]
    texts = [f"{ends.count(end)} requests were {end}" for end in ("aborted", "refused") if end in ends]
    if "failed" in ends:
        why = next(request.error for request in found.requests if outcome(request) == "failed")
        texts.append(f"{ends.count('failed')} requests failed: {why}")
    return tuple(texts)


def check_size(experiment: Experiment) -> None:
    """Refuse a workload that is larger than what is kept of a run.

    Raises:
        WorkloadError: with the number and the limit.
    """
    spec = experiment.workload
    asked = spec.stop.requests if spec.kind == "generated" else len(listed(spec))
    if asked is not None and asked > MAX_FINISHED:
        raise WorkloadError(
            f"the workload has {asked:,} requests; an experiment keeps the records of {MAX_FINISHED:,} a run. "
            f"Take fewer: stop.requests, or count of a trace"
        )


class ExperimentRunner:
    """One experiment on its way: ``run`` does it here, ``start`` on a thread of its own that a page or lesson looks at.

    Args:
        experiment: what to run.
        place: where; ``HostPlace(client)``.
        alive: whether somebody still wants the result, asked now and then; after ``grace`` seconds of no the experiment is
            cancelled. None: until it is done.
        on_progress: hears of every change, on the thread that runs.
        warm_up: run every variant once before what is measured.
    """

    def __init__(
        self,
        experiment: Experiment,
        place: Place,
        *,
        alive: Callable[[], bool] | None = None,
        grace: float = GRACE,
        on_progress: Callable[[Progress], None] | None = None,
        warm_up: bool = True,
    ) -> None:
        check_size(experiment)
        self.experiment = experiment
        self.result: ExperimentResult | None = None
        self.progress = Progress()
        self._place = place
        self._alive, self._grace = alive, grace
        self._on_progress = on_progress
        self._warm_up = warm_up
        self._cancel = threading.Event()
        self._why = "cancelled"
        self._seen = time.monotonic()
        self._thread: threading.Thread | None = None
        self._took: dict[str, list[float]] = {}

    # -- from any thread -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Run on a thread of its own; ``progress`` and ``result`` tell how it stands."""
        self._thread = threading.Thread(target=self._guarded, name="experiment", daemon=True)
        self._thread.start()

    def cancel(self, why: str = "cancelled") -> None:
        """End it as soon as may be; returns at once."""
        self._why = why
        self._cancel.set()

    def wait(self, timeout: float | None = None) -> Progress:
        """Block until it is over, or for ``timeout`` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self.progress

    @property
    def over(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.progress.state in ("done", "cancelled", "failed")

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self) -> ExperimentResult:
        """Run it here and return the result.

        Raises:
            Cancelled: it was told to end.
            HostError, HostGone, WorkloadError: it can't run, or broke down; the message says what to do.
        """
        order = turns(self.experiment)
        names = [variant.name for variant in self.experiment.variants] if self._warm_up else []
        total = len(names) + len(order)
        self._say(state="running", text="taking the machine for this experiment", total=total)
        try:
            others = self._place.open()
            self._say(others=others)
            for name in names:
                self._turn(name, f"warm-up with {name}, left out of the result")
            values: list[RunValues] = []
            kept: dict[int, list[RunRecords]] = {}
            for turn in order:
                text = f"repetition {turn.repetition + 1} of {self.experiment.repetitions}: {turn.variant}"
                found = self._turn(turn.variant, text)
                values.append(run_values(found, self.experiment, turn.repetition))
                kept.setdefault(turn.repetition, []).append(found)
                self._drop_extremes(kept)
            self.result = self._collect(values, kept, others)
        except Cancelled:
            self._say(state="cancelled", text=self._why)
            raise
        except Exception as error:
            self._say(state="failed", text=str(error) or type(error).__name__)
            raise
        finally:
            self._place.close()
        self._say(state="done", text="done", seconds_left=0.0)
        return self.result

    def _guarded(self) -> None:
        with contextlib.suppress(Exception):
            self.run()  # the progress says how it ended

    def _turn(self, name: str, text: str) -> RunRecords:
        """One run; its time makes the estimate of the time left."""
        self._going()
        self._say(text=text)
        begin = time.monotonic()
        found = self._place.run(self.experiment.variant(name), self.experiment.workload, self._going)
        self._took.setdefault(name, []).append(time.monotonic() - begin)
        done = self.progress.done + 1
        self._say(done=done, seconds_left=self._left())
        return found

    def _left(self) -> float:
        """Seconds for the runs that are still to come, from the mean of each variant's runs so far."""
        known = [took for each in self._took.values() for took in each]
        mean = sum(known) / len(known)
        left = 0.0
        for variant in self.experiment.variants:
            took = self._took.get(variant.name, [])
            ahead = self.experiment.repetitions + (1 if self._warm_up else 0) - len(took)
            left += ahead * (sum(took) / len(took) if took else mean)
        return left

    def _going(self) -> None:
        if self._alive is None or self._alive():
            self._seen = time.monotonic()
        elif time.monotonic() - self._seen > self._grace:
            self.cancel("cancelled: the page that asked for it was closed")
        if self._cancel.is_set():
            raise Cancelled(self._why)

    def _drop_extremes(self, kept: dict[int, list[RunRecords]]) -> None:
        """Records of whole repetitions are kept until the one of median length is known; memory stays bounded."""
        whole = sorted(
            (number for number, found in kept.items() if len(found) == len(self.experiment.variants)),
            key=lambda number: sum(records.length for records in kept[number]),
        )
        while len(whole) > 5:
            for number in (whole.pop(0), whole.pop()):
                del kept[number]

    def _collect(self, values: list[RunValues], kept: dict[int, list[RunRecords]], others: str) -> ExperimentResult:
        order = sorted(kept, key=lambda number: sum(records.length for records in kept[number]))
        middle = order[(len(order) - 1) // 2]
        by_name = {found.variant: found for found in kept[middle]}
        return ExperimentResult(
            experiment=self.experiment,
            made=time.time(),
            model=self._place.model,
            others=others,
            runs=tuple(values),
            shown_repetition=middle,
            shown=tuple(by_name[variant.name] for variant in self.experiment.variants),
            lab_version=__version__,
        )

    def _say(self, **changes: Any) -> None:
        self.progress = msgspec.structs.replace(self.progress, **changes)
        if self._on_progress is not None:
            self._on_progress(self.progress)


def run_file(
    experiment: Experiment,
    *,
    model: str,
    device: str = "auto",
    dtype: str = "auto",
    threads: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> ExperimentResult:
    """Run an experiment on a host of its own, which ends with it: what the terminal does.

    Raises:
        HostError, HostGone, WorkloadError: the model can't be loaded, or the experiment can't run.
    """
    with EngineClient(model, device, dtype, threads=threads) as client:
        client.wait_ready()
        return ExperimentRunner(experiment, HostPlace(client), on_progress=on_progress).run()
