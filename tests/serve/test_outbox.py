"""What is unsent stays bounded, in order, and says what it left out."""

import threading

import msgspec
import pytest

from engine.core.outputs import ClosedRequest, EngineStats, OpenedRequest, TokenEvent
from engine.core.trace import Event, Keyframe, Preemption, RequestTrace, Scheduled, StepTrace
from engine.observe.log import step_units
from engine.serve.outbox import MAX_REPLIES, Outbox, closed_units, opened_units, token_units
from engine.serve.protocol import HostState, LabUpdate, Reply

pytestmark = pytest.mark.timeout(30)


def step(index: int, rows: int = 4) -> StepTrace:
    return StepTrace(
        index=index, start=1e9, scheduled=tuple(Scheduled(f"r{i}", "decode", 1, 2**40, 0, 0, 7) for i in range(rows))
    )


def news(lab: str = "a", generation: int = 1, **fields) -> LabUpdate:
    return LabUpdate(lab=lab, generation=generation, **fields)


def test_news_of_a_lab_merge_and_a_reply_never_overtakes_them() -> None:
    outbox = Outbox(10**6)
    outbox.post_update(news(steps=[step(0)], notice="one"))
    outbox.post(Reply(1))
    outbox.post_update(news("b", steps=[step(0)]))
    outbox.post_update(news(steps=[step(1)], stats=EngineStats(steps=2), now=3.0, notice="two"))
    outbox.post(Reply(2))
    first, reply, second, last = (outbox.take() for _ in range(4))
    assert [s.index for s in first.steps] == [0, 1]
    assert first.stats.steps == 2 and first.now == 3.0 and first.notice == "one · two"
    assert (reply.seq, second.lab, last.seq) == (1, "b", 2)


def test_news_after_sending_start_a_new_update() -> None:
    outbox = Outbox(10**6)
    outbox.post_update(news(steps=[step(0)]))
    assert [s.index for s in outbox.take().steps] == [0]
    outbox.post_update(news(steps=[step(1)]))
    assert [s.index for s in outbox.take().steps] == [1]


def test_generations_do_not_mix_and_only_the_newest_few_wait() -> None:
    outbox = Outbox(10**6)
    for generation in range(1, 9):
        outbox.post_update(news(generation=generation, steps=[step(0)]))
    assert [outbox.take().generation for _ in range(3)] == [6, 7, 8]
    outbox.post(Reply(1))
    assert outbox.take().seq == 1


def test_only_the_newest_host_state_waits() -> None:
    outbox = Outbox(10**6)
    for percent in range(100):
        outbox.post(HostState(state="loading", progress=percent / 100))
    outbox.post(Reply(1))
    assert outbox.take().progress == 0.99
    assert outbox.take().seq == 1


def test_a_slow_reader_gets_the_newest_steps_and_is_told_how_many_are_missing() -> None:
    outbox = Outbox(20_000)
    for index in range(5_000):
        tokens = [TokenEvent(f"r{i}", index, 7, "ab", index) for i in range(4)]
        outbox.post_update(news(steps=[step(index)], tokens=tokens))
    update = outbox.take()
    kept = [s.index for s in update.steps]
    assert 50 < len(kept) < 300
    assert kept == list(range(5_000 - len(kept), 5_000))
    assert f"{5_000 - len(kept):,} older steps were left out" in update.notice
    assert min(token.step for token in update.tokens) == kept[0]
    assert sum(map(step_units, update.steps)) + sum(map(token_units, update.tokens)) <= 20_000


def test_requests_are_left_out_last_and_whole() -> None:
    outbox = Outbox(50_000)
    for number in range(300):
        trace = RequestTrace(request_id=str(number), number=number, token_times=[1.0] * 100, token_steps=[1] * 100)
        outbox.post_update(
            news(opened=[OpenedRequest(trace, "p" * 5000, tuple(range(1000)))], closed=[ClosedRequest(trace, "t" * 100)])
        )
    outbox.post_update(news(opened=[OpenedRequest(RequestTrace(request_id="300", number=300), "p" * 5000, ())]))
    update = outbox.take()
    kept = [c.trace.number for c in update.closed]
    assert 50 < len(kept) < 200 and kept == list(range(300 - len(kept), 300))
    assert [o.trace.number for o in update.opened] == [*kept, 300], "a request is known whole, or not at all"
    assert all(len(o.prompt) <= 80 for o in update.opened[:10])
    assert "finished requests were left out" in update.notice
    assert all(len(c.trace.token_times) == 100 for c in update.closed), "a trace is whole or absent, never shortened"


def test_units_bound_the_bytes_on_the_wire() -> None:
    encode = msgspec.msgpack.Encoder().encode
    top = tuple((2**40, "\U0001f600" * 5, 0.123456789) for _ in range(5))
    token = TokenEvent("request-with-a-name", 2**40, 2**40, "\U0001f600" * 100, 2**40, top)
    trace = RequestTrace(request_id="r" * 20, token_times=[0.1] * 50, token_steps=[2**40] * 50, seed=2**62)
    name, large = "r" * 20, range(2**40, 2**40 + 100)
    frame = Keyframe(tuple(large), (1,), {name: tuple(large)}, {name: 2**40}, (name,), (name,))
    events = tuple(Event("preempt", name, tuple(large), 2**40, name) for _ in range(10))
    heavy = StepTrace(
        index=2**40,
        start=0.1,
        scheduled=step(0, rows=50).scheduled,
        events=events,
        events_after=events,
        keyframe=frame,
        preemptions=(Preemption(name, 2**40, name),) * 5,
    )
    assert len(encode(heavy)) <= 9 * step_units(heavy)
    assert len(encode(token)) <= 9 * token_units(token)
    opened = OpenedRequest(trace, "\U0001f600" * 300, tuple(range(2**40, 2**40 + 100)))
    assert len(encode(opened)) <= 9 * (opened_units(opened) + 2 * 50)
    closed = ClosedRequest(trace, "\U0001f600" * 300)
    assert len(encode(closed)) <= 9 * closed_units(closed)


def test_replies_hold_the_reader_back_until_they_are_sent() -> None:
    outbox = Outbox(10**6)
    for seq in range(MAX_REPLIES):
        outbox.post(Reply(seq))
    assert not outbox.wait_for_room(0.01)
    threading.Timer(0.1, outbox.take).start()
    assert outbox.wait_for_room(5)


def test_draining_waits_for_the_last_message_to_be_sent() -> None:
    outbox = Outbox(10**6)
    outbox.post(Reply(1))
    assert not outbox.drain(0.01)
    outbox.take()
    assert not outbox.drain(0.01)
    outbox.done()
    assert outbox.drain(0.01)
