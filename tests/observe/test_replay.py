"""Time travel gives exactly the state that the engine had."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.observe.replay import StepGoneError, state_at
from tests.observe.recorded import KINDS, record


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6))
def test_every_recorded_step_is_rebuilt_exactly(seed: int) -> None:
    config, recording = record(seed)
    for step, state in zip(recording.steps, recording.states, strict=True):
        assert state_at(recording.steps, step.index, config.num_kv_blocks).keyframe == state


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())) or "default")
def test_steps_after_a_lost_beginning_are_rebuilt_from_the_next_keyframe(kind: dict) -> None:
    config, recording = record(5, num_actions=900, **kind)
    kept = [step for step in recording.steps if step.index >= 200]
    assert any(step.keyframe for step in kept)
    first_keyframe = next(step.index for step in kept if step.keyframe)
    for step in kept:
        if step.index >= first_keyframe:
            assert state_at(kept, step.index, config.num_kv_blocks).keyframe == recording.states[step.index]
        else:
            with pytest.raises(StepGoneError, match="keyframe"):
                state_at(kept, step.index, config.num_kv_blocks)


def test_during_a_step_its_requests_still_hold_their_blocks() -> None:
    config, recording = record(3, num_actions=200, batching="continuous", kv_layout="paged", use_kv_cache=True)
    ending = [step for step in recording.steps if any(event.op == "free" for event in step.events_after)]
    assert ending
    for step in ending:
        during = state_at(recording.steps, step.index, config.num_kv_blocks, "during")
        assert config.num_kv_blocks - len(during.free) == step.kv_used
        for event in step.events_after:
            if event.op == "free":
                assert during.tables[event.request_id] == tuple(reversed(event.blocks))
        held = {block for table in during.tables.values() for block in table}
        assert set(during.owners) == held


@pytest.mark.parametrize("index", [-1, 10_000_000])
def test_a_step_that_was_never_recorded_is_named_with_those_that_were(index: int) -> None:
    _, recording = record(1, num_actions=50)
    last = recording.steps[-1].index
    with pytest.raises(StepGoneError, match=f"0 to {last}"):
        state_at(recording.steps, index, 8)


def test_ten_thousand_steps_take_a_moment() -> None:
    """The claim is under 20 ms a look; the bound here is far above it and catches only a wrong order of growth."""
    config, recording = record(2, num_actions=10_000, batching="continuous", kv_layout="paged", num_kv_blocks=64)
    begun = time.perf_counter()
    for index in range(len(recording.steps) - 200, len(recording.steps), 10):
        state_at(recording.steps, recording.steps[index].index, config.num_kv_blocks)
    assert (time.perf_counter() - begun) / 20 < 0.5
