"""More than m shards of a copy are gone: the store gives the bytes, once, and another copy takes its place."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.engine.engines import KIB, content, until
from tests.warm.nodes import CHUNK_BYTES, Unreadable, node_on
from tests.warm.surveying import survey
from tiercache.engine.demotion import Outcome
from tiercache.tiers.memory import MemoryCold

TARGETS_COUNT = 7


@pytest.mark.parametrize("size_bytes", [3 * CHUNK_BYTES, 10 * KIB], ids=["a copy of its own", "in a pack"])
@pytest.mark.parametrize("seed", range(3))  # of what is looked at first
async def test_a_lost_copy_is_replaced_by_a_new_one(tmp_path: Path, size_bytes: int, seed: int) -> None:
    targets = [tmp_path / f"target{number}" for number in range(TARGETS_COUNT)]
    store, data, faults = MemoryCold(), content(seed, size_bytes), Unreadable()
    store.put("object", data)
    async with node_on(tmp_path / "one", targets, store, faults=faults) as node:
        assert await node.mount.cat("object") == data
        assert set((await node.demote()).values()) == {Outcome.WRITTEN}
        await node.forget_hot()
        [lost] = survey(targets).copies.values()
        for index in range(lost.manifest.geometry.parity_count + 1):
            lost.shards[index][0].unlink()

        assert await node.mount.cat("object") == data
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.warm.repairs.run)
            await until(lambda: node.warm.repairs.waiting_count == 0)
            nursery.cancel_scope.cancel()
        assert set((await node.demote()).values()) == {Outcome.WRITTEN}
        await node.forget_hot()
        faults.is_down = True
        assert await node.mount.cat("object") == data
        assert len(survey(targets).copies) == 2
    async with node_on(tmp_path / "other", targets, store, faults=faults) as node:
        cleaned = await node.scrub(repair=True)
        assert (cleaned.found["lost"], cleaned.found["superseded"], cleaned.damaged_count) == (1, 0, 0)
        assert survey(targets).incomplete(TARGETS_COUNT) == []
        assert await node.mount.cat("object") == data
