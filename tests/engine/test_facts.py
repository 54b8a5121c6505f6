"""What is told about a file's copies is true at every stage of its way through the hot tier."""

from __future__ import annotations

from pathlib import Path

import xxhash

from tests.engine.engines import CHUNK_BYTES, MIB, content, engine_on, limits
from tiercache.engine.facts import Hot
from tiercache.tiers.memory import MemoryCold

SIZE_BYTES = MIB + 5000
DATA = content(1, SIZE_BYTES)


async def test_a_file_on_its_way_through_the_hot_tier(tmp_path: Path) -> None:
    cold = MemoryCold()
    cold.put("a", DATA)
    async with engine_on(tmp_path, cold, numbers=limits(read_ahead_bytes=0)) as mount:
        facts, entry = mount.engine.facts, await mount.entry("a")
        assert (facts.hot(entry), facts.residency(entry), facts.checksum(entry)) == (Hot(0, 0, 5), "cold", "")
        async with mount.opened("a") as inode:
            await mount.read(inode, 0, 4096)
        await mount.settled()
        assert (facts.hot(entry), facts.residency(entry), facts.checksum(entry)) == (Hot(CHUNK_BYTES, 1, 5), "hot(1/5),cold", "")
        assert facts.hot_bytes(entry) == CHUNK_BYTES
        assert await mount.cat("a") == DATA
        await mount.settled()
        assert facts.hot(entry) == Hot(4 * CHUNK_BYTES + 8192, 5, 5)
        assert facts.hot(entry).complete
        assert facts.hot_bytes(entry) == SIZE_BYTES
        assert facts.residency(entry) == "hot,cold"
        digests = [xxhash.xxh3_64_digest(DATA[begin : begin + CHUNK_BYTES]) for begin in range(0, SIZE_BYTES, CHUNK_BYTES)]
        assert facts.checksum(entry) == f"xxh3-chunks:{CHUNK_BYTES}:{xxhash.xxh3_64_hexdigest(b''.join(digests))}"
        await mount.engine.holdings.evict([entry.object_id])
        assert facts.residency(entry) == "cold"


async def test_case_16_small_and_empty_files(tmp_path: Path) -> None:
    cold = MemoryCold()
    cold.put("one", b"x")
    cold.put("empty", b"")
    async with engine_on(tmp_path, cold) as mount:
        facts = mount.engine.facts
        assert await mount.cat("one") == b"x"
        assert await mount.cat("empty") == b""
        await mount.settled()
        one, empty = await mount.entry("one"), await mount.entry("empty")
        assert facts.residency(one) == "hot,cold"
        assert facts.checksum(one) == f"xxh3:{xxhash.xxh3_64_hexdigest(b'x')}"
        assert facts.hot_bytes(one) == 1
        assert (facts.residency(empty), facts.checksum(empty), facts.hot_bytes(empty)) == ("cold", "", 0)
