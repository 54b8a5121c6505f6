"""Which misses fill a chunk, and which only fetch the extent that was asked for.

A miss can be answered in two ways. FILL fetches the whole chunk (8 MiB) and keeps it; PASS fetches the
extent and keeps nothing. Filling always would make random 4 KiB reads move 2,048 times what
they read; passing always would never fill a file that is read at random and fits the hot tier well.

**Expected reads.** Small objects are filled. In a large object a chunk is filled when the read looks
like part of something longer: it starts the object, it continues a run (`Miss.run_bytes`), or it enters a
chunk whose predecessor is there. Each of these could also be luck, so each is bounded:

* "enters" means: starts within its own length L of the chunk's beginning. A reader that goes through the
  object in pieces of L cannot enter a chunk elsewhere, a random one does so with probability L / chunk. What the rule
  fills for nothing is thus, on average, at most what was read.
* When room can only be had by evicting something (`scarce`), a run must have covered an eighth of a
  chunk first: records below 1 MiB at random places then move only themselves. A run of R bytes
  costs at most R + 2 chunks, and (R + chunk) / R <= 9 times its bytes on average.

**Everything else is ski rental.** Passing is rent, filling is purchase, and nobody knows how often the chunk
will be missed again. A request for n bytes costs n + REQUEST_BYTES. Rent is paid until it would reach the
price of the purchase; then the chunk is bought. Let B be the price: rent paid so far is below B, so
the total stays below 2 B, and whoever had known the future would have paid at least B by then. So it is at most twice
the optimum, and no deterministic rule does better (Karlin et al., 1988). With 8 MiB chunks the 17th random 4 KiB
miss of a chunk fills it.

The proof needs that what was bought is kept. In a hot tier that is too small, chunks are evicted before they have
paid for themselves and the game starts again: 17 misses of 4 KiB would move 8 MiB each round, 120 times what was
read. Two things prevent that:

* `Touches` remembers passes only of as many chunks as the hot tier can hold, least recently missed out first.
  A chunk whose misses lie further apart than that would have been evicted between them anyway (this is the ghost
  list of 2Q and ARC). Uniformly random reads over a 100 GiB object with 1 GiB of hot tier practically never fill.
* The price of a request, REQUEST_BYTES, buys every object at most once over: what was filled on the strength of
  passes is counted for each object (`Past.filled_bytes`). Beyond the object's size, and while room is scarce, only bytes
  count: the misses of a chunk must have asked for as many bytes as the fill fetches. So whatever the pattern,

      transferred by passes and by the fills they led to  <=  object size + 2 x missed bytes

  (in whole pages), until the count starts anew after ALLOWANCE_SECONDS: an object that another job pushed out last
  night deserves to come back quickly.

Measured with random 4 KiB reads and a simulated tier of 1 GiB (tests/core/test_admission.py):

                                            as built   passes never forgotten   nor fills counted
    one object of 100 GiB, moved / read          1.0                     21.7                21.7
    two of 768 MiB, 300,000 reads, moved in all  2.9 sizes                2.8                63.4

REQUEST_BYTES: a request costs about 1.25 ms of CPU against 0.7 s for a GiB (so 1.8 MiB), and 10 to 30 ms of waiting
against 100 MB/s on one connection (1 to 3 MiB). Half a MiB is deliberately below that, because bytes are paid by all
nodes on one store, and waiting by one reader.

Rejected: filling at the second miss of a chunk (after one miss a random 4 KiB reader has earned nothing: up to
1,000 times what was read); a coin with probability extent / chunk (the same average without memory, but a hot chunk
waits 2,048 misses on average); frequency sketches (TinyLFU: count accesses to decide between objects,
and say nothing about the price of a fill).
"""

from __future__ import annotations

import enum
from collections import OrderedDict

import msgspec

from tiercache.core.chunk import PAGE_BYTES
from tiercache.core.record import HotRecord, ObjectId

REQUEST_BYTES = 512 * 1024
ALLOWANCE_SECONDS = 4 * 3600
SCARCE_RUN_SHARE = 8  # a run earns a chunk of scarce room when it has covered 1/8 of one
MAX_TOUCHES = 65_536  # about 20 MiB of memory

PROMOTE_PRESENT_SHARE = 4  # a large object is completed when a quarter of it is there
PROMOTE_RUN_SHARE = 8  # or when one run has covered an eighth of it,
PROMOTE_RUN_BYTES = 64 * 1024 * 1024  # but not less than this


class Admit(enum.Enum):
    FILL = "fill"
    PASS = "pass"


class Past(msgspec.Struct, frozen=True):
    """What is remembered when a chunk is missed: passes of this chunk, and fills of its object that followed passes."""

    passed_count: int = 0
    passed_bytes: int = 0
    filled_bytes: int = 0


class Miss(msgspec.Struct, frozen=True):
    """One read that found one chunk missing.

    `offset` and `length` are the part of the read that lies in this chunk. `run_bytes` is the length of the
    sequential run that the read belongs to, this read included (equal to `length` for a lone read).
    `neighbour`: the chunk before is present or being filled. `scarce`: the hot tier could take this
    chunk only by evicting something. `past` comes from `Touches.recall`.
    """

    size_bytes: int
    chunk_bytes: int
    chunk: int
    offset: int
    length: int
    run_bytes: int
    neighbour: bool
    scarce: bool
    past: Past = Past()

    @property
    def fill_bytes(self) -> int:
        """What a fill of the chunk would fetch."""
        return min(self.chunk_bytes, self.size_bytes - self.chunk * self.chunk_bytes)


def admit(miss: Miss, whole_file_bytes: int) -> Admit:
    """Fill the chunk or pass the extent; objects of up to `whole_file_bytes` are always filled."""
    if miss.size_bytes <= whole_file_bytes or _is_expected(miss) or _has_paid(miss):
        return Admit.FILL
    return Admit.PASS


def _is_expected(miss: Miss) -> bool:
    if miss.offset == 0:
        return True
    if miss.neighbour and miss.offset - miss.chunk * miss.chunk_bytes < miss.length:
        return True
    wanted_run_bytes = miss.chunk_bytes // SCARCE_RUN_SHARE if miss.scarce else 0
    return miss.run_bytes > miss.length and miss.run_bytes >= wanted_run_bytes


def _has_paid(miss: Miss) -> bool:
    """Ski rental: would the rent, with this read's, reach the price of the chunk?"""
    past = miss.past
    on_allowance = past.filled_bytes + miss.fill_bytes <= miss.size_bytes
    request_bytes = REQUEST_BYTES if on_allowance or not miss.scarce else 0
    rent_bytes = past.passed_bytes + miss.length + (past.passed_count + 1) * request_bytes
    return rent_bytes >= miss.fill_bytes + request_bytes


def pass_extent(miss: Miss, block_bytes: int = 128 * 1024) -> tuple[int, int]:
    """Offset and length in bytes of what to fetch for a PASS: whole pages, cut at the end of the object.

    Pages, because the kernel asks for pages and will ask for the rest of one next. A read of up to
    `block_bytes` (what FUSE moves at most in one request) that lies askew is not blown up beyond that.
    """
    begin = miss.offset - miss.offset % PAGE_BYTES
    end = min(miss.size_bytes, miss.offset + miss.length + (-(miss.offset + miss.length)) % PAGE_BYTES)
    if end - begin > max(block_bytes, miss.length):
        return miss.offset, miss.length
    return begin, end - begin


def promote_rest(size_bytes: int, chunk_bytes: int, present_count: int, run_bytes: int, whole_file_bytes: int) -> bool:
    """Whether the missing chunks of an object are worth fetching in the background.

    `present_count` chunks are in the hot tier or on their way, `run_bytes` is the longest sequential run on the
    object. A look into a 500 GB object stays small: it takes 62 GB of sequential reading, or
    125 GB of chunks that were wanted one by one, before the rest is taken for wanted too. One chunk alone is what a look at
    a header brings, whatever its share of the object.
    """
    if size_bytes <= whole_file_bytes:
        return True
    if present_count > 1 and present_count * chunk_bytes * PROMOTE_PRESENT_SHARE >= size_bytes:
        return True
    return run_bytes >= max(PROMOTE_RUN_BYTES, size_bytes // PROMOTE_RUN_SHARE)


def worth_demoting(record: HotRecord, *, is_superseded: bool) -> bool:
    """Whether a hot copy that has to go is worth a warm one: whole, and of the present version.

    A part of an object is not: what was looked at here and there is as cheap to look at in the cold store.
    """
    return record.complete and record.size_bytes > 0 and not is_superseded


def touches_capacity(hot_capacity_bytes: int, chunk_bytes: int) -> int:
    """How many chunks `Touches` should remember: as many as the hot tier can hold, within memory's bound."""
    return max(1, min(MAX_TOUCHES, hot_capacity_bytes // chunk_bytes))


class _Account(msgspec.Struct):
    opened_seconds: float
    filled_bytes: int


class Touches:
    """What was passed lately: at most `capacity` chunks, the least recently missed forgotten first.

    Lives in memory only; after a restart the passes are paid again.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self._capacity = capacity
        self._passed: OrderedDict[tuple[ObjectId, int], tuple[int, int]] = OrderedDict()
        self._accounts: OrderedDict[ObjectId, _Account] = OrderedDict()

    def __len__(self) -> int:
        return len(self._passed)

    def recall(self, object_id: ObjectId, chunk: int, now_seconds: float) -> Past:
        passed_count, passed_bytes = self._passed.get((object_id, chunk), (0, 0))
        account = self._accounts.get(object_id)
        if account is not None and now_seconds - account.opened_seconds >= ALLOWANCE_SECONDS:
            account = None
        return Past(passed_count, passed_bytes, account.filled_bytes if account else 0)

    def record(self, object_id: ObjectId, miss: Miss, verdict: Admit, now_seconds: float) -> None:
        """Remember what was decided for a miss; call it before fetching, so that readers at the same time count too."""
        if verdict is Admit.PASS:
            self._record_pass(object_id, miss)
        elif self._passed.pop((object_id, miss.chunk), None) is not None:
            self._charge(object_id, miss.fill_bytes, now_seconds)

    def _record_pass(self, object_id: ObjectId, miss: Miss) -> None:
        name = (object_id, miss.chunk)
        passed_count, passed_bytes = self._passed.pop(name, (0, 0))
        self._passed[name] = (passed_count + 1, passed_bytes + miss.length)
        if len(self._passed) > self._capacity:
            self._passed.popitem(last=False)

    def _charge(self, object_id: ObjectId, filled_bytes: int, now_seconds: float) -> None:
        account = self._accounts.pop(object_id, None)
        if account is None or now_seconds - account.opened_seconds >= ALLOWANCE_SECONDS:
            account = _Account(now_seconds, 0)
        account.filled_bytes += filled_bytes
        self._accounts[object_id] = account
        if len(self._accounts) > self._capacity:
            self._accounts.popitem(last=False)
