"""Which tier below the hot one serves a read: the replica and the warm copies while they are not slower, else cold.

A tier that does not hold the bytes (NotHeld) or fails (any other TierError of a tier above cold) is passed over, and
the next one goes on where it stopped: what a sink has accepted is right whoever sent it, because every tier
checks the version before its first byte. Only the cold store's word counts for "gone" and "changed". When the cold store
cannot be reached, those that were passed over for their speed are asked after it; when its last request failed, before it.

A warm copy is there in order that the cold store is left alone. So it is passed over only when it takes WARM_RATIO times as long
as cold usually does, and WARM_SECONDS longer; as long as nobody knows how long cold takes, never.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tiercache.core.record import ObjectRef
from tiercache.engine.dataset import Dataset
from tiercache.errors import BadResponse, NotHeld, TierError, Unavailable
from tiercache.tiers.begun import Begun, Ended, begin_of
from tiercache.tiers.measured import MeasuredTier
from tiercache.tiers.tier import Sink, Tier

Passed = Callable[[str, str, TierError], None]


class WarmCopies(NamedTuple):
    """`lacks` says without I/O that there is no copy, `has` that one was seen; both are False when it would have to look."""

    tier: MeasuredTier
    lacks: Callable[[ObjectRef], bool]
    has: Callable[[ObjectRef], bool]


EXPLORE_EVERY = 64
"""One read in so many goes to the tier that measured slower, or its figure could never recover."""
WARM_RATIO = 2.0
WARM_SECONDS = 0.1


def _nobody(_tier: str) -> None:
    """Nobody listens."""


class Source:
    """Reads of one dataset from below the hot tier. `served` is told (tier name, bytes) as they arrive."""

    def __init__(
        self, dataset: Dataset, served: Callable[[str, str, int], None], passed: Passed, warm: WarmCopies | None = None
    ) -> None:
        self._dataset = dataset
        self._warm = warm
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
        cold: Tier = self._dataset.background if background else self._dataset.cold
        first, last = self._order(ref, length)
        refusal: TierError | None = None
        for tier in [*first, cold, *last]:
            done = sink.received_bytes - start
            asking(tier.name)
            try:
                await tier.read(ref, offset + done, length - done, sink)
            except TierError as error:
                self._count(tier, sink.received_bytes - start - done)
                if tier is cold:
                    if not last or not isinstance(error, Unavailable | BadResponse):
                        raise
                    refusal = error
                elif not isinstance(error, NotHeld):
                    self._passed(self._dataset.name, tier.name, error)
                if sink.received_bytes - start == length:
                    return tier.name  # it failed after its last byte: nothing is left to be asked for
                continue
            self._count(tier, sink.received_bytes - start - done)
            return tier.name
        assert refusal is not None, "the cold tier either serves or raises"
        raise refusal

    def is_only_cold(self, ref: ObjectRef) -> bool:
        """Is the cold store the only one to be asked, as far as can be told without I/O?"""
        return self._dataset.replica is None and (self._warm is None or self._warm.lacks(ref))

    def has_warm(self, ref: ObjectRef) -> bool:
        """Will the bytes come from a warm copy, as far as can be told without I/O?"""
        return self._warm is not None and self._warm.has(ref) and not self._is_slow(self._warm, ref.size_bytes)

    def begin(self, ref: ObjectRef, sink: Sink, *, background: bool, asking: Callable[[str], None], ended: Ended) -> Begun | None:
        """All of a small object, where the cold store is the only one to be asked (`tiers/begun.py`). None: `read` it."""
        if not self.is_only_cold(ref) or self.in_trouble:
            return None
        cold = self._dataset.background if background else self._dataset.cold

        def counted(error: Exception | None) -> None:
            self._count(cold, sink.received_bytes)
            ended(error)

        asking(cold.name)
        return begin_of(cold)(ref, sink, counted)

    def _count(self, tier: Tier, received_bytes: int) -> None:
        if received_bytes:
            self._served(self._dataset.name, tier.name, received_bytes)

    def _order(self, ref: ObjectRef, length: int) -> tuple[Sequence[Tier], Sequence[Tier]]:
        """Who is asked before the cold store, and who after it, should it not answer."""
        replica = self._dataset.replica
        warm = None if self._warm is None or self._warm.lacks(ref) else self._warm
        if replica is None and warm is None:
            return (), ()
        self._reads += 1
        is_exploring = self._reads % EXPLORE_EVERY == 0 or self.in_trouble
        first: list[Tier] = []
        last: list[Tier] = []
        if replica is not None:
            is_slower = self._dataset.replica_cost(length) > self._dataset.cold_cost(length)
            (last if is_slower and not is_exploring else first).append(replica)
        if warm is not None:
            (last if self._is_slow(warm, length) and not is_exploring else first).append(warm.tier)
        return first, last

    def _is_slow(self, warm: WarmCopies, length: int) -> bool:
        usual_seconds = self._dataset.cold_usual(length)
        bearable_seconds = max(usual_seconds * WARM_RATIO, usual_seconds + WARM_SECONDS)
        return usual_seconds > 0.0 and warm.tier.estimate.read_seconds(length) > bearable_seconds
