"""What may be opened and read without the engine: whole, hashed and verified hot files, published to whoever serves them.

The engine publishes an inode when it finds its hot copy whole and trusted. It withdraws it before it touches that copy
(eviction, damage), and when it learns that its name leads elsewhere. A copy that is open natively is in use, as if the reader had
it open.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from tiercache.core.record import Entry, ObjectId


class Use(NamedTuple):
    """How a published file was used since the last `harvest`: `bytes_read` only as far as the daemon's threads served it."""

    object_id: ObjectId
    dataset: str
    open_count: int
    bytes_read: int
    size_bytes: int
    used_seconds: int


class StillOpen(NamedTuple):
    """A file that is open: `daemon_count` of its opens are served by Python."""

    entry: Entry
    daemon_count: int


class Publication(Protocol):
    """Every call is cheap and never waits."""

    def publish(self, entry: Entry, directory: int) -> bool:
        """Opens of the inode may be answered from its hot file in this hot directory. False: they are not."""

    def withdraw(self, entry: Entry) -> None:
        """The name leads elsewhere: look-ups of it and opens of the inode come to the engine again."""

    def withdraw_object(self, object_id: ObjectId) -> int:
        """Opens of the object come to the engine again; how many native opens there still are."""

    def uses(self, object_id: ObjectId) -> int:
        """How many native opens the object's file has."""

    def hand_over(self, entry: Entry) -> bool:
        """The engine has just opened the inode for a caller. True: it is published, and this open is the publication's own from
        now on. To be called as the last thing before the caller is answered."""

    def harvest(self) -> list[Use]:
        """What was used since the last call; a bounded part of it."""

    def still_open(self) -> list[StillOpen]:
        """Every file that is open and whose entry a predecessor, or this process, has described."""


class NothingPublished:
    """Where every open and read goes through the engine."""

    def publish(self, entry: Entry, directory: int) -> bool:
        return False

    def withdraw(self, entry: Entry) -> None:
        return

    def withdraw_object(self, object_id: ObjectId) -> int:
        return 0

    def uses(self, object_id: ObjectId) -> int:
        return 0

    def hand_over(self, entry: Entry) -> bool:
        return False

    def harvest(self) -> list[Use]:
        return []

    def still_open(self) -> list[StillOpen]:
        return []
