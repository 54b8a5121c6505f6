"""Tables of the index: their names, keys, and how a value becomes bytes and is believed again.

    entries      parent (8 B) + name    -> Link
    inodes       inode (8 B)            -> Entry
    directories  inode (8 B)            -> DirectoryState
    superseded   inode (8 B)            -> Mark            inodes that no name leads to any more
    hot          object id (20 B)       -> HotRecord
    chunks       object id + chunk (4 B)-> ChunkRecord
    pins         hash of what is pinned -> Pin             a prefix reaches 1,024 bytes, a key 511
    meta         b"meta"                -> Meta

Numbers in keys are big-endian, so that a range scan is the order of the numbers.

A value is: CRC-32 of (table, key, rest) in 4 bytes, one form byte, MessagePack. The checksum is there because a page of
noise that LMDB can walk would otherwise give records that decode with some other inode or digest in them; it
covers table and key, so a value that was moved elsewhere is noticed too. It is checked on every read: 0.2 us of
about 3 us for a whole read (CRC-32 takes two buffers without joining them, which xxh3 in Python does not).

The form byte says whether texts are plain UTF-8 or `ESCAPED`: MessagePack refuses the lone surrogates that stand for
undecodable bytes (PEP 383), so records that have any keep each text as its bytes, written as Latin-1.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Generic, TypeVar
from zlib import crc32

import msgspec

from tiercache.core.record import ChunkRecord, DirectoryState, Entry, HotRecord, Inode, Link, ObjectId, Pin
from tiercache.errors import IndexDamaged

FORMAT_VERSION = 1
CHECKSUM_BYTES = 4
INODE_BYTES = 8
PLAIN = 0
ESCAPED = 1

T = TypeVar("T", bound=msgspec.Struct)
Buffer = bytes | memoryview


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """Present or not: nothing else to say."""


class Meta(msgspec.Struct, frozen=True, array_like=True):
    """One record about the whole; written in the transaction of whatever changes it.

    `held_bytes` per hot directory, `hot_count` over all of them.
    """

    format_version: int
    boot_id: str
    epoch: int
    trusted_epoch: int
    held_bytes: dict[int, int]
    hot_count: int


class Codec(Generic[T]):
    """Form byte and MessagePack of one kind of record."""

    def __init__(self, kind: type[T]) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(kind)

    def encode(self, value: T) -> bytes:
        try:
            return b"\x00" + self._encoder.encode(value)
        except UnicodeEncodeError:
            return b"\x01" + self._encoder.encode(_each_text(value, _escaped))

    def decode(self, raw: Buffer) -> T:
        """Raises ValueError (which msgspec's errors are) when the bytes are not such a record."""
        form = raw[0] if raw else None
        value = self._decoder.decode(raw[1:])
        if form == PLAIN:
            return value
        if form == ESCAPED:
            return _each_text(value, _unescaped)
        raise ValueError(f"unknown form {form} of a record")


class Table(Generic[T]):
    """One LMDB database: its name, and its values with their checksums."""

    def __init__(self, name: bytes, kind: type[T]) -> None:
        self.name = name
        self._codec = Codec(kind)
        self._seed = crc32(name)

    def pack(self, key: bytes, value: T) -> bytes:
        body = self._codec.encode(value)
        return crc32(body, crc32(key, self._seed)).to_bytes(CHECKSUM_BYTES, "little") + body

    def unpack(self, key: Buffer, raw: Buffer) -> T:
        """Raises IndexDamaged when the value does not belong to the key or is not what was stored."""
        body = raw[CHECKSUM_BYTES:]
        if int.from_bytes(raw[:CHECKSUM_BYTES], "little") != crc32(body, crc32(key, self._seed)):
            raise self.damaged(key, "its checksum does not match")
        try:
            return self._codec.decode(body)
        except ValueError as error:
            raise self.damaged(key, str(error)) from error

    def damaged(self, key: Buffer, why: str) -> IndexDamaged:
        return IndexDamaged(f"index record {self.name.decode()}/{bytes(key).hex()} is damaged: {why}", hint=RESTART)


RESTART = "restart the daemon: it checks the index and rebuilds it"

ENTRIES = Table(b"entries", Link)
INODES = Table(b"inodes", Entry)
DIRECTORIES = Table(b"directories", DirectoryState)
SUPERSEDED = Table(b"superseded", Mark)
HOT = Table(b"hot", HotRecord)
CHUNKS = Table(b"chunks", ChunkRecord)
PINS = Table(b"pins", Pin)
META = Table(b"meta", Meta)
META_KEY = b"meta"

TABLES: tuple[Table[Any], ...] = (ENTRIES, INODES, DIRECTORIES, SUPERSEDED, HOT, CHUNKS, PINS, META)


def inode_key(inode: Inode) -> bytes:
    return inode.to_bytes(INODE_BYTES, "big")


def entry_key(parent: Inode, name: bytes) -> bytes:
    return parent.to_bytes(INODE_BYTES, "big") + name


def chunk_key(object_id: ObjectId, chunk: int) -> bytes:
    return object_id + chunk.to_bytes(4, "big")


def pin_key(dataset: str, prefix: str, exact: bool) -> bytes:
    digest = blake2b(digest_size=20, person=b"tiercache-pin")
    for part in (dataset, prefix):
        raw = part.encode("utf-8", "surrogateescape")
        digest.update(len(raw).to_bytes(4, "big"))
        digest.update(raw)
    digest.update(b"\x01" if exact else b"\x00")
    return digest.digest()


def _escaped(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("latin-1")


def _unescaped(text: str) -> str:
    return text.encode("latin-1").decode("utf-8", "surrogateescape")


def _each_text(value: T, change: Any) -> T:
    texts = {name: change(text) for name in value.__struct_fields__ if isinstance(text := getattr(value, name), str)}
    return msgspec.structs.replace(value, **texts)
