"""Reads that are begun without a task: the wrappers do for them what they do for a read, and what fails goes on as a read."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import xxhash
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.servers.s3 import S3Account
from tests.servers.scripted import Answer, reply, running_scripted
from tests.tiers.beginning import Beginning
from tests.tiers.s3_tier import open_s3, ref_of
from tests.tiers.test_hot import tier_at
from tiercache.core.backoff import Backoff
from tiercache.core.record import Listed, ObjectId, ObjectRef
from tiercache.errors import BadResponse, NotFound, TierError, Unavailable, VersionChanged
from tiercache.tiers.begun import Anew, BrokenOff
from tiercache.tiers.cold.s3 import S3Cold
from tiercache.tiers.faulty import Fault, Faulty, Script
from tiercache.tiers.limited import Limited
from tiercache.tiers.measured import Measured
from tiercache.tiers.memory import MemoryCold
from tiercache.tiers.retrying import Retrying
from tiercache.tiers.sink import FileSink
from tiercache.tiers.tier import Cold, MemorySink

DATA = random.Random(1).randbytes(100_000)
POLICY = Backoff(first_seconds=0.1, ceiling_seconds=4.0, deadline_seconds=30.0)
OID = ObjectId(bytes(range(20)))


class Rig:
    """All wrappers over a tier that offers `begin`."""

    def __init__(self, *faults: Fault, slots: int = 1, deaf: bool = False) -> None:
        self.memory = MemoryCold()
        self.ref = self.memory.put("key", DATA)
        self.observed: list[tuple[str, type[BaseException] | None]] = []
        self.retries: list[TierError] = []
        self.ends: list[Exception | None] = []
        self.below = Beginning(Faulty(self.memory, Script(*faults)), deaf=deaf)
        self.measured = Measured(self.below, self._observe, clock=trio.current_time)
        self.limited = Limited(self.measured, slots)
        self.tier = self.over(self.limited)
        self.sink = MemorySink(len(DATA))

    def over(self, cold: Cold) -> Retrying:
        return Retrying(
            cold, POLICY, rng=random.Random(2), on_retry=lambda _, error: self.retries.append(error), clock=trio.current_time
        )

    def _observe(self, _tier: str, operation: str, _s: float, _bytes: int, error: type[BaseException] | None) -> None:
        self.observed.append((operation, error))

    async def ended(self) -> Exception | None:
        await wait_all_tasks_blocked()
        assert len(self.ends) == 1
        return self.ends[0]

    async def read(self) -> bytes:
        await self.tier.read(self.ref, 0, len(DATA), self.sink)
        return bytes(self.sink.view)


async def test_all_of_it_lands_and_is_counted_as_a_read() -> None:
    rig = Rig()
    assert rig.tier.begin(rig.ref, rig.sink, rig.ends.append) is not None
    assert rig.ends == []
    assert rig.limited.slots.enter_now(background=False) is False
    assert await rig.ended() is None
    assert bytes(rig.sink.view) == DATA
    assert rig.observed == [("read", None)]
    assert rig.limited.slots.enter_now(background=False) is True


async def test_nothing_is_begun_without_a_free_slot_or_for_what_is_not_small() -> None:
    rig = Rig()
    assert rig.limited.slots.enter_now(background=False)
    assert rig.tier.begin(rig.ref, rig.sink, rig.ends.append) is None
    rig.limited.slots.leave(False)
    large = rig.memory.put("large", bytes(2 << 20))
    assert rig.tier.begin(large, MemorySink(2 << 20), rig.ends.append) is None
    assert rig.limited.slots.enter_now(background=False), "the slot was given back"
    assert rig.below.begun_count == 0
    assert rig.ends == rig.observed == []


async def test_background_leaves_a_slot_to_foreground() -> None:
    rig = Rig(slots=4)
    background = rig.over(rig.limited.background())
    begun = [background.begin(rig.ref, MemorySink(len(DATA)), rig.ends.append) for _ in range(4)]
    assert [each is not None for each in begun] == [True, True, True, False]
    assert rig.tier.begin(rig.ref, rig.sink, rig.ends.append) is not None


async def test_failure_is_the_first_attempt_of_the_read_that_goes_on(autojump_clock: MockClock) -> None:
    rig = Rig(
        Fault("read", delay_seconds=29.0, error=lambda: Unavailable("one")), Fault("read", error=lambda: Unavailable("two"))
    )
    assert rig.tier.begin(rig.ref, rig.sink, rig.ends.append) is not None
    await trio.sleep(29.5)
    assert isinstance(await rig.ended(), Unavailable)
    assert await rig.read() == DATA
    assert [str(error) for error in rig.retries] == ["one", "two"]
    assert [error for _, error in rig.observed] == [Unavailable, Unavailable, None]
    assert trio.current_time() < 30.0, "the deadline is that of the whole read"


@pytest.mark.parametrize("kind", [NotFound, VersionChanged])
async def test_what_is_not_retried_is_raised_by_the_read(kind: type[TierError]) -> None:
    rig = Rig(Fault("read", error=lambda: kind("no")))
    assert rig.tier.begin(rig.ref, rig.sink, rig.ends.append) is not None
    assert isinstance(await rig.ended(), kind)
    with pytest.raises(kind, match="no"):
        await rig.read()
    assert rig.retries == []
    assert await rig.read() == DATA, "only once"


async def test_late_one_ends_with_the_deadline(autojump_clock: MockClock) -> None:
    rig = Rig(Fault("read", delay_seconds=1000.0))
    begun = rig.tier.begin(rig.ref, rig.sink, rig.ends.append)
    assert begun is not None
    await trio.sleep(29.9)
    begun.look()
    assert rig.ends == []
    await trio.sleep(0.2)
    begun.look()
    assert "no answer for 30 s" in str(await rig.ended())
    assert rig.observed == [("read", trio.Cancelled)]
    with pytest.raises(Unavailable, match="no answer for 30 s"):
        await rig.read()


async def test_late_one_that_does_not_end_is_left_behind(autojump_clock: MockClock) -> None:
    rig = Rig(Fault("read", delay_seconds=40.0), deaf=True)
    begun = rig.tier.begin(rig.ref, rig.sink, rig.ends.append)
    assert begun is not None
    await trio.sleep(31.0)
    begun.look()
    await wait_all_tasks_blocked()
    assert rig.ends == []
    begun.look()
    assert "no answer for 30 s" in str(rig.ends[0])
    await trio.sleep(20.0)
    assert len(rig.ends) == 1
    assert rig.limited.slots.enter_now(background=False)


async def test_cancelled_one_is_broken_off(autojump_clock: MockClock) -> None:
    rig = Rig(Fault("read", delay_seconds=1000.0))
    begun = rig.tier.begin(rig.ref, rig.sink, rig.ends.append)
    assert begun is not None
    begun.cancel()
    assert "broken off" in str(await rig.ended())


async def test_anew_is_no_attempt() -> None:
    rig = Rig()
    rig.tier = rig.over(_NotNow(rig.memory, rig.measured))
    assert rig.tier.begin(rig.ref, rig.sink, rig.ends.append) is not None
    assert isinstance(rig.ends[0], Anew)
    assert await rig.read() == DATA
    assert rig.retries == []


class _NotNow(Beginning):
    def __init__(self, cold: Cold, begun: object) -> None:
        super().__init__(cold)
        self._begun = begun

    def begin(self, _ref: ObjectRef, _sink: object, ended: object) -> object:  # type: ignore[override]
        assert callable(ended)
        ended(Anew())
        return self._begun


# -- over S3


@pytest.fixture
def credentials() -> Iterator[None]:
    with S3Account("", "testkey", "testsecret").in_environment():
        yield


def whole(body: bytes, etag: str = "") -> Answer:
    return reply(200, {"etag": f'"{etag or hashlib.md5(DATA).hexdigest()}"'}, body)


def sink_in(root: Path) -> FileSink:
    return FileSink(tier_at(root).begin(OID, len(DATA), 0), 0, len(DATA))


@asynccontextmanager
async def opened(server_url: str) -> AsyncIterator[S3Cold]:
    """With credentials at hand, as after the first request."""
    async with open_s3(server_url) as tier:
        tier._endpoint.keys()
        yield tier


async def begun_over_s3(tier: S3Cold, sink: FileSink, etag: str = "") -> Exception | None:
    """How it ended."""
    ends: list[Exception | None] = []
    done = trio.Event()

    def ended(error: Exception | None) -> None:
        ends.append(error)
        done.set()

    ref = ref_of(tier, Listed("k", f"{etag or hashlib.md5(DATA).hexdigest()}:{len(DATA)}", len(DATA), 0))
    assert tier.begin(ref, sink, ended) is not None
    assert ends == []
    with trio.fail_after(10):
        await done.wait()
    return ends[0]


@pytest.mark.usefixtures("credentials")
class TestOverS3:
    @pytest.fixture(autouse=True)
    def _native(self) -> None:
        pytest.importorskip("tiercache.tiers.cold.native")

    async def test_it_lands_in_a_file_that_is_made(self, tmp_path: Path) -> None:
        sink = sink_in(tmp_path)
        with running_scripted(lambda _: whole(DATA)) as server:
            async with opened(server.endpoint_url) as tier:
                assert await begun_over_s3(tier, sink) is None
        assert sink.received_bytes == len(DATA)
        assert sink.digest == xxhash.xxh3_64_intdigest(DATA)
        assert os.pread(sink.file.fd, len(DATA) + 1, 0) == DATA

    @pytest.mark.parametrize(
        ("answer", "kind"),
        [
            (whole(bytes(len(DATA))), BadResponse),
            (whole(DATA, "0" * 32), VersionChanged),
            (whole(DATA[:-1]), VersionChanged),
            (Answer(whole(DATA).raw[:-1], "close"), Unavailable),
            (reply(404, {}, b"<Error><Code>NoSuchKey</Code></Error>"), NotFound),
            (reply(412, {}, b"<Error><Code>PreconditionFailed</Code></Error>"), VersionChanged),
            (reply(503, {}, b"<Error><Code>SlowDown</Code></Error>"), Unavailable),
            (reply(403, {}, b"<Error><Code>ExpiredToken</Code></Error>"), Anew),
        ],
        ids=["md5", "etag", "size", "short", "404", "412", "503", "expired"],
    )
    async def test_nothing_else_lands(self, tmp_path: Path, answer: Answer, kind: type[Exception]) -> None:
        sink = sink_in(tmp_path)
        with running_scripted(lambda _: answer) as server:
            async with opened(server.endpoint_url) as tier:
                error = await begun_over_s3(tier, sink)
        assert type(error) is kind
        assert sink.received_bytes == 0
        assert sink.digest is None

    async def test_it_can_be_broken_off(self, tmp_path: Path) -> None:
        sink = sink_in(tmp_path)
        ends: list[Exception | None] = []
        with running_scripted(lambda _: Answer(whole(DATA).raw[:500], "stall")) as server:
            async with opened(server.endpoint_url) as tier:
                ref = ref_of(tier, Listed("k", f"{hashlib.md5(DATA).hexdigest()}:{len(DATA)}", len(DATA), 0))
                begun = tier.begin(ref, sink, ends.append)
                assert begun is not None
                begun.cancel()
                with trio.fail_after(5):
                    while not ends:  # noqa: ASYNC110 - a thread ends it
                        await trio.sleep(0.001)
        assert [type(error) for error in ends] == [BrokenOff]

    async def test_closed_tier_begins_nothing(self, tmp_path: Path) -> None:
        async with opened("http://127.0.0.1:9") as tier:
            ref = ref_of(tier, Listed("k", f"{hashlib.md5(DATA).hexdigest()}:{len(DATA)}", len(DATA), 0))
            await tier.aclose()
            assert tier.begin(ref, sink_in(tmp_path), lambda _: None) is None
