"""Every number of the golden trace: what the tools' own code reported for three requests (tests/observe/data)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.trace import RequestTrace, Scheduled, StepTrace
from engine.observe import other_tools as tools
from engine.observe.metrics import Objectives, measure
from engine.observe.other_tools import Delivery, Stat, StreamRecord, ToolReport

GOLDEN = json.loads((Path(__file__).parent / "data" / "tools_golden.json").read_text())
EXPECTED = GOLDEN["expected"]
SPAN = (GOLDEN["bench_start"] / 1000, GOLDEN["bench_end"] / 1000)
OBJECTIVES = Objectives(ttft=GOLDEN["slo"]["ttft_ms"] / 1000, tpot=GOLDEN["slo"]["tpot_ms"] / 1000)
PERCENTILES = {"median": "p50", "n": "count", "stddev(ddof=1)": "std"}


def golden_records(role_message_ms: float | None = None) -> list[StreamRecord]:
    records = []
    for r in GOLDEN["requests"]:
        role = [] if role_message_ms is None else [(r["sent"] + role_message_ms, 0)]
        chunks = tuple((at / 1000, n) for at, n in [*role, *r["chunks"]])
        records.append(
            StreamRecord(
                request_id=r["id"],
                prompt_tokens=r["prompt_tokens"],
                sent=r["sent"] / 1000,
                chunks=chunks,
                done=r["done"] / 1000,
                queued=r["sent"] / 1000,
                scheduled=(r["sent"] + 10) / 1000,
            )
        )
    return records


def close(value: float) -> Any:
    """The fixture gives all digits, or six decimals."""
    digits = len(repr(value).partition(".")[2])
    return pytest.approx(value, abs=6e-7) if digits == 6 else pytest.approx(value, rel=1e-9, abs=1e-12)


class Checker:
    """Compares a block of the fixture with a report and remembers which keys it has covered."""

    def __init__(self, block: dict[str, Any]) -> None:
        self.block = block
        self.left = set(block)

    def scalar(self, key: str, value: float | None) -> None:
        self.left.discard(key)
        assert value == close(self.block[key]), key

    def stat(self, key: str, stat: Stat | None, factor: float = 1000) -> None:
        """``factor``: from our unit to the fixture's (seconds to milliseconds unless said)."""
        self.left.discard(key)
        assert stat is not None
        for name, value in self.block[key].items():
            if name == "per_request":
                continue
            mine = getattr(stat, PERCENTILES.get(name, name))
            assert mine is not None, (key, name)
            assert (mine if name in ("n", "count") else mine * factor) == close(value), (key, name)

    def ignore(self, *keys: str) -> None:
        self.left -= set(keys)

    def done(self) -> None:
        assert not self.left, f"not compared: {self.left}"


def common(check: Checker, report: ToolReport) -> None:
    check.scalar("duration_s", report.duration)
    check.scalar("request_throughput", report.request_throughput)
    check.scalar("request_goodput", report.goodput)
    check.stat("ttft", report.ttft)


def test_vllm_bench_serve() -> None:
    report = tools.vllm_bench_serve(golden_records(), SPAN, OBJECTIVES)
    check = Checker(EXPECTED["vllm_bench_serve_0.32.0(completions)"])
    common(check, report)
    check.scalar("output_throughput", report.output_throughput)
    check.scalar("total_token_throughput", report.total_throughput)
    check.stat("tpot", report.tpot)
    check.stat("itl", report.itl)
    check.stat("e2el", report.e2e)
    check.scalar("max_output_tokens_per_s", report.peak_output_throughput)
    check.scalar("max_concurrent_requests", report.peak_concurrency)
    check.done()


def test_vllm_takes_an_empty_role_message_for_the_first_token() -> None:
    report = tools.vllm_bench_serve(golden_records(role_message_ms=5), SPAN, OBJECTIVES)
    check = Checker(EXPECTED["vllm_bench_serve_0.32.0(openai-chat, empty role chunk 5 ms after send)"])
    check.scalar("request_goodput", report.goodput)
    check.stat("ttft", report.ttft)
    check.stat("tpot", report.tpot)
    check.stat("itl", report.itl)
    check.stat("e2el", report.e2e)
    check.scalar("max_output_tokens_per_s", report.peak_output_throughput)
    check.done()


@pytest.mark.parametrize("tool", [tools.sglang_native, tools.sglang_openai, tools.genai_perf, tools.aiperf, tools.guidellm])
def test_tools_that_look_for_content_do_not_move_with_a_role_message(tool: Any) -> None:
    assert tool(golden_records(role_message_ms=5), SPAN, OBJECTIVES) == tool(golden_records(), SPAN, OBJECTIVES)


def test_llmperf_counts_the_role_message_only_in_its_divisor() -> None:
    plain, role = tools.llmperf(golden_records(), SPAN), tools.llmperf(golden_records(role_message_ms=5), SPAN)
    assert role.ttft == plain.ttft
    # by hand: last token 206, 310, 170 ms over 6, 5, 2 messages → 34.3333, 62, 85
    assert role.itl is not None and role.itl.mean == pytest.approx((206 / 6 + 310 / 5 + 170 / 2) / 3 / 1000)


def test_sglang_native() -> None:
    report = tools.sglang_native(golden_records(), SPAN, OBJECTIVES)
    check = Checker(EXPECTED["sglang_bench_0.5.23(native /generate)"])
    common(check, report)
    check.scalar("output_throughput", report.output_throughput)
    check.scalar("input_throughput", report.input_throughput)
    check.scalar("concurrency", report.concurrency)
    check.scalar("slo_attainment", report.attainment)
    check.stat("tpot", report.tpot)
    check.stat("itl", report.itl)
    check.stat("e2e", report.e2e)
    check.scalar("max_output_tokens_per_s", report.peak_output_throughput)
    check.done()


def test_sglang_openai() -> None:
    report = tools.sglang_openai(golden_records(), SPAN, OBJECTIVES)
    block = EXPECTED["sglang_bench_0.5.23(OpenAI backends)"]
    check = Checker(block)
    assert block["same_as_native_except"] == "itl and max_output_tokens_per_s"
    check.ignore("same_as_native_except")
    check.stat("itl", report.itl)
    check.scalar("max_output_tokens_per_s", report.peak_output_throughput)
    check.done()
    native = tools.sglang_native(golden_records(), SPAN, OBJECTIVES)
    changed = {f for f in ToolReport.__struct_fields__ if getattr(report, f) != getattr(native, f)}
    assert changed == {"tool", "notes", "itl", "peak_output_throughput"}


def nvidia(check: Checker, report: ToolReport) -> None:
    common(check, report)
    check.scalar("output_token_throughput", report.output_throughput)
    check.stat("time_to_second_token", report.more["time_to_second_token"])
    check.stat("inter_token_latency", report.itl)
    check.stat("output_token_throughput_per_user", report.more["output_token_throughput_per_user"], factor=1)
    check.stat("request_latency", report.e2e)
    check.done()


def test_genai_perf() -> None:
    nvidia(Checker(EXPECTED["genai_perf_0.0.16"]), tools.genai_perf(golden_records(), SPAN, OBJECTIVES))


def test_aiperf() -> None:
    report = tools.aiperf(golden_records(), SPAN, OBJECTIVES)
    block = EXPECTED["aiperf_0.13.0"]
    assert {k.partition("(")[0] for k in block["same_as_genai_perf_for"]} == set(EXPECTED["genai_perf_0.0.16"])
    nvidia(Checker(EXPECTED["genai_perf_0.0.16"]), report)
    check = Checker(block)
    check.ignore("same_as_genai_perf_for")
    check.stat("inter_chunk_latency", report.more["inter_chunk_latency"])
    check.stat("e2e_output_token_throughput", report.more["e2e_output_token_throughput"], factor=1)
    check.stat("decode_duration", report.more["decode_duration"])
    check.done()


def test_guidellm() -> None:
    report = tools.guidellm(golden_records(), SPAN, OBJECTIVES)
    check = Checker(EXPECTED["guidellm_0.8.1"])
    check.scalar("window_s", report.duration)
    check.scalar("requests_per_second_mean", report.request_throughput)
    check.scalar("output_tokens_per_second_mean", report.output_throughput)
    check.scalar("request_concurrency_mean", report.concurrency)
    check.stat("ttft", report.ttft)
    check.stat("itl(weighted by n-1)", report.itl)
    check.stat("tpot(incl. first token, weighted by n)", report.tpot)
    check.stat("request_latency_s", report.e2e, factor=1)
    check.scalar("slo_attainment", report.attainment)
    check.scalar("slo_determined_requests", report.determined)
    check.scalar("request_goodput_mean", report.goodput)
    check.done()


def test_llmperf() -> None:
    report = tools.llmperf(golden_records(), SPAN)
    check = Checker(EXPECTED["llmperf_f1d6bed"])
    check.ignore("assume")
    check.scalar("duration_s", report.duration)
    check.stat("ttft_s", report.ttft, factor=1)
    check.stat("inter_token_latency_s", report.itl, factor=1)
    for record, value in zip(golden_records(), check.block["inter_token_latency_s"]["per_request"], strict=True):
        alone = tools.llmperf([record]).itl
        assert alone is not None and alone.mean == close(value)
    assert report.itl is not None and report.itl.std == pytest.approx(0.066412072)  # a sample's, from 41.2, 77.5, 170 ms
    check.stat("end_to_end_latency_s", report.e2e, factor=1)
    check.stat("request_output_throughput_token_per_s", report.more["request_output_throughput"], factor=1)
    check.scalar("mean_output_throughput_token_per_s", report.output_throughput)
    assert report.request_throughput is not None
    check.scalar("num_completed_requests_per_min", 60 * report.request_throughput)
    check.done()


def test_vllm_prometheus() -> None:
    report = tools.vllm_prometheus(golden_records())
    check = Checker(EXPECTED["vllm_prometheus_0.32.0(server sees the same times)"])
    for counter in ("generation_tokens_total", "prompt_tokens_total"):
        check.scalar(counter, report.counters[counter])
    for name in sorted(check.left):
        histogram, block = report.histograms[name], check.block[name]
        check.ignore(name)
        assert histogram.count == block["count"]
        assert histogram.sum == close(block["sum"])
        for edge, cumulative in block["cum"].items():
            assert histogram.cumulative[histogram.edges.index(float(edge))] == cumulative, (name, edge)
        for share, value in block["histogram_quantile"].items():
            assert histogram.quantile(float(share)) == close(value), (name, share)
    check.done()


def test_vllm_prometheus_queue_time_shows_what_coarse_buckets_do() -> None:
    """10 ms of queueing each: the dashboard's median says 150 ms, because the first edge is at 0.3 s."""
    queue = tools.vllm_prometheus(golden_records()).histograms["request_queue_time_seconds"]
    assert (queue.count, queue.cumulative[0]) == (3, 3)
    assert queue.sum == pytest.approx(0.03)
    assert [queue.quantile(q) for q in (0.5, 0.9, 0.99)] == pytest.approx([0.15, 0.27, 0.297])


def test_vllm_prometheus_parts_obey_their_identity() -> None:
    h = tools.vllm_prometheus(golden_records()).histograms
    queue, prefill, decode, inference = (
        h[f"request_{name}_time_seconds"].sum for name in ("queue", "prefill", "decode", "inference")
    )
    assert queue + prefill + decode == pytest.approx(queue + inference) == pytest.approx(0.686)


def test_third_quantile_of_time_per_token_from_the_written_table() -> None:
    histogram = tools.vllm_prometheus(golden_records()).histograms["request_time_per_output_token_seconds"]
    assert histogram.quantile(0.99) == pytest.approx(0.049625)


# Records from traces ------------------------------------------------------------------------------------------------------


def golden_traces() -> list[RequestTrace]:
    """The same three requests as the engine would record them, one token of a two-token message at a time."""
    traces = []
    for r in GOLDEN["requests"]:
        times = [at / 1000 for at, n in r["chunks"] for _ in range(n)]
        traces.append(
            RequestTrace(
                request_id=r["id"],
                arrival=r["sent"] / 1000,
                tokenised=r["sent"] / 1000,
                queued=r["sent"] / 1000,
                first_scheduled=(r["sent"] + 10) / 1000,
                token_times=times,
                token_steps=list(range(len(times))),
                prompt_tokens=r["prompt_tokens"],
                finished=times[-1],
                finish_reason="length",
            )
        )
    return traces


def test_a_message_a_token_without_delay_is_the_engines_own_view() -> None:
    traces = golden_traces()
    own = measure(traces)
    report = tools.vllm_bench_serve(tools.request_records(traces), SPAN)
    for name in ("ttft", "itl", "tpot", "e2e"):
        ours, theirs = own.latency[name], getattr(report, name)
        for field in ("count", "mean", "std", "p50", "p90", "p95", "p99", "max"):
            assert getattr(ours, field) == pytest.approx(getattr(theirs, field)), (name, field)


def test_stream_interval_raises_itl_and_leaves_tpot() -> None:
    trace = RequestTrace(
        request_id="a",
        arrival=0.0,
        token_times=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        prompt_tokens=3,
        finished=6.0,
        finish_reason="stop",
    )
    (record,) = tools.request_records([trace], Delivery(stream_interval=2, delay=0.5, close_delay=0.25))
    # first token alone, then pairs, then the rest: known at 1, 3, 5, 6; half a second on the way
    assert record.chunks == ((1.5, 1), (3.5, 2), (5.5, 2), (6.5, 1))
    assert record.done == 6.75
    report = tools.vllm_bench_serve([record])
    assert report.itl is not None and report.itl.mean == pytest.approx(5 / 3)
    assert report.tpot is not None and report.tpot.mean == pytest.approx(1.0)


def test_text_held_back_arrives_with_the_next_text_and_is_labelled_apart() -> None:
    """Half an emoji at 0.3, the rest at 0.4: the engine's TTFT is 0.30, what tools that look for text see is 0.40."""
    trace = RequestTrace(
        request_id="a", arrival=0.0, token_times=[0.3, 0.4], prompt_tokens=1, finished=0.4, finish_reason="length"
    )
    (record,) = tools.request_records([trace], Delivery(role_message=0.01), texts={"a": ["", "🙂"]})
    assert record.chunks == ((0.01, 0), (0.3, 0), (0.4, 2))
    assert trace.ttft == 0.3
    assert tools.vllm_bench_serve([record]).ttft.mean == pytest.approx(0.01)
    for tool in (tools.sglang_native, tools.sglang_openai, tools.aiperf, tools.genai_perf, tools.guidellm, tools.llmperf):
        report = tool([record])
        assert report.ttft.mean == pytest.approx(0.4), report.tool
        assert report.output_throughput is not None


def test_unfinished_and_refused_requests_make_no_record_and_failed_ones_an_unsuccessful_one() -> None:
    traces = [
        RequestTrace(request_id="running", arrival=0.0, queued=0.0, token_times=[1.0]),
        RequestTrace(request_id="refused", arrival=0.0, finished=0.0, finish_reason="error"),
        RequestTrace(request_id="failed", arrival=0.0, queued=0.0, finished=2.0, finish_reason="error"),
        RequestTrace(request_id="cut", arrival=0.0, queued=0.0, token_times=[1.0], finished=2.0, finish_reason="abort"),
    ]
    assert [(r.request_id, r.success) for r in tools.request_records(traces)] == [("failed", False), ("cut", False)]


@pytest.mark.parametrize(
    "records",
    [
        [],
        [StreamRecord(request_id="a", prompt_tokens=1, sent=0.0, chunks=(), done=1.0, success=False)],
        [StreamRecord(request_id="a", prompt_tokens=1, sent=1.0, chunks=((1.0, 1),), done=1.0)],
        [StreamRecord(request_id="a", prompt_tokens=1, sent=1.0, chunks=((1.0, 3), (1.0, 1)), done=1.0)],
    ],
    ids=["none", "all failed", "instantaneous", "instantaneous, several tokens"],
)
def test_every_tool_reports_in_every_state(records: list[StreamRecord]) -> None:
    for report in tools.compare(records, None, OBJECTIVES):
        json.dumps(msgspec.to_builtins(report), allow_nan=False)
        assert report.request_throughput is None or report.request_throughput >= 0
        if not records or not records[0].success:
            assert report.completed == 0
            assert report.ttft == Stat()
    prometheus = tools.vllm_prometheus(records)
    assert all(h.quantile(0.5) is None for h in prometheus.histograms.values() if h.count == 0)


def test_failed_requests_leave_latencies_and_count_where_the_tool_counts_them() -> None:
    failed = StreamRecord(request_id="F", prompt_tokens=9, sent=0.0, chunks=((0.001, 1),), done=0.1, success=False)
    before = {r.tool: r for r in tools.compare(golden_records(), SPAN, OBJECTIVES)}
    after = {r.tool: r for r in tools.compare([*golden_records(), failed], SPAN, OBJECTIVES)}
    for tool, report in after.items():
        assert (report.ttft, report.itl, report.tpot, report.e2e) == (
            before[tool].ttft,
            before[tool].itl,
            before[tool].tpot,
            before[tool].e2e,
        )
    assert after["SGLang native"].attainment == pytest.approx(2 / 4)
    assert after["GuideLLM"].attainment == pytest.approx(1 / 3)


def test_genai_perfs_goodput_shifts_when_a_one_token_answer_comes_first() -> None:
    """R3 (no ITL) first: its TTFT meets R1's ITL, R1's TTFT meets R2's; AIPerf keeps them together."""
    records = golden_records()
    shifted = [records[2], records[1], records[0]]
    # GenAI-Perf pairs TTFT 170, 160 with ITL 30 (R2), 27.75 (R1): the second pair is good
    assert tools.genai_perf(shifted, SPAN, Objectives(ttft=0.165, tpot=0.029)).goodput == pytest.approx(1 / 0.35)
    assert tools.genai_perf(shifted, SPAN, Objectives(ttft=0.1, tpot=0.029)).goodput == 0
    assert tools.aiperf(shifted, SPAN, Objectives(ttft=0.1, tpot=0.029)).goodput == pytest.approx(1 / 0.35)


def test_quantile_in_the_last_bucket_and_outside_its_range() -> None:
    h = tools.histogram([0.5, 3.0, 9.0], (1.0, 2.0))
    assert (h.cumulative, h.count, h.sum) == ((1, 1), 3, 12.5)
    assert h.quantile(0.9) == 2.0
    assert h.quantile(0.0) == 0.0
    with pytest.raises(ValueError, match=r"share=1\.5"):
        h.quantile(1.5)


def test_token_edges() -> None:
    assert tools.token_edges(2048) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
    assert tools.token_edges(1) == (1,)


def test_iteration_tokens_count_prompt_and_generated_tokens_of_a_step() -> None:
    step = StepTrace(
        index=0,
        start=0.0,
        scheduled=(Scheduled("a", "prefill", 6, 0, sampled=5), Scheduled("b", "decode", 1, 9, sampled=7)),
    )
    h = tools.vllm_prometheus([], [step, StepTrace(index=1, start=1.0)]).histograms["iteration_tokens_total"]
    assert (h.count, h.sum) == (1, 8.0)  # six prompt tokens, two sampled


@given(st.lists(st.floats(0, 1e4, allow_subnormal=False), min_size=1, max_size=60))
def test_stepped_percentile_is_the_smallest_sample_that_reaches_the_share(samples: list[float]) -> None:
    stat = tools.stepped(samples)
    ordered = sorted(samples)
    assert stat.p90 is not None
    reach = sum(s <= stat.p90 for s in ordered) / len(ordered)
    assert stat.p90 in ordered and reach >= 0.9 - 1e-9
    smaller = [s for s in ordered if s < stat.p90]
    assert not smaller or len(smaller) / len(ordered) < 0.9 + 1e-9


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60), st.floats(0.001, 1))
def test_prometheus_quantile_lies_in_the_bucket_of_the_exact_one(samples: list[float], share: float) -> None:
    h = tools.histogram(samples, tools.LATENCY_BUCKETS)
    value = h.quantile(share)
    rank = max(1, -(-share * len(samples) // 1))
    exact = sorted(samples)[int(rank) - 1]
    bucket = next(i for i, edge in enumerate(h.edges) if exact <= edge)
    lower = h.edges[bucket - 1] if bucket else 0.0
    assert value is not None and lower - 1e-9 <= value <= h.edges[bucket] + 1e-9


@pytest.mark.parametrize("fields", [{"stream_interval": 0}, {"delay": -1.0}, {"close_delay": float("inf")}])
def test_an_impossible_delivery_model_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        Delivery(**fields)
