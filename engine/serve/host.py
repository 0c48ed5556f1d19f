"""The engine's process: ``python -m engine.serve.host --fd N``. Started by ``EngineClient``, not by hand.

::

            ┌ reader ─── commands ──▶ inbox ─┐                          ┌─▶ outbox ──▶ writer ┐
    socket ─┤                                ├─▶ main loop: commands ───┤                     ├─ socket
            └ ends the process at EOF        │   between steps,         └─ news merge when     ┘
                                  loader ────┘   labs in turn              the client is slow

The main loop alone touches models and labs. The process ends at once when the other end of the socket is gone, also in the
middle of a step or of loading: the reader waits for nothing else.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import msgspec

from engine.core.trace import DeviceSample
from engine.serve.gpu_figures import Sampler, watch
from engine.serve.labs import HostModel, LabSet, RefusalError, describe, nothing_sampled
from engine.serve.outbox import Outbox
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
    LabUpdate,
    Lease,
    LoadModel,
    OpenLab,
    Reconfigure,
    Reply,
    Send,
    Shutdown,
    StartTraffic,
)
from engine.serve.scripted import ScriptedModel, is_scripted
from engine.serve.transport import FrameError, recv_frame, send_frame

INBOX_SIZE = 256
"""Commands that may wait; one more is answered with an error at once."""
COMMANDS_A_STEP = 32
"""Commands done between two steps, so that no flood of them stops the engine."""
POOL_SHARE = 0.4
"""Share of the free memory that all KV pools may take unless the options say otherwise."""
GPU_POOL_SHARE = 0.9
"""The same of a GPU's memory, which serves nothing else."""
PARENT_CHECK = 2.0
"""Seconds between two looks at whether the parent process still lives."""

Progress = Callable[[str, float | None], None]


class _Numbered(msgspec.Struct):
    """What can be read of a command that makes no sense otherwise."""

    seq: int = -1


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A command and when it was read, ``time.perf_counter`` seconds."""

    command: Command
    received: float


def load_host_model(command: LoadModel, options: HostOptions, progress: Progress) -> HostModel:
    """Load what a command asks for. torch is imported here, and only for a model that needs it."""
    if is_scripted(command.model):
        return ScriptedModel(command.model, progress)
    progress("importing torch", None)
    from engine.serve.loaded import TorchModel

    return TorchModel(command, options, progress)


class Host:
    """The host's state and its main loop.

    Args:
        connection: the socket to the one client.
        options: see ``HostOptions``.
    """

    def __init__(self, connection: socket.socket, options: HostOptions) -> None:
        self._connection = connection
        self._options = options
        self._outbox = Outbox(options.backlog_units)
        self._inbox: queue.Queue[_Arrived | Callable[[], None]] = queue.Queue(INBOX_SIZE)
        self._labs: LabSet | None = None
        self._gpu: Sampler | None = None
        self._state = HostState(state="starting")
        self._said = 0.0
        """When loading last told its progress."""

    def run(self) -> NoReturn:
        """Serve until the client says ``Shutdown`` or is gone."""
        for work in (self._read, self._write):
            threading.Thread(target=self._guarded, args=(work,), daemon=True, name=work.__name__).start()
        self._become(self._state)
        while True:
            lab, due = self._labs.next() if self._labs else (None, None)
            timeout = 0.0 if lab else (None if due is None else max(0.0, due - time.monotonic()))
            if self._do_commands(timeout) and self._labs:
                lab, due = self._labs.next()
            if lab is not None and self._labs:
                self._labs.step(lab)

    # -- threads -------------------------------------------------------------------------------------------------------

    @staticmethod
    def _guarded(work: Callable[[], None]) -> None:
        """The process ends with its connection, whatever the main loop is doing."""
        try:
            work()
        except (FrameError, OSError) as error:
            sys.stderr.write(f"connection lost: {error}\n")
        except BaseException:
            traceback.print_exc()
        _exit(3)

    def _read(self) -> None:
        """Commands from the socket to the inbox; returns when the client is gone."""
        decoder = msgspec.msgpack.Decoder(Command)
        for frame in _frames(self._connection, self._outbox):
            received = time.perf_counter()
            try:
                command = decoder.decode(frame)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                self._reply(_seq_of(frame), f"this command can't be understood: {error}")
                continue
            try:
                self._inbox.put_nowait(_Arrived(command, received))
            except queue.Full:
                self._reply(command.seq, f"the engine is busy: {INBOX_SIZE} commands wait already. Try again in a moment")
        _exit(0)

    def _write(self) -> None:
        """Messages from the outbox to the socket."""
        encoder = msgspec.msgpack.Encoder()
        while True:
            message = self._outbox.take()
            payload = encoder.encode(message)
            if len(payload) > MAX_FRAME:
                payload = encoder.encode(_shortened(message, len(payload)))
            send_frame(self._connection, payload)
            self._outbox.done()

    # -- commands ------------------------------------------------------------------------------------------------------

    def _do_commands(self, timeout: float | None) -> bool:
        """Do what waits in the inbox; wait up to ``timeout`` seconds for the first. Whether anything was done."""
        for done in range(COMMANDS_A_STEP):
            try:
                if done or timeout == 0.0:
                    item = self._inbox.get_nowait()
                else:
                    item = self._inbox.get(timeout=timeout)
            except queue.Empty:
                return done > 0
            if isinstance(item, _Arrived):
                self._do(item)
            else:
                item()
        return True

    def _do(self, arrived: _Arrived) -> None:
        command = arrived.command
        if isinstance(command, Shutdown):
            self._reply(command.seq)
            self._outbox.drain(timeout=2.0)
            _exit(0)
        if isinstance(command, LoadModel):
            self._load(command)
            return
        try:
            if self._labs is None:
                raise RefusalError(self._not_ready())
            result = self._lab_command(self._labs, command, arrived.received)
        except ValueError as error:
            self._reply(command.seq, str(error))
        except Exception as error:
            traceback.print_exc()
            self._reply(command.seq, f"{type(command).__name__} failed: {describe(error)}")
        else:
            self._reply(command.seq, result=result)

    @staticmethod
    def _lab_command(labs: LabSet, command: Command, received: float) -> Any:
        """Do one command on the labs; returns the reply's result."""
        match command:
            case OpenLab():
                result: Any = labs.open(command.lab, command.config, paused=command.paused, generation=command.generation)
            case CloseLab():
                labs.close(command.lab)
                result = None
            case Reconfigure():
                result = labs.reconfigure(command.lab, command.config)
            case Send():
                result = labs.get(command.lab).send(command, received)
            case Abort():
                result = labs.get(command.lab).abort(command.request_id)
            case Control():
                lab = labs.get(command.lab)
                lab.control(command.action, command.steps, command.rate)
                result = lab.info()
            case StartTraffic():
                labs.get(command.lab).start_traffic(command.spec)
                result = None
            case ChangeTraffic():
                labs.get(command.lab).change_traffic(command.rate)
                result = None
            case Lease():
                result = labs.lease(command.lab, command.on)
            case _:
                raise RefusalError(f"this host doesn't know the command {type(command).__name__}")
        return result

    def _reply(self, seq: int, error: str = "", result: Any = None) -> None:
        self._outbox.post(Reply(seq, error, result))

    def _become(self, state: HostState) -> None:
        self._state = state
        self._outbox.post(state)

    def _not_ready(self) -> str:
        state = self._state
        if state.state == "loading":
            share = f", {state.progress:.0%}" if state.progress is not None else ""
            return f"the model is still loading ({state.stage}{share}): try again when it is ready"
        if state.state == "failed":
            return f"no model is loaded: {state.error}"
        return "no model is loaded yet: load one first"

    # -- models --------------------------------------------------------------------------------------------------------

    def _load(self, command: LoadModel) -> None:
        """Close all labs, let the old model go, and load the new one on a thread of its own."""
        if self._state.state == "loading":
            self._reply(command.seq, f"{self._not_ready()}, then change it")
            return
        if self._labs is not None:
            self._labs.close_all("The model is being changed, so this lab was closed.")
            self._labs = None
        self._stop_gpu()
        gc.collect()
        self._become(HostState(state="loading", stage="starting to load"))
        threading.Thread(target=self._load_on_thread, args=(command,), daemon=True, name="loader").start()

    def _load_on_thread(self, command: LoadModel) -> None:
        try:
            model = load_host_model(command, self._options, self._progress)
        except Exception as error:
            traceback.print_exc()
            self._inbox.put(partial(self._load_failed, command, describe(error)))
        else:
            self._inbox.put(partial(self._loaded, command, model))

    def _progress(self, stage: str, fraction: float | None) -> None:
        """Tell how far loading is, at most ten times a second unless the stage is new. Runs on the loader's thread."""
        now = time.monotonic()
        if stage != self._state.stage or now - self._said > 0.1:
            self._said = now
            self._become(HostState(state="loading", stage=stage, progress=fraction))

    def _load_failed(self, command: LoadModel, error: str) -> None:
        gc.collect()
        self._become(HostState(state="failed", error=error))
        self._reply(command.seq, error)

    def _loaded(self, command: LoadModel, model: HostModel) -> None:
        gc.collect()
        quota = self._options.kv_quota_bytes
        if quota is None:
            quota = int(model.free_bytes() * (POOL_SHARE if model.gpu is None else GPU_POOL_SHARE))
        self._gpu = watch(model.gpu, self._gpu_news)
        sampled = self._gpu.latest if self._gpu is not None else nothing_sampled
        self._labs = LabSet(model, self._post, max_labs=self._options.max_labs, quota_bytes=quota, device_sample=sampled)
        self._become(HostState(state="ready", model=model.info))
        self._reply(command.seq)

    def _gpu_news(self, sample: DeviceSample | None) -> None:
        """The GPU's figures changed. Runs on the sampler's thread."""
        self._outbox.post(GpuNews(sample))

    def _stop_gpu(self) -> None:
        if self._gpu is not None:
            self._gpu.stop()
            self._gpu = None
            self._outbox.post(GpuNews(None))

    def _post(self, update: LabUpdate) -> None:
        self._outbox.post_update(update)


def _frames(connection: socket.socket, outbox: Outbox) -> Any:
    """Frames as they come; between them a look at the parent, and a pause while too many replies are unsent."""
    parent = os.getppid()
    selector = selectors.DefaultSelector()
    selector.register(connection, selectors.EVENT_READ)
    while True:
        if os.getppid() != parent:
            return
        if not outbox.wait_for_room(PARENT_CHECK) or not selector.select(PARENT_CHECK):
            continue
        frame = recv_frame(connection)
        if frame is None:
            return
        yield frame


def _seq_of(frame: bytearray) -> int:
    """The number of a command that can't be read, so that its sender hears of it; -1 if not even that can be read."""
    try:
        return msgspec.msgpack.decode(frame, type=_Numbered).seq
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return -1


def _shortened(message: Any, length: int) -> Any:
    """What is sent in place of a message that no frame can hold."""
    text = f"{length:,} bytes of news were left out: one message may have {MAX_FRAME:,}"
    if isinstance(message, LabUpdate):
        return LabUpdate(
            lab=message.lab,
            generation=message.generation,
            info=message.info,
            stats=message.stats,
            now=message.now,
            notice=text,
        )
    return Reply(message.seq, text) if isinstance(message, Reply) else HostState(state=message.state, error=text)


def _exit(code: int) -> NoReturn:
    """End the process without waiting for anything."""
    try:
        sys.stderr.flush()
        sys.stdout.flush()
    finally:
        os._exit(code)


def connect(fd: int | None, port: int | None) -> socket.socket:
    """The socket to the client: inherited, or (where that can't be) a loopback connection with a one-time token."""
    if fd is not None:
        return socket.socket(fileno=fd)
    connection = socket.create_connection(("127.0.0.1", port or 0), timeout=10)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    send_frame(connection, os.environ.pop(TOKEN_VARIABLE, "").encode())
    return connection


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a host as the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.serve.host", description="The engine's process; see engine.serve.client."
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--fd", type=int, help="inherited socket")
    where.add_argument("--port", type=int, help="loopback port to connect to")
    parser.add_argument("--options", default="{}", help="HostOptions as JSON")
    parsed = parser.parse_args(arguments)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches the parent, and the host ends with it.
    options = msgspec.json.decode(parsed.options, type=HostOptions)
    Host(connect(parsed.fd, parsed.port), options).run()


if __name__ == "__main__":
    main()
