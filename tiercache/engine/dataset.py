"""A dataset as the engine sees it: a name, where its bytes can be had, and how long its names stay fresh."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tiercache.core.record import ObjectRef
from tiercache.tiers.tier import Cold, Tier

Cost = Callable[[int], float]
"""Bytes to read -> seconds that it is expected to take; 0.0 while nothing is known, so that a tier is tried."""


def _unknown(_length: int) -> float:
    return 0.0


@dataclass(frozen=True)
class Dataset:
    """`prefix` is '' or ends with '/': keys of the cold store begin with it, paths under the mount do not.

    `background` is the same cold store at a lower priority: what nobody waits for is fetched there.
    `cold_usual` is what a read of the cold store took when it was last measured, however long ago; `cold_cost` fades.
    `trouble()` says what the cold store's last request failed with ('' when it did not).
    `notice` is what the operator should know of the source since the start ('' for nothing), `replica_trouble()` why nothing
    can be read from the replica now.
    `metadata_ttl_seconds` is `math.inf` for an immutable dataset.
    """

    name: str
    cold: Cold
    background: Cold
    prefix: str
    metadata_ttl_seconds: float
    immutable: bool = False
    replica: Tier | None = None
    source: str = ""
    replica_path: str | None = None
    replica_holds: Callable[[ObjectRef], Awaitable[bool]] | None = None
    cold_cost: Cost = _unknown
    cold_usual: Cost = _unknown
    replica_cost: Cost = _unknown
    trouble: Callable[[], str] = str
    notice: str = ""
    replica_trouble: Callable[[], str] = str

    @property
    def source_id(self) -> str:
        return self.cold.source_id
