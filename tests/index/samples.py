"""Records for the index tests, made from numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import trio

from tiercache.core.record import ROOT_INODE, ChunkRecord, Entry, HotRecord, Inode, Kind, ObjectId, Pin, inode_number
from tiercache.index.index import Index, PutChunk, PutHot

CHUNK_BYTES = 1 << 20


def object_id(number: int) -> ObjectId:
    return ObjectId(random.Random(number).randbytes(20))


def hot(number: int, *, chunks: int = 1, directory: int = 0, key: str = "") -> HotRecord:
    """An object of `chunks` chunks, none of which is there yet."""
    size_bytes = chunks * CHUNK_BYTES - 5
    text = key or f"train/{number}.jpg"
    version = f"etag:{size_bytes}"
    return HotRecord(object_id(number), "set", text, version, size_bytes, CHUNK_BYTES, directory, 0, False, 0, 0)


def digest(number: int, chunk: int) -> int:
    return random.Random(number * 1000 + chunk).getrandbits(64)


def filled(number: int, *, chunks: int = 1, directory: int = 0, epoch: int = 1) -> list[PutHot | PutChunk]:
    """The changes that make a complete object."""
    record = hot(number, chunks=chunks, directory=directory)
    return [
        PutHot(record),
        *(
            PutChunk(record.object_id, chunk, ChunkRecord(digest(number, chunk), epoch), CHUNK_BYTES, chunk == chunks - 1)
            for chunk in range(chunks)
        ),
    ]


def entry(name: bytes, *, parent: Inode = ROOT_INODE, version: str = "v1", kind: Kind = Kind.FILE, key: str = "") -> Entry:
    text = key or name.decode("utf-8", "surrogateescape")
    inode = inode_number("set", f"{parent}/{text}", version)
    return Entry(inode, parent, name, kind, "set", text, version, 10, 20, ObjectId(b"o" * 20 if kind is Kind.FILE else b""))


def pin(prefix: str, *, exact: bool = False, owner: str = "alice") -> Pin:
    return Pin("set", prefix, exact, owner, "because", 100, 0, 12345)


def everything(index: Index) -> dict[bytes, tuple[HotRecord, dict[int, ChunkRecord]]]:
    return {record.object_id: (record, index.chunks(record.object_id)) for record in index.all_hot()}


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Poll for a condition; fails when the deadline passes."""
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in another thread
            await trio.sleep(0.005)


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)
