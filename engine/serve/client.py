"""The engine's client: starts the host process, sends it commands, and mirrors its labs. Never imports torch.

::

    client = EngineClient(model="smollm2")
    client.start()                                   the page can be drawn at once
    client.wait_ready(timeout=120)                   loading shows in client.state meanwhile
    client.open_lab("demo", {"num_kv_blocks": 128})
    client.send("demo", "Why is the sky blue?", params={"max_tokens": 32})
    client.log("demo").snapshot()                    what every picture is drawn from
    client.close()

All methods may be called from any thread. A refusal raises ``HostError`` with a message for people; when the process is gone
they raise ``HostGone``, and ``restart`` brings a new one.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine.core.trace import DeviceSample
from engine.observe.archive import Archive, model_facts, remove_stale
from engine.observe.log import TraceLog
from engine.serve.logfile import new_log, tail
from engine.serve.protocol import (
    MAX_FRAME,
    TOKEN_VARIABLE,
    Abort,
    ChangeTraffic,
    CloseLab,
    Command,
    Control,
    GpuNews,
    HostOptions,
    HostState,
    LabInfo,
    LabUpdate,
    Lease,
    LoadModel,
    Message,
    OpenLab,
    Reconfigure,
    Reply,
    Send,
    Shutdown,
    StartTraffic,
)
from engine.serve.transport import FrameError, recv_frame, send_frame, set_send_timeout

if TYPE_CHECKING:
    from engine.workload.spec import WorkloadSpec

LOGGER = logging.getLogger(__name__)
SPIN_COUNT = "10000"
"""How long OpenMP's threads spin before they sleep, unless the user's environment says how they wait."""
SEND_TIMEOUT = 10.0
"""Seconds that the host may leave a command unread."""
CLOSE_GRACE = 3.0
"""Seconds that each stage of ending the process gets."""


class HostError(ValueError):
    """The host refused a command; the message says why and what to change."""


class HostTimeoutError(HostError, TimeoutError):
    """The host did not answer in time. The command may still be carried out."""


class HostGone(RuntimeError):
    """The host process is not there: not started, closed, or crashed (with its exit code and last words)."""


class EngineClient:
    """One host process and everything known of it.

    Args:
        model, device, dtype: what to load first; see ``engine.model``. "scripted" needs no weights and no torch.
        threads: threads of the forward pass. None: what the environment says, else one per core.
        env: environment variables for the host, on top of this process's own.
        host_command: how to start Python; default this interpreter.
        options: quotas of the host; ``threads`` above wins over its own.
        recordings: folder in which each lab is recorded while it lives, so that steps older than the ring can be shown and
            a run can be saved; None: nothing is recorded.
        loopback: talk over a loopback connection instead of an inherited socket (the default on Windows only).

    Attributes:
        state: what the host last said of itself and its model.
        gpu: what the GPU last said of itself; None without one.
        on_change: called with each new state, on the reader's thread: keep them cheap.
    """

    def __init__(
        self,
        model: str = "smollm2",
        device: str = "auto",
        dtype: str = "auto",
        *,
        threads: int | None = None,
        env: dict[str, str] | None = None,
        host_command: Sequence[str] | None = None,
        options: HostOptions | None = None,
        recordings: Path | None = None,
        loopback: bool = sys.platform == "win32",
    ) -> None:
        self._recordings = recordings
        if recordings is not None:
            remove_stale(recordings)
        self.model, self.device, self.dtype = model, device, dtype
        self.threads = threads
        self.state = HostState(state="stopped", stage="not started")
        self.gpu: DeviceSample | None = None
        self.on_change: list[Callable[[HostState], None]] = []
        self._env = dict(env or {})
        self._host_command = list(host_command) if host_command else [sys.executable]
        self._options = options or HostOptions()
        self._loopback = loopback
        self._link: _Link | None = None
        self._life = threading.RLock()
        """Held while the process is started or ended."""
        self._lock = threading.Lock()
        """Guards logs and subscribers."""
        self._state_changed = threading.Condition()
        self._logs: dict[str, TraceLog] = {}
        self._subscribers: dict[str, list[Callable[[int], None]]] = {}

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the host and let it load the model; returns at once. Does nothing while a host is running.

        Raises:
            HostGone: the process can't be started.
        """
        with self._life:
            if self._link is not None and self._link.alive:
                return
            self._set_state(HostState(state="starting", stage="starting the engine's process"))
            try:
                self._link = _Link(self._command(), self._environment(), self._loopback, weakref.WeakMethod(self._hear))
            except OSError as error:
                message = f"the engine's process can't be started: {error}"
                self._set_state(HostState(state="stopped", error=message))
                raise HostGone(message) from error
            self._link.listen()
            with contextlib.suppress(HostGone):  # The state tells of a process that ended at once.
                self._link.post(LoadModel(seq=self._link.number(), model=self.model, device=self.device, dtype=self.dtype))

    def close(self) -> None:
        """End the host: politely, then by closing the connection, then by force. Leaves no process. Idempotent."""
        with self._life:
            link, self._link = self._link, None
            if link is not None:
                link.close()
                self._end_logs("the engine was stopped")
                self._end_recordings()
            self._set_state(HostState(state="stopped", stage="stopped"))

    def restart(self) -> None:
        """End the host, if there is one, and start a new one with the same model. Labs have to be opened again."""
        with self._life:
            self.close()
            self.start()

    def __enter__(self) -> EngineClient:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the running host, or None."""
        link = self._link
        return link.process.pid if link is not None and link.alive else None

    @property
    def log_path(self) -> Path | None:
        """The file that takes the host's output."""
        return self._link.log_path if self._link is not None else None

    def wait_ready(self, timeout: float | None = None) -> HostState:
        """Block until the model is loaded; returns the state.

        Raises:
            HostError: loading failed, or took longer than ``timeout`` seconds.
            HostGone: the process ended.
        """
        with self._state_changed:
            self._state_changed.wait_for(lambda: self.state.state in ("ready", "failed", "stopped"), timeout)
            state = self.state
        if state.state == "ready":
            return state
        if state.state == "failed":
            raise HostError(state.error)
        if state.state == "stopped":
            raise HostGone(state.error or "the engine is not running: start it")
        raise HostTimeoutError(f"the model is not loaded after {timeout:g} s: {state.stage}")

    # -- commands ------------------------------------------------------------------------------------------------------

    def load_model(
        self, model: str, device: str = "auto", dtype: str = "auto", *, wait: bool = True, timeout: float = 3600.0
    ) -> None:
        """Change the model; all labs are closed. With ``wait=False`` it returns once the host has the command."""
        command = LoadModel(seq=0, model=model, device=device, dtype=dtype)
        if wait:
            self._ask(command, timeout)
        else:
            link = self._running()
            link.post(msgspec.structs.replace(command, seq=link.number()))
        self.model, self.device, self.dtype = model, device, dtype

    def open_lab(
        self, lab: str, config: dict[str, Any] | None = None, *, paused: bool = False, timeout: float = 30.0
    ) -> LabInfo:
        """Create a lab, or find the one of this name. ``config``: engine settings by name."""
        generation = self.log(lab).generation + 1
        command = OpenLab(seq=0, lab=lab, config=config or {}, paused=paused, generation=generation)
        return msgspec.convert(self._ask(command, timeout), LabInfo)

    def close_lab(self, lab: str, *, timeout: float = 30.0) -> None:
        """End a lab's requests and free its pool. Its log can still be read until ``forget``."""
        self._ask(CloseLab(seq=0, lab=lab), timeout)

    def reconfigure(self, lab: str, config: dict[str, Any], *, timeout: float = 60.0) -> LabInfo:
        """Restart a lab's engine with changed settings; when they are refused it goes on as it was."""
        return msgspec.convert(self._ask(Reconfigure(seq=0, lab=lab, config=config), timeout), LabInfo)

    def send(
        self,
        lab: str,
        prompt: str | list[int],
        *,
        chat: bool = True,
        params: dict[str, Any] | None = None,
        copies: int = 1,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout: float = 30.0,
    ) -> list[str]:
        """Add requests; returns their ids. The log knows them by then."""
        command = Send(
            seq=0,
            lab=lab,
            prompt=prompt,
            chat=chat,
            params=params or {},
            copies=copies,
            priority=priority,
            cache_salt=cache_salt,
        )
        return list(self._ask(command, timeout))

    def abort(self, lab: str, request_id: str | None = None, *, timeout: float = 30.0) -> int:
        """Stop one request, or all of a lab; returns how many were stopped (0 for unknown or finished ones)."""
        return int(self._ask(Abort(seq=0, lab=lab, request_id=request_id), timeout))

    def control(self, lab: str, action: str, *, steps: int = 1, rate: float | None = None, timeout: float = 30.0) -> LabInfo:
        """Run, pause or step a lab (``action``: "run", "pause", "step").

        ``rate``: slow motion, steps a second. Single steps are taken after the answer: wait for them in the log.
        """
        if action not in ("run", "pause", "step"):
            raise HostError(f"action={action!r} must be 'run', 'pause' or 'step'")
        command = Control(seq=0, lab=lab, action=action, steps=steps, rate=rate)  # type: ignore[arg-type]
        return msgspec.convert(self._ask(command, timeout), LabInfo)

    def start_traffic(self, lab: str, spec: WorkloadSpec | dict[str, Any], *, timeout: float = 30.0) -> None:
        """Run a workload on a lab; ``log(lab).traffic`` tells how it stands."""
        plain = msgspec.to_builtins(spec) if isinstance(spec, msgspec.Struct) else spec
        self._ask(StartTraffic(seq=0, lab=lab, spec=plain), timeout)

    def change_traffic(self, lab: str, rate: float, *, timeout: float = 30.0) -> None:
        """Change the rate of a lab's workload: requests a second, or a step."""
        self._ask(ChangeTraffic(seq=0, lab=lab, rate=rate), timeout)

    def stop_traffic(self, lab: str, *, timeout: float = 30.0) -> None:
        """No more requests of the lab's workload; those under way run on."""
        self._ask(ChangeTraffic(seq=0, lab=lab), timeout)

    def lease(self, lab: str, on: bool, *, timeout: float = 30.0) -> list[str]:
        """Give a lab the host for itself, or give it back; returns which other labs had work to do."""
        return list(self._ask(Lease(seq=0, lab=lab, on=on), timeout))

    def _running(self) -> _Link:
        link = self._link
        if link is None:
            raise HostGone(self.state.error or "the engine is not running: start it")
        return link

    def _ask(self, command: Command, timeout: float) -> Any:
        """Send a command, wait for its reply, and return the result."""
        return self._running().ask(command, timeout)

    # -- what is known -------------------------------------------------------------------------------------------------

    def log(self, lab: str) -> TraceLog:
        """The mirror of a lab; empty before it is opened. The same object until ``forget``, over all restarts."""
        with self._lock:
            if lab not in self._logs:
                archive = Archive(self._recordings, lambda: model_facts(self.state.model)) if self._recordings else None
                self._logs[lab] = TraceLog(archive=archive)
            return self._logs[lab]

    def forget(self, lab: str) -> None:
        """Drop the mirror and the subscribers of a lab that nobody looks at any more."""
        with self._lock:
            log = self._logs.pop(lab, None)
            if log is not None and isinstance(log.archive, Archive):
                log.archive.close()
            self._subscribers.pop(lab, None)

    def subscribe(self, lab: str, callback: Callable[[int], None]) -> Callable[[], None]:
        """Have ``callback(version)`` called after each change of a lab's log; returns what ends that.

        It runs on the reader's thread and must be cheap: set an event, or ``loop.call_soon_threadsafe(event.set)`` for
        asyncio, and read the log elsewhere. To wait without a callback use ``log(lab).wait(version, timeout)``.
        """
        with self._lock:
            self._subscribers.setdefault(lab, []).append(callback)

        def unsubscribe() -> None:
            with self._lock, contextlib.suppress(KeyError, ValueError):
                self._subscribers[lab].remove(callback)

        return unsubscribe

    # -- what comes in -------------------------------------------------------------------------------------------------

    def _hear(self, link: _Link, message: HostState | GpuNews | LabUpdate | None, farewell: str = "") -> None:
        """A message of the host, or its end. On the reader's thread."""
        if isinstance(message, LabUpdate):
            log = self._logs.get(message.lab)
            if log is not None:  # nobody asks for a forgotten lab's last news
                self._tell(message.lab, log.apply(message))
        elif isinstance(message, GpuNews):
            self.gpu = message.sample
        elif message is not None:
            self._set_state(message)
        elif link is self._link:
            self._end_logs(farewell)
            self._set_state(HostState(state="stopped", error=farewell))

    def _tell(self, lab: str, version: int) -> None:
        with self._lock:
            callbacks = tuple(self._subscribers.get(lab, ()))
        for callback in callbacks:
            try:
                callback(version)
            except Exception:
                LOGGER.exception("a subscriber of lab %s failed", lab)

    def _end_logs(self, reason: str) -> None:
        with self._lock:
            logs = list(self._logs.items())
        for lab, log in logs:
            self._tell(lab, log.end_all(reason))

    def _end_recordings(self) -> None:
        with self._lock:
            logs = list(self._logs.values())
        for log in logs:
            if isinstance(log.archive, Archive):
                log.archive.close()

    def _set_state(self, state: HostState) -> None:
        with self._state_changed:
            self.state = state
            if state.state != "ready":
                self.gpu = None
            self._state_changed.notify_all()
        for callback in tuple(self.on_change):
            try:
                callback(state)
            except Exception:
                LOGGER.exception("a listener to the host's state failed")

    # -- how it is started ---------------------------------------------------------------------------------------------

    def _command(self) -> list[str]:
        options = self._options
        if self.threads is not None:
            options = msgspec.structs.replace(options, threads=self.threads)
        return [*self._host_command, "-m", "engine.serve.host", "--options", msgspec.json.encode(options).decode()]

    def _environment(self) -> dict[str, str]:
        return host_environment({**os.environ, **self._env}, self.threads)


def host_environment(base: dict[str, str], threads: int | None = None) -> dict[str, str]:
    """The environment of a host: OpenMP reads how to wait before torch loads, so whoever starts the process must set it.

    The user's own ``OMP_*`` and ``GOMP_*`` variables win over the defaults; an explicit ``threads`` wins over
    ``OMP_NUM_THREADS``.
    """
    env = dict(base)
    if "OMP_WAIT_POLICY" not in env:
        env.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    env["PYTHONUNBUFFERED"] = "1"
    root = str(Path(__file__).resolve().parents[2])
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in paths:
        env["PYTHONPATH"] = os.pathsep.join([*paths, root])
    return env


class _Link:
    """One host process, the connection to it, and the thread that reads from it.

    It knows its client only weakly, so that a forgotten client is collected and takes the process with it.
    """

    def __init__(
        self, command: list[str], env: dict[str, str], loopback: bool, hear: weakref.WeakMethod[Callable[..., None]]
    ) -> None:
        self.log_path, log_file = new_log()
        self._hear = hear
        self._numbers = itertools.count(1)
        self._sending = threading.Lock()
        self._waiting: dict[int, queue.SimpleQueue[Reply | HostGone]] = {}
        self._waiting_lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._gone = ""
        self._closing = False
        with log_file:
            self.process, self._socket = (_start_loopback if loopback else _start_inherited)(command, env, log_file)
        set_send_timeout(self._socket, SEND_TIMEOUT)
        self._finalizer = weakref.finalize(self, _end, self.process, self._socket, os.getpid())
        self._reader = threading.Thread(
            target=_read, args=(weakref.ref(self), self._socket), daemon=True, name="engine-client"
        )

    def listen(self) -> None:
        """Start to read what the host says."""
        self._reader.start()

    @property
    def alive(self) -> bool:
        """Whether commands can be sent."""
        return not self._gone and self.process.poll() is None

    def number(self) -> int:
        """The number of the next command."""
        return next(self._numbers)

    def post(self, command: Command) -> None:
        """Send a command without waiting for its reply.

        Raises:
            HostError: it can't be sent: too long, or not text.
            HostGone: the connection is broken.
        """
        try:
            payload = self._encoder.encode(command)
        except UnicodeEncodeError as error:
            raise HostError(
                "the text holds half a character (a lone surrogate), which is not valid text: remove it"
            ) from error
        except (OverflowError, TypeError) as error:
            raise HostError(f"a value can't be sent to the engine: {error}") from error
        if len(payload) > MAX_FRAME:
            raise HostError(
                f"the command has {len(payload):,} bytes; one can have at most {MAX_FRAME:,}. Send a shorter text"
            )
        try:
            with self._sending:
                send_frame(self._socket, payload)
        except OSError as error:
            self._sever()
            if threading.current_thread() is not self._reader:
                self._reader.join(2 * CLOSE_GRACE)
            raise HostGone(self._gone or f"the engine's process does not take commands any more: {error}") from error

    def ask(self, command: Command, timeout: float) -> Any:
        """Send a command and wait for the result of its reply."""
        command = msgspec.structs.replace(command, seq=self.number())
        inbox: queue.SimpleQueue[Reply | HostGone] = queue.SimpleQueue()
        with self._waiting_lock:
            if self._gone:
                raise HostGone(self._gone)
            self._waiting[command.seq] = inbox
        try:
            self.post(command)
            answer = inbox.get(timeout=timeout)
        except queue.Empty:
            name = type(command).__name__
            raise HostTimeoutError(f"the engine did not answer {name} within {timeout:g} s; it may still do it") from None
        finally:
            with self._waiting_lock:
                self._waiting.pop(command.seq, None)
        if isinstance(answer, HostGone):
            raise HostGone(str(answer))
        if answer.error:
            raise HostError(answer.error)
        return answer.result

    def hear(self, message: Message) -> None:
        """Pass on what the host said."""
        if isinstance(message, Reply):
            with self._waiting_lock:
                inbox = self._waiting.get(message.seq)
            if inbox is not None:
                inbox.put(message)
            elif message.seq < 0:
                LOGGER.warning("the engine's process could not read a command: %s", message.error)
            return
        hear = self._hear()
        if hear is not None and not self._closing:
            hear(self, message)

    def lost(self, reason: str) -> None:
        """The connection ended: find out why, and tell everybody who waits."""
        farewell = "the engine was stopped" if self._closing else self._farewell(reason)
        with self._waiting_lock:
            self._gone = farewell
            waiting = list(self._waiting.values())
        for inbox in waiting:
            inbox.put(HostGone(farewell))
        hear = self._hear()
        if hear is not None and not self._closing:
            hear(self, None, farewell)

    def _farewell(self, reason: str) -> str:
        """What is known of a crash: exit code, its meaning, last lines of output."""
        try:
            code: int | None = self.process.wait(CLOSE_GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = None
        parts = [f"the engine's process {_how_it_ended(code)}{f' ({reason})' if reason else ''}: restart it to go on"]
        last = tail(self.log_path)
        if last:
            parts.append(f"Its last words were:\n{last}")
        return ". ".join(parts)

    def _sever(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the process and everything that belongs to it."""
        self._closing = True
        if self.alive:
            with contextlib.suppress(HostError, HostGone):
                self.ask(Shutdown(seq=0), CLOSE_GRACE)
        self._finalizer()
        if threading.current_thread() is not self._reader:
            self._reader.join(CLOSE_GRACE)


def _read(link_ref: weakref.ref[_Link], connection: socket.socket) -> None:
    """The reader thread: messages until the connection ends."""
    decoder = msgspec.msgpack.Decoder(Message)
    reason = ""
    while True:
        try:
            frame = recv_frame(connection)
            if frame is None:
                break
            message = decoder.decode(frame)
        except (FrameError, OSError, msgspec.MsgspecError) as error:
            reason = "" if isinstance(error, OSError) and not isinstance(error, FrameError) else str(error)
            break
        link = link_ref()
        if link is None:
            return
        link.hear(message)
        del link, message
    link = link_ref()
    if link is not None:
        link.lost(reason)


def _end(process: subprocess.Popen[bytes], connection: socket.socket, owner: int) -> None:
    """Close the connection, which ends a host at once; then use force. Also runs when the interpreter exits."""
    if os.getpid() != owner:
        return
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    for force in (None, process.terminate, process.kill):
        if force is not None:
            force()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(CLOSE_GRACE)
            break
    connection.close()


def _start_inherited(
    command: list[str], env: dict[str, str], log_file: Any
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the host with one end of a socket pair."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                [*command, "--fd", str(theirs.fileno())],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


def _start_loopback(command: list[str], env: dict[str, str], log_file: Any) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the host and let it connect back; only who knows the one-time token is let in."""
    token = secrets.token_urlsafe(32)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        process = subprocess.Popen(
            [*command, "--port", str(server.getsockname()[1])],
            env={**env, TOKEN_VARIABLE: token},
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                connection.settimeout(5)
                greeting = recv_frame(connection)
                if greeting is not None and secrets.compare_digest(bytes(greeting), token.encode()):
                    connection.settimeout(None)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return process, connection
                connection.close()
    process.kill()
    process.wait()
    raise OSError("it did not connect within 30 s")


def _how_it_ended(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "does not answer and was ended"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = ", which is what the system does when memory runs out" if name == "SIGKILL" else ""
    return f"was killed by {name} (exit code {code}{hint})"
