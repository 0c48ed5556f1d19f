"""An independent reading of the trace: a pool of plain lists that must end up where the engine is."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core.trace import Event, Keyframe, StepTrace


@dataclass
class Model:
    """Queues and pool as the events tell them."""

    free: list[int] = field(default_factory=list)
    cached: set[int] = field(default_factory=set)
    tables: dict[str, list[int]] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    running: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, key: Keyframe) -> Model:
        """Start from a keyframe."""
        return cls(
            list(key.free),
            set(key.cached),
            {name: list(table) for name, table in key.tables.items()},
            dict(key.computed),
            list(key.waiting),
            list(key.running),
        )

    def keyframe(self) -> Keyframe:
        """The state, as the engine snapshots it."""
        return Keyframe(
            tuple(self.free),
            tuple(sorted(self.cached)),
            {name: tuple(table) for name, table in self.tables.items()},
            dict(self.computed),
            tuple(self.waiting),
            tuple(self.running),
        )

    def held(self, block: int) -> int:
        """How many tables hold the block."""
        return sum(table.count(block) for table in self.tables.values())

    def step(self, step: StepTrace) -> None:
        """Apply one record."""
        self.before(step)
        self.after(step)

    def before(self, step: StepTrace) -> None:
        """Apply what happened up to the scheduling of the step."""
        for event in step.events:
            self.apply(event)
        for row in step.scheduled:
            if row.kind not in ("padding", "fork") and row.request_id in self.computed:
                self.computed[row.request_id] = row.context + row.num_tokens
            elif row.kind == "fork" and row.request_id in self.computed:
                self.computed[row.request_id] = row.context

    def after(self, step: StepTrace) -> None:
        """Apply what its tokens brought about."""
        for event in step.events_after:
            self.apply(event)

    def apply(self, event: Event) -> None:
        """Apply one event."""
        getattr(self, f"on_{event.op}")(event.request_id, list(event.blocks), event)

    def on_queue(self, name: str, blocks: list[int], event: Event) -> None:
        self.waiting.insert(int(event.other), name)

    def on_admit(self, name: str, blocks: list[int], event: Event) -> None:
        self.waiting.remove(name)
        self.running.append(name)
        self.tables[name] = []
        self.computed[name] = event.value

    def on_hit(self, name: str, blocks: list[int], event: Event) -> None:
        for block in blocks:
            assert block in self.cached, "a hit on a block whose content nobody knows"
            if block in self.free:
                self.free.remove(block)
            else:
                assert self.held(block)
            self.tables[name].append(block)

    def on_alloc(self, name: str, blocks: list[int], event: Event) -> None:
        for block in blocks:
            assert block not in self.cached, "a block is used before its content was forgotten"
            self.free.remove(block)
            self.tables[name].append(block)

    def on_cow(self, name: str, blocks: list[int], event: Event) -> None:
        source, copy = blocks
        assert self.held(source) > 1
        self.free.remove(copy)
        assert self.tables[name][event.value] == source
        self.tables[name][event.value] = copy

    def on_fork(self, name: str, blocks: list[int], event: Event) -> None:
        parent = self.running.index(event.other)
        siblings = sum(1 for other in self.running[parent + 1 :] if other.startswith(f"{event.other}#"))
        self.running.insert(parent + 1 + siblings, name)
        self.tables[name] = list(self.tables[event.other])
        self.computed[name] = 0

    def on_evict(self, name: str, blocks: list[int], event: Event) -> None:
        for block in blocks:
            assert not self.held(block)
            self.cached.remove(block)

    def on_cache(self, name: str, blocks: list[int], event: Event) -> None:
        for block in blocks:
            assert block not in self.cached
            assert self.held(block)
            self.cached.add(block)

    def on_free(self, name: str, blocks: list[int], event: Event) -> None:
        assert blocks == self.tables[name][::-1], "released tail first"
        del self.tables[name]
        self.computed.pop(name, None)
        for block in blocks:
            if not self.held(block):
                self.free.insert(len(self.free) if block in self.cached else 0, block)

    def on_preempt(self, name: str, blocks: list[int], event: Event) -> None:
        self.running.remove(name)
        self.tables.pop(name, None)
        self.computed.pop(name, None)
        self.waiting.insert(int(event.other), name)

    def on_finish(self, name: str, blocks: list[int], event: Event) -> None:
        if name in self.running:
            self.running.remove(name)
        elif name in self.waiting:
            self.waiting.remove(name)
        if not self.tables.get(name):
            self.tables.pop(name, None)
            self.computed.pop(name, None)

    def on_scrub(self, name: str, blocks: list[int], event: Event) -> None:
        for block in blocks:
            assert block in self.free
            assert block not in self.cached
