"""Schedules worked out by hand: who computes how many tokens in which step, who waits and why, who is preempted."""

from __future__ import annotations

import pytest

from tests.core.kit import add, assert_oracle, drain, make, rows, tokens_of, who


def test_continuous_batching_as_in_the_textbook_with_d_arriving_at_step_four():
    engine = make(max_num_seqs=3, num_kv_blocks=64)
    add(engine, 4, 4, request_id="A", start=1)
    add(engine, 4, 2, request_id="B", start=2)
    add(engine, 4, 6, request_id="C", start=3)
    seen = []
    for number in range(1, 6):
        if number == 4:
            add(engine, 4, 3, request_id="D", start=4)
        seen.append(who(engine.step()))
    assert seen == ["A B C", "A B C", "A C", "A C D", "C D"]
    drain(engine)


def test_continuous_batching_with_d_queued_takes_the_free_seat_in_the_next_step():
    engine = make(max_num_seqs=3, num_kv_blocks=64)
    for name, count in (("A", 4), ("B", 2), ("C", 5), ("D", 3)):
        add(engine, 4, count, request_id=name, start=ord(name))
    steps = [engine.step() for _ in range(5)]
    assert [who(step) for step in steps] == ["A B C", "A B C", "A C D", "A C D", "C D"]
    blocked = [step.blocked and (step.blocked.request_id, step.blocked.reason) for step in steps]
    assert blocked == [("D", "seats"), ("D", "seats"), None, None, None]
    assert (steps[0].blocked.needed, steps[0].blocked.available) == (1, 0)
    assert [step.num_waiting for step in steps] == [1, 1, 0, 0, 0]
    assert [step.num_running for step in steps] == [3, 3, 3, 3, 2]
    assert not engine.has_unfinished()


def test_a_long_prompt_is_split_by_the_budget_while_decodes_go_on():
    engine = make(max_num_batched_tokens=16, num_kv_blocks=64)
    for name in "ABC":
        add(engine, 4, 9, request_id=name, start=ord(name))
    assert rows(engine.step()) == {"A": 4, "B": 4, "C": 4}
    add(engine, 40, 2, request_id="D", start=9)
    decisions = [rows(engine.step()) for _ in range(5)]
    decodes = {"A": 1, "B": 1, "C": 1}
    assert decisions == [
        {**decodes, "D": 13},
        {**decodes, "D": 13},
        {**decodes, "D": 13},
        {**decodes, "D": 1},
        {**decodes, "D": 1},
    ]
    drain(engine)
    for name in "ABCD":
        assert_oracle(engine, name)


@pytest.mark.parametrize(
    ("budget", "chunks"),
    [(1024, [1024] * 4), (4096, [4096]), (1000, [1000] * 4 + [96]), (4095, [4095, 1]), (8192, [4096])],
)
def test_chunks_of_a_lone_prompt(budget, chunks):
    engine = make(max_num_batched_tokens=budget, max_model_len=4100, num_kv_blocks=260, max_num_seqs=4)
    identity = add(engine, 4096, 2)
    steps = drain(engine)
    assert [rows(step)[identity] for step in steps] == [*chunks, 1]
    assert [row.kind for step in steps for row in step.scheduled] == ["prefill"] * len(chunks) + ["decode"]
    assert [row.sampled >= 0 for step in steps for row in step.scheduled] == [False] * (len(chunks) - 1) + [True, True]
    assert [row.context for step in steps for row in step.scheduled] == [
        *(sum(chunks[:i]) for i in range(len(chunks))),
        4096,
    ]


def test_two_prompts_share_one_budget():
    engine = make(max_num_batched_tokens=16, num_kv_blocks=64)
    add(engine, 10, 2, request_id="A", start=1)
    add(engine, 10, 2, request_id="B", start=2)
    add(engine, 10, 2, request_id="C", start=3)
    steps = drain(engine)
    assert [rows(step) for step in steps] == [{"A": 10, "B": 6}, {"A": 1, "B": 4, "C": 10}, {"B": 1, "C": 1}]
    blocked = steps[0].blocked
    assert (blocked.request_id, blocked.reason, blocked.needed, blocked.available) == ("C", "tokens", 1, 0)


def test_running_requests_beyond_the_budget_wait_their_turn_and_nobody_starves():
    engine = make(max_num_batched_tokens=2, max_num_seqs=4, num_kv_blocks=64)
    for name in "ABCD":
        add(engine, 1, 5, request_id=name, start=ord(name))
    steps = drain(engine)
    assert all(step.num_tokens <= 2 for step in steps)
    assert who(steps[0]) == "A B"
    for name in "ABCD":
        assert_oracle(engine, name)


def test_long_prefill_token_threshold_caps_a_prompt_only_while_others_exist():
    engine = make(max_num_batched_tokens=64, long_prefill_token_threshold=8, num_kv_blocks=64)
    add(engine, 40, 1, request_id="A")
    assert rows(engine.step()) == {"A": 40}
    add(engine, 40, 2, request_id="B", start=2)
    add(engine, 12, 2, request_id="C", start=3)
    decisions = [rows(engine.step()) for _ in range(6)]
    assert decisions[:3] == [{"B": 8, "C": 8}, {"B": 8, "C": 4}, {"B": 8, "C": 1}]
    assert decisions[3] == {"B": 16}  # alone again: the rest of the prompt at once
    drain(engine)
    for name in "ABC":
        assert_oracle(engine, name)


def test_whole_prompts_only_without_chunked_prefill():
    engine = make(enable_chunked_prefill=False, max_num_batched_tokens=64, max_model_len=64, num_kv_blocks=64)
    add(engine, 40, 3, request_id="A", start=1)
    add(engine, 30, 3, request_id="B", start=2)
    add(engine, 5, 3, request_id="C", start=3)
    steps = drain(engine)
    assert [rows(step) for step in steps[:2]] == [{"A": 40}, {"A": 1, "B": 30, "C": 5}]
    blocked = steps[0].blocked
    assert (blocked.request_id, blocked.reason, blocked.needed, blocked.available) == ("B", "tokens", 30, 24)


def test_without_chunked_prefill_a_cached_prefix_counts_less():
    engine = make(enable_chunked_prefill=False, max_num_batched_tokens=64, max_model_len=64, num_kv_blocks=64)
    add(engine, 40, 1, request_id="A", start=1)
    drain(engine)
    add(engine, 40, 1, request_id="B", start=2)
    add(engine, 40, 1, request_id="C", start=1)
    assert rows(engine.step()) == {"B": 40, "C": 8}


# ---------------------------------------------------------------- preemption


def test_fcfs_preempts_the_last_and_puts_it_at_the_head():
    engine = make(block_size=4, num_kv_blocks=4, enable_prefix_caching=False)
    add(engine, 7, 5, request_id="A", start=1)
    add(engine, 7, 5, request_id="B", start=2)
    add(engine, 1, 2, request_id="C", start=3)
    first = engine.step()
    assert rows(first) == {"A": 7, "B": 7}
    assert (first.blocked.request_id, first.blocked.reason) == ("C", "blocks")
    assert (first.blocked.needed, first.blocked.available) == (1, 0)
    assert rows(engine.step()) == {"A": 1, "B": 1}
    third = engine.step()  # A stores its 9th token and needs a block: B, the last, gives up its two
    assert rows(third) == {"A": 1}
    assert [(p.request_id, p.tokens_lost, p.in_favour_of) for p in third.preemptions] == [("B", 8, "A")]
    assert (third.blocked.request_id, third.blocked.reason) == ("B", "preemption")
    assert third.num_waiting == 2
    assert engine.snapshot().waiting == ("B", "C")
    fourth = engine.step()  # B needs 3 blocks for its 9 tokens, one is free: C waits behind it although it would fit
    assert rows(fourth) == {"A": 1}
    assert (fourth.blocked.request_id, fourth.blocked.needed, fourth.blocked.available) == ("B", 3, 1)
    steps = drain(engine)
    assert rows(steps[0]) == {"A": 1}
    resumed = steps[1].scheduled[0]
    assert (resumed.request_id, resumed.kind, resumed.num_tokens, resumed.recomputed) == ("B", "recompute", 9, 8)
    for name in "ABC":
        assert_oracle(engine, name)
    stats = engine.stats()
    assert (stats.preemptions, stats.tokens_lost, stats.tokens_recomputed, stats.tokens_resumed) == (1, 8, 8, 0)
    assert engine.request("B").preemptions == 1


def test_nobody_is_admitted_in_a_step_that_preempted():
    engine = make(block_size=4, num_kv_blocks=5, enable_prefix_caching=False)
    add(engine, 8, 4, request_id="A", start=1)
    add(engine, 10, 4, request_id="B", start=2)
    engine.step()
    add(engine, 1, 1, request_id="C", start=3)
    step = engine.step()  # A needs a third block, B's three come free: C would fit, but waits
    assert rows(step) == {"A": 1}
    assert [p.request_id for p in step.preemptions] == ["B"]
    assert (step.blocked.request_id, step.blocked.reason) == ("B", "preemption")
    assert step.num_waiting == 2
    drain(engine)


def priority_engine(blocks, **fields):
    return make(scheduling_policy="priority", block_size=4, num_kv_blocks=blocks, enable_prefix_caching=False, **fields)


def test_priority_decides_admission_then_arrival():
    engine = priority_engine(64, max_num_seqs=1)
    for name, priority in (("A", 5), ("B", 0), ("C", 5), ("D", -3)):
        add(engine, 2, 1, request_id=name, priority=priority, start=ord(name))
    assert engine.snapshot().waiting == ("D", "B", "A", "C")
    assert [who(engine.step()) for _ in range(4)] == ["D", "B", "A", "C"]


def test_priority_is_ignored_under_fcfs():
    engine = make(max_num_seqs=1)
    for name, priority in (("A", 5), ("B", 0)):
        add(engine, 2, 1, request_id=name, priority=priority)
    assert [who(engine.step()) for _ in range(2)] == ["A", "B"]


def test_the_worst_priority_is_preempted_even_before_the_current_request_and_its_budget_is_refunded():
    engine = priority_engine(6, max_num_batched_tokens=8)
    add(engine, 3, 7, request_id="A", priority=9, start=1)
    engine.step()
    add(engine, 7, 6, request_id="B", priority=0, start=2)
    assert rows(engine.step()) == {"A": 1, "B": 7}
    add(engine, 7, 6, request_id="C", priority=1, start=3)
    # The pool: A 5 tokens in 2 blocks, B 8 in 2, so C's 7 tokens take the last two. Budget: A 1, B 1, C 6 of 7.
    assert rows(engine.step()) == {"A": 1, "B": 1, "C": 6}
    assert engine.stats().blocks_referenced == 6
    # Now B stores its 9th token and finds no block. A is the worst, stands before B and was scheduled already: its one
    # token goes back to the budget, its blocks to B and C.
    step = engine.step()
    assert [(p.request_id, p.tokens_lost, p.in_favour_of) for p in step.preemptions] == [("A", 5, "B")]
    assert rows(step) == {"B": 1, "C": 1}
    assert engine.snapshot().waiting == ("A",)
    assert engine.snapshot().running == ("B", "C")
    drain(engine)
    for name in "ABC":
        assert_oracle(engine, name)


def test_refunded_budget_is_spent_in_the_same_step():
    engine = priority_engine(4, max_num_batched_tokens=3)
    add(engine, 3, 9, request_id="A", priority=9, start=1)
    assert rows(engine.step()) == {"A": 3}
    add(engine, 3, 9, request_id="B", priority=0, start=2)
    add(engine, 4, 2, request_id="C", priority=1, start=3)
    assert rows(engine.step()) == {"A": 1, "B": 2}
    assert rows(engine.step()) == {"A": 1, "B": 1, "C": 1}
    assert rows(engine.step()) == {"A": 1, "B": 1, "C": 1}
    step = engine.step()  # B stores its 5th token: A, scheduled already, gives up its two blocks and its token of budget
    assert [(p.request_id, p.tokens_lost) for p in step.preemptions] == [("A", 6)]
    assert rows(step) == {"B": 1, "C": 2}  # which C's prompt gets
    drain(engine)
    for name in "ABC":
        assert_oracle(engine, name)


def test_the_worst_priority_behind_the_current_request_gives_way():
    engine = priority_engine(4)
    add(engine, 7, 4, request_id="A", priority=0, start=1)
    add(engine, 7, 4, request_id="B", priority=3, start=2)
    engine.step()
    engine.step()
    step = engine.step()
    assert rows(step) == {"A": 1}
    assert [(p.request_id, p.in_favour_of) for p in step.preemptions] == [("B", "A")]
    drain(engine)


def test_a_request_that_is_itself_the_worst_gives_way_and_the_others_go_on():
    engine = priority_engine(4)
    add(engine, 7, 4, request_id="A", priority=3, start=1)
    add(engine, 6, 4, request_id="B", priority=0, start=2)
    engine.step()
    engine.step()
    step = engine.step()  # A stores its 9th token and is the worst itself; B needs no block
    assert rows(step) == {"B": 1}
    assert [(p.request_id, p.in_favour_of) for p in step.preemptions] == [("A", "A")]
    drain(engine)
    assert tokens_of(engine, "B")


def test_a_preempted_request_waits_at_its_place_by_priority():
    engine = priority_engine(4)
    add(engine, 7, 4, request_id="A", priority=1, start=1)
    add(engine, 7, 4, request_id="B", priority=3, start=2)
    engine.step()
    engine.step()
    add(engine, 3, 2, request_id="C", priority=2, start=3)
    add(engine, 3, 2, request_id="D", priority=4, start=4)
    engine.step()
    assert engine.snapshot().waiting == ("C", "B", "D")
    drain(engine)
    for name in "ABCD":
        assert_oracle(engine, name)


# ---------------------------------------------------------------- limits and liveness


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("budget", [16, 40, 512])
def test_six_growing_requests_in_a_small_pool(caching, policy, budget):
    engine = make(
        num_kv_blocks=8,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        scheduling_policy=policy,
        max_model_len=80,
    )
    names = [add(engine, 40, 40, start=i, priority=i % 3) for i in range(1, 7)]
    steps = drain(engine, 1500)
    assert all(step.num_tokens <= budget for step in steps)
    assert engine.stats().preemptions > 0
    for name in names:
        assert_oracle(engine, name)


@pytest.mark.parametrize("caching", [True, False])
def test_a_resumed_request_waits_until_its_whole_context_fits(caching):
    engine = make(num_kv_blocks=6, max_num_batched_tokens=16, enable_prefix_caching=caching)
    names = [add(engine, 40, 24, start=start) for start in (1, 2)]
    drain(engine)
    stats = engine.stats()
    assert 0 < stats.preemptions <= 2
    assert stats.tokens_computed <= 126 + 49 + 16
    for name in names:
        assert_oracle(engine, name)


@pytest.mark.parametrize("blocks", [2, 3, 5, 8])
@pytest.mark.parametrize("caching", [True, False])
def test_prefills_that_fill_the_pool_do_not_lock_it(blocks, caching):
    engine = make(num_kv_blocks=blocks, enable_prefix_caching=caching)
    names = [add(engine, 16, 8, start=start) for start in range(1, 9)]
    drain(engine, 500)
    assert engine.stats().preemptions > 0
    for name in names:
        assert_oracle(engine, name)


def test_small_requests_wait_behind_a_large_one_and_the_step_names_it():
    engine = make(num_kv_blocks=10, enable_prefix_caching=False, max_num_seqs=32)
    runner = add(engine, 80, 10, start=1)  # 6 blocks to the end
    engine.step()
    large = add(engine, 128, 1, start=2)
    small = [add(engine, 5, 2, start=start) for start in range(3, 23)]
    while engine.has_unfinished() and engine.request(runner).finish_reason is None:
        step = engine.step()
        assert rows(step) == {runner: 1}
        assert (step.blocked.request_id, step.blocked.reason, step.blocked.needed) == (large, "blocks", 8)
        assert step.blocked.available == 10 - step.kv_used
        assert step.num_waiting == 21
    step = engine.step()
    assert step.scheduled[0].request_id == large
    drain(engine)
    for name in small:
        assert_oracle(engine, name)
