"""The KV cache: the same answer with it and without it, and the bytes it takes."""

from __future__ import annotations

from typing import Any

from engine.observe.formulas import kv_bytes
from lessons.runs import Experiment, RunRecord, Runs, Value

OUTPUT = 64
"""Output tokens of the request that runs with the cache and without it; its prompt is one token."""
PROMPT, SHARED, ANSWER = 40, 32, 10
"""Of the two requests whose bytes are counted: prompt tokens, of which shared, and output tokens."""


def _config(**changes: Any) -> dict[str, Any]:
    base = {
        "max_model_len": 256, "max_num_batched_tokens": 256, "max_num_seqs": 4, "block_size": 16, "num_kv_blocks": 32,
        "enable_prefix_caching": False,
    }  # fmt: skip
    return {**base, **changes}


def _alone(prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    return {
        "arrivals": {"unit": "steps"},
        "requests": [{"id": "A", "prompt_tokens": prompt_tokens, "output_tokens": output_tokens}],
    }


def without() -> Experiment:
    """No cache: every step computes the whole sequence again."""
    return Experiment(config=_config(use_kv_cache=False), workload=_alone(1, OUTPUT))


def cached() -> Experiment:
    """With the cache."""
    return Experiment(config=_config(), workload=_alone(1, OUTPUT))


def sized() -> Experiment:
    """Two requests whose prompts begin alike; the second comes a step later and shares the first one's blocks."""
    requests = [
        {"id": name, "at": at, "prompt_tokens": PROMPT, "prefix_tokens": SHARED, "output_tokens": answer}
        for name, at, answer in (("A", 0, ANSWER + 1), ("B", 1, ANSWER))
    ]
    return Experiment(
        config=_config(enable_prefix_caching=True), workload={"arrivals": {"unit": "steps"}, "requests": requests}
    )


def free(use_kv_cache: str = "on", prompt_tokens: int = 16, output_tokens: int = 32) -> Experiment:
    """One request of chosen lengths, with the cache or without it."""
    return Experiment(config=_config(use_kv_cache=use_kv_cache == "on"), workload=_alone(prompt_tokens, output_tokens))


EXPERIMENTS = {"without": without, "cached": cached, "sized": sized, "free": free}
PAIRS = {
    "cached": {"with the KV cache": "cached", "without it": "without"},
    "without": {"without the KV cache": "without"},
}
"""Which runs one picture shows together."""


def _computed(run: RunRecord) -> int:
    return sum(step.num_tokens for step in run.work)


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _end_ms(run: RunRecord) -> float:
    """Median time of the last eight steps, milliseconds."""
    return 1000 * _median([step.end - step.start for step in run.work[-8:]])


def _mean_ms(run: RunRecord) -> float:
    return 1000 * sum(step.end - step.start for step in run.work) / len(run.work)


def _fact(run: RunRecord, name: str) -> int:
    return int(run.model.get(name, 0))


def _token_bytes(run: RunRecord) -> int:
    """2 · layers · KV heads · head dimension · bytes an element, as the loaded model says."""
    return _fact(run, "kv_bytes_per_token")


def _fullest(run: RunRecord) -> int:
    """The last step that both requests are in."""
    return max(step.index for step in run.work if len(step.scheduled) == 2)


def _stored(run: RunRecord) -> int:
    """Tokens with stored K and V at the fullest step, each request's counted by itself."""
    return sum(run.state(_fullest(run)).computed.values())


def _blocks(run: RunRecord) -> int:
    """Different blocks that are held at the fullest step."""
    return len(run.state(_fullest(run)).owners)


def _partial(run: RunRecord) -> int:
    """Empty slots in last blocks at the fullest step."""
    state = run.state(_fullest(run))
    size = run.config.block_size
    return sum(len(table) * size - state.computed[request] for request, table in state.tables.items())


def _saved(run: RunRecord) -> int:
    """Slots that sharing saves at the fullest step."""
    state = run.state(_fullest(run))
    held = sum(len(table) for table in state.tables.values())
    return (held - len(state.owners)) * run.config.block_size


def _sizes(runs: Runs) -> dict[str, float]:
    run = runs["sized"]
    each = _token_bytes(run)
    size = run.config.block_size
    held = _blocks(run) * size
    return {
        "formula, 2 requests": _stored(run) * each,
        "last blocks, not full": _partial(run) * each,
        "shared, held once": -_saved(run) * each,
        "held by requests =": held * each,
        "the rest of the pool": (run.config.num_kv_blocks * size - held) * each,
        "null block": size * each,
        "allocated =": run.pool_bytes,
    }


SIZES = {"sized": _sizes}
"""Experiment → named sizes in bytes for the picture of sizes."""


def _grows(run: RunRecord) -> str:
    """Whether the tokens computed in a step grow over the run."""
    first, last = run.work[1].num_tokens, run.work[-1].num_tokens
    return "grows" if last > first else "same"


VALUES: dict[str, Value] = {
    "computed_without": lambda runs: _computed(runs["without"]),
    "computed_cached": lambda runs: _computed(runs["cached"]),
    "last_step_without": lambda runs: runs["without"].work[-1].num_tokens,
    "last_step_cached": lambda runs: runs["cached"].work[-1].num_tokens,
    "last_index": lambda runs: runs["without"].work[-1].index,
    "work_ratio": lambda runs: _computed(runs["without"]) / _computed(runs["cached"]),
    "growth_cached": lambda runs: _grows(runs["cached"]),
    "end_ratio": lambda runs: _end_ms(runs["without"]) / _end_ms(runs["cached"]),
    "end_without_ms": lambda runs: _end_ms(runs["without"]),
    "end_cached_ms": lambda runs: _end_ms(runs["cached"]),
    "samples_end": lambda runs: float(len(runs["without"].work[-8:])),
    "example_mib": lambda runs: kv_bytes(num_layers=32, num_kv_heads=8, head_dim=128, tokens=4096, element_bytes=2) / 2**20,
    "layers": lambda runs: _fact(runs["sized"], "num_layers"),
    "heads": lambda runs: _fact(runs["sized"], "num_heads"),
    "kv_heads": lambda runs: _fact(runs["sized"], "num_kv_heads"),
    "head_dim": lambda runs: _fact(runs["sized"], "head_dim"),
    "title": lambda runs: str(runs["sized"].model.get("title", "the script")),
    "token_bytes": lambda runs: _token_bytes(runs["sized"]),
    "stored_tokens": lambda runs: _stored(runs["sized"]),
    "fullest": lambda runs: _fullest(runs["sized"]),
    "held_blocks": lambda runs: _blocks(runs["sized"]),
    "held_slots": lambda runs: _blocks(runs["sized"]) * runs["sized"].config.block_size,
    "partial_slots": lambda runs: _partial(runs["sized"]),
    "saved_slots": lambda runs: _saved(runs["sized"]),
    "hit_tokens": lambda runs: runs["sized"].request("B").trace.cached_tokens,
    "formula_bytes": lambda runs: _stored(runs["sized"]) * _token_bytes(runs["sized"]),
    "held_bytes": lambda runs: _blocks(runs["sized"]) * runs["sized"].config.block_size * _token_bytes(runs["sized"]),
    "pool_bytes": lambda runs: runs["sized"].pool_bytes,
    "free_computed": lambda runs: _computed(runs["free"]),
    "free_largest": lambda runs: max(step.num_tokens for step in runs["free"].work[1:] or runs["free"].work),
    "free_ms": lambda runs: _mean_ms(runs["free"]),
    "free_end_ms": lambda runs: _end_ms(runs["free"]),
}
"""What the runs of this lesson measure."""
