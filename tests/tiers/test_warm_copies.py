"""Where copies are: what is asked, remembered and forgotten."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.tiers.warm_copies import CHUNK_BYTES, Flash, flash, ref_of
from tiercache.core.record import ObjectId
from tiercache.errors import NotHeld
from tiercache.tiers.warm import catalogue
from tiercache.tiers.warm.copies import ABSENT_SECONDS, Copies
from tiercache.tiers.warm.hedging import PATIENCE_SECONDS
from tiercache.tiers.warm.target import Target

DATA = random.Random(5).randbytes(2 * CHUNK_BYTES + 17)
SMALL = {f"small/{number}": random.Random(number).randbytes(1 + 977 * number) for number in range(12)}


class Counting:
    """Counts what targets are asked, and holds back some of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        self.slow: dict[str, trio.Event] = {}
        for name in ("names", "read", "read_whole", "scan"):
            monkeypatch.setattr(Target, name, self._wrapped(name, getattr(Target, name)))

    def _wrapped(self, name: str, original):  # type: ignore[no-untyped-def]
        async def call(target: Target, *arguments: object, **named: object) -> object:
            self.calls[name] += 1
            if target.path in self.slow:
                await self.slow[target.path].wait()
            return await original(target, *arguments, **named)

        return call


async def test_answers_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with flash(tmp_path) as store:
        manifest = await store.write("key", DATA)
        now = 0.0
        copies = Copies(store.targets, store.catalogues, store.hedging, 2, clock=lambda: now)
        counting = Counting(monkeypatch)
        for _ in range(3):
            (copy,) = await copies.find(manifest.object_id)
            assert copy.manifest == manifest
        assert copies.known(manifest.object_id)
        assert 0 < counting.calls["names"] <= 3
        assert 0 < counting.calls["read_whole"] <= 3

        counting.calls.clear()
        nobodys = ref_of("nobody's", b"x").object_id
        for _ in range(3):
            assert await copies.find(nobodys) == []
        assert counting.calls["names"] == 3
        now += ABSENT_SECONDS
        assert await copies.find(nobodys) == []
        assert counting.calls["names"] == 6
        new = await store.write("nobody's", b"x")
        copies.add(new)
        assert [copy.manifest for copy in await copies.find(nobodys)] == [new]
        copies.forget(nobodys)
        assert not copies.known(nobodys)


async def test_what_is_kept_is_bounded(tmp_path: Path) -> None:
    async with flash(tmp_path, "1+0") as store:
        copies = Copies(store.targets, store.catalogues, store.hedging, 0, kept_bytes=10_000)
        for number in range(20):
            manifest = await store.write(f"key/{number}", DATA)
            assert len(await copies.find(manifest.object_id)) == 1
            assert copies.kept_bytes <= 10_000
        assert copies.kept_bytes > 5_000


async def test_one_look_up_for_all_who_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with flash(tmp_path) as store:
        manifest = await store.write("key", DATA)
        counting = Counting(monkeypatch)
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(store.copies.find, manifest.object_id)
        assert counting.calls["names"] <= 6


async def test_one_manifest_is_read_for_all_members_of_a_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with flash(tmp_path) as store:
        await store.write_pack(SMALL)
        await store.catalogues.refresh()
        counting = Counting(monkeypatch)
        async with trio.open_nursery() as nursery:
            for key, data in SMALL.items():
                nursery.start_soon(store.copies.find, ref_of(key, data).object_id)
        assert counting.calls["read_whole"] <= 6
        assert counting.calls["names"] == 0


async def test_slow_targets_are_not_taken_for_a_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All m+1 that have the manifest are late; the others have none."""
    async with flash(tmp_path) as store:
        manifest = await store.write("key", DATA)
        counting = Counting(monkeypatch)
        let_go = trio.Event()
        first = store.targets.ordered(manifest.object_id)[:3]
        counting.slow = {target.path: let_go for target in first}
        found = []

        async def find() -> None:
            found.extend(await store.copies.find(manifest.object_id))

        with trio.fail_after(PATIENCE_SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(find)
                while counting.calls["names"] < 6:
                    await trio.lowlevel.checkpoint()
                assert found == []
                let_go.set()
        assert [copy.manifest for copy in found] == [manifest]


async def test_a_manifest_left_behind_does_not_hide_another_copy(tmp_path: Path) -> None:
    """A removal that was broken off left a manifest without shards on the target that answers."""
    async with flash(tmp_path) as store:
        old = await store.write("key", DATA, generation=1 << 20)
        new = await store.write("key", DATA, generation=2 << 20)
        for index in range(6):
            store.shard(old, index).unlink()
        first = store.targets.ordered(old.object_id)[0]
        for path in store.manifests(old):
            if not str(path).startswith(first.path + "/"):
                path.unlink()
        for path in store.manifests(new):
            if str(path).startswith(first.path + "/"):
                path.unlink()
        for _ in range(5):
            assert await store.another_node().read("key", DATA) == DATA


async def test_catalogues_follow_the_targets(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        one = await store.write_pack(SMALL, seed=1)
        catalogues = store.catalogues
        assert not catalogues.is_loaded
        await catalogues.refresh()
        assert catalogues.is_loaded
        assert catalogues.catalogue.packs_count == 1
        two = await store.write_pack({"other": b"x"}, seed=2)
        assert catalogues.find(ref_of("other", b"x").object_id) == []
        await catalogues.refresh()
        assert catalogues.find(ref_of("other", b"x").object_id) == [(two.object_id, two.generation, 0)]
        await _drop(store, one.object_id)
        await catalogues.refresh()
        assert catalogues.catalogue.packs == [(two.object_id, two.generation)]
        with pytest.raises(NotHeld):
            await store.read("small/3", SMALL["small/3"])


async def _drop(store: Flash, object_id: ObjectId) -> None:
    for target in store.targets.all:
        for name in await target.names("packs"):
            if name.startswith(object_id.hex()):
                await target.remove(f"packs/{name}")


async def test_a_bad_segment_is_taken_from_another_target(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        pack = await store.write_pack(SMALL)
        for path in store.manifests(pack)[:2]:
            path.write_bytes(b"noise")
        await store.catalogues.refresh()
        for key, data in SMALL.items():
            assert await store.read(key, data) == data


async def test_who_reads_right_after_the_start_waits_until_packs_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting(monkeypatch)
    async with flash(tmp_path) as store:
        await store.write_pack(SMALL)
        node = store.another_node()
        slow = store.targets.all[0]
        counting.slow[slow.path] = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.catalogues.run)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(_release, counting.slow[slow.path])
            assert await node.read("small/3", SMALL["small/3"]) == SMALL["small/3"]
            nursery.cancel_scope.cancel()


async def _release(event: trio.Event) -> None:
    await trio.testing.wait_all_tasks_blocked()
    event.set()


async def test_nobody_waits_long_for_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "FIRST_LOOK_SECONDS", 0.1)
    counting = Counting(monkeypatch)
    async with flash(tmp_path) as store:
        await store.write_pack(SMALL)
        node = store.another_node()
        for target in store.targets.all:
            counting.slow[target.path] = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.catalogues.run)
            object_id = ref_of("small/3", SMALL["small/3"]).object_id
            with trio.fail_after(PATIENCE_SECONDS):
                assert await node.copies.find(object_id, in_packs_only=True) == []
            nursery.cancel_scope.cancel()
