"""Random lives of an engine: add, step, abort, fork, NaN and failing runners, tiny pools, every configuration.

After every action the engine's own check must pass, and so must the invariants written down here, which read only
``snapshot()``, ``stats()`` and the trace. When drained, everything is returned and each request has exactly its tokens.
"""

from __future__ import annotations

import os
import sys
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from engine.core.engine import RequestRefused
from engine.core.trace import StepTrace
from tests.core.kit import VOCABULARY, MemoryRunner, QueueRunner, add, assert_idle, make, note_schedules, oracle, prompt_of
from tests.core.replay_model import Model

ACTIONS = Counter[str]()
"""Actions run in this process, by kind."""
SEEN = Counter[str]()
"""What happened to the engines: a soak that never preempts or copies proves little."""

configurations = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 2, 4]),
        "num_kv_blocks": st.integers(16, 56),  # here: tokens
        "max_num_seqs": st.integers(1, 5),
        "max_num_queued_requests": st.sampled_from([3, 100, 100, 100]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "async_scheduling": st.booleans(),
    },
    optional={
        "max_num_batched_tokens": st.integers(1, 40),
        "enable_prefix_caching": st.booleans(),
        "enable_chunked_prefill": st.booleans(),
        "long_prefill_token_threshold": st.integers(1, 6),
    },
)
baselines = st.sampled_from(
    [
        {},
        {},
        {},
        {"batching": "static"},
        {"kv_layout": "contiguous", "reserve": "request"},
        {"batching": "static", "kv_layout": "contiguous", "reserve": "request"},
        {"use_kv_cache": False},
    ]
)

requests = st.fixed_dictionaries(
    {
        "family": st.integers(0, 1),
        "shared": st.sampled_from([0, 3, 8, 12]),
        "own": st.integers(1, 6),
        "max_tokens": st.integers(1, 14),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "priority": st.integers(0, 2),
        "salt": st.sampled_from([None, None, None, "s"]),
        "stop": st.sampled_from([(), (), tuple(range(0, VOCABULARY, 5))]),
        "min_tokens": st.integers(0, 3),
    }
)


def possible(fields: dict, baseline: dict) -> dict:
    """The settings with what the combination rules forbid taken out."""
    blocks = max(2, fields["num_kv_blocks"] // fields["block_size"])
    fields = {**fields, **baseline, "max_model_len": 40, "num_kv_blocks": blocks}
    whole = baseline.get("batching") == "static" or "use_kv_cache" in baseline
    if whole:
        fields.pop("enable_chunked_prefill", None)
        fields["async_scheduling"] = False
    if baseline:
        fields.pop("enable_prefix_caching", None)
    if whole or fields.get("enable_chunked_prefill") is False:
        fields.pop("long_prefill_token_threshold", None)
        if "max_num_batched_tokens" in fields:
            fields["max_num_batched_tokens"] += 40
    return fields


def bad_hash(parent, tokens, salt):
    return bytes([sum(tokens) % 3])


class EngineMachine(RuleBasedStateMachine):
    """One engine and what must be true of it."""

    @initialize(fields=configurations, baseline=baselines, weak_hash=st.booleans(), queue=st.booleans())
    def build(self, fields, baseline, weak_hash, queue):
        runner = QueueRunner if queue else MemoryRunner
        self.engine = make(runner, block_hash=bad_hash if weak_hash else None, **possible(fields, baseline))
        self.engine.runner.keep_batches = False
        self.config = self.engine.config
        self.scheduled = note_schedules(self.engine)
        self.asked: dict[str, dict] = {}
        self.wasted = 0
        self.model = Model.of(self.engine.snapshot())

    @rule(options=requests)
    def add(self, options):
        self.add_one(**options)

    @rule(options=st.lists(requests, min_size=2, max_size=5))
    def add_several(self, options):
        for one in options:
            self.add_one(**one)

    def add_one(self, family, shared, own, max_tokens, n, priority, salt, stop, min_tokens):
        ACTIONS["add"] += 1
        prompt = [*prompt_of(shared, family), *prompt_of(own, len(self.asked) % 5)]
        minimum = min(min_tokens, max_tokens)
        before = self.engine.snapshot()
        try:
            options = {"n": n, "priority": priority, "cache_salt": salt, "stop_token_ids": stop, "min_tokens": minimum}
            name = add(self.engine, prompt, max_tokens, **options)
        except RequestRefused as refused:
            SEEN["refusals"] += 1
            self.refused_with_numbers(str(refused))
            assert self.engine.snapshot() == before
            return
        self.asked[name] = {"prompt": prompt, "max_tokens": max_tokens, "n": n, "stop": stop, "min_tokens": minimum}

    @staticmethod
    def refused_with_numbers(message: str):
        assert any(character.isdigit() for character in message)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            ACTIONS["step"] += 1
            self.one_step()

    def one_step(self) -> StepTrace:
        unfinished = self.engine.has_unfinished()  # before the step
        pending = self.engine.has_pending_events()
        step = self.engine.step()
        assert self.engine.runner.faults == []
        if unfinished or pending:
            self.model.before(step)
            assert not step.scheduled or self.model.keyframe() == self.scheduled.pop(step.index)
            self.model.after(step)
            assert self.scheduled or self.model.keyframe() == self.engine.snapshot()
            assert not self.scheduled or step.events_after == ()
        assert unfinished == (step.num_tokens > 0), "a step with unfinished requests computes something, another nothing"
        assert step.num_tokens <= self.config.token_budget
        assert step.num_running <= step.seats <= self.config.max_num_seqs
        assert step.kv_used + step.kv_cached <= (self.config.num_kv_blocks if self.config.use_kv_cache else 0)
        SEEN["copies on write"] += sum(event.op == "cow" for event in step.events)
        SEEN["tokens computed in vain"] += self.engine.stats().tokens_wasted - self.wasted
        self.wasted = self.engine.stats().tokens_wasted
        happened = [*step.events, *step.events_after]
        assert [e.request_id for e in happened if e.op == "preempt"] == [p.request_id for p in step.preemptions]
        if not self.config.async_scheduling:
            assert not step.preemptions or not any(event.op == "admit" for event in step.events)
            assert self.wasted == 0
        return step

    @rule(
        kind=st.sampled_from(["abort"] * 6 + ["NaN"] * 4 + ["runner raises", "device raises", "abort all"]),
        which=st.integers(0, 30),
        sample=st.sampled_from(["", "", "#1", "#2", "#9"]),
    )
    def disturb(self, kind, which, sample):
        running = self.engine.snapshot().running
        if kind == "abort":
            self.abort(str(which % (len(self.asked) + 1)), sample)
        elif kind == "abort all":
            self.engine.abort_all()
            assert self.engine.stats().running == self.engine.stats().waiting == 0
            assert self.engine.has_unfinished() == bool(self.scheduled)
        elif kind == "device raises" and isinstance(self.engine.runner, QueueRunner):
            self.engine.runner.fail_collect = True
        elif kind == "NaN" and running:
            self.engine.runner.poison.add(running[which % len(running)])
        else:
            kind = "runner raises"
            self.engine.runner.fail_next = RuntimeError("now and then")
        ACTIONS[kind] += 1

    def abort(self, name, sample):
        try:
            alive = self.engine.request(f"{name}{sample}").finish_reason is None
        except KeyError:
            alive = False
        if not sample and name in self.asked:
            alive = any(output.finish_reason is None for output in self.engine.output(name).outputs)
        assert self.engine.abort(f"{name}{sample}") is alive

    @invariant()
    def sound(self):
        if not hasattr(self, "engine"):
            return
        engine, config = self.engine, self.config
        engine.check()
        state, stats = engine.snapshot(), engine.stats()
        pool = range(1, config.num_kv_blocks + 1) if config.use_kv_cache else range(0)
        held = Counter(block for table in state.tables.values() for block in table)
        assert all(len(set(table)) == len(table) for table in state.tables.values())
        assert len(set(state.free)) == len(state.free)
        assert not set(state.free) & set(held)
        assert sorted([*state.free, *held]) == list(pool)
        assert set(state.cached) <= set(pool)
        unreferenced = set(state.cached) & set(state.free)
        assert stats.blocks_referenced == len(held)
        assert stats.blocks_cached == len(unreferenced)
        assert stats.blocks_free == len(state.free) - len(unreferenced)
        assert [engine._kv.pool.ref_count[block] for block in pool] == [held[block] for block in pool]
        for name, table in state.tables.items():
            if config.kv_layout == "contiguous":
                assert list(table) == list(range(table[0], table[0] + len(table)))
                assert state.computed[name] <= len(table) * config.block_size
            elif config.use_kv_cache:
                assert len(table) == -(-state.computed[name] // config.block_size)
        assert not set(state.waiting) & set(state.running)
        assert stats.running == len(state.running) <= config.max_num_seqs
        assert stats.waiting == len(state.waiting)
        assert stats.kv_stored_tokens <= stats.kv_reserved_tokens == len(held) * config.block_size
        for name in state.waiting:
            assert name not in state.tables
        assert len(self.scheduled) <= 1
        assert all(min(entry.tokens) >= 0 for entry in engine._kv.pool._known.values())

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.runner.fail_next, engine.runner.fail_collect = None, False
        engine.runner.poison.clear()
        work = sum(a["n"] * (len(a["prompt"]) + a["max_tokens"]) for a in self.asked.values())
        limit = 20 + 4 * work  # a generous bound: every step computes something, and recomputation ends
        for _ in range(limit):
            if not engine.has_unfinished():
                break
            self.one_step()
            self.sound()
        assert not engine.has_unfinished(), f"not drained after {limit} steps"
        assert_idle(engine)
        stats = engine.stats()
        if isinstance(engine.runner, QueueRunner):
            assert engine.runner.in_flight == []
        SEEN["preemptions"] += stats.preemptions
        SEEN["prefix-cache hits"] += stats.prefix_hit_blocks
        SEEN["evictions"] += stats.evictions
        SEEN["padded tokens"] += stats.tokens_padded
        SEEN["finished requests"] += stats.finished
        SEEN["failed requests"] += stats.failed
        self.step_when_idle()
        for name, asked in self.asked.items():
            output = engine.output(name)
            assert output.finished
            assert [sample.index for sample in output.outputs] == list(range(asked["n"]))
            for sample in output.outputs:
                self.right_tokens(asked, sample)

    def step_when_idle(self):
        if self.engine.has_pending_events():
            self.one_step()
        count = self.engine.stats().steps
        assert self.engine.step().scheduled == ()
        assert self.engine.stats().steps == count

    @staticmethod
    def right_tokens(asked, sample):
        expected = oracle(asked["prompt"], asked["max_tokens"], sample.index)
        stops = [i for i, token in enumerate(expected) if token in asked["stop"] and i >= asked["min_tokens"]]
        if stops:
            expected = expected[: stops[0] + 1]
        if sample.finish_reason in ("stop", "length"):
            assert sample.token_ids == expected
            assert sample.finish_reason == ("stop" if stops else "length")
        else:
            assert sample.finish_reason in ("abort", "error")
            assert sample.token_ids == expected[: len(sample.token_ids)]
            assert len(sample.token_ids) < len(expected)


# Enough to meet every configuration many times; hypothesis's own database and shrinking stay on.
EngineMachine.TestCase.settings = settings(
    max_examples=350, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngineMachine = EngineMachine.TestCase


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_random_actions(capsys):
    """As many actions as SOAK_ACTIONS asks for (100,000); says how many were run."""
    goal = int(os.environ.get("SOAK_ACTIONS", "100000"))
    many_actions(EngineMachine, goal, ACTIONS, SEEN, capsys, steps=60)
    assert all(SEEN[kind] for kind in ("preemptions", "copies on write", "prefix-cache hits", "evictions", "padded tokens"))


def many_actions(machine, goal, actions, seen, capsys, steps):
    """Run a machine, ``steps`` actions a life, until ``actions`` counts the goal; says what it did and met."""
    actions.clear()
    seen.clear()
    while actions.total() < goal:
        examples = max(1, min(200, (goal - actions.total()) // steps))
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                derandomize=False,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    with capsys.disabled():
        for title, counts in (("actions run", actions), ("seen on the way", seen)):
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.most_common())
            total = f" {counts.total():,}" if counts is actions else ""
            sys.stdout.write(f"\n{title}:{total} ({kinds})")
