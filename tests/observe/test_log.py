"""The mirror of a lab tells exactly what the engine would, stays within its bounds, and never goes backwards."""

import random
import threading

import pytest

from engine.core.clock import VirtualClock
from engine.core.config import EngineConfig
from engine.core.engine import Engine
from engine.core.outputs import ClosedRequest, EngineStats, OpenedRequest, TokenEvent
from engine.core.runner import ScriptedRunner
from engine.core.sampling_params import SamplingParams
from engine.core.trace import Event, RequestTrace, Scheduled, StepTrace
from engine.observe.log import TraceLog, step_units
from engine.serve.protocol import LabInfo, LabUpdate
from engine.serve.scripted import ByteCodec


class Feed:
    """An engine whose listener fills updates, as a host does."""

    def __init__(self, config: EngineConfig) -> None:
        self.clock = VirtualClock()
        self.clock.advance(100)
        self.config = config
        runner = ScriptedRunner(lambda request: 97 + request.num_output_tokens % 26, self.clock)
        self.engine = Engine(config, runner, self.clock, codec=ByteCodec(), vocab_size=256, listener=self)
        self.lists: dict[str, list] = {"opened": [], "steps": [], "tokens": [], "closed": []}

    def opened(self, event):
        self.lists["opened"].append(event)

    def token(self, event):
        self.lists["tokens"].append(event)

    def closed(self, event):
        self.lists["closed"].append(event)

    def stepped(self, step):
        self.lists["steps"].append(step)

    def update(self, **fields) -> LabUpdate:
        lists, self.lists = self.lists, {name: [] for name in self.lists}
        return LabUpdate(lab="l", generation=1, stats=self.engine.stats(), now=self.clock.now(), **lists, **fields)

    def info(self) -> LabInfo:
        return LabInfo(lab="l", config=self.config, mode="running", rate=None, generation=1, kv_pool_bytes=0)


def simple_trace(request_id: str, number: int = 0) -> RequestTrace:
    return RequestTrace(request_id=request_id, number=number, arrival=0.0, queued=0.0)


def opened(request_id: str, number: int = 0) -> OpenedRequest:
    return OpenedRequest(simple_trace(request_id, number), "prompt", (1, 2, 3))


def decode_step(index: int, *ids: str) -> StepTrace:
    rows = tuple(Scheduled(request_id, "decode", 1, 5, sampled=9) for request_id in ids)
    return StepTrace(index=index, start=float(index), end=index + 0.5, scheduled=rows)


def update(**fields) -> LabUpdate:
    return LabUpdate(lab="l", generation=fields.pop("generation", 1), **fields)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("seed", range(4))
def test_the_log_equals_the_engine_after_every_update(policy: str, every: int, seed: int) -> None:
    chance = random.Random(seed)
    config = EngineConfig(
        max_model_len=96, max_num_batched_tokens=32, max_num_seqs=4, block_size=4, num_kv_blocks=30, scheduling_policy=policy
    )
    feed, log = Feed(config), TraceLog()
    engine, known = feed.engine, []
    log.apply(feed.update(info=feed.info()))
    preempted = 0
    for round_number in range(800):
        if chance.random() < 0.2 and round_number < 160:
            prompt = [chance.randrange(97, 100) for _ in range(chance.randrange(1, 50))]
            params = SamplingParams(max_tokens=chance.randrange(1, 40), n=chance.choice([1, 1, 1, 3]))
            first = engine.add_request(prompt, params, priority=chance.randrange(3))
            known += engine.request(first).samples or (first,)
        if chance.random() < 0.03 and known:
            engine.abort(chance.choice(known))
        if engine.has_unfinished() or engine.has_pending_events():
            engine.step(slow=chance.random() < 0.1)
        if round_number % every:
            continue
        log.apply(feed.update())
        truth, seen = engine.snapshot(), log.snapshot(last_steps=3, max_finished=1000)
        assert seen.waiting == truth.waiting
        assert seen.running == truth.running
        assert seen.stats == engine.stats()
        assert [view.trace.request_id for view in seen.requests] == known
        for view in seen.requests:
            expected = engine.request(view.trace.request_id)
            if not view.closed:
                expected.cache_note = view.trace.cache_note
                assert view.trace.slow or not expected.slow
                expected.slow = view.trace.slow
            assert view.trace == expected
            assert view.closed == (expected.finish_reason is not None)
            assert view.text == "".join(chr(97 + i % 26) for i in range(expected.output_tokens))
            assert len(view.tokens) == expected.output_tokens
            preempted = max(preempted, expected.preemptions)
    assert preempted > 0
    assert log.num_live == 0


def test_steps_are_found_by_index_across_a_gap_and_beyond_the_ring() -> None:
    log = TraceLog(max_steps=100)
    log.apply(update(steps=[decode_step(i) for i in [*range(500), *range(600, 700)]]))
    assert (log.first_index, log.next_index, log.steps_let_go) == (600, 700, 500)
    assert log.step(599) is None
    assert log.step(650).index == 650
    assert log.step(700) is None
    assert [step.index for step in log.steps(698)] == [698, 699]
    assert [step.index for step in log.steps(0, 601)] == [600, 601]
    for index in range(700, 5000):
        log.apply(update(steps=[decode_step(index)]))
    assert log.first_index == 4900
    assert len(log.steps()) == 100
    assert len(log._steps) < 500, "memory is given back, not only hidden"


def test_an_empty_log_has_an_empty_range() -> None:
    log = TraceLog()
    assert log.first_index == log.next_index == 0
    seen = log.snapshot()
    assert seen.steps == () and seen.requests == () and seen.stats == EngineStats()
    assert log.request("nobody") is None


def test_heavy_steps_go_earlier_than_light_ones() -> None:
    heavy = StepTrace(index=0, start=0.0, events=(Event("alloc", "a", tuple(range(10_000))),))
    log = TraceLog(max_units=50_000)
    log.apply(update(steps=[StepTrace(index=i, start=0.0, events=heavy.events) for i in range(20)]))
    assert len(log.steps()) == 50_000 // step_units(heavy)
    log.apply(update(steps=[StepTrace(index=20, start=0.0, events=(Event("alloc", "a", tuple(range(90_000))),))]))
    assert [step.index for step in log.steps()] == [20], "the newest step is always kept"


def test_tokens_and_finished_requests_are_bounded_and_the_newest_win() -> None:
    log = TraceLog(max_finished=10, max_tokens=100, max_times=1000)
    for number in range(40):
        name = f"r{number}"
        trace = simple_trace(name, number)
        log.apply(update(opened=[OpenedRequest(trace, "p", ())]))
        log.apply(update(tokens=[TokenEvent(name, i, 1, "x", i) for i in range(20)]))
        final = RequestTrace(
            request_id=name, number=number, token_times=[0.1] * 20, token_steps=[1] * 20, finish_reason="stop"
        )
        log.apply(update(closed=[ClosedRequest(final, "x" * 20)]))
    views = log.snapshot(max_finished=100).requests
    assert [view.trace.number for view in views] == list(range(30, 40))
    assert sum(len(view.tokens) for view in views) <= 100
    assert len(views[-1].tokens) == 20 and views[0].tokens_left_out == 20 and views[0].text == "x" * 20
    assert log.finished_let_go == 30


def test_a_live_request_with_endless_tokens_loses_the_oldest() -> None:
    log = TraceLog(max_tokens=100)
    log.apply(update(opened=[opened("a")]))
    for i in range(1000):
        log.apply(update(tokens=[TokenEvent("a", i, 1, "x", i)]))
    view = log.request("a")
    assert len(view.tokens) <= 100 and view.tokens[-1].index == 999
    assert view.tokens[0].index == view.tokens_left_out
    assert view.text == "x" * 1000


def test_long_token_times_push_old_requests_out() -> None:
    log = TraceLog(max_times=1000)
    for number in range(5):
        final = RequestTrace(request_id=str(number), number=number, token_times=[0.0] * 400, finish_reason="stop")
        log.apply(update(opened=[opened(str(number), number)], closed=[ClosedRequest(final, "")]))
    assert [trace.number for trace in log.traces()] == [3, 4]


def test_a_new_generation_empties_the_log_and_an_old_one_is_ignored() -> None:
    log = TraceLog()
    log.apply(update(opened=[opened("0")], steps=[decode_step(0, "0")], now=5.0))
    before = log.version
    log.apply(update(generation=2, steps=[decode_step(0), decode_step(1)], now=0.1))
    assert log.version > before and log.next_index == 2 and log.request("0") is None and log.now == 0.1
    log.apply(update(generation=1, steps=[decode_step(7)]))
    assert log.next_index == 2


def test_when_the_engine_is_gone_live_requests_end_with_the_reason() -> None:
    log = TraceLog()
    stats = EngineStats(running=1, waiting=1, blocks_referenced=3, blocks_total=8)
    log.apply(update(opened=[opened("0"), opened("1", 1)], steps=[decode_step(0, "0")], stats=stats))
    log.end_all("the process is gone")
    seen = log.snapshot()
    assert [view.trace.error for view in seen.requests] == ["the process is gone"] * 2
    assert all(view.closed and view.trace.finish_reason == "error" for view in seen.requests)
    assert (seen.stats.running, seen.stats.waiting, seen.stats.kv_usage) == (0, 0, 0.0)
    assert seen.waiting == seen.running == () and seen.notices[-1].text == "the process is gone"


def test_a_closing_that_got_lost_is_noticed_when_the_engine_is_idle() -> None:
    log = TraceLog()
    log.apply(update(opened=[opened("0")], stats=EngineStats(running=1)))
    log.apply(update(stats=EngineStats()))
    assert log.num_live == 0
    assert "left out" in log.request("0").trace.error


def test_a_snapshot_does_not_change_afterwards() -> None:
    log = TraceLog()
    log.apply(update(opened=[opened("0")], steps=[decode_step(0, "0")], tokens=[TokenEvent("0", 0, 1, "a", 0)]))
    seen = log.snapshot()
    log.apply(update(steps=[decode_step(1, "0")], tokens=[TokenEvent("0", 1, 1, "b", 1)]))
    assert seen.requests[0].trace.token_times == [0.5] and seen.requests[0].text == "a" and len(seen.steps) == 1
    assert log.request("0").text == "ab"


def test_readers_wait_for_news_and_see_consistent_states() -> None:
    log = TraceLog()
    log.apply(update(opened=[opened("0")]))
    wrong: list[str] = []

    def watch() -> None:
        version = 0
        while log.next_index < 2000:
            newer = log.wait(version, timeout=5)
            seen = log.snapshot(last_steps=5)
            trace = seen.requests[0].trace
            if (
                newer <= version
                or len(trace.token_times) != len(trace.token_steps)
                or seen.next_index != trace.output_tokens
            ):
                wrong.append(f"{newer} {version} {seen.next_index} {trace.output_tokens}")
            version = seen.version
            if version >= 2001:
                return

    watchers = [threading.Thread(target=watch) for _ in range(3)]
    for thread in watchers:
        thread.start()
    for index in range(2000):
        log.apply(update(steps=[decode_step(index, "0")]))
    for thread in watchers:
        thread.join(20)
        assert not thread.is_alive()
    assert wrong == []
    assert log.wait(log.version, timeout=0.01) == log.version
    assert not log.wait_until(lambda seen: seen.next_index > 9999, timeout=0.01)
