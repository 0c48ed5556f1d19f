"""The trace tells everything: its rows add up to the counters, and replaying its events gives the engine's state."""

from __future__ import annotations

import random

import msgspec
import pytest

from engine.core import engine as engine_module
from engine.core.trace import RequestTrace, StepTrace, letter
from tests.core.kit import add, drain, make
from tests.core.replay_model import Model

CONFIGURATIONS = [
    {},
    {"num_kv_blocks": 9},
    {"num_kv_blocks": 9, "scheduling_policy": "priority"},
    {"num_kv_blocks": 9, "enable_prefix_caching": False, "max_num_batched_tokens": 7},
    {"num_kv_blocks": 12, "max_num_batched_tokens": 5},
    {"num_kv_blocks": 30, "kv_layout": "contiguous", "reserve": "request"},
    {"num_kv_blocks": 30, "batching": "static"},
    {"num_kv_blocks": 30, "batching": "static", "kv_layout": "contiguous", "reserve": "request"},
    {"use_kv_cache": False},
]


@pytest.mark.parametrize("fields", CONFIGURATIONS, ids=str)
@pytest.mark.parametrize("keyframe_every", [3, 256])
def test_replaying_the_events_gives_the_engines_state_at_every_step_from_every_keyframe(fields, keyframe_every, monkeypatch):
    monkeypatch.setattr(engine_module, "KEYFRAME_EVERY", keyframe_every)
    draw = random.Random(11)
    engine = make(block_size=4, max_num_seqs=4, max_model_len=48, **fields)
    can_fork = fields.get("batching") != "static" and "kv_layout" not in fields and "use_kv_cache" not in fields
    models: list[Model] = []
    steps: list[StepTrace] = []
    live: list[str] = []
    while len(steps) < 150 or engine.has_unfinished():
        if len(steps) < 150 and draw.random() < 0.4:
            samples = draw.choice([1, 1, 2, 3]) if can_fork else 1
            shape = {"n": samples, "start": draw.randrange(3), "priority": draw.randrange(3)}
            live.append(add(engine, draw.randrange(1, 18), draw.randrange(1, 12), **shape))
        if live and draw.random() < 0.08:
            engine.abort(draw.choice(live) + draw.choice(["", "", "#1"]))
        if draw.random() < 0.06 and engine.snapshot().running:
            engine.runner.poison.add(draw.choice(engine.snapshot().running))
        if draw.random() < 0.03:
            engine.runner.fail_next = RuntimeError("now and then")
        step = engine.step()
        engine.check()
        assert engine.runner.faults == []
        if step.index < engine.stats().steps and (not steps or step.index > steps[-1].index):
            steps.append(step)
            if step.keyframe is not None:
                for model in models:
                    assert model.keyframe() == step.keyframe
                models.append(Model.of(step.keyframe))
            for model in models:
                model.step(step)
                assert model.keyframe() == engine.snapshot()
        assert len(steps) < 1000
    assert len(models) >= (1 if keyframe_every > len(steps) else len(steps) // keyframe_every)
    assert_sums(engine, steps)


def assert_sums(engine, steps: list[StepTrace]) -> None:
    """Sums over the rows of all steps are the engine's counters."""
    stats = engine.stats()
    rows = [row for step in steps for row in step.scheduled]
    work = [row for row in rows if row.kind != "padding"]
    events = [event for step in steps for event in (*step.events, *step.events_after)]
    assert stats.steps == len(steps)
    assert [step.index for step in steps] == list(range(len(steps)))
    assert stats.tokens_computed == sum(row.num_tokens for row in work)
    assert stats.tokens_padded == sum(row.num_tokens for row in rows if row.kind == "padding")
    assert stats.tokens_recomputed == sum(row.recomputed for row in work)
    assert stats.tokens_cached + stats.tokens_resumed == sum(row.cached for row in work)
    assert stats.tokens_generated == sum(row.sampled >= 0 for row in work)
    assert stats.preemptions == sum(len(step.preemptions) for step in steps)
    assert stats.tokens_lost == sum(p.tokens_lost for step in steps for p in step.preemptions)
    assert stats.evictions == sum(len(event.blocks) for event in events if event.op == "evict")
    finished = [event.other for event in events if event.op == "finish"]
    assert stats.aborted == finished.count("abort")
    assert stats.failed == finished.count("error")
    assert stats.finished == finished.count("stop") + finished.count("length")
    for step in steps:
        assert step.num_tokens <= step.token_budget
        assert step.seats <= engine.config.max_num_seqs
        assert step.num_running <= step.seats


@pytest.mark.parametrize("fields", CONFIGURATIONS, ids=str)
def test_request_traces_agree_with_the_rows(fields):
    engine = make(block_size=4, max_num_seqs=4, max_model_len=48, **fields)
    names = [add(engine, 5 + start, 3 + start, start=start) for start in range(7)]
    steps = drain(engine)
    for name in names:
        trace = engine.request(name)
        rows = [(step, row) for step in steps for row in step.scheduled if row.request_id == name and row.kind != "padding"]
        sampled = [(step.index, step.end, row.sampled) for step, row in rows if row.sampled >= 0]
        assert trace.token_steps == [index for index, _, _ in sampled]
        assert trace.token_times == [end for _, end, _ in sampled]
        assert engine.output(name).outputs[0].token_ids == [token for _, _, token in sampled]
        assert trace.first_scheduled == rows[0][0].start
        assert trace.finished == trace.token_times[-1]
        assert trace.recomputed_tokens == sum(row.recomputed for _, row in rows)
        assert trace.preemptions == sum(p.request_id == name for step in steps for p in step.preemptions)
        assert trace.ttft == trace.token_times[0]
        assert trace.e2e_latency == trace.token_times[-1]


def test_times_are_engine_time():
    engine = make(num_kv_blocks=16, max_num_batched_tokens=4)
    engine.clock.advance(10.0)
    name = add(engine, 8, 3, arrival=9.0)
    steps = drain(engine)
    trace = engine.request(name)
    assert (trace.arrival, trace.queued, trace.first_scheduled) == (9.0, 10.0, 10.0)
    assert trace.token_times == [12.0, 13.0, 14.0]
    assert [(step.start, step.end) for step in steps] == [(10.0, 11.0), (11.0, 12.0), (12.0, 13.0), (13.0, 14.0)]
    assert (trace.ttft, trace.tpot, trace.itl, trace.e2e_latency) == (3.0, 1.0, [1.0, 1.0], 5.0)


def test_metrics_of_short_and_unfinished_requests_are_none_not_zero():
    engine = make(num_kv_blocks=16)
    one, none = add(engine, 3, 1), add(engine, 3, 5)
    engine.abort(none)
    drain(engine)
    assert engine.request(one).tpot is None
    assert engine.request(one).itl == []
    trace = engine.request(none)
    assert (trace.ttft, trace.tpot, trace.itl, trace.e2e_latency) == (None, None, [], None)
    assert trace.finished >= 0


def test_slow_steps_and_waits_are_marked():
    engine = make(num_kv_blocks=16)
    fast, slow = add(engine, 3, 1), add(engine, 3, 3)
    assert engine.step(wait_time=0.25).wait_time == 0.25
    assert engine.step(slow=True).slow
    drain(engine)
    assert not engine.request(fast).slow
    assert engine.request(slow).slow


def test_records_are_immutable_and_copies_do_not_change_later():
    engine = make(num_kv_blocks=16)
    name = add(engine, 3, 3)
    step = engine.step()
    early = engine.request(name)
    with pytest.raises(AttributeError):
        step.index = 5
    drain(engine)
    assert early.output_tokens == 1
    assert engine.request(name).output_tokens == 3


@pytest.mark.parametrize("encode", [msgspec.msgpack, msgspec.json], ids=["msgpack", "json"])
def test_records_survive_a_round_trip(encode):
    engine = make(block_size=4, num_kv_blocks=5, max_num_seqs=3)
    names = [add(engine, 7, 6, start=start) for start in range(4)]
    steps = drain(engine)
    for step in steps:
        assert encode.decode(encode.encode(step), type=StepTrace) == step
    for name in names:
        trace = engine.request(name)
        assert encode.decode(encode.encode(trace), type=RequestTrace) == trace


def test_letters_count_like_the_columns_of_a_spreadsheet():
    assert [letter(n) for n in (0, 25, 26, 51, 52, 701, 702)] == ["A", "Z", "AA", "AZ", "BA", "ZZ", "AAA"]


def test_finished_requests_are_forgotten_after_a_while_and_say_so(monkeypatch):
    monkeypatch.setattr(engine_module, "KEEP_FINISHED", 3)
    engine = make(num_kv_blocks=8)
    names = [add(engine, 3, 1) for _ in range(5)]
    drain(engine)
    assert engine.request(names[-1]).output_tokens == 1
    with pytest.raises(KeyError, match="before the last"):
        engine.request(names[0])
    with pytest.raises(KeyError, match="unknown"):
        engine.output("nobody")
