from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import MockClock

from tiercache.core.backoff import Backoff
from tiercache.core.record import ObjectRef
from tiercache.errors import (
    AccessDenied,
    Archived,
    BadResponse,
    HotFull,
    NotFound,
    TierError,
    Unavailable,
    VersionChanged,
)
from tiercache.tiers.faulty import Fault, Faulty, Script, Seeded, failing
from tiercache.tiers.memory import MemoryCold
from tiercache.tiers.retrying import Retrying
from tiercache.tiers.tier import Cold, MemorySink, Sink, SinkClosed

DATA = random.Random(1).randbytes(300_000)
POLICY = Backoff(first_seconds=0.1, ceiling_seconds=4.0, deadline_seconds=30.0)


def _lost() -> TierError:
    return Unavailable("lost")


class Retries:
    def __init__(self) -> None:
        self.seen: list[tuple[str, type[TierError], float]] = []

    def __call__(self, operation: str, error: TierError) -> None:
        self.seen.append((operation, type(error), trio.current_time()))


class Rig:
    """A memory tier with scripted faults below a Retrying."""

    def __init__(self, *faults: Fault, policy: Backoff = POLICY, piece_bytes: int = 64 << 10) -> None:
        self.memory = MemoryCold(piece_bytes=piece_bytes)
        self.ref = self.memory.put("key", DATA)
        self.retries = Retries()
        self.script = Script(*faults)
        self.tier = self.over(Faulty(self.memory, self.script), policy)

    def over(self, cold: Cold, policy: Backoff = POLICY) -> Retrying:
        return Retrying(cold, policy, rng=random.Random(2), on_retry=self.retries, clock=trio.current_time)

    async def read(self, offset: int = 0, length: int = len(DATA)) -> bytes:
        sink = MemorySink(length)
        await self.tier.read(self.ref, offset, length, sink)
        return bytes(sink.view)


async def test_resumes_where_the_last_attempt_stopped(autojump_clock: MockClock) -> None:
    rig = Rig(
        Fault("read", after_bytes=1, error=_lost),
        Fault("read", after_bytes=100_001, error=_lost),
        Fault("read", error=_lost),
        Fault("read", after_bytes=65_536, error=_lost),
    )
    assert await rig.read(1000, 250_000) == DATA[1000:251_000]
    assert rig.memory.sent_bytes == 250_000
    assert [seen[:2] for seen in rig.retries.seen] == [("read", Unavailable)] * 4


async def test_goes_on_in_a_sink_that_already_has_bytes(autojump_clock: MockClock) -> None:
    rig = Rig(Fault("read", key=None, after_bytes=10, error=_lost))
    sink = MemorySink(1000)
    await rig.memory.read(rig.ref, 0, 400, sink)
    await rig.tier.read(rig.ref, 400, 600, sink)
    assert bytes(sink.view) == DATA[:1000]


async def test_failure_after_the_last_byte_asks_for_nothing_more(autojump_clock: MockClock) -> None:
    rig = Rig(Fault("read", after_bytes=len(DATA), error=_lost))
    assert await rig.read() == DATA
    assert rig.memory.requests["read"] == 1


@pytest.mark.parametrize("wrong", [NotFound, VersionChanged, AccessDenied, Archived])
async def test_final_errors_are_not_retried(wrong: type[TierError], autojump_clock: MockClock) -> None:
    rig = Rig(
        *(Fault(operation, error=lambda: wrong("no")) for operation in ("read", "list", "head")),
    )
    calls: list[Callable[[], Awaitable[object]]] = [rig.read, lambda: rig.tier.list(""), lambda: rig.tier.head("key")]
    for call in calls:
        with pytest.raises(wrong, match="no"):
            await call()
    assert rig.retries.seen == []
    assert trio.current_time() == pytest.approx(0.0)
    assert sum(rig.memory.requests.values()) == 0


async def test_case_11_slowdown_backs_off_with_jitter_and_succeeds(autojump_clock: MockClock) -> None:
    rig = Rig(*failing("list", lambda: Unavailable("503 SlowDown"), 6))
    page = await rig.tier.list("")
    assert [found.key for found in page.objects] == ["key"]
    times = [time for _, _, time in rig.retries.seen]
    waits = [after - before for before, after in zip(times, [*times[1:], trio.current_time()], strict=True)]
    assert all(wait >= POLICY.floor_seconds for wait in waits)
    assert all(wait <= POLICY.first_seconds * 2**turn for turn, wait in enumerate(waits))
    assert len({round(wait, 4) for wait in waits}) == len(waits)


async def test_case_11_retry_after_is_honoured(autojump_clock: MockClock) -> None:
    rig = Rig(Fault("head", error=lambda: Unavailable("slow down", retry_after_seconds=7.0)))
    assert (await rig.tier.head("key")).key == "key"
    assert 7.0 < trio.current_time() <= 7.0 + POLICY.first_seconds


async def test_case_10_dead_store_fails_with_its_last_error_within_the_deadline(autojump_clock: MockClock) -> None:
    count = iter(range(1000))
    rig = Rig(*failing("read", lambda: Unavailable(f"refused {next(count)}"), 1000))
    with pytest.raises(Unavailable, match="refused") as caught:
        await rig.read()
    assert 30.0 - POLICY.ceiling_seconds <= trio.current_time() <= 30.0
    assert str(caught.value) == f"refused {next(count) - 1}"
    assert len(rig.retries.seen) < 50


@pytest.mark.parametrize("operation", ["read", "list", "head"])
async def test_case_10_store_that_never_answers_is_cut_off(operation: str, autojump_clock: MockClock) -> None:
    rig = Rig(Fault(operation, until=trio.Event()))
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "read": rig.read,
        "list": lambda: rig.tier.list(""),
        "head": lambda: rig.tier.head("key"),
    }
    with pytest.raises(Unavailable, match="no answer for 30 s"):
        await calls[operation]()
    assert trio.current_time() == pytest.approx(30.0)


async def test_stall_after_a_failure_raises_the_failure(autojump_clock: MockClock) -> None:
    rig = Rig(Fault("read", error=_lost), Fault("read", until=trio.Event()))
    with pytest.raises(Unavailable, match="lost"):
        await rig.read()
    assert trio.current_time() == pytest.approx(30.0)


class Trickle:
    """A store that gives a byte, then thinks."""

    name = "trickle"
    source_id = "trickle"

    def __init__(self, memory: MemoryCold, pause_seconds: float) -> None:
        self._memory = memory
        self._pause_seconds = pause_seconds
        self.list = memory.list
        self.head = memory.head
        self.aclose = memory.aclose

    async def read(self, ref: ObjectRef, offset: int, length: int, sink: Sink) -> None:
        for at in range(offset, offset + length):
            await trio.sleep(self._pause_seconds)
            await self._memory.read(ref, at, 1, sink)


async def test_slow_but_moving_read_outlives_the_deadline(autojump_clock: MockClock) -> None:
    rig = Rig()
    tier = rig.over(Trickle(rig.memory, 20.0))
    sink = MemorySink(50)
    await tier.read(rig.ref, 7, 50, sink)
    assert bytes(sink.view) == DATA[7:57]
    assert trio.current_time() == pytest.approx(1000.0)
    assert rig.retries.seen == []


async def test_read_that_stops_moving_is_cut_off(autojump_clock: MockClock) -> None:
    rig = Rig()
    tier = rig.over(Trickle(rig.memory, 31.0))
    with pytest.raises(Unavailable, match="no answer"):
        await tier.read(rig.ref, 0, 50, MemorySink(50))
    assert trio.current_time() == pytest.approx(30.0)


async def test_attempts_are_bounded_even_when_each_gains_a_byte(autojump_clock: MockClock) -> None:
    policy = Backoff(attempts_count=20)
    rig = Rig(*failing("read", _lost, 1000, after_bytes=1), policy=policy)
    with pytest.raises(Unavailable):
        await rig.read()
    assert rig.memory.requests["read"] == 20


async def test_bad_response_before_any_byte_is_retried(autojump_clock: MockClock) -> None:
    rig = Rig(Fault("read", error=lambda: BadResponse("wrong range")))
    assert await rig.read() == DATA


async def test_bad_response_after_bytes_is_final_because_they_are_suspect(autojump_clock: MockClock) -> None:
    rig = Rig(Fault("read", after_bytes=len(DATA), error=lambda: BadResponse("MD5 differs")))
    with pytest.raises(BadResponse, match="MD5 differs"):
        await rig.read()
    assert rig.memory.requests["read"] == 1
    assert rig.retries.seen == []


async def test_case_3_version_change_between_attempts_is_never_a_mixture(autojump_clock: MockClock) -> None:
    rig = Rig(Fault("read", after_bytes=1000, error=_lost))
    gate = rig.memory.hold("read", after_bytes=1000)
    sink = MemorySink(len(DATA))
    async with trio.open_nursery() as nursery:

        async def reads() -> None:
            with pytest.raises(VersionChanged):
                await rig.tier.read(rig.ref, 0, len(DATA), sink)

        nursery.start_soon(reads)
        await gate.reached.wait()
        rig.memory.put("key", bytes(len(DATA)))
        gate.release()
    assert bytes(sink.view) == DATA[:1000]


class Refusing(MemorySink):
    """A sink that raises at a chosen byte."""

    def __init__(self, error: Exception) -> None:
        super().__init__(len(DATA))
        self._error = error

    def advance(self, count: int) -> None:
        if self.received_bytes >= 64 << 10:
            raise self._error
        super().advance(count)


@pytest.mark.parametrize("error", [SinkClosed("gone"), HotFull("full")])
async def test_what_the_sink_raises_is_not_retried(error: Exception, autojump_clock: MockClock) -> None:
    rig = Rig()
    with pytest.raises(type(error)):
        await rig.tier.read(rig.ref, 0, len(DATA), Refusing(error))
    assert rig.memory.requests["read"] == 1


async def test_cancellation_during_back_off_is_at_once(autojump_clock: MockClock) -> None:
    rig = Rig(Fault("head", error=lambda: Unavailable("busy", retry_after_seconds=20.0)))
    with trio.move_on_after(5.0) as scope:
        await rig.tier.head("key")
    assert scope.cancelled_caught
    assert trio.current_time() == pytest.approx(5.0)


async def test_closing_ends_the_waiting_for_another_attempt(autojump_clock: MockClock) -> None:
    rig = Rig(Fault("head", error=lambda: Unavailable("busy", retry_after_seconds=20.0)))
    async with trio.open_nursery() as nursery:

        async def heads() -> None:
            with pytest.raises(Unavailable, match="closed"):
                await rig.tier.head("key")

        nursery.start_soon(heads)
        await trio.sleep(5.0)
        await rig.tier.aclose()
    assert trio.current_time() == pytest.approx(5.0)


@pytest.mark.parametrize("seed", range(30))
async def test_seeded_faults_never_change_a_byte(seed: int, autojump_clock: MockClock) -> None:
    rng = random.Random(seed)
    memory = MemoryCold(piece_bytes=rng.randint(1000, 50_000))
    ref = memory.put("key", DATA)
    tier = Retrying(Faulty(memory, Seeded(rng, 0.6)), POLICY, rng=rng, on_retry=Retries(), clock=trio.current_time)
    for _ in range(10):
        offset = rng.randrange(len(DATA))
        length = rng.randint(1, len(DATA) - offset)
        sink = MemorySink(length)
        try:
            await tier.read(ref, offset, length, sink)
        except (Unavailable, BadResponse):
            assert bytes(sink.view) == DATA[offset : offset + sink.received_bytes]
        else:
            assert bytes(sink.view) == DATA[offset : offset + length]
