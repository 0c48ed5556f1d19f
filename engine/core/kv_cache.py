"""Where the K and V of each request lie: paged blocks, contiguous extents, or nowhere.

**Paged** (PagedAttention): a request's tokens are cut into blocks of ``block_size``; its block table maps logical blocks to
physical ones::

    A, 40 tokens, block_size 16          pool
    logical  0    1    2                 1 2 3 4 5 6 7 8 9 10
    physical 7    3    9 ── 8 of 16      . . A . B . A . A  .
             full full used

The only waste is inside the last block: at most ``block_size - 1`` slots a request. Prompts that begin alike share full
blocks (prefix cache), and samples of one prompt share all of them until one writes: **copy-on-write**::

    prompt 20 tokens = block 7 (full) + block 3 (4 used), n = 2
      fork            sample 0: 7 3      sample 1: 7 3        block 3 has two owners
      sample 0 writes sample 0: 7 5      sample 1: 7 3        3 copied to 5, then written at offset 4
      sample 1 writes sample 0: 7 5      sample 1: 7 3        3 has one owner: written in place

**Contiguous**: one run of blocks a request, reserved whole at admission, first fit::

    pool  A A A A A . . B B B C C C C . .
          used│res. hole                    reserved but unused: internal waste
                                            holes too short for the next request: external fragmentation

Positions map to slots in the same way for both: block ``table[p // block_size]``, offset ``p % block_size``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.core.block_pool import BlockHash, BlockPool, ContentId, sha256_block_hash
from engine.core.config import EngineConfig
from engine.core.request import Request
from engine.core.trace import Event

Record = Callable[[Event], None]


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens`` tokens: the quotient rounded up."""
    return -(-num_tokens // block_size)


class KVCache:
    """What the scheduler asks of a KV layout. By itself the layout of ``use_kv_cache=False``: nothing is ever stored."""

    no_hits = "nothing is stored without a KV cache"

    def __init__(self, config: EngineConfig, record: Record) -> None:
        self.pool = BlockPool(config.num_kv_blocks if config.use_kv_cache else 0, record)
        self._config = config
        self._record = record
        self._scrub: list[int] = []

    def lookup(self, request: Request) -> list[int]:
        """Cached blocks with which the request's sequence begins; at most ``num_tokens - 1`` tokens."""
        return []

    def explain(self, request: Request, hits: list[int]) -> str:
        """Why the prefix cache gave no more than ``hits``, for people."""
        return self.no_hits

    def shortage(self, request: Request, hits: list[int]) -> tuple[int, int] | None:
        """None if the whole sequence so far fits now, else (blocks needed, blocks available)."""
        return None

    def admit(self, request: Request, hits: list[int]) -> None:
        """Start the request's table with ``hits``."""

    def grow(self, request: Request, num_tokens: int) -> Sequence[tuple[int, int]] | None:
        """Make room for the next ``num_tokens`` positions; block copies to make first, or None when there is no room."""
        return ()

    def fork(self, parent: Request, child: Request) -> None:
        """Give ``child`` all blocks of ``parent``, shared. Where it can't be done the request was refused when added."""
        raise RuntimeError("only paged blocks can be shared by samples")

    def commit(self, request: Request) -> None:
        """The request's computed positions are written: offer its new full blocks to others."""

    def commit_until(self, request: Request, num_tokens: int) -> None:
        """The same for its first ``num_tokens`` positions, where steps in flight still compute the others."""

    def release(self, request: Request, *, scrub: bool = False) -> None:
        """Take everything from the request, tail first, so that the beginning of the sequence is evicted last.

        ``scrub``: zero what nobody else holds or knows before its reuse. What steps in flight write is zeroed in any case:
        when it turns out to be NaN, somebody else may hold the block already.
        """
        blocks = tuple(reversed(request.block_table))
        suspects = blocks if scrub else self._written_in_flight(request) if request.in_flight else ()
        request.block_table = []
        if not blocks:
            return
        self.pool.release(blocks)
        self._record(Event("free", request.request_id, blocks))
        if suspects:
            dirty = [b for b in suspects if not self.pool.ref_count[b] and not self.pool.is_cached(b)]
            self._scrub.extend(dirty)
            self._record(Event("scrub", request.request_id, tuple(dirty)))

    def _written_in_flight(self, request: Request) -> list[int]:
        size = self._config.block_size
        known = request.num_computed_tokens - request.in_flight
        return request.block_table[known // size : blocks_for(request.num_computed_tokens, size)]

    def refusal(self, num_prompt_tokens: int, max_tokens: int) -> str:
        """Why such a request can never run, with the numbers; '' when it can."""
        return ""

    def room(self, num_prompt_tokens: int) -> int:
        """Most tokens such a prompt can generate."""
        return self._config.max_model_len - num_prompt_tokens

    def unused_tokens(self, requests: Sequence[Request]) -> int:
        """Token slots reserved for these requests that hold no K and V."""
        return 0

    @property
    def largest_hole(self) -> int:
        """Most blocks that one request could get now."""
        return self.pool.num_available

    def take_scrub(self) -> list[int]:
        """Blocks to zero before the next forward pass: those of requests that produced NaN."""
        scrub, self._scrub = self._scrub, []
        return scrub

    def return_scrub(self, blocks: list[int]) -> None:
        """The step that took ``blocks`` failed: they may still hold NaN."""
        self._scrub = list(blocks)

    def check(self, requests: Sequence[Request]) -> None:
        """Verify the pool against the tables of ``requests``; raises RuntimeError saying what is wrong."""
        self.pool.check([request.block_table for request in requests])


class PagedKVCache(KVCache):
    """Block tables over a ``BlockPool``, with the prefix cache when the configuration wants it."""

    def __init__(self, config: EngineConfig, record: Record, block_hash: BlockHash | None = None) -> None:
        super().__init__(config, record)
        self._block_size = config.block_size
        self._caching = config.prefix_caching
        self._hash = block_hash or sha256_block_hash

    def lookup(self, request: Request) -> list[int]:
        """Walk the chain of full blocks until one is unknown. Each hit verifies tokens and parent, not the hash alone."""
        if not self._caching:
            return []
        limit = (request.num_tokens - 1) // self._block_size
        hits: list[int] = []
        parent: ContentId = request.cache_salt
        for index, digest in enumerate(self._digests(request, limit)):
            entry = self.pool.find(digest, self._tokens(request, index), parent)
            if entry is None:
                break
            hits.append(entry.block)
            parent = entry.uid
        return hits

    def explain(self, request: Request, hits: list[int]) -> str:
        """Why the prefix cache gave no more than ``hits``, for people."""
        size, prompt = self._block_size, request.num_prompt_tokens
        if not self._caching:
            return "prefix caching is off"
        cached = len(hits) * size
        if prompt < size:
            return f"the prompt has {prompt} tokens, not one full block of {size}: only full blocks are shared"
        if prompt == size:
            return f"the prompt is one block of {size}, and the last token is always computed: its logits are needed"
        if cached + size == prompt:
            return "everything but the last block: the last token is always computed, its logits are needed"
        if cached == (prompt - 1) // size * size:
            return "every full block of the prompt was found"
        parent = self.pool.content_id(hits[-1]) if hits else request.cache_salt
        partial = self.pool.longest_partial_match(request.token_ids[cached : cached + size], parent)
        after = f"after {cached} tokens " if cached else ""
        if partial:
            shared = f"{after}the shared prefix goes on for {partial} tokens, shorter than a block of {size}"
            return f"{shared}: only full blocks are shared"
        return f"{after}nothing cached begins like this prompt" if not cached else f"{after}the prompts differ"

    def shortage(self, request: Request, hits: list[int]) -> tuple[int, int] | None:
        """Hits that nobody holds lie in the free queue themselves, so they reduce what is available."""
        needed = blocks_for(request.num_tokens, self._block_size) - len(hits)
        available = self.pool.num_available - sum(1 for block in hits if not self.pool.ref_count[block])
        return None if needed <= available else (needed, available)

    def admit(self, request: Request, hits: list[int]) -> None:
        """Share the hits; the request starts after them."""
        for block in hits:
            self.pool.share(block)
        request.block_table.extend(hits)
        request.num_computed_tokens = len(hits) * self._block_size
        request.num_cached_blocks = len(hits)
        request.cached_uid = self.pool.content_id(hits[-1]) if hits else request.cache_salt
        if hits:
            self._record(Event("hit", request.request_id, tuple(hits)))

    def grow(self, request: Request, num_tokens: int) -> Sequence[tuple[int, int]] | None:
        """Blocks are taken only for what this step writes; a shared last block is copied first."""
        table = request.block_table
        missing = -(-(request.num_computed_tokens + num_tokens) // self._block_size) - len(table)
        shared_at = self._shared_block(request) if request.shared else -1
        if missing <= 0 and shared_at < 0:
            return ()
        missing = max(missing, 0)
        if missing + (shared_at >= 0) > self.pool.num_available:
            return None
        copies = []
        if shared_at >= 0:
            source = table[shared_at]
            (copy,) = self.pool.take(1)
            self.pool.release((source,))
            table[shared_at] = copy
            request.shared = False
            copies.append((source, copy))
            self._record(Event("cow", request.request_id, (source, copy), shared_at))
        if missing:
            blocks = self.pool.take(missing)
            table.extend(blocks)
            self._record(Event("alloc", request.request_id, tuple(blocks)))
        return copies

    def _shared_block(self, request: Request) -> int:
        """Index of the block that the next token is written into, if somebody else holds it too; else -1."""
        index, offset = divmod(request.num_computed_tokens, self._block_size)
        if offset and self.pool.ref_count[request.block_table[index]] > 1:
            return index
        request.shared = False
        return -1

    def fork(self, parent: Request, child: Request) -> None:
        """The child holds every block of the parent, the partial last one included, until one of them writes."""
        child.block_table = list(parent.block_table)
        for block in child.block_table:
            self.pool.share(block)
        child.block_hashes = list(parent.block_hashes)
        child.num_cached_blocks = parent.num_cached_blocks
        child.cached_uid = parent.cached_uid
        parent.shared = child.shared = True
        self._record(Event("fork", child.request_id, (), 0, parent.request_id))

    def commit(self, request: Request) -> None:
        """Register each block that became full, in order."""
        if not self._caching:
            return
        full = request.num_computed_tokens // self._block_size
        if request.num_cached_blocks >= full:
            return
        self._offer(request, full)

    def commit_until(self, request: Request, num_tokens: int) -> None:
        """Register each block that became full within the first ``num_tokens`` positions."""
        full = num_tokens // self._block_size
        if self._caching and request.num_cached_blocks < full:
            self._offer(request, full)

    def _offer(self, request: Request, full: int) -> None:
        digests = self._digests(request, full)
        for index in range(request.num_cached_blocks, full):
            block = request.block_table[index]
            request.cached_uid = self.pool.register(block, digests[index], self._tokens(request, index), request.cached_uid)
        request.num_cached_blocks = full

    def release(self, request: Request, *, scrub: bool = False) -> None:
        """Tail first; the request knows nothing of the cache any more."""
        super().release(request, scrub=scrub)
        request.num_cached_blocks = 0
        request.cached_uid = request.cache_salt
        request.shared = False

    def refusal(self, num_prompt_tokens: int, max_tokens: int) -> str:
        """The last sampled token is never fed back, so prompt + max_tokens - 1 tokens must fit the pool."""
        needed = blocks_for(num_prompt_tokens + max_tokens - 1, self._block_size)
        return _pool_refusal(self._config, num_prompt_tokens, max_tokens, needed)

    def room(self, num_prompt_tokens: int) -> int:
        """Until the pool is full."""
        return self._config.kv_capacity - num_prompt_tokens + 1

    def unused_tokens(self, requests: Sequence[Request]) -> int:
        """The rest of each last block, a shared one counted once."""
        unused = 0
        seen: set[int] = set()
        for request in requests:
            table = request.block_table
            if table and table[-1] not in seen:
                seen.add(table[-1])
                unused += len(table) * self._block_size - request.num_computed_tokens
        return unused

    def check(self, requests: Sequence[Request]) -> None:
        """The pool against the tables of ``requests``, and each table against its request."""
        super().check(requests)
        for request in requests:
            held = len(request.block_table) * self._block_size
            if not request.num_computed_tokens <= held:
                raise RuntimeError(f"{request} has slots for {held} tokens only")
            if request.num_cached_blocks * self._block_size > request.num_computed_tokens:
                raise RuntimeError(f"{request} offers {request.num_cached_blocks} blocks that are not yet written")

    def _digests(self, request: Request, count: int) -> list[bytes]:
        digests = request.block_hashes
        for index in range(len(digests), count):
            parent = digests[-1] if digests else b""
            salt = request.cache_salt if index == 0 else None
            digests.append(self._hash(parent, self._tokens(request, index), salt))
        return digests[:count]

    def _tokens(self, request: Request, index: int) -> tuple[int, ...]:
        size = self._block_size
        return tuple(request.token_ids[index * size : (index + 1) * size])


class ContiguousKVCache(KVCache):
    """One extent of neighbouring blocks a request, first fit: how serving worked before paging, kept to be compared with."""

    no_hits = "a contiguous extent can't share blocks"

    def _extent(self, num_prompt_tokens: int, max_tokens: int) -> int:
        whole = self._config.reserve == "max_model_len"
        tokens = self._config.max_model_len if whole else num_prompt_tokens + max_tokens
        return blocks_for(tokens, self._config.block_size)

    def shortage(self, request: Request, hits: list[int]) -> tuple[int, int] | None:
        """The longest hole counts, not the sum of all: the difference is external fragmentation."""
        needed = self._extent(request.num_prompt_tokens, request.max_tokens)
        return None if self._first_fit(needed) else (needed, self.largest_hole)

    def admit(self, request: Request, hits: list[int]) -> None:
        """Reserve the whole extent now."""
        needed = self._extent(request.num_prompt_tokens, request.max_tokens)
        start = self._first_fit(needed)
        blocks = list(range(start, start + needed))
        for block in blocks:
            self.pool.free.remove(block)
            self.pool.ref_count[block] = 1
        request.block_table = blocks
        request.num_computed_tokens = 0
        self._record(Event("alloc", request.request_id, tuple(blocks)))

    def refusal(self, num_prompt_tokens: int, max_tokens: int) -> str:
        """The extent must fit the empty pool."""
        return _pool_refusal(self._config, num_prompt_tokens, max_tokens, self._extent(num_prompt_tokens, max_tokens))

    def room(self, num_prompt_tokens: int) -> int:
        """Until the pool is full."""
        return self._config.kv_capacity - num_prompt_tokens

    def unused_tokens(self, requests: Sequence[Request]) -> int:
        """Reserved for tokens that are not there yet, or never come."""
        size = self._config.block_size
        return sum(
            len(request.block_table) * size - request.num_computed_tokens for request in requests if request.block_table
        )

    @property
    def largest_hole(self) -> int:
        """Longest run of neighbouring free blocks."""
        longest = run = 0
        for count in self.pool.ref_count[1:]:
            run = 0 if count else run + 1
            longest = max(longest, run)
        return longest

    def _first_fit(self, needed: int) -> int:
        """First block of the first hole of at least ``needed`` blocks, or 0."""
        run = 0
        for block in range(1, self.pool.num_blocks + 1):
            run = 0 if self.pool.ref_count[block] else run + 1
            if run == needed:
                return block - needed + 1
        return 0

    def check(self, requests: Sequence[Request]) -> None:
        """The pool against the extents, and that each extent is one run."""
        super().check(requests)
        for request in requests:
            table = request.block_table
            if table and table != list(range(table[0], table[0] + len(table))):
                raise RuntimeError(f"the extent of {request} is not contiguous: {table}")


def make_kv_cache(config: EngineConfig, record: Record, block_hash: BlockHash | None = None) -> KVCache:
    """The layout that ``config`` names."""
    if not config.use_kv_cache:
        return KVCache(config, record)
    if config.kv_layout == "contiguous":
        return ContiguousKVCache(config, record)
    return PagedKVCache(config, record, block_hash)


def _pool_refusal(config: EngineConfig, num_prompt_tokens: int, max_tokens: int, needed: int) -> str:
    if needed <= config.num_kv_blocks:
        return ""
    return (
        f"the request can need {needed} KV blocks ({num_prompt_tokens} prompt tokens + max_tokens={max_tokens}, block_size="
        f"{config.block_size}), but the pool has num_kv_blocks={config.num_kv_blocks}: shorten the prompt, lower "
        f"max_tokens, or raise num_kv_blocks"
    )
