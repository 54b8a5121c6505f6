"""Who has which bytes of a hot directory: reserve before write.

Synchronous, and used on the event loop only: between two awaits nobody else changes a ledger, so "is
there room" and "it is mine" are one step without a lock.

    reserve(n) ──> Reservation ──settle──> held ──release──> free
                        └────cancel──> free └───unlinked──> unlinked ──gone──> free

* held: what lies in the hot files; starts from the index's figure and moves with every commit. A fill that broke off
  settles with what it wrote: a hot file is never punched, so those blocks stay until the file goes.
* reserved: promised to fills that run.
* unlinked: evicted, but somebody still has the file open: its blocks are not free before that ends.
* overhead: the index, its log, and directories; set from time to time.

`used_bytes` is the sum. No reservation makes it exceed the capacity. Only what was not asked for can: more
overhead, or an index that already held more at the start; then nothing is given out until reclaim has made room.

The file system's free space is an observation that ages. From one to the next it is taken to have lost all that
was settled since and all that is reserved (how much of that had been written before is unknown; the
figure errs on the safe side by at most the running fills), and to have gained what was released. Others who write to the
same file system are seen at the next observation; ENOSPC, should it come first, is HotFull as well.

Rejected: counting what has been written instead of what has been promised: the limit is then passed by whatever is
in flight, which is how caches grow past their size under load.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from tiercache.core import watermark
from tiercache.core.watermark import blocks
from tiercache.errors import HotFull


class Ledger:
    """The bytes of one hot directory. All figures are bytes; `name` is the directory as the user knows it.

    `low_ratio` < `high_ratio` <= 1 are ratios of `limit_bytes`. `free_bytes` and `total_bytes`: of the file system, at the start.
    `overhead_bytes` may be set at any time.
    """

    def __init__(
        self,
        name: str,
        *,
        capacity_bytes: int,
        min_free_bytes: int,
        high_ratio: float,
        low_ratio: float,
        block_bytes: int,
        held_bytes: int,
        free_bytes: int,
        total_bytes: int,
    ) -> None:
        assert 0 <= low_ratio < high_ratio <= 1
        assert capacity_bytes >= 0
        assert min_free_bytes >= 0
        assert held_bytes >= 0
        assert block_bytes > 0
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.min_free_bytes = min_free_bytes
        self.high_ratio = high_ratio
        self.low_ratio = low_ratio
        self.block_bytes = block_bytes
        self.held_bytes = held_bytes
        self.reserved_bytes = 0
        self.unlinked_bytes = 0
        self.overhead_bytes = 0
        self.observe_filesystem(free_bytes, total_bytes)

    @property
    def used_bytes(self) -> int:
        return self.held_bytes + self.reserved_bytes + self.unlinked_bytes + self.overhead_bytes

    @property
    def filesystem_free_bytes(self) -> int:
        """What is free when all that is promised has been written; below 0 when it will not fit."""
        return self._observed_free_bytes - self._taken_bytes - self.reserved_bytes

    @property
    def limit_bytes(self) -> int:
        """The most that may be used now, by capacity and by the file system's free space."""
        return watermark.limit_bytes(self.capacity_bytes, self.used_bytes, self.filesystem_free_bytes, self.min_free_bytes)

    @property
    def free_bytes(self) -> int:
        """What `reserve` would still give, 0 or more."""
        return max(0, self.limit_bytes - self.used_bytes)

    @property
    def over_high(self) -> bool:
        return watermark.over(self.used_bytes, self.limit_bytes, self.high_ratio)

    def to_low_bytes(self) -> int:
        """What must be evicted to reach the low watermark. Bytes on their way out (unlinked) are not asked for twice."""
        excess = watermark.excess_bytes(self.used_bytes, self.limit_bytes, self.low_ratio)
        return max(0, excess - self.unlinked_bytes)

    def reserve(self, length_bytes: int) -> Reservation:
        """Room for `length_bytes`, rounded up to blocks. Raises HotFull with the numbers; nothing is taken then.

        0 is always granted: rewriting blocks that a broken fill has left takes no room.
        """
        assert length_bytes >= 0
        wanted = blocks(length_bytes, self.block_bytes)
        if wanted == 0:
            return Reservation(self, 0)
        if self.used_bytes + wanted > self.capacity_bytes:
            raise HotFull(
                f"{self.name} has no room for {wanted} bytes: {self.used_bytes} of {self.capacity_bytes} are used "
                f"({self.held_bytes} held, {self.reserved_bytes} reserved, {self.unlinked_bytes} evicted but still open, "
                f"{self.overhead_bytes} overhead)"
            )
        if self.filesystem_free_bytes - wanted < self.min_free_bytes:
            raise HotFull(
                f"{self.name} has no room for {wanted} bytes: its file system has {self.filesystem_free_bytes} of "
                f"{self.filesystem_total_bytes} bytes free, and {self.min_free_bytes} must stay free"
            )
        self.reserved_bytes += wanted
        return Reservation(self, wanted)

    def release(self, held_bytes: int) -> None:
        """These bytes are free on the disk: their file was unlinked and is open nowhere."""
        self._leave(held_bytes)
        self._taken_bytes -= held_bytes

    def unlinked(self, held_bytes: int) -> None:
        """A file was unlinked while somebody has it open: `gone` follows when the last one has closed it."""
        self._leave(held_bytes)
        self.unlinked_bytes += held_bytes

    def gone(self, unlinked_bytes: int) -> None:
        """The blocks of a file that `unlinked` reported are free now."""
        assert 0 <= unlinked_bytes <= self.unlinked_bytes, "more gone than was unlinked"
        self.unlinked_bytes -= unlinked_bytes
        self._taken_bytes -= unlinked_bytes

    def observe_filesystem(self, free_bytes: int, total_bytes: int) -> None:
        """What `statvfs` says now (`HotTier.filesystem`). Ask every few seconds while filling, and after evictions."""
        assert free_bytes >= 0
        assert total_bytes > 0
        self._observed_free_bytes = free_bytes
        self.filesystem_total_bytes = total_bytes
        self._taken_bytes = 0

    def _leave(self, held_bytes: int) -> None:
        assert 0 <= held_bytes <= self.held_bytes, "more released than held"
        self.held_bytes -= held_bytes

    def _conclude(self, reserved_bytes: int, held_bytes: int) -> None:
        self.reserved_bytes -= reserved_bytes
        assert self.reserved_bytes >= 0
        self.held_bytes += held_bytes
        self._taken_bytes += held_bytes


class Reservation:
    """Room for one fill, concluded exactly once: by `settle`, by `cancel`, or by the end of its `with` block (as cancelled)."""

    def __init__(self, ledger: Ledger, reserved_bytes: int) -> None:
        self._ledger = ledger
        self.reserved_bytes = reserved_bytes
        self.concluded = False

    def settle(self, held_bytes: int) -> None:
        """The fill has ended and `held_bytes` of what was reserved lie in the file."""
        assert 0 <= held_bytes <= self.reserved_bytes, "a fill held more than it had reserved"
        assert not self.concluded, "a reservation is concluded once"
        self.concluded = True
        self._ledger._conclude(self.reserved_bytes, held_bytes)

    def cancel(self) -> None:
        """Nothing was written."""
        self.settle(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self.concluded:
            self.cancel()
