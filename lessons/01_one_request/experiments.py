"""One request from the prompt to the last token, alone and behind another one."""

from __future__ import annotations

from typing import Any

from lessons.runs import Experiment, RequestRecord, RunRecord, Runs, Send, Value

PROMPT = (
    "A librarian finds a letter between the pages of a book that nobody has borrowed for forty years. "
    "Write the first lines of the letter."
)
OUTPUT = 24
"""Output tokens of the request."""
AHEAD = 16
"""Output tokens of the request that stands before it in the second run."""


def _config(**changes: Any) -> dict[str, Any]:
    base = {
        "max_model_len": 1024, "max_num_batched_tokens": 1024, "max_num_seqs": 4, "block_size": 16, "num_kv_blocks": 128,
        "enable_prefix_caching": False,
    }  # fmt: skip
    return {**base, **changes}


def one() -> Experiment:
    """A single request, alone on the engine."""
    params = {"max_tokens": OUTPUT, "temperature": 0.0, "ignore_eos": True}
    return Experiment(config=_config(), sends=(Send(name="A", prompt=PROMPT, params=params),))


def behind() -> Experiment:
    """B stands behind A, and there is one seat."""
    requests = [
        {"id": "A", "prompt_tokens": 32, "output_tokens": AHEAD},
        {"id": "B", "prompt_tokens": 32, "output_tokens": 8},
    ]
    return Experiment(config=_config(max_num_seqs=1), workload={"arrivals": {"unit": "steps"}, "requests": requests})


def free(prompt_tokens: int = 32, output_tokens: int = 16, ahead: int = 0) -> Experiment:
    """One request of chosen lengths, behind a chosen number of others that take the only seat first."""
    listed: list[dict[str, Any]] = [
        {"id": f"ahead{index}", "prompt_tokens": 32, "output_tokens": 8} for index in range(ahead)
    ]
    listed.append({"id": "mine", "prompt_tokens": prompt_tokens, "output_tokens": output_tokens})
    return Experiment(config=_config(max_num_seqs=1), workload={"arrivals": {"unit": "steps"}, "requests": listed})


EXPERIMENTS = {"one": one, "behind": behind, "free": free}


def _parts(request: RequestRecord) -> dict[str, float]:
    """The three parts of TTFT, seconds."""
    trace = request.trace
    return {
        "tokenise": trace.tokenised - trace.arrival,
        "queue": trace.first_scheduled - trace.tokenised,
        "prefill": trace.token_times[0] - trace.first_scheduled,
    }


def _largest(request: RequestRecord) -> str:
    shares = _parts(request)
    return max(shares, key=lambda name: shares[name])


def _steps(run: RunRecord, name: str) -> int:
    return len(run.rows(name))


def _ms(seconds: float | None) -> float:
    assert seconds is not None
    return 1000 * seconds


def _one(runs: Runs) -> RequestRecord:
    return runs["one"].request("A")


def _share(request: RequestRecord, name: str) -> float:
    shares = _parts(request)
    return 100 * shares[name] / sum(shares.values())


VALUES: dict[str, Value] = {
    "prompt_tokens": lambda runs: _one(runs).trace.prompt_tokens,
    "steps_one": lambda runs: _steps(runs["one"], "A"),
    "first_step_tokens": lambda runs: runs["one"].rows("A")[0][1].num_tokens,
    "later_step_tokens": lambda runs: runs["one"].rows("A")[-1][1].num_tokens,
    "order": lambda runs: _order(_one(runs)),
    "largest_one": lambda runs: _largest(_one(runs)),
    "ttft_ms": lambda runs: _ms(_one(runs).trace.ttft),
    "tpot_ms": lambda runs: _ms(_one(runs).trace.tpot),
    "latency_ms": lambda runs: _ms(_one(runs).trace.e2e_latency),
    "tokenise_ms": lambda runs: 1000 * _parts(_one(runs))["tokenise"],
    "queue_ms": lambda runs: 1000 * _parts(_one(runs))["queue"],
    "prefill_ms": lambda runs: 1000 * _parts(_one(runs))["prefill"],
    "gaps": lambda runs: len(_one(runs).trace.itl),
    "last_step_one": lambda runs: _one(runs).trace.token_steps[-1],
    "first_step_behind": lambda runs: runs["behind"].request("B").trace.token_steps[0],
    "largest_behind": lambda runs: _largest(runs["behind"].request("B")),
    "queue_share_behind": lambda runs: _share(runs["behind"].request("B"), "queue"),
    "ttft_ratio": lambda runs: _ms(runs["behind"].request("B").trace.ttft) / _ms(runs["behind"].request("A").trace.ttft),
    "samples_one": lambda runs: 1.0 if "one" in runs else _missing(),
    "samples_behind": lambda runs: float(len(runs["behind"].requests)),
    "free_ttft": lambda runs: _ms(runs["free"].request("mine").trace.ttft),
    "free_queue": lambda runs: _share(runs["free"].request("mine"), "queue"),
    "free_tpot": lambda runs: _ms(runs["free"].request("mine").trace.tpot) if _has_tpot(runs) else "not defined",
    "free_latency": lambda runs: _ms(runs["free"].request("mine").trace.e2e_latency),
}
"""What the runs of this lesson measure."""


def _has_tpot(runs: Runs) -> bool:
    return runs["free"].request("mine").trace.tpot is not None


def _missing() -> float:
    raise KeyError("one")


def _order(request: RequestRecord) -> list[str]:
    """The stations of a request in the order of their moments."""
    trace = request.trace
    moments = {
        "tokenise": trace.tokenised,
        "queue": trace.queued,
        "prefill": trace.first_scheduled,
        "first": trace.token_times[0],
        "decode": trace.token_times[1],
    }
    return sorted(moments, key=lambda name: (moments[name], list(moments).index(name)))
