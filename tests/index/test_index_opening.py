"""Opening the index in every state: trust after clean and unclean ends, damage of each kind, recovery from the log."""

from __future__ import annotations

import os
import random
import re
import shutil
import stat
import time
from pathlib import Path

import msgspec
import pytest

from tests.index import samples
from tiercache.core.record import ChunkRecord, HotRecord, ObjectId
from tiercache.errors import HotSick
from tiercache.index import opening
from tiercache.index.environment import DATA_NAME, Environment, View
from tiercache.index.index import DropPin, PutEntry, PutHot, PutPin
from tiercache.index.lmdb import LmdbIndex, open_index
from tiercache.index.opening import judge
from tiercache.index.records import HOT, META, META_KEY, Meta
from tiercache.index.sidecar import LOG_NAME

OBJECT_COUNT = 60


async def opened(directory: Path, *, boot_id: str = "boot", missing: frozenset[bytes] = frozenset()) -> LmdbIndex:
    return await open_index(
        directory, boot_id=boot_id, exists=lambda record: record.object_id not in missing, map_bytes=1 << 20, touch_seconds=0.01
    )


def digests(chunks: dict[int, ChunkRecord]) -> dict[int, int]:
    return {chunk: record.digest for chunk, record in chunks.items()}


async def populate(directory: Path, *, clean: bool) -> dict[bytes, tuple[HotRecord, dict[int, ChunkRecord]]]:
    """An index with names, objects and a pin, whose free list is in use too; what `everything` says of it."""
    index = await opened(directory)
    await index.commit([PutEntry(samples.entry(b"%d" % number), 1.0) for number in range(300)])
    for number in range(OBJECT_COUNT):
        await index.commit(samples.filled(number, chunks=1 + number % 3))
    await index.commit([PutPin(samples.pin("keep/")), PutPin(samples.pin("drop/")), DropPin("set", "drop/", False)], sync=True)
    before = samples.everything(index)
    await index.aclose(clean=clean)
    return before


@pytest.mark.parametrize(
    ("clean", "boot_id", "epoch", "unclean"),
    [(True, "boot", 1, False), (True, "other", 1, False), (False, "boot", 1, True), (False, "other", 2, True)],
)
async def test_only_an_unclean_end_with_another_boot_costs_the_trust(
    tmp_path: Path, clean: bool, boot_id: str, epoch: int, unclean: bool
) -> None:
    before = await populate(tmp_path / "index", clean=clean)
    index = await opened(tmp_path / "index", boot_id=boot_id)
    health = index.health
    assert (health.epoch, health.trusted_epoch, health.unclean, health.rebuilt) == (epoch, epoch, unclean, "")
    assert samples.everything(index) == before
    assert index.pins() == [samples.pin("keep/")]
    await index.aclose(clean=True)
    again = await opened(tmp_path / "index", boot_id="third")
    assert (again.health.epoch, again.health.trusted_epoch, again.health.unclean) == (epoch, epoch, False)
    await again.aclose(clean=False)


async def test_the_clean_mark_holds_for_one_start_only(tmp_path: Path) -> None:
    await populate(tmp_path / "index", clean=True)
    await (await opened(tmp_path / "index", boot_id="second")).aclose(clean=False)
    index = await opened(tmp_path / "index", boot_id="third")
    assert (index.health.epoch, index.health.trusted_epoch, index.health.unclean) == (2, 2, True)
    await index.aclose(clean=False)


def _exchanged(data: Path, how: str, older: bytes) -> None:
    """Another index file where the clean one was, size and mtime as they were wherever that can be had."""
    before = data.stat()
    match how:
        case "older copy":
            data.write_bytes(older)
        case "older copy, same mtime":
            data.write_bytes(older.ljust(before.st_size, b"\0"))
            os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
        case "same bytes in another file":
            shutil.copy2(data, data.with_suffix(".new"))
            data.with_suffix(".new").rename(data)
        case _:
            os.utime(data)


@pytest.mark.parametrize("how", ["older copy", "older copy, same mtime", "same bytes in another file", "touched"])
async def test_a_file_that_the_clean_mark_does_not_vouch_for_costs_the_trust_in_the_same_boot(tmp_path: Path, how: str) -> None:
    directory = tmp_path / "index"
    await populate(directory, clean=True)
    older = (directory / DATA_NAME).read_bytes()
    index = await opened(directory)
    await index.commit(samples.filled(1000))
    await index.aclose(clean=True)
    _exchanged(directory / DATA_NAME, how, older)
    index = await opened(directory)
    health = index.health
    assert (health.unclean, health.rebuilt) == (True, "")
    assert all(
        chunk.epoch < health.trusted_epoch for _, chunks in samples.everything(index).values() for chunk in chunks.values()
    )
    await index.aclose(clean=True)
    again = await opened(directory)
    assert (again.health.unclean, again.health.trusted_epoch) == (False, health.trusted_epoch)
    await again.aclose(clean=True)


async def test_the_distrust_of_an_exchanged_file_survives_a_crash_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "index"
    await populate(directory, clean=True)
    os.utime(directory / DATA_NAME)

    def crash(*_: object, **__: object) -> None:
        raise OSError("the process ends here")

    with monkeypatch.context() as patch:
        patch.setattr(opening, "_open_sound", crash)
        with pytest.raises(HotSick):
            await opened(directory)
    index = await opened(directory)
    assert index.health.trusted_epoch == 2
    await index.aclose(clean=True)


async def test_a_new_index_is_private_and_clean(tmp_path: Path) -> None:
    index = await opened(tmp_path / "deep" / "index")
    assert (index.health.unclean, index.health.rebuilt, index.hot_count()) == (False, "", 0)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "deep" / "index").iterdir()}
    assert stat.S_IMODE((tmp_path / "deep" / "index").stat().st_mode) == 0o700
    assert set(modes.values()) == {0o600}, modes
    await index.aclose(clean=True)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("damage", ["deleted", "truncated", "emptied", "noise at the front", "other file"])
async def test_a_damaged_index_is_set_aside_and_recovered_from_the_log(tmp_path: Path, clean: bool, damage: str) -> None:
    directory = tmp_path / "index"
    before = await populate(directory, clean=clean)
    data = directory / DATA_NAME
    noise = random.Random(damage).randbytes(8192)
    match damage:
        case "deleted":
            data.unlink()
        case "truncated":
            os.truncate(data, data.stat().st_size // 2)
        case "emptied":
            os.truncate(data, 0)
        case "noise at the front":
            samples.overwrite(data, 0, noise)
        case _:
            data.write_bytes(b"not an index at all" * 1000)
    gone = samples.object_id(7)
    index = await opened(directory, missing=frozenset([gone]))
    del before[gone]
    assert index.health.rebuilt
    assert index.health.recovered_count == index.hot_count() == len(before)
    recovered = samples.everything(index)
    assert {key: record for key, (record, _) in recovered.items()} == {key: record for key, (record, _) in before.items()}
    assert index.held_bytes(0) == sum(record.held_bytes for record, _ in before.values())
    for key, (_, chunks) in recovered.items():
        assert digests(chunks) == digests(before[key][1])
        assert all(each.epoch < index.health.trusted_epoch for each in chunks.values())
    assert index.pins() == [samples.pin("keep/")]
    assert (tmp_path / "index.damaged-1" / DATA_NAME).exists() == (damage != "deleted")
    await index.commit(samples.filled(1000))
    await index.aclose(clean=True)
    again = await opened(directory)
    assert (again.health.rebuilt, again.hot_count()) == ("", len(before) + 1)
    await again.aclose(clean=True)


@pytest.mark.parametrize("seed", range(8))
async def test_a_page_of_noise_never_gives_wrong_records(tmp_path: Path, seed: int) -> None:
    """Whichever page it is (metas and free list included): either it was out of use, or the index is rebuilt."""
    directory = tmp_path / "index"
    before = await populate(directory, clean=seed % 2 == 0)
    rng = random.Random(seed)
    data = directory / DATA_NAME
    page = [0, 1, *rng.sample(range(2, data.stat().st_size // 4096), 6)][seed]
    noise_bytes = rng.choice([4096, 256])
    samples.overwrite(data, page * 4096 + rng.randrange(0, 4096, noise_bytes), rng.randbytes(noise_bytes))
    index = await opened(directory)
    after = samples.everything(index)
    assert {key: record for key, (record, _) in after.items()} == {key: record for key, (record, _) in before.items()}
    for key, (_, chunks) in after.items():
        assert digests(chunks) == digests(before[key][1])
    assert index.pins() == [samples.pin("keep/")]
    for number in range(OBJECT_COUNT, OBJECT_COUNT + 40):
        await index.commit(samples.filled(number))
    assert index.hot_count() == OBJECT_COUNT + 40
    await index.aclose(clean=False)


async def test_one_flipped_bit_in_any_record_is_found(tmp_path: Path) -> None:
    directory = tmp_path / "index"
    await populate(directory, clean=False)
    data = directory / DATA_NAME
    content = data.read_bytes()
    keys = [samples.object_id(number) + b"\x00\x00\x00\x00" for number in (3, 11)] + [b"keep/"]
    for key in keys:
        for found in re.finditer(re.escape(key), content):
            samples.overwrite(data, found.end() + 6, bytes([content[found.end() + 6] ^ 1]))
        assert await judge(directory) != ""
        data.write_bytes(content)
    assert await judge(directory) == ""


async def test_totals_that_do_not_add_up_are_damage(tmp_path: Path) -> None:
    directory = tmp_path / "index"
    await populate(directory, clean=False)
    environment = Environment(directory, 1 << 24)
    with environment.reading as view:
        meta = view.get(META, META_KEY)
    assert meta is not None
    wrong = Meta(meta.format_version, meta.boot_id, meta.epoch, meta.trusted_epoch, {0: 1}, meta.hot_count)
    environment.write(lambda view: view.put(META, META_KEY, wrong))
    environment.close()
    assert "totals" in await judge(directory)


async def test_at_most_two_damaged_files_are_kept(tmp_path: Path) -> None:
    directory = tmp_path / "index"
    await populate(directory, clean=True)
    for _ in range(4):
        samples.overwrite(directory / DATA_NAME, 0, b"noise" * 2000)
        index = await opened(directory)
        assert index.hot_count() == OBJECT_COUNT
        await index.aclose(clean=True)
    assert sorted(os.listdir(tmp_path)) == ["index", "index.damaged-3", "index.damaged-4"]


async def test_everything_gone_is_a_fresh_start(tmp_path: Path) -> None:
    await populate(tmp_path / "index", clean=True)
    shutil.rmtree(tmp_path / "index")
    index = await opened(tmp_path / "index")
    assert (index.health.rebuilt, index.hot_count()) == ("", 0)
    await index.aclose(clean=True)


async def test_a_lost_log_is_written_again(tmp_path: Path) -> None:
    directory = tmp_path / "index"
    before = await populate(directory, clean=True)
    (directory / LOG_NAME).unlink()
    index = await opened(directory)
    await index.commit([PutPin(samples.pin("new/"))])
    await samples.until(lambda: not (directory / "objects.rewrite").exists() and (directory / LOG_NAME).stat().st_size > 3000)
    await index.aclose(clean=True)
    (directory / DATA_NAME).unlink()
    again = await opened(directory)
    assert samples.everything(again).keys() == before.keys()
    assert again.pins() == [samples.pin("keep/"), samples.pin("new/")]
    await again.aclose(clean=True)


async def test_a_check_that_dies_or_hangs_means_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "index"
    await populate(directory, clean=False)
    dying = tmp_path / "dying"
    dying.write_text("#!/bin/sh\nkill -SEGV $$\n")
    dying.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(dying))
    assert "SIGSEGV" in await judge(directory)
    dying.write_text("#!/bin/sh\nexec sleep 100\n")
    monkeypatch.setattr(opening, "CHECK_START_SECONDS", 0.2)
    started = time.monotonic()
    assert "did not end" in await judge(directory)
    assert time.monotonic() - started < 20


async def test_another_format_is_set_aside(tmp_path: Path) -> None:
    directory = tmp_path / "index"
    await populate(directory, clean=False)
    environment = Environment(directory, 1 << 24)
    environment.write(lambda view: view.put(META, META_KEY, Meta(99, "boot", 1, 1, {}, 0)))
    environment.close()
    index = await opened(directory)
    assert "format 99" in index.health.rebuilt
    assert index.hot_count() == OBJECT_COUNT
    await index.aclose(clean=True)


async def test_a_place_that_cannot_hold_an_index_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(HotSick, match="file"):
        await opened(tmp_path / "file")


async def test_case_8_a_big_index_opens_at_once_after_a_clean_stop(tmp_path: Path) -> None:
    directory = tmp_path / "index"
    await (await opened(directory)).aclose(clean=False)
    count = 300_000
    rng = random.Random(0)
    one = samples.hot(0)
    ids = sorted(ObjectId(rng.randbytes(20)) for _ in range(count))
    records = [msgspec.structs.replace(one, object_id=object_id) for object_id in ids]

    def fill(view: View) -> None:
        meta = view.get(META, META_KEY)
        assert meta is not None
        for record in records:
            view.put(HOT, record.object_id, record)
        view.put(META, META_KEY, Meta(meta.format_version, "boot", 1, 1, {}, count))

    environment = Environment(directory, 1 << 20)
    environment.write(fill)
    environment.close()
    index = await opened(directory)
    await index.aclose(clean=True)
    started = time.monotonic()
    index = await opened(directory, boot_id="other")
    took_seconds = time.monotonic() - started
    assert index.hot_count() == count
    assert index.health.rebuilt == ""
    assert not index.health.unclean
    assert took_seconds < 0.5
    await index.commit([PutHot(records[0])])
    await index.aclose(clean=True)
