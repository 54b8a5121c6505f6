"""The sidecar log: whole frames survive damage around them, and the log stays small."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.index import samples
from tiercache.core.record import ChunkRecord
from tiercache.index import sidecar
from tiercache.index.compaction import MIN_LOG_BYTES
from tiercache.index.environment import DATA_NAME
from tiercache.index.index import DropHot, DropPin, PutHot, PutPin
from tiercache.index.lmdb import LmdbIndex, open_index
from tiercache.index.records import chunk_key
from tiercache.index.sidecar import LOG_NAME, LoggedObject, encode_object, encode_pin, encode_unpin, read_log


def frame(number: int, chunks: int = 2) -> bytes:
    record = samples.hot(number, chunks=chunks, key=f"k/{number}\udc80")
    keyed = [(chunk_key(record.object_id, chunk), ChunkRecord(samples.digest(number, chunk), 1)) for chunk in range(chunks)]
    encoded = encode_object(record, keyed)
    assert encoded is not None
    return encoded


FRAMES = [
    *(frame(number) for number in range(6)),
    encode_pin(samples.pin("a/\udcff")),
    encode_unpin(DropPin("set", "a/\udcff", False)),
]


def test_frames_come_back_as_they_were(tmp_path: Path) -> None:
    (tmp_path / LOG_NAME).write_bytes(b"".join(FRAMES))
    logged = list(read_log(tmp_path / LOG_NAME))
    assert logged[:6] == [
        LoggedObject(samples.hot(n, chunks=2, key=f"k/{n}\udc80"), (samples.digest(n, 0), samples.digest(n, 1))) for n in range(6)
    ]
    assert logged[6:] == [samples.pin("a/\udcff"), DropPin("set", "a/\udcff", False)]
    assert list(read_log(tmp_path / "none")) == []


@pytest.mark.parametrize("read_bytes", [1, 7, 1000])
def test_frames_are_found_across_the_borders_of_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int) -> None:
    (tmp_path / LOG_NAME).write_bytes(b"junk" + b"\xf1TC" + b"".join(FRAMES) + b"\xf1T")
    whole = list(read_log(tmp_path / LOG_NAME))
    assert len(whole) == len(FRAMES)
    monkeypatch.setattr(sidecar, "READ_BYTES", read_bytes)
    assert list(read_log(tmp_path / LOG_NAME)) == whole


@given(st.integers(0, 10**9), st.binary(min_size=1, max_size=300), st.integers(0, 10**9))
def test_damage_costs_the_frames_it_touches_and_no_other(
    tmp_path_factory: pytest.TempPathFactory, place: int, noise: bytes, end: int
) -> None:
    whole = b"".join(FRAMES)
    at = place % len(whole)
    cut = at + end % (len(whole) - at + 1)
    path = tmp_path_factory.mktemp("log") / LOG_NAME
    path.write_bytes(whole)
    undamaged = list(read_log(path))
    path.write_bytes(whole[:at] + noise + whole[cut:])
    kept, position = [], 0
    for each, logged in zip(FRAMES, undamaged, strict=True):
        if position + len(each) <= at or position >= cut:
            kept.append(logged)
        position += len(each)
    read = list(read_log(path))
    assert [logged for logged in read if logged in undamaged] == read
    assert [logged for logged in kept if logged not in read] == []


def test_an_object_without_all_digests_is_not_logged() -> None:
    record = samples.hot(1, chunks=3)
    keyed = [(chunk_key(record.object_id, chunk), ChunkRecord(1, 1)) for chunk in range(3)]
    assert encode_object(record, keyed) is not None
    assert encode_object(record, keyed[:2]) is None
    assert encode_object(record, keyed[1:]) is None
    assert encode_object(record, [*keyed, (chunk_key(record.object_id, 3), ChunkRecord(1, 1))]) is None


async def opened(directory: Path) -> LmdbIndex:
    return await open_index(directory, boot_id="boot", exists=lambda record: True, map_bytes=1 << 22)


async def test_the_log_is_rewritten_when_most_of_it_is_history(tmp_path: Path) -> None:
    directory = tmp_path / "index"
    index = await opened(directory)
    await index.commit([PutPin(samples.pin("first/")), *(c for number in range(700) for c in samples.filled(number))])
    records = {record.object_id: record for record in index.all_hot()}
    rounds = 0
    largest = 0
    while rounds < 200 and not largest > index._writer.log_bytes:
        largest = index._writer.log_bytes
        await index.commit([PutHot(record) for record in records.values()])
        rounds += 1
    assert MIN_LOG_BYTES < largest < 3 * MIN_LOG_BYTES
    await index.commit([PutPin(samples.pin("second/")), DropHot(samples.object_id(3)), *samples.filled(2000)], sync=True)
    del records[samples.object_id(3)]
    await index.aclose(clean=True)
    (directory / DATA_NAME).unlink()
    again = await open_index(
        directory, boot_id="boot", exists=lambda record: record.object_id != samples.object_id(3), map_bytes=1 << 22
    )
    assert {record.object_id for record in again.all_hot()} == {*records, samples.object_id(2000)}
    assert again.pins() == [samples.pin("first/"), samples.pin("second/")]
    await again.aclose(clean=True)
