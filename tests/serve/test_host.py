"""The host process and its client: life, death and everything between, with real processes."""

import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time

import msgspec
import psutil
import pytest

from engine.serve.client import EngineClient, HostError, HostGone, HostTimeoutError, host_environment
from engine.serve.protocol import (
    MAX_FRAME,
    Control,
    HostOptions,
    HostState,
    LabUpdate,
    LoadModel,
    Message,
    OpenLab,
    Reply,
    Send,
    Shutdown,
)
from engine.serve.scripted import FAILS
from engine.serve.transport import recv_frame, send_frame

from .conftest import ROOT, gone

pytestmark = pytest.mark.timeout(60)
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def idle(log) -> bool:
    return log.num_live == 0 and log.next_index > 0


def serves(client: EngineClient, lab: str) -> bool:
    """Whether a request still gets its answer: the lab is alive."""
    (request,) = client.send(lab, "x", params={"max_tokens": 5})
    log = client.log(lab)
    return log.wait_until(lambda seen: seen.num_live == 0, 10) and log.request(request).text == "abcde"


# -- sending, streaming, stepping ------------------------------------------------------------------


def test_a_request_streams_and_the_log_knows_it_when_send_returns(client) -> None:
    info = client.open_lab("l", {"num_kv_blocks": 64})
    assert (info.mode, info.generation, info.config.num_kv_blocks) == ("running", 1, 64)
    versions: list[int] = []
    unsubscribe = client.subscribe("l", versions.append)
    (request,) = client.send("l", "hello", params={"max_tokens": 40})
    log = client.log("l")
    assert log.request(request).prompt == "hello"
    partial = log.wait_until(lambda seen: 0 < len(seen.request(request).text) < 40, 10)
    assert partial, "text arrives before the request is done"
    assert log.wait_until(idle, 10)
    view = log.request(request)
    assert view.text == (ALPHABET * 2)[:40] and view.closed and view.trace.finish_reason == "length"
    assert [token.index for token in view.tokens] == list(range(40))
    assert versions == sorted(set(versions)) and len(versions) > 10
    unsubscribe()
    seen = len(versions)
    assert serves(client, "l")
    assert len(versions) == seen


def test_pause_step_and_resume(client) -> None:
    client.open_lab("l", paused=True)
    log = client.log("l")
    client.send("l", "hello", params={"max_tokens": 30}, copies=2)
    time.sleep(0.1)
    assert log.next_index == 0 and log.stats.waiting == 2
    client.control("l", "step", steps=3)
    assert log.wait_until(lambda seen: seen.next_index == 3, 10)
    time.sleep(0.1)
    assert log.next_index == 3 and log.info.mode == "paused"
    client.control("l", "run")
    assert log.wait_until(idle, 10)
    assert [step.slow for step in log.steps()] == [True] * 3 + [False] * 27
    with pytest.raises(HostError, match="nothing to step through"):
        client.control("l", "step")
    with pytest.raises(HostError, match="action='jump'"):
        client.control("l", "jump")


def test_slow_motion(client) -> None:
    client.open_lab("l")
    assert client.control("l", "run", rate=20.0).rate == 20.0
    client.send("l", "x", params={"max_tokens": 5})
    start = time.monotonic()
    assert client.log("l").wait_until(idle, 10)
    assert time.monotonic() - start > 0.15
    assert client.control("l", "run").rate is None
    assert serves(client, "l")


def test_new_settings_good_and_bad(client) -> None:
    client.open_lab("l")
    client.send("l", "x", params={"max_tokens": 1000})
    with pytest.raises(HostError, match="block_size=0 must be at least 1"):
        client.reconfigure("l", {"block_size": 0})
    assert client.log("l").num_live == 1
    info = client.reconfigure("l", {"block_size": 8, "num_kv_blocks": 32})
    assert (info.generation, info.config.block_size) == (2, 8)
    log = client.log("l")
    assert (log.generation, log.num_live, log.stats.blocks_total) == (2, 0, 32)
    assert serves(client, "l")


def test_one_request_is_stopped_and_the_others_go_on(client) -> None:
    client.open_lab("l")
    first, second = client.send("l", "x", params={"max_tokens": 60}, copies=2)
    assert client.abort("l", first) == 1
    assert client.abort("l", first) == 0, "twice is harmless"
    assert client.abort("l", "nobody") == 0
    log = client.log("l")
    assert log.wait_until(idle, 10)
    assert log.request(first).trace.finish_reason == "abort"
    assert log.request(second).trace.output_tokens == 60


def test_when_everything_is_stopped_the_gauges_are_fresh_at_once(client) -> None:
    client.open_lab("l", {"max_num_seqs": 8})
    log = client.log("l")
    client.send("l", "some prompt of more than one block of tokens", params={"max_tokens": 1000}, copies=16)
    assert log.wait_until(lambda seen: seen.stats.running == 8 and seen.stats.waiting == 8, 10)
    assert client.abort("l") == 16
    assert (log.stats.running, log.stats.waiting, log.stats.kv_usage) == (0, 0, 0.0)
    assert log.num_live == 0 and log.snapshot().running == () == log.snapshot().waiting


def test_two_labs_take_turns_and_record_their_waits(make_client) -> None:
    client = make_client("scripted:seconds=0.01")
    for lab in ("a", "b"):
        client.open_lab(lab)
        client.send(lab, "x", params={"max_tokens": 25})
    logs = [client.log("a"), client.log("b")]
    assert all(log.wait_until(idle, 20) for log in logs)
    for log in logs:
        waited = [step.wait_time for step in log.steps() if step.wait_time > 0]
        assert len(waited) >= 20 and all(wait > 0.009 for wait in waited)


def test_a_step_that_fails_leaves_the_host_alive(client) -> None:
    client.open_lab("l")
    (request,) = client.send("l", [1, FAILS])
    log = client.log("l")
    assert log.wait_until(idle, 10)
    assert "MemoryError" in log.request(request).trace.error
    assert serves(client, "l")


def test_a_closed_lab_is_gone_and_closing_twice_is_harmless(client) -> None:
    client.open_lab("l")
    client.send("l", "x", params={"max_tokens": 1000})
    client.close_lab("l")
    client.close_lab("l")
    assert client.log("l").num_live == 0
    with pytest.raises(HostError, match="not open"):
        client.send("l", "x")
    assert client.open_lab("l").generation == 2
    assert serves(client, "l")
    client.forget("l")
    assert client.log("l").next_index == 0


def test_an_idle_host_uses_no_processor_time(client) -> None:
    client.open_lab("l")
    client.open_lab("slow")
    client.control("slow", "run", rate=100.0)
    assert serves(client, "l")
    process = psutil.Process(client.pid)
    before = process.cpu_times()
    time.sleep(1.0)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.1


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ("", {}, "no tokens"),
        ([], {}, "no tokens"),
        ("x" * 1_000_000, {}, r"1,000,000 characters.*max_model_len=2,048"),
        ("x" * 1_000, {"params": {"max_tokens": 2000}}, r"1000 tokens and max_tokens=2000.*max_model_len=2048"),
        ([1, 300], {}, "token id 300.*256"),
        ([-1], {}, "-1"),
        ("x", {"copies": 65}, "copies=65 must be from 1 to 64"),
        ("x", {"params": {"nonsense": 1}}, "unknown sampling setting 'nonsense'"),
        ("x", {"params": {"seed": 2**80}}, "can't be sent"),
        ("half \ud83d", {}, "lone surrogate"),
        ([2**70], {}, "can't be sent"),
        (3.5, {}, "can't be understood"),
    ],
)
def test_bad_input_is_refused_quickly_with_the_numbers_and_the_lab_goes_on(shared_client, prompt, fields, message) -> None:
    shared_client.open_lab("l")
    start = time.monotonic()
    with pytest.raises(HostError, match=message):
        shared_client.send("l", prompt, **fields)
    assert time.monotonic() - start < 2
    assert serves(shared_client, "l")


@pytest.fixture(scope="module")
def shared_client(tmp_path_factory):
    os.environ["INFERENCE_LAB_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    with EngineClient(model="scripted") as client:
        client.wait_ready(30)
        yield client


def test_control_characters_and_every_kind_of_text_pass(shared_client) -> None:
    shared_client.open_lab("l")
    text = "\x00\x01\x1b[31m\u202e\ufeff\U0001f600\r\n"
    (request,) = shared_client.send("l", text, params={"max_tokens": 2})
    assert shared_client.log("l").request(request).prompt == text


def test_a_command_too_long_for_a_frame_is_refused_by_the_client(shared_client) -> None:
    with pytest.raises(HostError, match="67,108,864"):
        shared_client.send("l", "x" * (MAX_FRAME + 1))
    shared_client.open_lab("l")
    assert serves(shared_client, "l")


def test_labs_have_bounds(make_client) -> None:
    client = make_client("scripted:kv_bytes=1024", options=HostOptions(max_labs=2, kv_quota_bytes=2**25))
    client.open_lab("a")
    with pytest.raises(HostError, match=r"32\.0 MiB.*Set num_kv_blocks to at most 1,"):
        client.open_lab("b", {"num_kv_blocks": 2048})
    client.open_lab("b")
    with pytest.raises(HostError, match="max_labs=2"):
        client.open_lab("c")


def test_many_threads_at_once_each_get_their_own_answer(client) -> None:
    client.open_lab("l", {"max_num_queued_requests": 4000})
    ids: list[str] = []

    def send() -> None:
        for _ in range(20):
            ids.extend(client.send("l", "x", params={"max_tokens": 2}))

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(ids) == len(set(ids)) == 160
    assert client.log("l").wait_until(idle, 20)


# -- loading ---------------------------------------------------------------------------------------


def test_loading_shows_its_progress_and_other_commands_are_told_to_wait(make_client) -> None:
    states: list[HostState] = []
    client = make_client("scripted:load=0.8", wait=False)
    client.on_change.append(states.append)
    with pytest.raises(HostError, match=r"still loading|loaded yet"):
        client.open_lab("l")
    with pytest.raises(HostTimeoutError):
        client.wait_ready(0.05)
    assert client.wait_ready(20).model.title == "Scripted model"
    fractions = [state.progress for state in states if state.state == "loading" and state.progress is not None]
    assert len(fractions) >= 4 and fractions == sorted(fractions)
    client.open_lab("l")


def test_a_model_that_cannot_be_loaded_is_an_answer_not_an_end(make_client) -> None:
    client = make_client("scripted:nonsense=1", wait=False)
    with pytest.raises(HostError, match="can't read 'nonsense=1'"):
        client.wait_ready(20)
    assert client.state.state == "failed"
    with pytest.raises(HostError, match="no model is loaded"):
        client.open_lab("l")
    with pytest.raises(HostError, match="can't read 'more=2'"):
        client.load_model("scripted:more=2")
    client.load_model("scripted")
    client.open_lab("l")
    assert serves(client, "l")


def test_changing_the_model_closes_the_labs(client) -> None:
    client.open_lab("l")
    client.send("l", "x", params={"max_tokens": 1000})
    client.load_model("scripted:seconds=0.001,load=0.3", wait=False)
    assert client.log("l").wait_until(lambda seen: seen.num_live == 0, 10)
    with pytest.raises(HostError, match=r"still loading.*then change it"):
        client.load_model("scripted")
    client.wait_ready(10)
    with pytest.raises(HostError, match="not open"):
        client.send("l", "x")
    assert "model is being changed" in client.log("l").snapshot().notices[-1].text
    client.open_lab("l")
    assert serves(client, "l")


# -- death -----------------------------------------------------------------------------------------


def test_a_crash_while_streaming_is_reported_and_a_restart_works(client) -> None:
    client.open_lab("l")
    client.send("l", "x", params={"max_tokens": 1900})
    log = client.log("l")
    assert log.wait_until(lambda seen: seen.next_index > 5, 10)
    os.kill(client.pid, signal.SIGKILL)
    assert log.wait_until(lambda seen: seen.num_live == 0, 10)
    with pytest.raises(HostGone, match="SIGKILL"):
        client.send("l", "x")
    assert client.state.state == "stopped" and "restart" in client.state.error
    assert client.pid is None
    view = log.snapshot().requests[0]
    assert view.trace.finish_reason == "error" and "SIGKILL" in view.trace.error and view.text.startswith("abc")
    client.restart()
    client.wait_ready(30)
    before = log.version
    assert client.open_lab("l").generation == 2
    assert log.version > before and log.next_index == 0
    assert serves(client, "l")


def test_a_command_in_flight_when_the_host_dies_is_answered(make_client) -> None:
    client = make_client("scripted:seconds=30")
    client.open_lab("l")
    client.send("l", "x")
    threading.Timer(0.3, os.kill, (client.pid, signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(HostGone, match="exit code -9"):
        client.abort("l")
    assert time.monotonic() - start < 5


def test_last_words_are_shown_and_a_host_that_cannot_start_says_why(tmp_path) -> None:
    script = tmp_path / "python.py"
    script.write_text("import sys\nprint('no such library: libfoo', file=sys.stderr)\nsys.exit(7)\n")
    client = EngineClient(model="scripted", host_command=[sys.executable, str(script)])
    client.start()
    with pytest.raises(HostGone, match=r"(?s)exit code 7.*no such library: libfoo"):
        client.wait_ready(10)
    with pytest.raises(HostGone, match="exit code 7"):
        client.open_lab("l")
    client.close()
    nowhere = EngineClient(model="scripted", host_command=[str(tmp_path / "nothing-here")])
    with pytest.raises(HostGone, match="can't be started"):
        nowhere.start()
    assert nowhere.state.state == "stopped"


@pytest.mark.parametrize("model", ["scripted:seconds=60", "scripted:load=60"])
def test_closing_in_the_middle_of_a_step_or_of_loading_is_quick_and_leaves_no_process(model: str) -> None:
    client = EngineClient(model=model)
    client.start()
    pid = client.pid
    if "load" not in model:
        client.wait_ready(20)
        client.open_lab("l")
        client.send("l", "x")
        time.sleep(0.1)
    start = time.monotonic()
    client.close()
    client.close()
    assert time.monotonic() - start < 8
    assert gone(pid, 0.5)
    with pytest.raises(HostGone, match=r"not running|stopped"):
        client.open_lab("l")


def test_a_forgotten_client_takes_its_host_with_it() -> None:
    client = EngineClient(model="scripted")
    client.start()
    client.wait_ready(20)
    pid = client.pid
    del client
    gc.collect()
    assert gone(pid)


PARENT = """
    import sys, time
    from engine.serve.client import EngineClient
    client = EngineClient(model="MODEL", loopback=LOOPBACK)
    client.start()
    if "load" not in client.model:
        client.wait_ready(30)
        client.open_lab("l")
        client.send("l", "x", params={"max_tokens": 2000})
    print(client.pid, flush=True)
    ENDING
"""


def parent(model: str, ending: str = "time.sleep(60)", loopback: bool = False) -> tuple[subprocess.Popen, int]:
    """A process with a client, and the pid of its host."""
    code = textwrap.dedent(PARENT).replace("MODEL", model).replace("ENDING", ending).replace("LOOPBACK", str(loopback))
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    return process, int(process.stdout.readline())


@pytest.mark.parametrize(
    ("model", "loopback"),
    [
        ("scripted", False),
        ("scripted", True),
        ("scripted:seconds=60", False),
        ("scripted:seconds=60", True),
        ("scripted:load=60", False),
        ("tiny", False),
    ],
)
def test_when_the_parent_is_killed_the_host_ends_also_in_a_step_or_in_loading(model: str, loopback: bool) -> None:
    process, host = parent(model, loopback=loopback)
    assert psutil.pid_exists(host)
    process.kill()
    process.wait(5)
    assert gone(host, 10), f"host {host} outlived its parent"  # Far less than 60 s; starting Python alone can take seconds.


@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "raise ValueError('oops')"])
def test_when_the_parent_ends_without_closing_the_host_ends_too(ending: str) -> None:
    process, host = parent("scripted:seconds=0.01", ending)
    process.wait(10)
    assert gone(host, 5)


def test_over_a_loopback_connection_everything_works_the_same(make_client) -> None:
    client = make_client("scripted", loopback=True)
    client.open_lab("l")
    assert serves(client, "l")
    assert "INFERENCE_LAB_TOKEN" not in client._environment()


def test_an_interrupt_from_the_terminal_does_not_end_the_host(client) -> None:
    client.open_lab("l")
    os.kill(client.pid, signal.SIGINT)
    assert serves(client, "l")


# -- the raw connection: a client that is broken, or slow ------------------------------------------


class Raw:
    """A host with a bare socket in place of a client."""

    def __init__(self, options: str = "{}") -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "engine.serve.host", "--fd", str(theirs.fileno()), "--options", options]
            self.process = subprocess.Popen(
                command, pass_fds=(theirs.fileno(),), env=host_environment(dict(os.environ)), stderr=subprocess.PIPE
            )
        self.decoder = msgspec.msgpack.Decoder(Message)

    def send(self, command) -> None:
        send_frame(self.socket, msgspec.msgpack.encode(command))

    def reply(self, seq: int) -> Reply:
        while True:
            message = self.decoder.decode(recv_frame(self.socket))
            if isinstance(message, Reply) and message.seq == seq:
                return message

    def rss(self) -> int:
        return psutil.Process(self.process.pid).memory_info().rss

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()
        self.process.wait(5)
        self.process.stderr.close()


@pytest.mark.parametrize(
    ("frame", "seq"),
    [
        (b"", -1),
        (b"\xc1", -1),
        (b"not msgpack at all", -1),
        (msgspec.msgpack.encode([1, 2]), -1),
        (msgspec.msgpack.encode({"type": "Explode", "seq": 7}), 7),
        (msgspec.msgpack.encode({"type": "Send", "seq": 8, "lab": 3, "prompt": "x"}), 8),
        (msgspec.msgpack.encode({"type": "OpenLab", "seq": 9}), 9),
        (b"\x91" * 100_000, -1),
    ],
)
def test_a_frame_that_makes_no_sense_is_answered_and_the_host_lives(frame: bytes, seq: int) -> None:
    with Raw() as raw:
        send_frame(raw.socket, frame)
        assert "can't be understood" in raw.reply(seq).error
        raw.send(LoadModel(seq=20, model="scripted"))
        assert raw.reply(20).error == ""
        raw.send(Shutdown(seq=21))
        assert raw.reply(21).error == ""
        assert raw.process.wait(5) == 0


def test_a_stream_that_is_not_frames_ends_the_host_with_a_reason() -> None:
    with Raw() as raw:
        raw.socket.sendall(struct.pack("<I", MAX_FRAME + 1) + b"GET / HTTP/1.1\r\n\r\n")
        assert raw.process.wait(5) == 3
        assert b"67,108,864" in raw.process.stderr.read()


def test_a_client_that_does_not_read_costs_bounded_memory_and_then_gets_the_newest() -> None:
    with Raw('{"backlog_units": 200000}') as raw:
        raw.send(LoadModel(seq=1, model="scripted"))
        raw.reply(1)
        raw.send(OpenLab(seq=3, lab="l", config={"max_num_seqs": 64, "num_kv_blocks": 8192}))
        assert raw.reply(3).error == ""
        for seq in range(4, 24):
            raw.send(Send(seq=seq, lab="l", prompt="x" * 50, params={"max_tokens": 1900}, copies=32))
        time.sleep(1.0)
        early = raw.rss()
        busy = psutil.Process(raw.process.pid).cpu_times().user
        time.sleep(2.0)
        assert psutil.Process(raw.process.pid).cpu_times().user > busy + 0.2, "it went on working"
        assert raw.rss() - early < 30 * 2**20
        raw.send(Control(seq=30, lab="l", action="pause"))
        notices, steps, replies = "", [], []
        while 30 not in replies:
            message = raw.decoder.decode(recv_frame(raw.socket))
            if isinstance(message, LabUpdate):
                notices += message.notice
                steps += [step.index for step in message.steps]
            elif isinstance(message, Reply):
                replies.append(message.seq)
        assert [seq for seq in replies if seq < 24] == list(range(4, 24))
        assert "older steps were left out" in notices
        assert steps == sorted(set(steps)) and len(steps) < steps[-1]


def test_commands_without_end_from_a_client_that_does_not_read_cost_bounded_memory() -> None:
    with Raw() as raw:
        raw.send(LoadModel(seq=1, model="scripted"))
        raw.reply(1)
        early = raw.rss()
        raw.socket.settimeout(1.0)
        frame = msgspec.msgpack.encode(Control(seq=5, lab="nowhere", action="pause"))

        def flood() -> None:
            for _ in range(2_000_000):
                send_frame(raw.socket, frame)

        with pytest.raises(TimeoutError):
            flood()
        assert raw.rss() - early < 20 * 2**20


# -- what a client needs and sets ------------------------------------------------------------------


def test_the_client_imports_no_torch_and_starts_quickly() -> None:
    heavy = "{'torch', 'numpy', 'transformers'}"
    code = f"import sys, engine.serve.client, engine.observe.log; print(sorted({heavy} & set(sys.modules)))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True).stdout == "[]\n"


def test_the_scripted_host_imports_no_torch(client) -> None:
    libraries = {os.path.basename(m.path).split(".")[0] for m in psutil.Process(client.pid).memory_maps()}
    assert not any(name.startswith("libtorch") for name in libraries)


def test_how_threads_wait_is_set_unless_the_user_chose() -> None:
    assert host_environment({})["GOMP_SPINCOUNT"] == "10000"
    assert host_environment({"GOMP_SPINCOUNT": "7"})["GOMP_SPINCOUNT"] == "7"
    assert "GOMP_SPINCOUNT" not in host_environment({"OMP_WAIT_POLICY": "PASSIVE"})
    assert "OMP_NUM_THREADS" not in host_environment({})
    assert host_environment({"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"
    assert host_environment({"OMP_NUM_THREADS": "3"}, 2)["OMP_NUM_THREADS"] == "2"


def test_old_logs_are_deleted(tmp_path, monkeypatch) -> None:
    from engine.serve import logfile

    monkeypatch.setenv("INFERENCE_LAB_CACHE", str(tmp_path))
    monkeypatch.setattr(logfile, "KEPT_LOGS", 5)
    for _ in range(12):
        path, file = logfile.new_log()
        file.write("é last\nwords".encode())
        file.close()
    assert len(list((tmp_path / "logs").iterdir())) == 5
    assert logfile.tail(path, lines=1) == "words"
    assert logfile.tail(None) == logfile.tail(tmp_path / "absent") == ""


# -- the real thing --------------------------------------------------------------------------------


def test_the_tiny_model_runs_behind_the_host(make_client) -> None:
    client = make_client("tiny", device="cpu", threads=1, env={"GOMP_SPINCOUNT": "1234"})
    model = client.state.model
    assert (model.device, model.dtype, model.threads, model.omp_wait) == ("cpu", "float32", 1, "spin 1,234")
    info = client.open_lab("l", {"num_kv_blocks": 128})
    assert info.kv_pool_bytes == 129 * 16 * model.kv_bytes_per_token
    log = client.log("l")
    greedy = {"max_tokens": 24, "temperature": 0.0}
    (chat,) = client.send("l", "Why is the sky blue?", params=greedy)
    raw = client.send("l", "Why is the sky blue?", params=greedy, chat=False, copies=2)
    assert log.wait_until(idle, 30)
    views = [log.request(request) for request in (chat, *raw)]
    assert all(view.closed and view.text for view in views)
    assert len(views[0].prompt_token_ids) > len(views[1].prompt_token_ids), "the chat template adds to the prompt"
    assert views[1].text == views[2].text
    steps = log.steps()
    assert steps[-1].forward_time > 0 and steps[-1].flops > 0
    start = time.monotonic()
    with pytest.raises(HostError, match="1,000,000 characters"):
        client.send("l", "word " * 200_000)
    assert time.monotonic() - start < 2
    with pytest.raises(HostError, match="max_model_len=9,000"):
        client.reconfigure("l", {"max_model_len": 9000})
    with pytest.raises(HostError, match="num_kv_blocks=100,000,000"):
        client.reconfigure("l", {"num_kv_blocks": 100_000_000})
    client.reconfigure("l", {"num_kv_blocks": 64})
    client.send("l", "again", params=greedy)
    assert log.wait_until(idle, 30)
    with pytest.raises(HostError, match="no-such-model"):
        client.load_model("./no-such-model")
    assert client.state.state == "failed"
    client.load_model("tiny", "cpu")
    assert client.open_lab("l").generation == 3
