"""Read-ahead: which sequential streams a handle carries, how far ahead of each to fetch, and who gets the memory.

**Streams.** A handle is not a stream. Loaders share a descriptor after fork, so that several readers go
through one file at once; the kernel cuts one reader's stream into pieces of 128 KiB and hands them over
slightly out of order; pages that it still has are not asked for, so that a stream jumps ahead.
`Streams` therefore keeps up to MAX_STREAMS heads, and a read belongs to the nearest head that it is close
to: up to BEHIND_BYTES behind, or AHEAD_BYTES (or the read-ahead window, where everything is being
fetched anyway) before it. A jump takes a quarter of its length off the run (one back into the run does
not: its way there was paid for), and a jump that would leave nothing of it begins another stream. With the
full room around each of 16 heads 5 % of random 4 KiB reads in a 1 GiB file would look sequential by
chance, with this 0.1 %.

A random read starts a stream of its own and resets nothing. Streams that never got a second read are the
first to be replaced, so that random reads between two sequential ones do not push those out; NEWCOMERS
places are kept for beginners, or several new streams at once could never become old enough.

**Windows.** A young run reads ahead as much as it has read, an established one (ESTABLISHED_BYTES) 8
times that, up to the caller's limit. What is fetched for nothing when a run ends is thus no more than what was
read while the run was short: records of 100 KiB to 1 MiB at random places stay cheap. With 8 MiB
chunks a file that is read from its start has 4 chunks under way ahead of it after 4 MiB and 8 after 8 MiB.
Plain doubling would reach that only after 64 MiB. Factor 8 is also what mountpoint-s3 settled on.

**Budget.** All handles share one number of bytes that may be under way ahead of their readers. A handle
may take as long as it holds no more than what is left free (the dynamic threshold of Choudhury and Hahne,
1998, for buffers shared by the ports of a switch): a lone one gets half of the budget, each of n gets
1 / (n + 1), newcomers always find something, and nobody has to know n.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tiercache.core.chunk import chunk_count

MAX_STREAMS = 16
NEWCOMERS = 4
BEHIND_BYTES = 1024 * 1024
AHEAD_BYTES = 2 * 1024 * 1024
JUMP_SHARE = 4  # a jump takes a quarter of its length off the run
ESTABLISHED_BYTES = 4 * 1024 * 1024
ESTABLISHED_FACTOR = 8

assert 0 < NEWCOMERS < MAX_STREAMS


class Run(msgspec.Struct, frozen=True):
    """What a read belongs to.

    `run_bytes`: bytes read by the stream so far, this read included (its own length for a lone read; what was
    read twice counts once). `window_bytes`: how far to fetch beyond `next_offset`, the stream's head.
    """

    run_bytes: int
    window_bytes: int
    next_offset: int


class _Stream:
    """`nearest_offset` to `farthest_offset` is where the next read may begin to belong to it."""

    __slots__ = ("begin", "farthest_offset", "head", "nearest_offset", "read_bytes", "reads")

    def __init__(self, offset: int, length: int) -> None:
        self.begin = offset
        self.head = offset + length
        self.read_bytes = length
        self.reads = 1

    @property
    def run_bytes(self) -> int:
        return min(self.read_bytes, self.head - self.begin)

    def take(self, offset: int, length: int) -> None:
        jump_bytes = 0 if self.begin <= offset <= self.head else abs(offset - self.head)
        self.read_bytes = self.run_bytes - jump_bytes // JUMP_SHARE + length
        self.begin = min(self.begin, offset)
        self.head = max(self.head, offset + length)
        self.reads += 1

    def make_room(self, window_bytes: int) -> None:
        room_bytes = JUMP_SHARE * self.run_bytes
        self.nearest_offset = self.head - min(BEHIND_BYTES, room_bytes)
        self.farthest_offset = self.head + min(max(AHEAD_BYTES, window_bytes), room_bytes)


class Streams:
    """The sequential streams of one handle; `max_window_bytes` limits the read-ahead of each.

    `observe` costs 1 us for the stream that was read last, 2 to 4 us for a random read among 16 streams.
    """

    def __init__(self, max_window_bytes: int) -> None:
        self._max_window_bytes = max_window_bytes
        self._streams: list[_Stream] = []  # least recently used first

    def observe(self, offset: int, length: int) -> Run:
        """Account for one read, present or missing; reads of no bytes are the caller's to leave out."""
        assert length > 0
        stream = self._nearest(offset)
        if stream is None:
            stream = _Stream(offset, length)
            stream.make_room(0)
            self._add(stream)
            return Run(length, 0, stream.head)
        stream.take(offset, length)
        window_bytes = self._window_bytes(stream.run_bytes)
        stream.make_room(window_bytes)
        if self._streams[-1] is not stream:
            self._streams.remove(stream)
            self._streams.append(stream)
        return Run(stream.run_bytes, window_bytes, stream.head)

    def _window_bytes(self, run_bytes: int) -> int:
        factor = ESTABLISHED_FACTOR if run_bytes >= ESTABLISHED_BYTES else 1
        return min(self._max_window_bytes, factor * run_bytes)

    def _nearest(self, offset: int) -> _Stream | None:
        near = [stream for stream in self._streams if stream.nearest_offset <= offset <= stream.farthest_offset]
        if len(near) <= 1:
            return near[0] if near else None
        return min(reversed(near), key=lambda stream: abs(offset - stream.head))

    def _add(self, stream: _Stream) -> None:
        if len(self._streams) == MAX_STREAMS:
            beginners = [each for each in self._streams if each.reads == 1]
            crowded = beginners if len(beginners) >= NEWCOMERS else [each for each in self._streams if each.reads > 1]
            self._streams.remove(crowded[0])
        self._streams.append(stream)


def plan(run: Run, size_bytes: int, chunk_bytes: int, chunk_states: Callable[[int], bool]) -> list[int]:
    """Which chunks to fill ahead of a stream, nearest first.

    `chunk_states(chunk)` says whether a chunk is present or being filled already. The chunk in which the head lies is left out: a
    read of it is a miss of its own, decided in `admission`. At most window / chunk + 1 chunks.
    """
    if run.window_bytes == 0:
        return []
    first = -(-run.next_offset // chunk_bytes)
    beyond = min(chunk_count(size_bytes, chunk_bytes), chunk_count(run.next_offset + run.window_bytes, chunk_bytes))
    return [chunk for chunk in range(first, beyond) if not chunk_states(chunk)]


class Budget:
    """The bytes that all handles together may have under way ahead of their readers."""

    def __init__(self, capacity_bytes: int) -> None:
        assert capacity_bytes >= 0
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def grant(self, wanted_bytes: int, held_bytes: int = 0) -> int:
        """Up to `wanted_bytes` for a handle that holds `held_bytes` of the budget already; 0 when its share is used up.

        Every granted byte must be given back.
        """
        free_bytes = self._capacity_bytes - self._used_bytes
        granted_bytes = max(0, min(wanted_bytes, free_bytes - held_bytes))
        self._used_bytes += granted_bytes
        return granted_bytes

    def give_back(self, granted_bytes: int) -> None:
        assert 0 <= granted_bytes <= self._used_bytes, f"{granted_bytes} bytes given back, {self._used_bytes} granted"
        self._used_bytes -= granted_bytes
