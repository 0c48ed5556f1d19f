"""Random lives of an ``LLM`` on a real model: requests of every kind come, run, fork and are cancelled in tiny pools.

After every action the engine's own check holds. At the end everything is returned, and each request is judged by itself:

* greedy: every token is the oracle's after the tokens before it (to within a near tie);
* seeded: the tokens are those that the request gets in an engine of its own;
* one whose sequence holds the poisoned token: it ends with "error" as soon as the token was fed to the model, alone.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from functools import lru_cache
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from safetensors.torch import load_file, save_file

from engine import SamplingParams
from tests.cases.kit import Model, assert_idle, assert_oracle, checked_step, prompt_of
from tests.fixtures import make_rand

ACTIONS = Counter[str]()
"""Actions run in this process, by kind."""
SEEN = Counter[str]()
"""What happened to the engines: lives that never preempt or copy prove little."""
EVERYTHING = (
    "preemptions", "copies on write", "prefix-cache hits", "evictions", "padded tokens", "finished requests",
    "failed requests", "refusals", "greedy tokens compared", "seeded tokens compared",
)  # fmt: skip
POISON = 255
LIMIT = 40


@lru_cache(maxsize=1)
def model() -> Model:
    """A random checkpoint in which one token's embedding is NaN (its head is not tied, so that others don't notice)."""
    folder = Path(tempfile.mkdtemp(prefix="lives"))
    try:
        path = make_rand(folder / "model")
        tensors = load_file(path / "model.safetensors")
        tensors["model.embed_tokens.weight"][POISON] = float("nan")
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        loaded = Model.load(path)
        assert_oracle(loaded, loaded.llm().generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8)))
        return loaded  # the oracle holds the weights in memory from here on
    finally:
        shutil.rmtree(folder)


def weak_hash(parent, tokens, salt):
    return bytes([sum(tokens) % 3])


PAGED = {
    "max_num_batched_tokens": st.integers(5, 40),
    "enable_prefix_caching": st.booleans(),
    "async_scheduling": st.booleans(),
}
configurations = st.one_of(
    st.fixed_dictionaries(PAGED, optional={"long_prefill_token_threshold": st.integers(1, 6)}),
    st.fixed_dictionaries(PAGED, optional={"scheduling_policy": st.just("priority")}),
    st.fixed_dictionaries({"enable_prefix_caching": st.booleans(), "scheduling_policy": st.just("priority")}),
    st.sampled_from(
        [
            {"enable_chunked_prefill": False, "max_num_batched_tokens": LIMIT},
            {"batching": "static"},
            {"batching": "static", "kv_layout": "contiguous", "reserve": "request"},
            {"kv_layout": "contiguous", "reserve": "request", "max_num_batched_tokens": 11},
            {"use_kv_cache": False, "max_num_batched_tokens": 90},
        ]
    ),
)
requests = st.fixed_dictionaries(
    {
        "shared": st.sampled_from([0, 3, 8, 12]),
        "own": st.integers(1, 6),
        "max_tokens": st.integers(1, 14),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "priority": st.integers(0, 2),
        "salt": st.sampled_from([None, None, None, "s"]),
        "seed": st.sampled_from([None, None, 1, 2]),
        "poison": st.sampled_from([False] * 9 + [True]),
    }
)


@lru_cache(maxsize=4096)
def alone(prompt: tuple[int, ...], seed: int, samples: int, max_tokens: int) -> list[list[int]]:
    """The samples of a seeded request in an engine of its own."""
    (output,) = model().llm(max_model_len=LIMIT).generate([list(prompt)], seeded(seed, samples, max_tokens))
    return [sample.token_ids for sample in output.outputs]


def seeded(seed: int, samples: int, max_tokens: int) -> SamplingParams:
    return SamplingParams(seed=seed, n=samples, temperature=1.3, top_p=0.95, frequency_penalty=0.2, max_tokens=max_tokens)


class Lives(RuleBasedStateMachine):
    """One engine on the shared model."""

    @initialize(
        fields=configurations, size=st.sampled_from([1, 2, 4, 16]), tokens=st.integers(40, 72), weak=st.booleans(),
        seats=st.integers(1, 5),
    )  # fmt: skip
    def build(self, fields, size, tokens, weak, seats):
        blocks = -(-tokens // size)
        hashing = weak_hash if weak else None
        self.llm = model().llm(
            max_model_len=LIMIT, block_size=size, num_kv_blocks=blocks, max_num_seqs=seats, block_hash=hashing, **fields
        )
        self.asked: dict[str, dict] = {}

    @rule(options=requests)
    def add(self, options):
        self.add_one(**options)

    @rule(options=st.lists(requests, min_size=2, max_size=4))
    def add_several(self, options):
        for one in options:
            self.add_one(**one)

    def add_one(self, shared, own, max_tokens, n, priority, salt, seed, poison):
        ACTIONS["add"] += 1
        prompt = [*prompt_of(shared, 1, below=POISON)[:shared], *prompt_of(own, len(self.asked) % 4, below=POISON)]
        if poison:
            prompt[len(prompt) // 2] = POISON
        greedily = SamplingParams(temperature=0, n=n, max_tokens=max_tokens)
        params = greedily if seed is None else seeded(seed, n, max_tokens)
        try:
            name = self.llm.add_request(prompt, params, priority=priority, cache_salt=salt)
        except ValueError as refusal:
            self.refused(str(refusal))
            return
        self.asked[name] = {"prompt": prompt, "seed": seed, "n": n, "max_tokens": max_tokens, "poison": poison}

    @staticmethod
    def refused(message):
        assert "n=" in message, "only samples can be too many here"
        SEEN["refusals"] += 1

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            ACTIONS["step"] += 1
            self.one_step()

    def one_step(self):
        unfinished = self.llm.has_unfinished()
        step = checked_step(self.llm)
        assert unfinished == (step.num_tokens > 0)
        SEEN["copies on write"] += sum(event.op == "cow" for event in step.events)

    @rule(which=st.integers(0, 20), sample=st.sampled_from(["", "", "#1", "#2"]))
    def abort(self, which, sample):
        ACTIONS["abort"] += 1
        name = f"{which % (len(self.asked) + 1)}{sample}"
        self.llm.abort(name)
        assert not self.llm.abort(name)

    @invariant()
    def sound(self):
        if hasattr(self, "llm"):
            self.llm.check()

    def teardown(self):
        if not hasattr(self, "llm"):
            return
        for _ in range(3000):
            if not self.llm.has_unfinished():
                break
            self.one_step()
        assert_idle(self.llm)
        stats = self.llm.stats()
        SEEN.update(
            {
                "preemptions": stats.preemptions,
                "prefix-cache hits": stats.prefix_hit_blocks,
                "evictions": stats.evictions,
                "padded tokens": stats.tokens_padded,
                "finished requests": stats.finished,
                "failed requests": stats.failed,
            }
        )
        self.judge()

    def judge(self):
        greedy_outputs = []
        for name, asked in self.asked.items():
            output = self.llm.output(name)
            assert output.finished and len(output.outputs) == asked["n"]
            for sample in output.outputs:
                self.ended_rightly(asked, sample)
            if asked["poison"]:
                continue
            if asked["seed"] is None:
                greedy_outputs.append(output)
                continue
            expected = alone(tuple(asked["prompt"]), asked["seed"], asked["n"], asked["max_tokens"])
            for sample, tokens in zip(output.outputs, expected, strict=True):
                assert sample.token_ids == tokens[: len(sample.token_ids)]
                SEEN["seeded tokens compared"] += len(sample.token_ids)
        count = sum(len(sample.token_ids) for output in greedy_outputs for sample in output.outputs)
        SEEN["greedy tokens compared"] += count
        if count:
            assert_oracle(model(), [output for output in greedy_outputs if output.outputs])

    @staticmethod
    def ended_rightly(asked, sample):
        tokens = sample.token_ids
        if sample.finish_reason == "length":
            assert len(tokens) == asked["max_tokens"] and not asked["poison"]
            assert POISON not in tokens[:-1]
        elif sample.finish_reason == "error":
            assert "NaN" in sample.error
            assert tokens == [] if asked["poison"] else tokens[-1] == POISON
        else:
            assert sample.finish_reason == "abort"
            assert len(tokens) < asked["max_tokens"] and not (asked["poison"] and tokens)
