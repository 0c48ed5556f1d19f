"""Experiments under way: owned by the server, one a lab, cancelled when the last page that wants them is gone."""

from __future__ import annotations

import threading

from streamlit.runtime import Runtime
from streamlit.runtime.scriptrunner import get_script_run_ctx

from app.experiments.store import ResultStore
from engine.serve.client import EngineClient
from engine.serve.experiments import ExperimentRunner, HostPlace, Progress
from engine.workload.experiment import Experiment


class Running:
    """One experiment, the sessions that look at it, and the name under which its result was saved."""

    def __init__(self, experiment: Experiment, client: EngineClient, store: ResultStore) -> None:
        self.saved = ""
        self.told = False
        """Whether a page has shown how it ended."""
        self._store = store
        self._sessions: set[str] = set()
        self.see()
        self.runner = ExperimentRunner(experiment, HostPlace(client), alive=self._wanted, on_progress=self._progress)

    def see(self) -> None:
        """Note that this session wants the result."""
        context = get_script_run_ctx(suppress_warning=True)
        if context is not None:
            self._sessions.add(context.session_id)

    def _wanted(self) -> bool:
        if not Runtime.exists() or not self._sessions:
            return True
        runtime = Runtime.instance()
        return any(runtime.is_active_session(session) for session in tuple(self._sessions))

    def _progress(self, progress: Progress) -> None:
        """Keep the result before anybody hears that it is there."""
        if progress.state == "done" and self.runner.result is not None and not self.saved:
            self.saved = self._store.save(self.runner.result)


_running: dict[str, Running] = {}
_lock = threading.Lock()


def start(lab: str, experiment: Experiment, client: EngineClient, store: ResultStore) -> Running:
    """Start an experiment for the owner of a lab.

    Raises:
        ValueError: one is under way already, or the workload is too large.
    """
    with _lock:
        before = _running.get(lab)
        if before is not None and not before.runner.over:
            raise ValueError("an experiment of yours is running already: wait for it, or cancel it")
        made = Running(experiment, client, store)
        _running[lab] = made
        for token in [token for token, each in _running.items() if each.runner.over and each.told]:
            if token != lab:
                del _running[token]
        made.runner.start()
        return made


def measuring() -> bool:
    """Whether an experiment has the engine for itself, so that every lab waits."""
    with _lock:
        return any(not each.runner.over for each in _running.values())


def of(lab: str) -> Running | None:
    """The newest experiment of a lab's owner."""
    return _running.get(lab)
