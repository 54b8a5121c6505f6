"""Which tier below the hot one serves a read: the replica while it can be trusted and is not slower, else cold.

A tier that does not hold the bytes (NotHeld) or fails (any other TierError of a replica) is passed over, and
the next one goes on where it stopped: what a sink has accepted is right whoever sent it, because every tier
checks the version before its first byte. Only the cold store's word counts for "gone" and "changed".
"""

from __future__ import annotations

from collections.abc import Callable

from tiercache.core.record import ObjectRef
from tiercache.engine.dataset import Dataset
from tiercache.errors import NotHeld, TierError
from tiercache.tiers.tier import Sink, Tier

Passed = Callable[[str, str, TierError], None]

EXPLORE_EVERY = 64
"""One read in so many goes to the tier that measured slower, or its figure could never recover."""


def _nobody(_tier: str) -> None:
    """Nobody listens."""


class Source:
    """Reads of one dataset from below the hot tier. `served` is told (tier name, bytes) as they arrive."""

    def __init__(self, dataset: Dataset, served: Callable[[str, str, int], None], passed: Passed) -> None:
        self._dataset = dataset
        self._served = served
        self._passed = passed
        self._reads = 0

    @property
    def in_trouble(self) -> bool:
        """Did the cold store's last request fail?"""
        return bool(self._dataset.trouble())

    async def read(
        self,
        ref: ObjectRef,
        offset: int,
        length: int,
        sink: Sink,
        *,
        background: bool,
        asking: Callable[[str], None] = _nobody,
    ) -> str:
        """Put the bytes into `sink` and return the name of the tier that gave the last of them. Raises TierError.

        `asking` hears the name of each tier before it is asked.
        """
        start = sink.received_bytes
        for tier in self._order(length, background):
            done = sink.received_bytes - start
            asking(tier.name)
            try:
                await tier.read(ref, offset + done, length - done, sink)
            except TierError as error:
                self._count(tier, sink.received_bytes - start - done)
                if tier is not self._dataset.replica:
                    raise
                if not isinstance(error, NotHeld):
                    self._passed(self._dataset.name, tier.name, error)
                if sink.received_bytes - start == length:
                    return tier.name  # it failed after its last byte: nothing is left to be asked for
                continue
            self._count(tier, sink.received_bytes - start - done)
            return tier.name
        raise AssertionError("the cold tier is always last and either serves or raises")

    def _count(self, tier: Tier, received_bytes: int) -> None:
        if received_bytes:
            self._served(self._dataset.name, tier.name, received_bytes)

    def _order(self, length: int, background: bool) -> list[Tier]:
        cold: Tier = self._dataset.background if background else self._dataset.cold
        replica = self._dataset.replica
        if replica is None:
            return [cold]
        self._reads += 1
        slower = self._dataset.replica_cost(length) > self._dataset.cold_cost(length)
        if slower and self._reads % EXPLORE_EVERY:
            return [cold]
        return [replica, cold]
