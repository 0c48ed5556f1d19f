"""Is the fast way right on this very GPU? Asked at start, on random input, in a few seconds; a wrong answer switches it off.

Kernels are compiled on the spot for whatever GPU is there, by whatever compiler came along. A combination that nobody has
tried must not give wrong lessons. So what runs fast is first compared with what is known to be right::

    Triton attention     with    torch SDPA in float32            one batch: chunks, decodes, block edges, splits, padding;
                                                                  rotated beforehand, and rotated while it is stored
    fused kernels        with    plain torch
    CUDA graph           with    the same step without a graph    garbage in every buffer first

Each check gives its largest difference and what is allowed. A check that fails, or raises, takes its part out of use, and
what is built on it: without Triton attention there are no graphs. (An illegal memory access can't be survived: it ends
the process, and the engine is then started with ``attention_backend="sdpa"``.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from engine.core.runner import PENDING
from engine.model.attention import Span
from engine.model.attention.sdpa import SdpaAttention
from engine.model.device import device_of
from engine.model.fused import add_rms_norm, norm_heads, rms_norm, silu_mul
from engine.model.graphs import (
    CudaGraphs,
    DecodeBuffers,
    DecodeGraphs,
    DecodeOutput,
    DecodeStep,
    GraphBackend,
    Sampling,
)
from engine.model.rope import rotate
from engine.model.sampler import FIELDS
from engine.model.spec import ModelSpec
from engine.model.state import DecodeInputs, RequestState, Row
from engine.model.transformer import Transformer

if TYPE_CHECKING:
    from engine.model.attention.triton_backend import TritonAttention

ALLOWED = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Largest difference between numbers of about 1, by number format: a few units in the last place."""
MakeAttention = Callable[..., "TritonAttention"]


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison. ``difference`` is the largest one found, relative to the largest expected number; NaN if none."""

    name: str
    passed: bool
    difference: float
    allowed: float
    seconds: float
    problem: str = ""

    def __str__(self) -> str:
        """One line for people."""
        if self.problem:
            return f"{self.name}: {self.problem}"
        verdict = "right" if self.passed else "WRONG"
        return f"{self.name}: {verdict}, differs by {self.difference:.1e} at most, {self.allowed:.1e} allowed"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What may be used on this machine, and why not what may not."""

    triton: bool
    fused: bool
    graphs: bool
    checks: tuple[Check, ...] = ()
    reason: str = ""
    """Empty when everything is in use; otherwise a sentence for the page."""

    @property
    def seconds(self) -> float:
        """Time that the checks took."""
        return sum(check.seconds for check in self.checks)


def self_check(
    model: Transformer,
    block_size: int,
    *,
    longest: int = 1500,
    make_attention: MakeAttention | None = None,
    graph_backend: GraphBackend | None = None,
) -> Verdict:
    """Compare the fast ways with the plain ones, in the model's shapes and number format.

    Args:
        model: to take shapes from, and to run a few decode steps of.
        block_size: of the KV pool.
        longest: keys of the longest sequence in the attention check; enough to be split.
        make_attention: makes the backend under test; default: Triton's, on a CUDA device with Triton installed.
        graph_backend: records graphs; default: CUDA's.
    """
    if make_attention is None:
        problem = _unavailable(model.device)
        if problem:
            return Verdict(triton=False, fused=False, graphs=False, reason=problem)
    make = make_attention or _triton_attention
    dtype = model.dtype
    with device_of(model.device).scope():
        attention = _timed("attention", lambda: _attention_difference(model, block_size, longest, make), dtype)
        fused = _timed("fused kernels", lambda: _fused_difference(model), dtype)
        checks = [attention, fused]
        if attention.passed:
            measure = partial(_graph_difference, model, block_size, make, graph_backend, fused.passed)
            checks.append(_timed("CUDA graph", measure, dtype))
    graphs = attention.passed and checks[-1].passed
    return Verdict(attention.passed, fused.passed, graphs, tuple(checks), _reason(checks))


def _triton_attention(**settings: Any) -> TritonAttention:
    from engine.model.attention.triton_backend import TritonAttention

    return TritonAttention(**settings)


def _unavailable(device: torch.device) -> str:
    if device.type != "cuda":
        return "The fast kernels need an NVIDIA GPU; torch computes instead."
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError:
        return "Triton is not installed, so torch computes attention: install the CUDA build of torch, which brings it."
    return ""


def _reason(checks: list[Check]) -> str:
    failed = [str(check) for check in checks if not check.passed]
    if not failed:
        return ""
    return f"The fast way is off where its check at start failed; torch's own kernels compute instead. {'; '.join(failed)}."


def _timed(name: str, measure: Callable[[], float], dtype: torch.dtype) -> Check:
    """Run a check. Whatever it raises is a reason not to trust the kernels, not to stop the engine."""
    start = time.perf_counter()
    try:
        with torch.inference_mode():
            difference = measure()
    except Exception as error:
        first_line = str(error).strip().split("\n")[0][:300]
        problem = f"failed with {type(error).__name__}: {first_line}"
        return Check(name, False, float("nan"), ALLOWED[dtype], time.perf_counter() - start, problem)
    seconds = time.perf_counter() - start
    return Check(name, difference <= ALLOWED[dtype], difference, ALLOWED[dtype], seconds)


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, as a share of the largest expected number; infinite where one of both is no number."""
    got, expected = got.double(), expected.double()
    if not bool((got.isfinite() & expected.isfinite()).all()):
        return float("inf")
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def _spans(block_size: int, longest: int) -> tuple[list[Span], int]:
    """A decode at every place around a block's edge, chunks with and without context, a long decode, padding."""
    edge = block_size
    decodes = [(longest - 1, 1), (edge - 1, 1), (edge, 1), (edge + 1, 1), (0, 1)]
    wanted = [*decodes, (0, 2 * edge + 3), (edge + 5, edge + 7), (3, 4)]
    spans, start, block = [], 0, 1
    for context, count in wanted:
        used = -(-(context + count) // block_size)
        spans.append(Span(start, count, context, list(range(block, block + used))))
        start, block = start + count, block + used
    spans.append(Span(start, 1, 0, [0], writes=False))
    return spans, block - 1


def _attention_difference(model: Transformer, block_size: int, longest: int, make_attention: MakeAttention) -> float:
    """Two layers on one pool whose unwritten slots are NaN, against SDPA in float32; also what they wrote.

    The first gets queries and keys rotated, the second rotates them itself where the backend can.
    """
    spec, device = model.spec, model.device
    spans, num_blocks = _spans(block_size, longest)
    settings: dict[str, Any] = {
        "num_layers": 2,
        "num_kv_blocks": num_blocks,
        "block_size": block_size,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "device": device,
    }
    tested = make_attention(**settings, dtype=model.dtype)
    plain = SdpaAttention(**settings, dtype=torch.float32)
    assert tested.pool is not None and plain.pool is not None
    generator = torch.Generator(device).manual_seed(0)
    _fill_contexts(tested.pool, spans, block_size, generator)
    plain.pool.copy_(tested.pool.nan_to_num())
    rows = spans[-1].start + 1
    shape = (rows, spec.qkv_heads, spec.head_dim)
    worst = 0.0
    for layer in range(2):
        qkv = torch.randn(shape, device=device, generator=generator).to(model.dtype)
        wide = qkv.to(torch.float32, copy=True)
        if layer and tested.rotates:
            cos, sin = _angles(rows, spec.head_dim, model.dtype, generator, device)
            rotate(wide[:, : spec.num_heads + spec.num_kv_heads], cos.float(), sin.float())
            got = tested.attend_rotating(layer, qkv, cos, sin, tested.plan(spans))
        else:
            got = tested.attend(layer, *_heads(qkv, spec), tested.plan(spans))
        expected = plain.attend(layer, *_heads(wide, spec), plain.plan(spans))
        padding = float(got[-1].abs().nan_to_num(nan=math.inf).max())  # a maximum in Python would pass over NaN
        worst = max(worst, _difference(got[:-1], expected[:-1]), padding)
        written = [slot for span in spans[:-1] for slot in _slots(span, block_size)]
        got, expected = (pool[layer].flatten(0, 1)[written] for pool in (tested.pool, plain.pool))
        worst = max(worst, _difference(got, expected))
    if bool(tested.pool[:, 0].count_nonzero()):
        return float("inf")
    return worst


def _heads(qkv: torch.Tensor, spec: ModelSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [T, H, D], and keys and values [T, 2, Hkv, D]."""
    return qkv[:, : spec.num_heads], qkv[:, spec.num_heads :].unflatten(1, (2, spec.num_kv_heads))


def _angles(
    rows: int, head_dim: int, dtype: torch.dtype, generator: torch.Generator, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines of random angles, [rows, 1, head dimension], as ``engine.model.rope`` lays them out."""
    angle = torch.rand((rows, 1, head_dim // 2), device=device, generator=generator) * 6.28
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def _fill_contexts(pool: torch.Tensor, spans: list[Span], block_size: int, generator: torch.Generator) -> None:
    """Random K and V where a context is, NaN where nothing was written yet, zeros in the null block."""
    pool[:, 1:] = float("nan")
    slots = pool.flatten(1, 2)
    for span in spans:
        held = _slots(span, block_size)[: span.context]
        if held:
            shape = (pool.shape[0], len(held), *pool.shape[3:])
            slots[:, held] = torch.randn(shape, device=pool.device, generator=generator).to(pool.dtype)


def _slots(span: Span, block_size: int) -> list[int]:
    """Slots of all positions of a span."""
    positions = range(span.context + span.num_tokens)
    return [span.block_table[p // block_size] * block_size + p % block_size for p in positions]


def _fused_difference(model: Transformer) -> float:
    spec, device, dtype = model.spec, model.device, model.dtype
    generator = torch.Generator(device).manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    x, added, weight = random(5, spec.hidden_size), random(5, spec.hidden_size), random(spec.hidden_size)
    sums = x.clone(), x.clone()
    norms = [add_rms_norm(sums[way], added, weight, spec.norm_eps, kernels=bool(way)) for way in (0, 1)]
    final_norms = [rms_norm(x, weight, spec.norm_eps, kernels=bool(way)) for way in (0, 1)]
    qkv, head_weights = random(5, spec.qkv_heads, spec.head_dim), random(2, spec.head_dim)
    heads = qkv.clone(), qkv.clone()
    for way in (0, 1):
        norm_heads(heads[way], head_weights[0], head_weights[1], spec.num_heads, spec.norm_eps, kernels=bool(way))
    if not (_same_inputs(device) and _same_ends(model)):
        return float("inf")
    gate_up = random(5, 2 * spec.intermediate_size)
    products = [silu_mul(gate_up, kernels=bool(way)) for way in (0, 1)]
    return max(_difference(fast, plain) for plain, fast in (sums, norms, final_norms, heads, products))


def _same_inputs(device: torch.device) -> bool:
    """Whether the kernel makes the same inputs of a mixed step as torch: a chunk of several rounds, a decode, padding."""
    results = []
    for kernels in (False, True):
        state = RequestState(3, 320, 8, device, partial(_upload, device), kernels)
        long = [3, 9, 4, *range(70, 33, -1)]
        state.write({2: Row(5, long), 0: Row(17, [8, 1, 6], token=44), 1: Row(9, [0, 0], writes=False)})
        spans = state.upload([[0, 300, 2], [300, 1, 0], [301, 2, 1]], torch.int64)
        ids = state.upload([*range(300), PENDING, 0, 0], torch.int64)
        results.append((*state.chunk_inputs(spans, ids), state.counters))
    return all(torch.equal(plain, fast) for plain, fast in zip(*results, strict=True))


def _same_ends(model: Transformer) -> bool:
    """Whether the kernels choose as torch does, over the whole vocabulary, and notice what is no number: in the logits' last
    place, in their middle, in the hidden state. The last row is greedy.
    """
    spec, device, rows = model.spec, model.device, 5
    generator = torch.Generator(device).manual_seed(3)
    logits = torch.randn((rows, spec.vocab_size), device=device, generator=generator).to(model.dtype)
    last = torch.zeros((rows, spec.hidden_size), dtype=model.dtype, device=device)
    logits[1, -1], logits[2, spec.vocab_size // 2], last[3, -1] = math.nan, math.inf, math.nan
    results = []
    for kernels in (False, True):
        state, inputs = RequestState(rows, 8, 8, device, partial(_upload, device), kernels), DecodeInputs(rows, device)
        inputs.temperatures.fill_(0.7)
        inputs.points.fill_(0.6)
        inputs.points[-1] = -1.0
        outcome = torch.zeros((2, rows), dtype=torch.int64, device=device)
        state.finish_decodes(torch.arange(rows, device=device), logits, inputs, last, outcome, commit=True)
        results.append((outcome, state.tokens, state.counters))
    return all(torch.equal(plain, fast) for plain, fast in zip(*results, strict=True))


def _upload(device: torch.device, values: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).to(device)


def _graph_difference(
    model: Transformer, block_size: int, make_attention: MakeAttention, backend: GraphBackend | None, fused: bool
) -> float:
    """Three decodes in graphs of four rows, against the same without a graph: logits, greedy tokens, drawn tokens.

    The graph's inputs are made by a kernel where kernels are in use, those of the other way by torch.
    """
    attention, longest = _small_lab(model, block_size, make_attention), 4 * block_size
    model.prepare_positions(longest)
    graphs = _small_graphs(model, attention, block_size, longest, backend or CudaGraphs(model.device), fused)
    plain = _small_graphs(model, attention, block_size, longest, None, fused, kernels=False)
    graphs.capture()
    worst, same = 0.0, True
    kinds: tuple[Sampling, ...] = ("logits", "greedy", "draw")
    for sampling in kinds:
        expected = _copy(_eager(plain, sampling, padded=True))
        alone = _copy(_eager(plain, sampling)) if sampling == "logits" else expected
        output = _run_over_garbage(graphs, sampling)
        if output is None or not bool(output.finite.all()) or not bool(expected.finite.all()):
            return float("inf")
        if output.logits is not None and expected.logits is not None and alone.logits is not None:
            # Another number of rows may take another matrix kernel, whose rounding the layers then amplify.
            shape = _difference(output.logits, alone.logits) / 4
            worst = max(_difference(output.logits, expected.logits), shape)
            same = torch.equal(output.logits, expected.logits)
            if not _same_state(graphs.state, plain.state):  # whatever the logits: no token is chosen here
                return float("inf")
        # Logits that are the same to the last bit must give the same tokens; others may tip a close decision.
        elif same and not (torch.equal(output.tokens, expected.tokens) and _same_state(graphs.state, plain.state)):
            return float("inf")
    assert attention.pool is not None
    return float("inf") if bool(attention.pool[:, 0].count_nonzero()) else worst  # padding must write nowhere


def _small_graphs(
    model: Transformer,
    attention: TritonAttention,
    block_size: int,
    longest: int,
    backend: GraphBackend | None,
    fused: bool,
    kernels: bool = True,
) -> DecodeGraphs:
    """Graphs of four rows over a state of six seats; without ``backend`` only to be run eagerly."""
    upload = attention.upload
    state = RequestState(6, longest, block_size, model.device, upload, kernels=fused and kernels)
    buffers = DecodeBuffers(4, model.spec.vocab_size, model.device)
    step = DecodeStep(model, attention, state, buffers, longest, fused)
    return DecodeGraphs(
        step, buffers, state, backend or _NoGraphs(), lambda rows: attention.splits_for(rows, longest), sizes=[4]
    )


class _NoGraphs:
    """Records nothing."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return work

    def allocated_bytes(self) -> int:
        return 0


SEATS = (4, 0, 3)
"""Of the three decodes, in the order in which they take part."""


def _rows(block_size: int) -> dict[int, Row]:
    """What the three seats hold: a greedy decode at a block's end, and two that draw."""
    contexts, warm = (2 * block_size - 1, block_size, 3), (0.0, 0.5, 1.0)
    rows = {}
    for place, (seat, context, temperature) in enumerate(zip(SEATS, contexts, warm, strict=True)):
        table = list(range(4 * place + 1, 4 * place + 2 + context // block_size))
        numbers = (temperature, *[0.0] * (len(FIELDS) - 1))
        rows[seat] = Row(context, table, place + 1, generated=place, key=-(7**20) * (place + 1), numbers=numbers)
    return rows


def _eager(graphs: DecodeGraphs, sampling: Sampling, padded: bool = False) -> DecodeOutput:
    graphs.state.write(_rows(graphs.state.block_size))
    return graphs.run_eagerly(SEATS, sampling, padded)


def _same_state(one: RequestState, other: RequestState) -> bool:
    """Whether both came to the same tokens and counters in the seats that took part, and left the null seat alone."""
    seats = [*SEATS, one.null]
    return all(
        torch.equal(a[seats], b[seats]) for a, b in ((one.tokens, other.tokens), (one.counters, other.counters))
    ) and not bool(one.counters[one.null].any())


def _small_lab(model: Transformer, block_size: int, make_attention: MakeAttention) -> TritonAttention:
    """Attention in the model's shapes over a dozen blocks of random K and V."""
    spec = model.spec
    attention = make_attention(
        num_layers=spec.num_layers,
        num_kv_blocks=12,
        block_size=block_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=model.dtype,
        device=model.device,
    )
    assert attention.pool is not None
    generator = torch.Generator(model.device).manual_seed(2)
    blocks = attention.pool[:, 1:]
    blocks.copy_(torch.randn(blocks.shape, device=model.device, generator=generator))
    return attention


def _run_over_garbage(graphs: DecodeGraphs, sampling: Sampling) -> DecodeOutput | None:
    """Replay with nothing right anywhere but in the state of those who take part, and in the null seat."""
    buffers, state = graphs.buffers, graphs.state
    for tensor in (*buffers.tensors, *(part[: state.null] for part in state.tensors)):
        tensor.view(torch.uint8).random_(0, 256)
    graphs.forget_seats()
    state.write(_rows(state.block_size))
    key = graphs.find(len(SEATS), sampling)
    return None if key is None else graphs.run(SEATS, key)


def _copy(output: DecodeOutput) -> DecodeOutput:
    """Outputs are overwritten by the next step."""
    logits = None if output.logits is None else output.logits.clone()
    return DecodeOutput(output.outcome.clone(), logits)
