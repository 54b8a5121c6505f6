"""Memory for chunks and pieces, which comes back by itself and is used again.

New pages are a good part of what moving large buffers costs (measured in a VM, where a page fault is dear: writing a copy takes
1.5 CPU s/GiB with new pages and 1.35 without). A buffer is lent as a view, and is idle again when nothing refers to it any more:
no view that was cut from it, and no thread that was given up inside a system call. Nobody hands anything back, so nobody can
hand back what somebody else may still read or fill.
"""

from __future__ import annotations

import ctypes
import weakref
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

LEAST_BYTES = 256 << 10
"""Less comes from the allocator, which keeps so much by itself."""
IDLE_BYTES = 128 << 20


class Loans:
    """Usable from all threads."""

    def __init__(self, idle_bytes: int = IDLE_BYTES) -> None:
        self._limit_bytes = idle_bytes
        self._idle: dict[int, list[mmap]] = {}  # by size, a power of two
        self._was_used = False

    @property
    def idle_bytes(self) -> int:
        return sum(size * len(blocks) for size, blocks in list(self._idle.items()))

    def take(self, size_bytes: int) -> memoryview:
        """So many bytes, of any content. New ones have no pages yet: who writes there first gets them."""
        if size_bytes < LEAST_BYTES:
            return memoryview(bytearray(size_bytes))
        self._was_used = True
        block_bytes = 1 << (size_bytes - 1).bit_length()
        try:
            block = self._idle[block_bytes].pop()
        except LookupError:
            block = mmap(-1, block_bytes, MAP_PRIVATE | MAP_ANONYMOUS)
        loan = (ctypes.c_ubyte * block_bytes).from_buffer(block)
        weakref.finalize(loan, self._came_back, block).atexit = False
        return memoryview(loan).cast("B")[:size_bytes]

    def rest(self) -> None:
        """Called now and then: when nobody has taken any since the last time, none is kept."""
        if not self._was_used:
            self._idle.clear()
        self._was_used = False

    def _came_back(self, block: mmap) -> None:
        if self.idle_bytes + len(block) <= self._limit_bytes:
            self._idle.setdefault(len(block), []).append(block)


LOANS = Loans()
