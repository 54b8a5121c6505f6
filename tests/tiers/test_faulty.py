"""Faulty, Measured and MemoryCold: the tools that other tests rely on."""

from __future__ import annotations

import random

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tiercache.errors import Archived, NotFound, Unavailable, VersionChanged
from tiercache.tiers.faulty import Fault, Faulty, Script, Seeded, failing
from tiercache.tiers.measured import HALF_LIFE_SECONDS, Measured
from tiercache.tiers.memory import MemoryCold
from tiercache.tiers.tier import MemorySink

DATA = random.Random(1).randbytes(100_000)


def _broken() -> Unavailable:
    return Unavailable("broken")


async def test_error_comes_after_the_true_bytes() -> None:
    memory = MemoryCold()
    ref = memory.put("key", DATA)
    tier = Faulty(memory, Script(Fault("read", after_bytes=12_345, error=_broken)))
    sink = MemorySink(50_000)
    with pytest.raises(Unavailable):
        await tier.read(ref, 100, 50_000, sink)
    assert bytes(sink.view) == DATA[100:12_445]


async def test_faults_are_used_once_in_order_and_only_where_they_match() -> None:
    memory = MemoryCold()
    memory.put("a", b"1")
    memory.put("b", b"2")
    script = Script(Fault("head", key="b", error=_broken), *failing("list", _broken, 2))
    tier = Faulty(memory, script)
    assert (await tier.head("a")).key == "a"
    with pytest.raises(Unavailable):
        await tier.head("b")
    assert (await tier.head("b")).key == "b"
    for _ in range(2):
        with pytest.raises(Unavailable):
            await tier.list("")
    assert len((await tier.list("")).objects) == 2
    assert script.left == []


async def test_stall_ends_when_released(autojump_clock: MockClock) -> None:
    memory = MemoryCold()
    ref = memory.put("key", DATA)
    release = trio.Event()
    tier = Faulty(memory, Script(Fault("read", after_bytes=10, until=release)))
    sink = MemorySink(len(DATA))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tier.read, ref, 0, len(DATA), sink)
        await trio.sleep(1000)
        assert sink.received_bytes == 10
        release.set()
    assert bytes(sink.view) == DATA


async def test_wrong_versions() -> None:
    memory = MemoryCold()
    ref = memory.put("key", DATA)
    faults = Script(*(Fault(operation, version="other") for operation in ("read", "head", "list")))
    tier = Faulty(memory, faults)
    with pytest.raises(VersionChanged):
        await tier.read(ref, 0, 10, MemorySink(10))
    assert (await tier.head("key")).version == "other"
    assert [found.version for found in (await tier.list("")).objects] == ["other"]
    assert (await tier.head("key")).version == ref.version


async def test_equal_seeds_give_equal_faults() -> None:
    draws = []
    for _ in range(2):
        faults = Seeded(random.Random(9), 0.5)
        drawn = [faults.draw("read", "key") for _ in range(200)]
        draws.append([(fault.after_bytes, fault.delay_seconds, fault.error is None) if fault else None for fault in drawn])
    assert draws[0] == draws[1]
    assert 60 < sum(draw is not None for draw in draws[0]) < 140


class Observed:
    def __init__(self) -> None:
        self.seen: list[tuple[str, str, float, int, type[BaseException] | None]] = []

    def __call__(
        self, tier: str, operation: str, seconds: float, transferred_bytes: int, error: type[BaseException] | None
    ) -> None:
        self.seen.append((tier, operation, round(seconds, 6), transferred_bytes, error))


async def test_measured_reports_every_outcome(autojump_clock: MockClock) -> None:
    memory = MemoryCold()
    ref = memory.put("key", DATA)
    observed = Observed()
    faults = Script(
        Fault("read", delay_seconds=2.0, after_bytes=7, error=_broken),
        Fault("read", delay_seconds=3.0),
        Fault("read", until=trio.Event()),
    )
    tier = Measured(Faulty(memory, faults), observed, clock=trio.current_time)
    with pytest.raises(Unavailable):
        await tier.read(ref, 0, 100, MemorySink(100))
    await tier.read(ref, 0, 100, MemorySink(100))
    with trio.move_on_after(5.0):
        await tier.read(ref, 0, 100, MemorySink(100))
    with pytest.raises(NotFound):
        await tier.head("none")
    await tier.list("")
    assert observed.seen == [
        ("memory", "read", 2.0, 7, Unavailable),
        ("memory", "read", 3.0, 100, None),
        ("memory", "read", 5.0, 0, trio.Cancelled),
        ("memory", "head", 0.0, 0, NotFound),
        ("memory", "list", 0.0, 0, None),
    ]


async def test_measured_prefers_the_nearer_tier_and_forgives_with_time(autojump_clock: MockClock) -> None:
    memory = MemoryCold()
    ref = memory.put("key", DATA)
    slow = Measured(
        Faulty(memory, Script(*(Fault("read", delay_seconds=1.0) for _ in range(20)))), Observed(), clock=trio.current_time
    )
    near = Measured(
        Faulty(memory, Script(*(Fault("read", delay_seconds=0.1) for _ in range(20)))), Observed(), clock=trio.current_time
    )
    assert slow.latency_seconds == near.latency_seconds == 0.0
    for _ in range(20):
        await slow.read(ref, 0, 1000, MemorySink(1000))
        await near.read(ref, 0, 1000, MemorySink(1000))
    assert slow.latency_seconds == pytest.approx(1.0, rel=0.05)
    assert near.latency_seconds == pytest.approx(0.1, rel=0.05)
    await trio.sleep(HALF_LIFE_SECONDS)
    assert slow.latency_seconds == pytest.approx(0.5, rel=0.1)


async def test_memory_pages_agree_with_a_plain_computation() -> None:
    rng = random.Random(4)
    memory = MemoryCold()
    keys = {"".join(rng.choice("ab/é\x01\udc80") for _ in range(rng.randint(1, 6))) for _ in range(300)}
    for key in keys:
        memory.put(key, b"")
    raw = {key: key.encode("utf-8", "surrogateescape") for key in keys}
    for prefix in ("", "a", "a/", "b/a/", "/", "é/", "a//"):
        for delimiter in (True, False):
            below = [key for key in keys if key.startswith(prefix)]
            folded = {prefix + key[len(prefix) :].partition("/")[0] + "/" for key in below if "/" in key[len(prefix) :]}
            prefixes = folded if delimiter else set()
            objects = {key for key in below if not delimiter or "/" not in key[len(prefix) :]}
            wanted = sorted(objects | prefixes, key=lambda name: raw.get(name) or name.encode("utf-8", "surrogateescape"))
            for limit in (1, 7, 1000):
                found: list[str] = []
                token = ""
                while True:
                    page = await memory.list(prefix, delimiter=delimiter, token=token, limit=limit)
                    names = [item.key for item in page.objects] + list(page.prefixes)
                    assert len(names) <= limit
                    found += sorted(names, key=lambda name: name.encode("utf-8", "surrogateescape"))
                    token = page.token
                    if not token:
                        break
                assert found == wanted


async def test_memory_gate_lets_the_test_act_in_between() -> None:
    memory = MemoryCold(piece_bytes=1000)
    ref = memory.put("key", DATA)
    gate = memory.hold("read", "key", after_bytes=3000)
    sink = MemorySink(len(DATA))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(memory.read, ref, 0, len(DATA), sink)
        await gate.reached.wait()
        assert sink.received_bytes == 3000
        memory.put("key", bytes(len(DATA)))
        await wait_all_tasks_blocked()
        assert sink.received_bytes == 3000
        gate.release()
    assert bytes(sink.view) == DATA
    with pytest.raises(VersionChanged):
        await memory.read(ref, 0, 1, MemorySink(1))
    assert memory.reads == {"key": 2}


async def test_memory_archived_objects_are_not_read() -> None:
    memory = MemoryCold()
    ref = memory.put("key", b"x", archived=True)
    assert (await memory.head("key")).archived
    with pytest.raises(Archived):
        await memory.read(ref, 0, 1, MemorySink(1))
