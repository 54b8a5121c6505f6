"""What to evict: least recently used, by sampling.

3.5 TB of hot tier hold 35 million files of 100 KiB. An exact LRU list of them costs 5 GB of memory and
is lost at a restart; one kept on disk turns every read into a write. Here nothing is kept for an object
but the time of its last access in its index record, written lazily. When room is needed, the engine
draws records at random (ids are hashes, so a seek to a random id is a fair draw) and the oldest go.

**Quality.** Taking a share q of every sample evicts from about the oldest q of all objects. The
POOL_CAPACITY oldest candidates that were not taken compete with the next sample, as in Redis since
version 3. Hit ratios on traces of 300,000 reads, 40,000 objects, a cache of a tenth of them, samples of 64
(the harness is tests/core/test_eviction_trace.py):

                       exact LRU   q = 1/8   q = 1/4   q = 1/2   no pool, q = 1/8   random
    Zipf                  0.7134    0.7129    0.7115    0.7061             0.7126   0.6753
    Zipf with scans       0.5973    0.5954    0.5934    0.5902             0.5950   0.5584
    drifting Zipf         0.1914    0.1909    0.1914    0.1910             0.1911   0.1885

The pool matters more with small samples (8 instead of 64: 0.7128 with it, 0.7118 without). Shuffled
epochs over more than fits are LRU's own worst case, with sampling as without.

**Cost.** A record is read in about 8 us, so that one eviction costs 8 us / q: 64 us.

**Times.** A pool entry may be outdated: read again since, or evicted. `Evict.accessed_seconds` lets the
engine compare with the present record and leave such a victim alone; it is out of the pool then.
Objects accessed within the last FRESH_SECONDS are not victims: readers that evict each other's fresh
chunks for ever get nothing done, while streaming past the hot tier always works. Times in the
future (the clock was set back) count as just beyond fresh: they neither stick for ever nor go first.

Rejected: CLOCK (a hand that goes over 35 million records scans the index); atime of the files (a walk);
random eviction (see the table). LRU-K and the like need only another `choose`: candidates carry
their access count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from tiercache.core.record import ObjectId

POOL_CAPACITY = 64
TAKE_SHARE = 8  # at most 1/8 of the candidates of one sample are taken
FRESH_SECONDS = 2  # times of access are whole seconds: at least one full second


class Candidate(msgspec.Struct, frozen=True):
    """What the choice needs to know of a hot object."""

    object_id: ObjectId
    held_bytes: int
    accessed_seconds: int
    access_count: int
    size_bytes: int


class Evict(msgspec.Struct, frozen=True):
    """Drop this copy, if it still was last accessed at `accessed_seconds`; frees `held_bytes`."""

    object_id: ObjectId
    held_bytes: int
    accessed_seconds: int


class SampledLru:
    """Chooses victims from samples. One for all hot directories whose candidates may stand for each other."""

    def __init__(self, pool_capacity: int = POOL_CAPACITY) -> None:
        self._pool_capacity = pool_capacity
        self._pool: dict[ObjectId, Candidate] = {}

    def choose(
        self,
        sample: Sequence[Candidate],
        need_bytes: int,
        now_seconds: float,
        protected: Callable[[ObjectId], bool],
        *,
        fresh_seconds: int = FRESH_SECONDS,
    ) -> list[Evict]:
        """Victims, oldest first: enough for `need_bytes`, but no more than a share of the sample (at least one).

        Call it again with a fresh sample until the need is met; an empty answer to a sample means that nothing
        of it can go now. `protected` objects (pinned, being filled) are never chosen. With `fresh_seconds` 0 what was just read
        may be chosen too, though last: for demotion, which loses nothing.
        """
        self._pool.update((candidate.object_id, candidate) for candidate in sample)
        latest_seconds = now_seconds - fresh_seconds
        ranked = sorted(
            (
                candidate
                for candidate in self._pool.values()
                if _may_go(candidate, now_seconds, fresh_seconds) and not protected(candidate.object_id)
            ),
            key=lambda candidate: (min(candidate.accessed_seconds, latest_seconds), candidate.access_count, candidate.object_id),
        )
        victims: list[Evict] = []
        freed_bytes = 0
        for candidate in ranked[: max(1, len(sample) // TAKE_SHARE)]:
            if freed_bytes >= need_bytes:
                break
            victims.append(Evict(candidate.object_id, candidate.held_bytes, candidate.accessed_seconds))
            freed_bytes += candidate.held_bytes
        left = ranked[len(victims) : len(victims) + self._pool_capacity]
        self._pool = {candidate.object_id: candidate for candidate in left}
        return victims


def _may_go(candidate: Candidate, now_seconds: float, fresh_seconds: int) -> bool:
    if candidate.held_bytes == 0:
        return False
    return not 0 <= now_seconds - candidate.accessed_seconds < fresh_seconds


class WarmCopy(msgspec.Struct, frozen=True):
    """A copy in the warm tier: what it occupies on all targets together, and whether it is the only one of its bytes."""

    object_id: ObjectId
    generation: int
    is_pack: bool
    occupied_bytes: int
    is_sole: bool


def oldest_copies(copies: Iterable[WarmCopy], need_bytes: int) -> list[WarmCopy]:
    """Warm copies to drop so that `need_bytes` become free: oldest first, and never one whose bytes are nowhere else."""
    going: list[WarmCopy] = []
    freed_bytes = 0
    for copy in sorted(copies, key=lambda copy: (copy.generation, copy.object_id)):
        if freed_bytes >= need_bytes:
            break
        if not copy.is_sole:
            going.append(copy)
            freed_bytes += copy.occupied_bytes
    return going
