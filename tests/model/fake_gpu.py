"""A GPU's habits on a CPU: graphs that repeat recorded calls, attention over resident tensors, copies that come late."""

import math
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from engine.model.attention.sdpa import SdpaAttention
from engine.model.backend import Backend


class Recorder(TorchDispatchMode):
    """Notes every torch call with its results."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


class Refuses(TorchDispatchMode):
    """Refuses whatever makes the host wait for a GPU: a look at a number, and a tensor made of the host's numbers."""

    LOOKS = (
        "_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique", "_unique2", "equal", "item",
        "lift_fresh", "lift_fresh_copy", "scalar_tensor", "tensor_split", "repeat_interleave",
    )  # fmt: skip

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[-1].split(".")[0]
        if name in self.LOOKS and func._overloadname != "self_int":  # a repetition by a plain number reads nothing
            raise AssertionError(f"{func} makes the host wait")
        return func(*args, **(kwargs or {}))


class RecordedGraphs:
    """As CUDA does it: the calls run once while they are recorded, and later again on the same addresses, without Python."""

    def __init__(self):
        self.captured = []
        self.allocated = 1000
        self.replays = 0

    def capture(self, work):
        recorder = Recorder()
        self.record(work, recorder)
        self.captured.append(len(recorder.calls))
        self.allocated += 7
        return lambda: self.replay(recorder.calls)

    def record(self, work, recorder):
        with Refuses(), recorder:  # neither can a capture in earnest record that the host looks
            work()

    @torch.inference_mode()
    def replay(self, calls):
        self.replays += 1
        with _disable_current_modes():
            for func, args, kwargs, result in calls:
                for new, old in zip(tree_leaves(func(*args, **kwargs)), tree_leaves(result), strict=True):
                    if isinstance(old, torch.Tensor) and new.data_ptr() != old.data_ptr():
                        old.copy_(new)

    def allocated_bytes(self):
        return self.allocated


class ResidentSdpa(SdpaAttention):
    """Plain attention over resident tensors: every table entry is a candidate, what lies behind the position is masked."""

    name = "resident SDPA"
    resident = True

    def splits_for(self, tiles, longest):
        return 8 // tiles + 1

    def plan_decodes(self, slots, tables, tiles, splits):
        return slots, tables, tiles

    def plan_resident(self, spans, seats, slots, tables):
        """Slots and tables are the device's; the host's must say the same, and are not used."""
        own, size = [], self.block_size
        for span, seat in zip(spans, seats, strict=True):
            table = tables[seat, : -(-(span.context + span.num_tokens) // size)].tolist()
            positions = range(span.context, span.context + span.num_tokens)
            wanted = [table[p // size] * size + p % size if span.writes else -1 for p in positions]
            assert slots[span.start : span.start + span.num_tokens].tolist() == wanted
            assert table == span.block_table[: len(table)]
            own.append(replace(span, block_table=table))
        return self.plan(own)

    def attend(self, layer, q, kv, plan):
        if not isinstance(plan, tuple):
            return super().attend(layer, q, kv, plan)
        slots, tables, tiles = plan
        tables = tables[tiles[:, 3].long()]
        pool = self.pool[layer].flatten(0, 1)
        writes = (slots >= 0)[:, None, None, None]
        targets = slots.clamp(min=0)
        pool.index_copy_(0, targets, torch.where(writes, kv, pool[targets]))
        at = torch.arange(tables.shape[1] * self.block_size)
        read = at <= tiles[:, 2:3]
        beyond = at // self.block_size > tiles[:, 2:3] // self.block_size
        blocks = tables[:, at // self.block_size].masked_fill(beyond, 0)
        seen = pool[blocks.long() * self.block_size + at % self.block_size]
        keys, values = seen.masked_fill(~read[:, :, None, None, None], 0.0).repeat_interleave(self.group, 3).unbind(2)
        scores = torch.einsum("rhd,rshd->rhs", q, keys) / self.head_dim**0.5
        weights = scores.masked_fill(~read[:, None], -math.inf).softmax(-1)
        return torch.einsum("rhs,rshd->rhd", weights, values)[tiles[:, 0].long()].flatten(1)


class LateEvent:
    """A mark behind what was sent so far. Its time is the number of marks before it."""

    def __init__(self, device):
        self.device, self.mark, self.time = device, 0, 0

    def record(self):
        self.device.marks += 1
        self.mark, self.time = len(self.device.sent), self.device.marks

    def wait(self):
        self.device.settle(self.mark)

    def seconds_since(self, earlier):
        return float(self.time - earlier.time)


class LateFetch:
    """Copies at the last moment: whatever was written to the source in between arrives too."""

    def __init__(self, device, source):
        self.device, self.source = device, source
        self.host = torch.full_like(source, 1) if source.dtype == torch.bool else torch.full_like(source, -(2**40))

    @torch.inference_mode()
    def wait(self):
        self.device.fetched += 1
        return self.host.copy_(self.source)


class LateDevice:
    """A GPU that is as late as it may be: pinned memory must stay until an event was waited for, results come when asked."""

    asynchronous = True

    def __init__(self):
        self.sent, self.settled, self.marks, self.fetched = [], 0, 0, 0
        self.last_work = None

    def pinned(self, size):
        return torch.randint(0, 256, (size,), dtype=torch.uint8)

    def event(self):
        return LateEvent(self)

    def send(self, source, target):
        target.copy_(source)
        self.sent.append((source, source.clone()))

    def settle(self, mark):
        for source, as_sent in self.sent[self.settled : mark]:
            assert bool((source.numpy() == as_sent.numpy()).all()), (
                "pinned memory was written while a copy out of it was under way"
            )
        self.settled = max(self.settled, mark)

    def fetch(self, source):
        return LateFetch(self, source)

    def scope(self):
        return nullcontext()

    def finish(self):
        self.settle(len(self.sent))


def fake_backend(graphs=True):
    """A backend with graphs on a CPU, and what records them."""
    recorded = RecordedGraphs()
    return Backend(ResidentSdpa, ResidentSdpa.name, graphs=(lambda: recorded) if graphs else None), recorded
