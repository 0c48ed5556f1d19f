"""What can never run is refused at once, with the numbers; what can run never holds more blocks than it needs."""

from __future__ import annotations

import pytest

from engine.core.engine import RequestRefused
from engine.core.sampling_params import SamplingParams
from tests.core.kit import add, assert_idle, assert_oracle, drain, make, prompt_of, state_of, tokens_of


def refuse(engine, prompt, params=None, **options) -> str:
    """The message of a refusal that changed nothing."""
    before, refused = state_of(engine), engine.stats().refused
    with pytest.raises(RequestRefused) as error:
        engine.add_request(prompt, params, **options)
    assert state_of(engine) == before
    assert engine.stats().refused == refused + 1
    assert not engine.has_unfinished()
    return str(error.value)


@pytest.mark.parametrize("budget", [1, 7, 64, 512])
@pytest.mark.parametrize(("length", "count"), [(63, 1), (1, 63), (32, 32), (62, 2)])
def test_a_request_that_fills_the_context_finishes(budget, length, count):
    engine = make(max_model_len=64, max_num_batched_tokens=budget, max_num_seqs=1)
    identity = add(engine, length, count)
    drain(engine)
    assert_oracle(engine, identity)
    assert len(tokens_of(engine, identity)) == count


@pytest.mark.parametrize(
    ("length", "count", "words"),
    [
        (64, 1, ["64 tokens", "max_model_len=64", "63 tokens"]),
        (65, 1, ["65 tokens", "max_model_len=64"]),
        (63, 2, ["63 tokens", "max_tokens=2", "65", "max_model_len=64", "lower max_tokens to 1"]),
        (1, 64, ["1 tokens", "max_tokens=64", "65", "lower max_tokens to 63"]),
    ],
)
def test_a_request_longer_than_the_context_is_refused(length, count, words):
    engine = make(max_model_len=64)
    message = refuse(engine, prompt_of(length), SamplingParams(max_tokens=count))
    for word in words:
        assert word in message


def test_zero_max_tokens_are_refused():
    with pytest.raises(ValueError, match="max_tokens=0"):
        add(make(max_model_len=64), 64, 0)


def test_max_tokens_none_means_as_many_as_context_and_pool_allow():
    engine = make(max_model_len=64, num_kv_blocks=8)
    identity = engine.add_request(prompt_of(10), SamplingParams(max_tokens=None))
    assert engine.request(identity).max_tokens == 54
    drain(engine)
    assert len(tokens_of(engine, identity)) == 54
    small = make(max_model_len=64, num_kv_blocks=2)
    identity = small.add_request(prompt_of(10), SamplingParams(max_tokens=None))
    drain(small)
    assert len(tokens_of(small, identity)) == 23  # 10 + 23 - 1 = 32 stored tokens fill two blocks


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_a_request_that_the_pool_can_never_hold_is_refused(layout):
    engine = make(num_kv_blocks=4, kv_layout=layout, reserve="request")
    message = refuse(engine, prompt_of(60), SamplingParams(max_tokens=40))
    for word in ("7 KV blocks", "60 prompt tokens", "max_tokens=40", "block_size=16", "num_kv_blocks=4"):
        assert word in message
    fits = 5 if layout == "paged" else 4  # an extent reserves a slot for the last token too
    identity = add(engine, 60, fits)
    drain(engine)
    assert_oracle(engine, identity)
    refuse(engine, prompt_of(60), SamplingParams(max_tokens=fits + 1))


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "no tokens"),
        ([1, -1], "-1"),
        ([1, 2.0], "2.0"),
        ([True], "True"),
        (["a"], "'a'"),
        ([1, 320], "320"),
        ([2**70], str(2**70)),
    ],
)
def test_bad_prompts_are_refused(prompt, words):
    engine = make(vocab_size=320)
    assert words in refuse(engine, prompt)
    engine.add_request([319], SamplingParams(max_tokens=2))
    drain(engine)


def test_a_token_id_beyond_64_bits_is_refused_without_a_vocabulary_too():
    assert str(2**63) in refuse(make(), [1, 2**63])


@pytest.mark.parametrize(
    ("options", "words"),
    [({"priority": 1.5}, "priority=1.5"), ({"priority": True}, "priority=True"), ({"cache_salt": 7}, "cache_salt=7")],
)
def test_bad_options_are_refused(options, words):
    assert words in refuse(make(), [1], **options)


def test_min_tokens_beyond_what_fits_are_refused():
    engine = make(max_model_len=64)
    assert "only 54 tokens fit" in refuse(engine, prompt_of(10), SamplingParams(max_tokens=None, min_tokens=55))
    assert "tokenizer" in refuse(engine, [1], SamplingParams(stop="x"))


def test_an_id_is_used_once_whether_running_or_finished_or_a_sample():
    engine = make()
    add(engine, 4, 2, request_id="a", n=2)
    for taken in ("a", "a#1"):
        with pytest.raises(RequestRefused, match=f"request_id='{taken}' was used before"):
            add(engine, 4, 2, request_id=taken)
    drain(engine)
    for taken in ("a", "a#1"):
        assert "was used before" in refuse(engine, [1], request_id=taken)
    add(engine, 4, 2, request_id="b#1")
    with pytest.raises(RequestRefused, match="b#1"):
        add(engine, 4, 2, request_id="b", n=2)
    drain(engine)
    assert_oracle(engine, "b#1")


def test_running_numbers_skip_ids_that_are_taken():
    engine = make()
    add(engine, 3, 1, request_id="0")
    add(engine, 3, 1, request_id="1#1")
    names = [add(engine, 3, 1, n=2), add(engine, 3, 1)]
    assert len({"0", "1#1", *names}) == 4
    drain(engine)
    for name in names:
        assert_oracle(engine, name)


@pytest.mark.parametrize("limit", [1, 3])
def test_a_full_queue_refuses_with_the_numbers_and_takes_again_later(limit):
    engine = make(max_num_queued_requests=limit, max_num_seqs=1)
    for _ in range(limit):
        add(engine, 4, 2)
    with pytest.raises(RequestRefused, match=f"{limit} requests wait already and max_num_queued_requests={limit}"):
        add(engine, 4, 2)
    engine.step()
    add(engine, 4, 2)
    drain(engine)
    assert engine.stats().finished == limit + 1
    assert engine.stats().refused == 1


@pytest.mark.parametrize("length", range(15, 50))
@pytest.mark.parametrize("count", [1, 2, 16, 17, 18])
def test_blocks_held_are_never_more_than_the_stored_tokens_need(length, count):
    engine = make(block_size=16, num_kv_blocks=8, enable_prefix_caching=False)
    identity = add(engine, length, count)
    peak = 0
    while engine.has_unfinished():
        step = engine.step()
        stored = step.scheduled[0].context + step.scheduled[0].num_tokens
        assert step.kv_used == -(-stored // 16)
        peak = max(peak, step.kv_used)
    assert peak == -(-(length + count - 1) // 16)
    assert_oracle(engine, identity)
    assert_idle(engine)


def test_stored_and_reserved_tokens_are_counted():
    engine = make(block_size=16, num_kv_blocks=8)
    add(engine, 20, 5, start=1)
    add(engine, 3, 5, start=2)
    engine.step()
    stats = engine.stats()
    assert (stats.kv_reserved_tokens, stats.kv_stored_tokens) == (48, 23)
    assert (stats.blocks_referenced, stats.kv_usage) == (3, 3 / 8)
