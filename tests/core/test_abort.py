"""Abort at any moment frees everything at once, disturbs nobody, and is harmless when repeated."""

from __future__ import annotations

import random
import threading

import pytest

from tests.core.kit import add, assert_idle, assert_oracle, drain, make, prompt_of, state_of

CONFIGURATIONS = {
    "paged": {"num_kv_blocks": 12},
    "chunked": {"num_kv_blocks": 12, "max_num_batched_tokens": 5},
    "preempting": {"num_kv_blocks": 4, "max_num_batched_tokens": 16},
    "contiguous": {"num_kv_blocks": 12, "kv_layout": "contiguous", "reserve": "request"},
    "no cache": {"use_kv_cache": False, "max_num_batched_tokens": 300},
    "static": {"num_kv_blocks": 16, "batching": "static", "max_num_batched_tokens": 300},
}


@pytest.mark.parametrize("fields", CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys())
@pytest.mark.parametrize("moment", range(14))
@pytest.mark.parametrize("victim", ["A", "B", "C"])
def test_abort_at_any_moment(fields, moment, victim):
    engine = make(max_num_seqs=2, **fields)
    shared = prompt_of(16)
    for number, name in enumerate("ABC"):
        add(engine, [*shared, number, 3], 5 + number, request_id=name)
    for _ in range(moment):
        engine.step()
        engine.check()
    done = engine.request(victim).finish_reason is not None
    assert engine.abort(victim) is not done
    engine.check()
    assert done or victim not in engine.snapshot().tables
    assert engine.abort(victim) is False
    drain(engine)
    for name in "ABC":
        if name != victim or done:
            assert_oracle(engine, name)
        else:
            assert engine.request(name).finish_reason == "abort"
    assert engine.stats().aborted == (0 if done else 1)
    assert engine.stats().finished == (3 if done else 2)


def test_repeated_late_and_unknown_aborts_are_no_ops():
    engine = make(num_kv_blocks=12)
    shared = prompt_of(32)
    add(engine, [*shared, 1], 6, request_id="A")
    engine.step()
    add(engine, [*shared, 2], 6, request_id="B")
    engine.step()
    assert engine.abort("A") is True
    for unknown in ("A", "nobody", "", "A#1", "B#7"):
        before = state_of(engine)
        assert engine.abort(unknown) is False
        assert state_of(engine) == before
    drain(engine)
    assert_oracle(engine, "B")
    assert engine.abort("B") is False
    assert engine.abort_all() == 0
    assert_idle(engine)


def fork_engine(**fields):
    fields.setdefault("num_kv_blocks", 20)
    return make(block_size=4, max_num_seqs=6, max_num_batched_tokens=4, **fields)


@pytest.mark.parametrize("moment", range(12))
@pytest.mark.parametrize("target", ["A", "A#1", "A#2", "all"])
@pytest.mark.parametrize("blocks", [20, 6])
def test_abort_of_samples_before_at_and_after_the_fork(moment, target, blocks):
    engine = fork_engine(num_kv_blocks=blocks)
    add(engine, 10, 12, request_id="A", n=3)
    add(engine, 5, 3, request_id="B", start=2)
    for _ in range(moment):
        engine.step()
        engine.check()
    if target == "all":
        assert engine.abort_all() > 0
    else:
        alive = {s.index for s in engine.output("A").outputs if s.finish_reason is None}
        index = int(target[2:] or 0) if "#" in target else None
        assert engine.abort(target) is bool(alive if index is None else index in alive)
    engine.check()
    assert engine.stats().running <= 6
    drain(engine)
    reasons = [sample.finish_reason for sample in engine.output("A").outputs]
    if target in ("A", "all"):
        assert reasons == ["abort"] * 3
    else:
        assert reasons == ["abort" if i == int(target[2:]) else "length" for i in range(3)]
    assert engine.stats().aborted == reasons.count("abort") + (engine.request("B").finish_reason == "abort")


def test_aborting_all_samples_one_by_one_before_the_fork_gives_back_their_seats():
    engine = fork_engine()
    add(engine, 10, 6, request_id="A", n=3)
    assert engine.step().seats == 3
    assert engine.abort("A#1")
    assert engine.step().seats == 2
    assert engine.abort("A#2")
    assert engine.abort("A#2") is False
    assert engine.step().seats == 1
    engine.check()
    drain(engine)
    assert [s.finish_reason for s in engine.output("A").outputs] == ["length", "abort", "abort"]


@pytest.mark.parametrize("fields", CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys())
@pytest.mark.parametrize("moment", range(4))
def test_gauges_are_fresh_right_after_everything_is_aborted(fields, moment):
    engine = make(max_num_seqs=8, max_model_len=64, **fields)
    for start in range(16):
        add(engine, 10, 8, start=start)
    for _ in range(moment):
        engine.step()
    assert engine.abort_all() == 16
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_usage, stats.aborted) == (0, 0, 0.0, 16)
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    assert_idle(engine)
    assert engine.has_pending_events()
    step = engine.step()
    assert step.scheduled == ()
    assert sum(event.op == "finish" for event in step.events) == 16
    assert not engine.has_pending_events()
    count = engine.stats().steps
    engine.step()
    assert engine.stats().steps == count  # an idle engine writes no more records
    identity = add(engine, 4, 3)
    drain(engine)
    assert_oracle(engine, identity)


@pytest.mark.timeout(60)
def test_aborts_from_a_second_thread_never_stop_the_others():
    engine = make(max_num_seqs=1, num_kv_blocks=8)
    draw = random.Random(3)
    errors = []
    for round_number in range(200):
        names = [f"{name}{round_number}" for name in "ABCD"]
        for start, name in enumerate(names):
            add(engine, 6, 3, request_id=name, start=start)
        pause = draw.random() * 2e-4

        def cancel(names=names, pause=pause):
            try:
                threading.Event().wait(pause)
                engine.abort(names[2])
                while engine.request(names[0]).finish_reason is None:
                    pass
                engine.abort(names[1])
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=cancel)
        thread.start()
        for _ in range(100):
            if not engine.has_unfinished():
                break
            engine.step()
        thread.join(10)
        assert not thread.is_alive()
        assert_oracle(engine, names[0])
        assert_oracle(engine, names[3])
        assert_idle(engine)
    assert errors == []


def test_a_listener_may_abort_the_request_it_hears_of():
    class Impatient:
        engine = None

        def opened(self, event): ...
        def closed(self, event): ...
        def stepped(self, step): ...
        def token(self, event):
            self.engine.abort(event.request_id)

    listener = Impatient()
    engine = listener.engine = make(num_kv_blocks=8, listener=listener)
    add(engine, 4, 1, request_id="A")
    add(engine, 4, 5, request_id="B", start=2)
    drain(engine)
    assert engine.request("A").output_tokens == 1
    assert engine.request("B").finish_reason == "abort"
