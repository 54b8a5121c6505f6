"""A wrapper that fails on purpose: the other half of every test that asks "and if the store misbehaves?".

Which faults come is decided by a `Faults` object: a `Script` plays written faults in order, `Seeded`
draws them. Faults are made in front of a real tier, so that the bytes handed over before an error
are the true ones, as the contract wants; without faults the wrapper passes the conformance suite.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import trio

from tiercache.core.record import Listed, ObjectRef, Page
from tiercache.errors import BadResponse, TierError, Unavailable, VersionChanged
from tiercache.tiers.tier import MAX_PAGE, Cold, Sink


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one operation ('read', 'list', 'head'); `key` None matches any key or prefix.

    In this order: `after_bytes` of a read are served, `delay_seconds` pass, `until` is waited for, `error` is raised.
    Without an error the operation then goes on and succeeds, answering with `version` (read: VersionChanged) if one is given.
    """

    operation: str
    key: str | None = None
    after_bytes: int = 0
    delay_seconds: float = 0.0
    until: trio.Event | None = None
    error: Callable[[], TierError] | None = None
    version: str | None = None


class Faults(Protocol):
    def draw(self, operation: str, key: str) -> Fault | None:
        """The fault of the operation that begins now, or None."""


class NoFaults:
    def draw(self, operation: str, key: str) -> Fault | None:
        return None


class Script:
    """Written faults: each is used once, by the first operation that it matches. `left` are still to come."""

    def __init__(self, *faults: Fault) -> None:
        self.left = list(faults)

    def draw(self, operation: str, key: str) -> Fault | None:
        for position, fault in enumerate(self.left):
            if fault.operation == operation and fault.key in (None, key):
                return self.left.pop(position)
        return None


class Seeded:
    """Every operation fails or dawdles with probability `ratio`; equal seeds give equal faults."""

    def __init__(self, rng: random.Random, ratio: float, *, slow_seconds: float = 0.05) -> None:
        assert 0.0 <= ratio <= 1.0
        self._rng = rng
        self._ratio = ratio
        self._slow_seconds = slow_seconds

    def draw(self, operation: str, key: str) -> Fault | None:
        if self._rng.random() >= self._ratio:
            return None
        kind = self._rng.randrange(4)
        if kind == 0:
            return Fault(operation, delay_seconds=self._rng.random() * self._slow_seconds)
        if kind == 1:
            return Fault(operation, error=lambda: BadResponse(f"injected: nonsense about {key!r}"))
        after_bytes = self._rng.randrange(1, 1 << self._rng.randrange(1, 24)) if kind == 2 else 0
        return Fault(operation, after_bytes=after_bytes, error=lambda: Unavailable(f"injected: lost {key!r}"))


class Faulty:
    """A `Cold` tier whose operations suffer the drawn faults."""

    def __init__(self, cold: Cold, faults: Faults) -> None:
        self.name = cold.name
        self.source_id = cold.source_id
        self._cold = cold
        self._faults = faults

    async def read(self, ref: ObjectRef, offset: int, length: int, sink: Sink) -> None:
        fault = self._faults.draw("read", ref.key)
        if fault is None:
            await self._cold.read(ref, offset, length, sink)
            return
        served = min(fault.after_bytes, length)
        if served:
            await self._cold.read(ref, offset, served, sink)
        await self._suffer(fault)
        if fault.version is not None:
            raise VersionChanged(f"{self.name}: {ref.key!r} is now version {fault.version}")
        if served < length:
            await self._cold.read(ref, offset + served, length - served, sink)

    async def list(self, prefix: str, *, delimiter: bool = True, token: str = "", limit: int = MAX_PAGE) -> Page:
        fault = await self._begin("list", prefix)
        page = await self._cold.list(prefix, delimiter=delimiter, token=token, limit=limit)
        if fault.version is None:
            return page
        return msgspec.structs.replace(page, objects=tuple(_as(found, fault.version) for found in page.objects))

    async def head(self, key: str) -> Listed:
        fault = await self._begin("head", key)
        found = await self._cold.head(key)
        return found if fault.version is None else _as(found, fault.version)

    async def aclose(self) -> None:
        await self._cold.aclose()

    async def _begin(self, operation: str, key: str) -> Fault:
        fault = self._faults.draw(operation, key)
        if fault is None:
            return Fault(operation)
        await self._suffer(fault)
        return fault

    async def _suffer(self, fault: Fault) -> None:
        if fault.delay_seconds:
            await trio.sleep(fault.delay_seconds)
        if fault.until is not None:
            await fault.until.wait()
        if fault.error is not None:
            raise fault.error()


def failing(operation: str, error: Callable[[], TierError], times: int, *, after_bytes: int = 0) -> tuple[Fault, ...]:
    """`times` equal faults for a Script."""
    return (Fault(operation, after_bytes=after_bytes, error=error),) * times


def _as(found: Listed, version: str) -> Listed:
    return msgspec.structs.replace(found, version=version)
