"""Steps on a device that is late: graphs, tokens that only the device knows, pinned memory, times. No GPU is needed."""

import random
import weakref

import pytest
import torch

from engine import LLM, SamplingParams
from engine.core.config import EngineConfig
from engine.core.runner import PENDING, StepBatch, Work
from engine.llm import resolve_config
from engine.model import backend as backend_module
from engine.model import runner as runner_module
from engine.model.backend import Backend, choose_backend, describe_backend, verdict_on
from engine.model.device import HOST, device_of
from engine.model.errors import ModelError
from engine.model.memory import OutOfMemory
from engine.model.runner import ModelRunner
from engine.model.sampler import Sampler, choose, draw_of
from engine.model.selfcheck import Verdict
from engine.model.staging import Uploads
from tests.model.fake_gpu import LateDevice, Refuses, ResidentSdpa, fake_backend
from tests.model.kit import Sequence, make_request, run_step

BLOCK_SIZE, BLOCKS, LONGEST = 8, 64, 96
SETTINGS = {"max_model_len": LONGEST, "block_size": BLOCK_SIZE, "num_kv_blocks": BLOCKS, "max_num_seqs": 5}


def late_runner(tiny, graphs=True, **config):
    backend, recorded = fake_backend(graphs)
    device = LateDevice()
    runner = ModelRunner(tiny.transformer, EngineConfig(**{**SETTINGS, **config}), backend=backend, device=device)
    return runner, recorded, device


def prompts(count, longest=40):
    ids = random.Random(3)
    return [[ids.randrange(3, 250) for _ in range(ids.randrange(1, longest))] for _ in range(count)]


KINDS = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.2, "seed": 9, "top_p": 0.8, "top_k": 40},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.7, "seed": 1, "min_tokens": 4},
    {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
]


def generate(tiny, runner=None, params=None, **config):
    llm = LLM(tiny, runner=runner, **{**SETTINGS, **config})
    wanted = params or [SamplingParams(max_tokens=6 + i, ignore_eos=i % 2 == 0, **kind) for i, kind in enumerate(KINDS)]
    outputs = llm.generate(prompts(len(wanted)), wanted)
    llm.check()
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs], llm


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
@pytest.mark.parametrize("graphs", [False, True], ids=["calls", "graphs"])
@pytest.mark.parametrize("budget", [6, 64])
def test_late_results_are_the_same_results(tiny, ahead, graphs, budget):
    expected, _ = generate(tiny, max_num_batched_tokens=budget)
    runner, recorded, device = late_runner(tiny, graphs, max_num_batched_tokens=budget, async_scheduling=ahead)
    found, llm = generate(tiny, runner, max_num_batched_tokens=budget, async_scheduling=ahead)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, got), (_, wanted) in zip(found, expected, strict=True):
        assert (got is None) == (wanted is None)
        for here, there in zip(got or [], wanted or [], strict=True):
            assert here.keys() == there.keys()
            assert all(abs(here[token].logprob - there[token].logprob) < 1e-4 for token in here)
    device.finish()
    assert (recorded.replays > 0) == graphs
    assert device.fetched >= llm.stats().steps


@pytest.mark.parametrize("graphs", [False, True], ids=["calls", "graphs"])
def test_to_submit_a_step_never_waits_for_the_device(tiny, graphs, monkeypatch):
    """Whatever requests ask of the sampler: nothing is fetched, no event but those of pinned memory is waited for."""
    expected, _ = generate(tiny)
    runner, _, device = late_runner(tiny, graphs, async_scheduling=True)
    submit, fetch, waits = runner.submit, device.fetch, []

    def noted(source):
        fetched, wait = fetch(source), []
        wait.append(fetched.wait)
        fetched.wait = lambda: waits.append(None) or wait[0]()
        return fetched

    def submitted(batch):
        before = len(waits)
        with Refuses():
            flight = submit(batch)
        assert len(waits) == before
        return flight

    monkeypatch.setattr(device, "fetch", noted)
    monkeypatch.setattr(runner, "submit", submitted)
    found, _ = generate(tiny, runner, async_scheduling=True)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert waits


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_a_decode_that_begins_no_block_sends_nothing(tiny, temperature):
    runner, recorded, device = late_runner(tiny)
    rows = [Sequence(make_request(str(i), [4, 5 + i], temperature=temperature, hash_seed=i), [1 + i]) for i in range(3)]
    run_step(runner, rows), run_step(runner, rows)
    sent = len(device.sent)
    for _ in range(4):
        run_step(runner, rows)
    assert len(device.sent) == sent and recorded.replays == 5


def test_preemption_and_prefix_cache_ahead_of_the_tokens(tiny):
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)] * 6
    pool = {"num_kv_blocks": 16, "enable_prefix_caching": True}
    expected, plain = generate(tiny, params=params, **pool)
    runner, _, _ = late_runner(tiny, async_scheduling=True, **pool)
    found, llm = generate(tiny, runner, params, async_scheduling=True, **pool)
    assert found == expected
    assert plain.stats().preemptions > 0 and llm.stats().preemptions > 0
    place, prompt = max(enumerate(prompts(6)), key=lambda pair: len(pair[1]))
    again = [llm.generate([prompt], params[0])[0].outputs[0].token_ids for _ in range(2)]
    assert again == [expected[place][0]] * 2
    assert llm.stats().tokens_cached >= 24


@pytest.mark.parametrize("more", [{}, {"top_k": 20}], ids=["in the graph", "behind it"])
def test_rows_of_a_static_batch_that_ended_only_take_up_room(tiny, more):
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=2 + 2 * i, ignore_eos=True, **more) for i in range(3)]
    static = {"batching": "static", "max_num_batched_tokens": 256}
    expected, _ = generate(tiny, params=params, **static)
    runner, recorded, _ = late_runner(tiny, **static)
    assert generate(tiny, runner, params, **static)[0] == expected
    assert recorded.replays == 5


class Ahead:
    """Two steps in flight at a time, by hand; what the host holds is spoiled as soon as a step is submitted."""

    def __init__(self, runner, sequences):
        self.runner, self.sequences, self.flights = runner, sequences, []

    def submit(self):
        works = [sequence.work() for sequence in self.sequences]
        flight = self.runner.submit(StepBatch(0, works))
        for sequence, work in zip(self.sequences, works, strict=True):
            sequence.context += len(work.token_ids)
            sequence.request.token_ids.append(PENDING)
            sequence.table = list(sequence.table)
            work.block_table[:] = [BLOCKS - 1] * len(work.block_table)
            work.token_ids[:] = [7] * len(work.token_ids)
        self.flights.append((flight, [s.request.num_tokens - 1 for s in self.sequences], list(self.sequences)))

    def collect(self):
        flight, places, sequences = self.flights.pop(0)
        result = self.runner.collect(flight)
        for sequence, place, token in zip(sequences, places, result.tokens, strict=True):
            sequence.request.token_ids[place] = token
        return result


@pytest.mark.parametrize("graphs", [False, True], ids=["calls", "graphs"])
def test_three_steps_in_flight_and_nothing_of_the_host_is_read_again(tiny, graphs):
    def sequences():
        params = [{"temperature": 0}, {"temperature": 1.5}, {"temperature": 0.6}]
        return [
            Sequence(make_request(str(i), [5 + i, 9, 30 + i], hash_seed=i, **kind), [1 + 4 * i, 2 + 4 * i])
            for i, kind in enumerate(params)
        ]

    plain, wanted = late_runner(tiny, graphs=False)[0], sequences()
    for _ in range(9):
        run_step(plain, wanted)
    runner, recorded, device = late_runner(tiny, graphs)
    drive = Ahead(runner, sequences())
    drive.submit()
    drive.submit()
    for _ in range(7):
        drive.submit()
        drive.collect()
        drive.sequences.reverse()  # another order each step: rows are found by request, not by place
    drive.collect()
    drive.collect()
    by_name = {sequence.request.request_id: sequence.request.output_token_ids for sequence in drive.sequences}
    assert by_name == {sequence.request.request_id: sequence.request.output_token_ids for sequence in wanted}
    assert recorded.replays == (8 if graphs else 0)
    device.finish()


def test_forks_go_on_from_their_parents_row_before_the_host_knows_its_tokens(tiny):
    def family():
        return [make_request(str(i), [5, 6, 7], hash_seed=3, sample_index=i, temperature=3.0) for i in range(3)]

    def go(runner, wait):
        requests = family()
        flight = runner.submit(StepBatch(0, [Work(requests[0], [5, 6, 7], 0, [1], tuple(requests))]))
        first = runner.collect(flight).tokens if wait else [PENDING] * 3
        for request, token in zip(requests, first, strict=True):
            request.token_ids.append(token)
        copies = [(1, 2), (1, 3)]
        works = [Work(r, [r.token_ids[-1]], 3, [1 + i], (r,)) for i, r in enumerate(requests)]
        second = runner.submit(StepBatch(1, works, copies=copies))
        first = first if wait else runner.collect(flight).tokens
        return first, runner.collect(second).tokens

    expected = go(late_runner(tiny)[0], wait=True)
    assert len(set(expected[0])) > 1
    assert go(late_runner(tiny)[0], wait=False) == expected


@pytest.mark.parametrize("graphs", [False, True], ids=["calls", "graphs"])
def test_nan_is_reported_for_its_request_alone(tiny, graphs):
    runner, recorded, _ = late_runner(tiny, graphs)
    sick, well = (
        Sequence(make_request(name, [4, 5, 6], temperature=0), table) for name, table in (("sick", [1]), ("well", [2]))
    )
    run_step(runner, [sick, well])
    runner.attention.pool[:, 1, 1] = float("nan")
    drive = Ahead(runner, [sick, well])
    drive.submit()
    drive.submit()
    assert drive.collect().nonfinite == {"sick"}
    assert drive.collect().nonfinite == {"sick"}
    assert recorded.replays == (2 if graphs else 0)


def test_a_token_that_nobody_sampled_is_refused(tiny):
    for graphs in (False, True):
        runner = late_runner(tiny, graphs)[0]
        request = make_request("a", [1, 2])
        with pytest.raises(
            KeyError, match=r"Request\('a'.* is pending, but the step submitted before doesn't sample for it"
        ):
            runner.submit(StepBatch(0, [Work(request, [PENDING], 2, [1], (request,))]))


def test_a_step_that_fails_leaves_the_one_in_flight_alone(tiny, monkeypatch):
    runner = late_runner(tiny)[0]
    drive = Ahead(runner, [Sequence(make_request("a", [1, 2], temperature=0), [1])])
    drive.submit()
    with monkeypatch.context() as broken:
        broken.setattr(runner.attention, "plan", lambda spans: 1 / 0)
        other = make_request("b", [1, 2])
        with pytest.raises(ZeroDivisionError):
            runner.submit(StepBatch(1, [Work(other, [1, 2], 0, [5], (other,))]))
    drive.submit()
    drive.collect(), drive.collect()
    alone = Sequence(make_request("c", [1, 2], temperature=0), [3])
    run_step(runner, [alone]), run_step(runner, [alone])
    assert drive.sequences[0].request.token_ids == alone.request.token_ids


@pytest.mark.parametrize("graphs", [False, True], ids=["calls", "graphs"])
def test_a_step_that_failed_may_be_asked_for_again(tiny, monkeypatch, graphs):
    """What the host took for told was not: the new request's state, the old one's next block."""

    def rows():
        requests = [make_request(name, [4, 5, 6, 7, 8, 9, 2], temperature=0.8, hash_seed=3) for name in "ab"]
        return [Sequence(request, [1 + 2 * i, 2 + 2 * i]) for i, request in enumerate(requests)]

    well, wanted = late_runner(tiny, graphs=False)[0], rows()
    runner, found = late_runner(tiny, graphs)[0], rows()
    for step in range(5):
        members = slice(step == 1, 2)
        run_step(well, wanted[members])
        with monkeypatch.context() as broken:
            broken.setattr(runner.state, "apply", lambda changes: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                run_step(runner, found[members])
        run_step(runner, found[members])
    assert [row.request.token_ids for row in found] == [row.request.token_ids for row in wanted]


# ---------------------------------------------------------------------- graphs of a lab


def test_no_graphs_where_memory_is_short(tiny, monkeypatch):
    monkeypatch.setattr(runner_module, "check_pool_memory", lambda *arguments: None)
    monkeypatch.setattr(runner_module, "available_bytes", lambda device: 1000)
    runner, recorded, _ = late_runner(tiny)
    info = runner.describe_backend()
    assert not info.graphs and info.graph_bytes == 0 and not recorded.captured
    assert "CUDA graphs are off: for max_num_seqs=5 they take about" in info.reason
    assert "lower num_kv_blocks or max_num_seqs" in info.reason
    assert str(info) == "resident SDPA"
    assert generate(tiny, runner)[0] == generate(tiny, late_runner(tiny, graphs=False)[0])[0]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nand so on"),
            "they were recorded (OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB): lower num_kv_blocks",
        ),
        (
            RuntimeError("operation not permitted when stream is capturing\nand so on"),
            "failed (RuntimeError: operation not permitted when",
        ),
    ],
    ids=["memory", "refused"],
)
def test_no_graphs_where_they_cannot_be_recorded(tiny, error, reason):
    class Full:
        def allocated_bytes(self):
            return 0

        def capture(self, work):
            raise error

    backend = Backend(ResidentSdpa, "fake", graphs=Full)
    runner = ModelRunner(tiny.transformer, EngineConfig(**SETTINGS), backend=backend, device=LateDevice())
    assert runner.graphs is None
    assert reason in runner.describe_backend().reason
    assert run_step(runner, [Sequence(make_request("a", temperature=0), [1])]).tokens


def test_graphs_are_described_and_given_back_before_the_pool(tiny):
    runner, recorded, _ = late_runner(tiny)
    info = runner.describe_backend()
    assert info.graphs and str(info) == "resident SDPA, CUDA graphs" and info.reason == ""
    assert info.graph_bytes == runner.graph_bytes == 7 * len(recorded.captured) + runner.graphs.buffers.num_bytes
    run_step(runner, [Sequence(make_request("a", presence_penalty=1.0), [1])])
    graphs, counts = weakref.ref(runner.graphs), weakref.ref(runner.sampler._penalties._before[0].counts)
    runner.close()
    assert graphs() is None and counts() is None and runner.kv_pool_bytes == 0 and runner.graph_bytes == 0


def test_labs_share_weights_and_have_graphs_of_their_own(tiny):
    params = [SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)] * 3
    first, second = late_runner(tiny)[0], late_runner(tiny, max_model_len=LONGEST, num_kv_blocks=20)[0]
    assert first.model is second.model
    expected = generate(tiny, params=params)[0]
    one = generate(tiny, first, params)[0]
    two = generate(tiny, second, params, num_kv_blocks=20)[0]
    second.close()
    assert one == two == expected == generate(tiny, first, params, enable_prefix_caching=False)[0]


def test_without_a_kv_cache_there_are_no_graphs(tiny):
    runner, recorded, _ = late_runner(tiny, use_kv_cache=False, max_num_batched_tokens=LONGEST)
    assert runner.graphs is None and not recorded.captured
    params = [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)] * 2
    settings = {"use_kv_cache": False, "max_num_batched_tokens": LONGEST}
    assert generate(tiny, runner, params, **settings)[0] == generate(tiny, params=params, **settings)[0]


# ---------------------------------------------------------------------- copies and times


def test_the_late_device_notices_pinned_memory_that_is_written_too_early():
    device, target = LateDevice(), torch.zeros(8, dtype=torch.uint8)
    pinned = device.pinned(8)
    device.send(pinned, target)
    pinned += 1
    with pytest.raises(AssertionError, match="while a copy out of it was under way"):
        device.finish()


def test_uploads_take_turns_and_grow():
    device = LateDevice()
    uploads = Uploads(device, torch.device("cpu"), size=64)
    ids = random.Random(0)
    for _ in range(12):
        with uploads:
            for _ in range(ids.randrange(5)):
                ints = [[ids.randrange(-9, 9) for _ in range(ids.randrange(1, 20))]] * ids.randrange(1, 4)
                for dtype in (torch.int64, torch.int32, torch.float32, torch.float64):
                    assert uploads.put(ints, dtype).tolist() == ints
            assert uploads.put([], torch.int64).shape == (0,)
    device.finish()
    assert len(device.sent) > 30


def test_the_host_does_not_wait_for_the_copies_of_the_step_before():
    device = LateDevice()
    uploads = Uploads(device, torch.device("cpu"), size=64)
    settled = []
    for _ in range(4):
        with uploads:
            uploads.put([1, 2], torch.int64)
        settled.append(device.settled)
    assert settled == [0, 0, 1, 2], "each set waits for its own last copy, two steps ago"


def test_memory_that_runs_out_while_a_step_is_computed_is_told_when_it_is_collected(tiny):
    runner = late_runner(tiny)[0]
    flight = runner.submit(StepBatch(0, [Work(request := make_request("a", [1, 2]), [1, 2], 0, [1], (request,))]))

    def late():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")

    flight.outcome.wait = late
    with pytest.raises(OutOfMemory, match=r"ran out in a step: 9\.00 GiB more were wanted.*Lower max_num_batched_tokens"):
        runner.collect(flight)


def test_times_come_from_the_devices_own_clock(tiny):
    runner, _, device = late_runner(tiny)
    a, b = (Sequence(make_request(name, [4, 5, 6], temperature=0), table) for name, table in (("a", [1]), ("b", [2])))
    first = run_step(runner, [a])  # start, computed, stop
    assert (first.forward_time, first.sample_time, first.gpu_time) == (1.0, 1.0, 2.0)
    assert first.gpu_idle_time == 0, "nothing ran before"
    assert first.prepare_time > 0 and first.launch_time > 0
    second = run_step(runner, [a])  # a graph: start, stop; sampling is part of it
    assert (second.forward_time, second.sample_time, second.gpu_time) == (1.0, 0.0, 1.0)
    assert second.gpu_idle_time == 2.0, "the mark of the first step's uploads, then its own"
    assert run_step(runner, [b]).gpu_idle_time == 0, "another request: time between is nobody's"
    runner._collected -= 60
    assert run_step(runner, [b]).gpu_idle_time == 0, "a minute's pause"
    assert run_step(runner, [b]).gpu_idle_time > 0
    assert device.last_work is not None


def test_a_cpu_has_no_device_times(tiny):
    runner = ModelRunner(tiny.transformer, EngineConfig(**SETTINGS))
    result = run_step(runner, [Sequence(make_request("a", temperature=0), [1])])
    assert runner.device is HOST is device_of(torch.device("cpu")) and not runner.asynchronous
    assert (result.launch_time, result.gpu_time, result.gpu_idle_time) == (0.0, 0.0, 0.0)
    assert result.prepare_time > 0 and result.forward_time > 0 and result.sample_time > 0
    assert HOST.last_work is None


# ---------------------------------------------------------------------- which backend


def test_a_cpu_is_told_why_nothing_is_fast(tiny):
    chosen = choose_backend(tiny.transformer)
    assert chosen.name == "torch SDPA over gathered blocks" and not chosen.fused and chosen.graphs is None
    assert "need an NVIDIA GPU" in chosen.reason
    assert verdict_on(tiny.transformer, 16) is verdict_on(tiny.transformer, 16), "checked once"
    runner = ModelRunner(tiny.transformer, EngineConfig(**SETTINGS))
    assert runner.attention_name == chosen.name and runner.verdict.reason == chosen.reason
    assert ModelRunner(tiny.transformer, EngineConfig(**SETTINGS), attention_backend="sdpa").describe_backend().reason == ""


@pytest.mark.parametrize(
    ("name", "message"), [("flash", "'flash' is not known"), ("triton", "can't be used here: The fast")]
)
def test_a_backend_that_is_not_there_is_refused(tiny, name, message):
    with pytest.raises(ModelError, match=message):
        ModelRunner(tiny.transformer, EngineConfig(**SETTINGS), attention_backend=name)


@pytest.mark.parametrize("graphs", [True, False])
def test_each_part_is_used_as_far_as_its_check_allows(tiny, monkeypatch, graphs):
    pytest.importorskip("triton")
    found = Verdict(triton=True, fused=graphs, graphs=graphs, reason="" if graphs else "CUDA graph: WRONG.")
    monkeypatch.setattr(backend_module, "self_check", lambda model, block_size: found)
    monkeypatch.setattr(backend_module, "_verdicts", weakref.WeakKeyDictionary())
    info = describe_backend(tiny.transformer)
    assert (info.name, info.fused, info.graphs, info.reason) == ("Triton paged attention", graphs, graphs, found.reason)
    assert describe_backend(tiny.transformer, enforce_eager=True).graphs is False
    assert describe_backend(tiny.transformer, attention_backend="sdpa").name == "torch SDPA over gathered blocks"


def test_choosing_on_the_device_gives_the_samplers_tokens():
    ids = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 50, generator=ids) * 3
    logits[4, 7] = float("nan")
    requests = [make_request(str(i), hash_seed=i, output=(1,) * i, temperature=[0.0, 0.4, 1.0][i % 3]) for i in range(9)]
    temperatures, points = zip(*map(draw_of, requests), strict=True)
    tokens, finite = choose(logits, torch.tensor(temperatures), torch.tensor(points, dtype=torch.float64))
    sampled = Sampler().sample(logits.clone(), requests)
    assert finite.tolist() == [not broken for broken in sampled.broken]
    assert finite.tolist().count(False) == 1 and tokens[4] == 0
    assert [t for t, fine in zip(tokens.tolist(), finite, strict=True) if fine] == [
        t for t, fine in zip(sampled.tokens, finite, strict=True) if fine
    ]
    assert sampled.on_device.tolist() == sampled.tokens


def test_settings_of_the_runner_and_the_engine_agree(tiny):
    assert resolve_config(tiny, SETTINGS) == EngineConfig(**SETTINGS)
