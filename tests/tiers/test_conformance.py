"""Every cold tier, and every wrapper around one, passes the same suite."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from tests.servers.moto import running_moto
from tests.servers.s3 import S3Account
from tests.servers.weed import running_weed
from tests.tiers.conformance import CHECKS, NAME_CHECKS, Check
from tiercache.core.backoff import Backoff
from tiercache.errors import TierError
from tiercache.tiers.cold.directory import Directory
from tiercache.tiers.cold.endpoint import Endpoint
from tiercache.tiers.cold.s3 import S3Cold
from tiercache.tiers.faulty import Faulty, NoFaults, Seeded
from tiercache.tiers.limited import Limited
from tiercache.tiers.measured import Measured
from tiercache.tiers.memory import MemoryCold
from tiercache.tiers.retrying import Retrying
from tiercache.tiers.tier import Cold

BUCKET = "conformance"


class MemoryStore:
    """A MemoryCold behind any wrapper."""

    prefix = "pre/"
    is_exact = True

    def __init__(self, wrap: Callable[[Cold], Cold]) -> None:
        self._memory = MemoryCold()
        self.cold = wrap(self._memory)

    async def put(self, key: str, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self._memory.put(key, data)

    async def delete(self, key: str) -> None:
        self._memory.delete(key)


class DirectoryStore:
    prefix = ""
    is_exact = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self.cold: Cold = Directory(path, dataset="data", threads=trio.CapacityLimiter(4))

    async def put(self, key: str, data: bytes) -> None:
        """In place, as careless programs do."""

        def write() -> None:
            path = self._path / key
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                for start in range(0, len(data), 100_000):
                    file.write(data[start : start + 100_000])

        await trio.to_thread.run_sync(write)

    async def delete(self, key: str) -> None:
        os.unlink(self._path / key)


class S3Store:
    """A real S3 server. All checks share one bucket, each below a prefix of its own."""

    def __init__(self, account: S3Account, prefix: str, *, is_exact: bool) -> None:
        self.prefix = prefix
        self.is_exact = is_exact
        self._account = account
        self._writers = trio.CapacityLimiter(8)
        self.cold: Cold = S3Cold(BUCKET, prefix, Endpoint(account.endpoint_url), dataset="data", threads=trio.CapacityLimiter(8))

    async def put(self, key: str, data: bytes) -> None:
        await trio.to_thread.run_sync(self._account.put, BUCKET, key, data, limiter=self._writers)

    async def delete(self, key: str) -> None:
        await trio.to_thread.run_sync(self._account.delete, BUCKET, key, limiter=self._writers)


def _ignore_retry(operation: str, error: TierError) -> None:
    pass


def _ignore_cost(tier: str, operation: str, seconds: float, transferred_bytes: int, error: type[BaseException] | None) -> None:
    pass


QUICK = Backoff(first_seconds=0.001, ceiling_seconds=0.002, floor_seconds=0.0005, deadline_seconds=30.0)


def _retrying(cold: Cold) -> Cold:
    return Retrying(cold, QUICK, rng=random.Random(3), on_retry=_ignore_retry)


def _all(cold: Cold) -> Cold:
    return _retrying(
        Limited(Measured(Faulty(cold, Seeded(random.Random(5), 0.3, slow_seconds=0.001)), _ignore_cost), 3).background()
    )


WRAPPERS: dict[str, Callable[[Cold], Cold]] = {
    "memory": lambda cold: cold,
    "faulty": lambda cold: Faulty(cold, NoFaults()),
    "retrying": _retrying,
    "limited": lambda cold: Limited(cold, 2),
    "measured": lambda cold: Measured(cold, _ignore_cost),
    "all-with-faults": _all,
}


@pytest.fixture(scope="module")
def weed() -> Iterator[S3Account]:
    with running_weed() as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Account]:
    with running_moto() as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", WRAPPERS)
async def test_memory_and_wrappers_conform(kind: str, check: Check) -> None:
    await check(MemoryStore(WRAPPERS[kind]))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_directory_conforms(check: Check, tmp_path: Path) -> None:
    await check(DirectoryStore(tmp_path))


async def _check_s3(check: Check, server: S3Account, monkeypatch: pytest.MonkeyPatch, *, is_exact: bool) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    store = S3Store(server, f"{check.__name__}/", is_exact=is_exact)
    try:
        await check(store)
    finally:
        await store.cold.aclose()


@pytest.mark.usefixtures("fetching")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_s3_conforms(check: Check, weed: S3Account, monkeypatch: pytest.MonkeyPatch) -> None:
    await _check_s3(check, weed, monkeypatch, is_exact=False)


@pytest.mark.parametrize("check", NAME_CHECKS, ids=lambda check: check.__name__)
async def test_s3_with_exact_names_conforms(check: Check, moto: S3Account, monkeypatch: pytest.MonkeyPatch) -> None:
    await _check_s3(check, moto, monkeypatch, is_exact=True)
