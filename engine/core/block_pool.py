"""The pool of KV blocks: who holds which block, which are free, and whose content can still be reused.

::

    free queue   front ▶ 5 4 6 7 8 9 10 3 2 1 ◀ back
                         │                └──┴─┴── content known by hash: a later prompt may take them out of the middle
                         └── next block to be handed out; if it has a hash, taking it forgets the content (eviction)

A block is in exactly one of three states:

* **referenced** by at least one block table (reference count > 0), not in the queue;
* **cached**: reference count 0, in the queue, but its content has a hash and can be shared again;
* **free**: reference count 0, in the queue, content worthless.

Block 0 is the null block: always zeros, read by padding, written by nobody, never in the queue. The queue is least
recently used: what was released longest ago is taken first. A request releases its blocks tail first, so that the beginning
of a prompt, which is what others share, stays longest.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence

import msgspec

from engine.core.trace import Event

BlockHash = Callable[[bytes, Sequence[int], str | None], bytes]
ContentId = int | str | None
"""Identity of a prefix's content: a number where it ends in a cached block; the cache salt (or None) for the empty one."""


def sha256_block_hash(parent: bytes, tokens: Sequence[int], salt: str | None) -> bytes:
    """Digest of a block: h_i = SHA-256(h_{i-1}, tokens of block i, salt). 32 bytes."""
    digest = hashlib.sha256(parent)
    digest.update(array("q", tokens).tobytes())
    if salt is not None:
        digest.update(b"salt" + salt.encode())
    return digest.digest()


class CachedBlock(msgspec.Struct, frozen=True, gc=False):
    """What the prefix cache knows of a block. A hit compares all of it: even a colliding hash can't cause a wrong hit."""

    block: int
    digest: bytes
    tokens: tuple[int, ...]
    parent: ContentId
    uid: int
    """Identity of this content: equal for two blocks only if salt and all tokens from the sequence's start are equal."""


class FreeQueue:
    """A queue of block numbers with O(1) removal from the middle.

    A doubly linked ring in two lists of integers; entry 0 (the null block is never free) is the ring's anchor::

        next:  0 → 5 → 4 → … → 1 → 0        prev: the same backwards
    """

    def __init__(self, num_blocks: int) -> None:
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]
        self._size = num_blocks

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        block = self._next[0]
        while block:
            yield block
            block = self._next[block]

    def pop_front(self) -> int:
        """Take the block that was released longest ago.

        Raises:
            IndexError: the queue is empty.
        """
        block = self._next[0]
        if not block:
            raise IndexError("the free queue is empty")
        self.remove(block)
        return block

    def remove(self, block: int) -> None:
        """Take ``block`` out, wherever it is."""
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self._size -= 1

    def push_front(self, block: int) -> None:
        """Put ``block`` where the next allocation takes it."""
        self._insert(block, 0, self._next[0])

    def push_back(self, block: int) -> None:
        """Put ``block`` where it stays longest."""
        self._insert(block, self._prev[0], 0)

    def _insert(self, block: int, before: int, after: int) -> None:
        self._next[before] = self._prev[after] = block
        self._prev[block] = before
        self._next[block] = after
        self._size += 1


class BlockPool:
    """``num_blocks`` usable blocks, numbered from 1, with reference counts, the free queue and the prefix cache's map.

    Args:
        num_blocks: usable blocks.
        record: receives an ``Event`` for each eviction and registration.
    """

    def __init__(self, num_blocks: int, record: Callable[[Event], None] = lambda event: None) -> None:
        self.num_blocks = num_blocks
        self.free = FreeQueue(num_blocks)
        self.ref_count = [0] * (num_blocks + 1)
        self.evictions = 0
        self.num_cached = 0
        """Cached blocks that nobody references: they are part of the free queue."""
        self._record = record
        self._known: dict[int, CachedBlock] = {}
        self._by_digest: dict[bytes, dict[int, CachedBlock]] = {}
        self._children: dict[ContentId, set[int]] = {}
        self._next_uid = 1

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: free ones and cached ones."""
        return len(self.free)

    @property
    def num_referenced(self) -> int:
        """Blocks held by at least one block table."""
        return self.num_blocks - len(self.free)

    def take(self, count: int) -> list[int]:
        """Hand out ``count`` blocks from the front of the queue, each with reference count 1, evicting what they cached.

        Raises:
            IndexError: fewer are available; ask ``num_available`` first.
        """
        blocks = [self.free.pop_front() for _ in range(count)]
        evicted = [block for block in blocks if block in self._known]
        for block in evicted:
            self._forget(block)
        if evicted:
            self.num_cached -= len(evicted)
            self.evictions += len(evicted)
            self._record(Event("evict", "", tuple(evicted)))
        for block in blocks:
            self.ref_count[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """One more block table holds ``block``; a cached block leaves the free queue."""
        if self.ref_count[block] == 0:
            self.free.remove(block)
            self.num_cached -= 1
        self.ref_count[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One block table lets go of ``blocks``, in this order.

        What nobody holds any more goes to the back of the queue if its content is known, else to the front.
        """
        counts = self.ref_count
        for block in blocks:
            counts[block] -= 1
            if counts[block]:
                continue
            if block in self._known:
                self.free.push_back(block)
                self.num_cached += 1
            else:
                self.free.push_front(block)

    def register(self, block: int, digest: bytes, tokens: tuple[int, ...], parent: ContentId) -> int:
        """Offer the full ``block`` to later prompts; returns the content's identity. Registering twice changes nothing."""
        known = self._known.get(block)
        if known is not None:
            return known.uid
        twin = self.find(digest, tokens, parent)
        uid = twin.uid if twin else self._next_uid
        if twin is None:
            self._next_uid += 1
        entry = CachedBlock(block, digest, tokens, parent, uid)
        self._known[block] = entry
        self._by_digest.setdefault(digest, {})[block] = entry
        self._children.setdefault(parent, set()).add(block)
        self._record(Event("cache", "", (block,)))
        return uid

    def find(self, digest: bytes, tokens: tuple[int, ...], parent: ContentId) -> CachedBlock | None:
        """A block that holds exactly ``tokens`` after exactly the prefix ``parent``, or None."""
        for entry in self._by_digest.get(digest, {}).values():
            if entry.tokens == tokens and entry.parent == parent:
                return entry
        return None

    def longest_partial_match(self, tokens: Sequence[int], parent: ContentId, look_at: int = 64) -> int:
        """How many of ``tokens`` (at least one) some cached block after ``parent`` starts with: too few to be a block."""
        best = 0
        for _, block in zip(range(look_at), self._children.get(parent, ()), strict=False):
            theirs = self._known[block].tokens
            if theirs[0] != tokens[0]:
                continue  # most blocks leave here
            common = 1
            while common < min(len(tokens), len(theirs)) and tokens[common] == theirs[common]:
                common += 1
            best = max(best, common)
        return best

    def is_cached(self, block: int) -> bool:
        """Whether the content of ``block`` is known by hash, referenced or not."""
        return block in self._known

    def content_id(self, block: int) -> int:
        """Identity of the prefix that ends in the cached ``block``."""
        return self._known[block].uid

    def cached_blocks(self) -> tuple[int, ...]:
        """All blocks whose content is known by hash."""
        return tuple(sorted(self._known))

    def _forget(self, block: int) -> None:
        entry = self._known.pop(block)
        _discard(self._by_digest, entry.digest, block)
        _discard(self._children, entry.parent, block)

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Verify every invariant against the block tables in existence.

        Raises:
            RuntimeError: saying which block breaks which rule.
        """
        held = [0] * (self.num_blocks + 1)
        for table in tables:
            if len(set(table)) != len(table):
                raise RuntimeError(f"a block table holds a block twice: {list(table)}")
            for block in table:
                held[block] += 1
        if held[0] or self.ref_count[0]:
            raise RuntimeError("the null block 0 is in a block table")
        queue = list(self.free)
        if len(queue) != len(self.free) or len(set(queue)) != len(queue):
            raise RuntimeError(f"the free queue says {len(self.free)} blocks and holds {queue}")
        queued = set(queue)
        for block in range(1, self.num_blocks + 1):
            if self.ref_count[block] != held[block]:
                raise RuntimeError(
                    f"block {block} has reference count {self.ref_count[block]} but is in {held[block]} block tables"
                )
            if (block in queued) == (held[block] > 0):
                raise RuntimeError(f"block {block} is {'also ' if held[block] else 'neither held nor '}in the free queue")
        cached = sum(1 for block in queue if block in self._known)
        if cached != self.num_cached:
            raise RuntimeError(f"{cached} unreferenced blocks are cached, but the count says {self.num_cached}")
        mapped = {block for entries in self._by_digest.values() for block in entries}
        if mapped != set(self._known) or not mapped <= set(range(1, self.num_blocks + 1)):
            raise RuntimeError("the hash map and the known blocks differ")


def _discard(index: dict, key: object, block: int) -> None:
    """Take ``block`` out of ``index[key]``, and the key when nothing is left."""
    members = index[key]
    if isinstance(members, dict):
        del members[block]
    else:
        members.discard(block)
    if not members:
        del index[key]
