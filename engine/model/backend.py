"""Which kernels compute: asked for by name, allowed by the check at start, and told to whoever wants to know.

::

    attention_backend   "auto"     Triton where there is a GPU and the check at start finds it right, else torch
                        "triton"   Triton, or a refusal that says why not
                        "sdpa"     torch's own kernels for everything: the reference to compare with

With Triton come fused elementwise kernels and CUDA graphs, each as far as its own check allows. Without a GPU everything
is torch, and nothing is checked.

What compiler and driver raise is of many kinds, and a lab compiles more than the check did (each number of splits, its own
block size). Whatever fails before the first step makes torch compute, and its words go with it as the reason: ``working``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, get_args
from typing import Literal as Choice
from weakref import WeakKeyDictionary

from engine.model.attention import Attention
from engine.model.attention.sdpa import SdpaAttention
from engine.model.errors import ModelError, in_one_line
from engine.model.graphs import CudaGraphs, GraphBackend
from engine.model.memory import ran_out
from engine.model.selfcheck import Verdict, self_check
from engine.model.transformer import Transformer

AttentionBackend = Choice["auto", "sdpa", "triton"]
Built = TypeVar("Built")
USUAL_BLOCK_SIZE = 16
"""Of the check that is made when a model is loaded, before any lab says what it uses."""


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What computes, for people."""

    name: str
    """Of the attention backend."""
    fused: bool
    """Whether elementwise work runs in fused kernels."""
    graphs: bool
    """Whether decode steps replay CUDA graphs."""
    reason: str = ""
    """Why something fast is not in use; empty when everything that was asked for is."""
    graph_bytes: int = 0
    """Device memory of the graphs and their buffers."""

    def __str__(self) -> str:
        """One line: 'Triton paged attention, fused kernels, CUDA graphs'."""
        return ", ".join([self.name, *["fused kernels"] * self.fused, *["CUDA graphs"] * self.graphs])


@dataclass(frozen=True, slots=True)
class Backend:
    """What a runner is built from."""

    make_attention: Callable[..., Attention]
    name: str
    fused: bool = False
    graphs: Callable[[], GraphBackend] | None = None
    """Makes what records graphs; None: decode steps run like all others."""
    verdict: Verdict | None = None
    reason: str = ""


_verdicts: WeakKeyDictionary[Transformer, dict[int, Verdict]] = WeakKeyDictionary()


def verdict_on(model: Transformer, block_size: int) -> Verdict:
    """What the check at start says for this model and block size. It runs once, and takes a few seconds on a GPU.

    A check that breaks down, whatever it raises, lets nothing through.
    """
    known = _verdicts.setdefault(model, {})
    if block_size not in known:
        try:
            known[block_size] = self_check(model, block_size)
        except Exception as error:
            reason = (
                f"The fast way is off: its check at start broke down ({in_one_line(error)}); torch's own kernels compute "
                "instead."
            )
            known[block_size] = Verdict(triton=False, fused=False, graphs=False, reason=reason)
    return known[block_size]


def choose_backend(
    model: Transformer,
    block_size: int = USUAL_BLOCK_SIZE,
    attention_backend: str = "auto",
    enforce_eager: bool = False,
) -> Backend:
    """The backend of that name, as far as the check at start allows.

    Args:
        model: shapes, number format and device.
        block_size: of the KV pool.
        attention_backend: "auto", "sdpa" or "triton".
        enforce_eager: no CUDA graphs, as vLLM calls it.

    Raises:
        ModelError: the name is not known, or "triton" can't be used here.
    """
    if attention_backend not in get_args(AttentionBackend):
        raise ModelError(f"attention_backend={attention_backend!r} is not known: choose 'auto', 'sdpa' or 'triton'")
    if attention_backend == "sdpa":
        return Backend(SdpaAttention, SdpaAttention.name)
    verdict = verdict_on(model, block_size)
    if not verdict.triton:
        if attention_backend == "triton":
            raise _refusal(verdict.reason)
        return Backend(SdpaAttention, SdpaAttention.name, verdict.fused, None, verdict, verdict.reason)
    from engine.model.attention.triton_backend import TritonAttention

    graphs = _graph_maker(model) if verdict.graphs and not enforce_eager else None
    return Backend(TritonAttention, TritonAttention.name, verdict.fused, graphs, verdict, verdict.reason)


def working(chosen: Backend, build: Callable[[Backend], Built], required: bool = False) -> tuple[Backend, Built]:
    """What ``build`` makes of a backend, and that backend; the plain one, with the reason, where the fast one fails in it.

    Args:
        chosen: what to try first.
        build: makes something of a backend and uses its kernels once; it is called again with the plain one after a failure,
            so it must leave nothing behind when it raises.
        required: refuse instead of falling back: somebody asked for these kernels by name.

    Raises:
        ModelError: ``build`` raised it, or ``required`` kernels failed; the message has the compiler's or driver's words.
        Exception: memory ran out, or the plain backend failed.
    """
    try:
        return chosen, build(chosen)
    except Exception as error:  # what compiler and driver raise has no common kind
        if isinstance(error, ModelError) or ran_out(error) or chosen.make_attention is SdpaAttention:
            raise
        problem = in_one_line(error)
    reason = f"The fast kernels failed while the lab was being prepared ({problem})."
    if required:
        raise _refusal(reason)
    # Elementwise kernels come from the same compiler; a failure of theirs in a later step could not be caught any more.
    reason = f"{chosen.reason} {reason} torch's own kernels compute instead.".strip()
    plain = Backend(SdpaAttention, SdpaAttention.name, verdict=chosen.verdict, reason=reason)
    return plain, build(plain)


def describe_backend(
    model: Transformer,
    block_size: int = USUAL_BLOCK_SIZE,
    attention_backend: str = "auto",
    enforce_eager: bool = False,
) -> BackendInfo:
    """What a lab on this model would compute with; a lab's own answer is ``ModelRunner.describe_backend``.

    Raises:
        ModelError: as ``choose_backend``.
    """
    chosen = choose_backend(model, block_size, attention_backend, enforce_eager)
    return BackendInfo(chosen.name, chosen.fused, chosen.graphs is not None, chosen.reason)


def _refusal(reason: str) -> ModelError:
    return ModelError(
        f"attention_backend='triton' can't be used here: {reason} Choose attention_backend='auto', which falls back by "
        "itself, or 'sdpa'"
    )


def _graph_maker(model: Transformer) -> Callable[[], GraphBackend]:
    where: Any = model.device
    return lambda: CudaGraphs(where)
