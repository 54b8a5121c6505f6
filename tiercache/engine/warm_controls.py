"""What can be asked of the warm tier by hand, and what it tells of itself: the seam between the admin interface and its parts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tiercache.core.record import HotRecord, ObjectRef
from tiercache.engine.demotion import Outcome
from tiercache.engine.progress import RebuildProgress, ScrubProgress
from tiercache.engine.warmset import WarmSet
from tiercache.tiers.warm.target import Target
from tiercache.tiers.warm.targets import MIN_FREE_RATIO

TargetState = Literal["up", "suspect", "down"]


@dataclass(frozen=True)
class TargetFacts:
    """One target now. `used_bytes` is what tiercache has there; None for what nobody has found out yet.

    `detail` says why it is not up, not writable or full.
    """

    path: str
    uuid: str
    state: TargetState
    detail: str
    used_bytes: int | None
    free_bytes: int | None
    total_bytes: int | None
    errors_count: int
    is_full: bool
    is_writable: bool


@dataclass(frozen=True)
class WarmFacts:
    """`used_bytes` and `capacity_bytes` are of all targets together, `capacity_bytes` None where only free space bounds it."""

    data_shards: int
    parity_shards: int
    targets: Sequence[TargetFacts]
    used_bytes: int = 0
    capacity_bytes: int | None = None
    packs_count: int = 0
    packed_objects_count: int = 0


Demote = Callable[[Sequence[HotRecord], Callable[[HotRecord, Outcome], None]], Awaitable[None]]
"""Make warm copies of these unless there are; tells what became of each. All stay hot."""


@dataclass(frozen=True)
class WarmControls:
    """`holds` raises TierError while too few targets can tell, `scrub(repair, progress)` and `rebuild` to give up."""

    facts: Callable[[], WarmFacts]
    holds: Callable[[ObjectRef], Awaitable[bool]]
    demote: Demote
    scrub: Callable[[bool, ScrubProgress], Awaitable[None]]
    rebuild: Callable[[RebuildProgress], Awaitable[None]]


def facts_of(warm: WarmSet) -> WarmFacts:
    catalogue = warm.catalogues.catalogue
    return WarmFacts(
        data_shards=warm.geometry.data_count,
        parity_shards=warm.geometry.parity_count,
        targets=[
            _facts(target, warm.room.used_bytes(target), is_full=warm.targets.lacks_room(target)) for target in warm.targets.all
        ],
        used_bytes=warm.room.total_bytes,
        capacity_bytes=warm.room.capacity_bytes,
        packs_count=catalogue.packs_count,
        packed_objects_count=catalogue.members_count,
    )


def _facts(target: Target, used_bytes: int | None, *, is_full: bool) -> TargetFacts:
    is_known = target.state != "down" and target.usage.total_bytes > 0
    return TargetFacts(
        path=target.path,
        uuid=target.uuid.hex(),
        state=target.state,
        detail=f"less than {MIN_FREE_RATIO:.0%} of its file system is free" if is_full else target.detail,
        used_bytes=used_bytes,
        free_bytes=target.usage.free_bytes if is_known else None,
        total_bytes=target.usage.total_bytes if is_known else None,
        errors_count=target.errors_count,
        is_full=is_full,
        is_writable=target.is_writable,
    )
