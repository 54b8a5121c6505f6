"""Warm copies: geometry, generations, names on a target, stripes, and the frame of a shard file. Byte tables: docs/formats.md.

A *copy* of an object is (object id, generation). It is cut into stripes; a stripe is one zstd frame (or plain bytes), cut into
k pieces, with m parity pieces; piece i of every stripe lies in shard file i. So all shard files of a copy have one size, and
a stripe lies at the same offset in each. Pieces follow each other without gaps: the offset of one is the end of the one before.

xxh3-64 finds damage by accident, with odds of 2^-64 to miss it; nothing here defends against a target that forges.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from typing import NewType

import msgspec
import xxhash

from tiercache import errors
from tiercache.core.record import OBJECT_ID_BYTES, ObjectId

Generation = NewType("Generation", int)

FORMAT_VERSION = 1
SHARDS_LIMIT = 64  # of one copy: two decimal digits in a name; the Cauchy code allows 256
STRIPE_LIMIT_BYTES = 1 << 30  # of one stripe; a reader allocates no more than this, whatever a table says

_GENERATION_RANDOM_BITS = 20

_HEADER = struct.Struct("<8sHBBBB2x20s4xQ8x")
_ROW = struct.Struct("<IIQQ")
_TRAILER = struct.Struct("<8sII8x")
_CHECKSUM = struct.Struct("<Q")
_HEADER_MAGIC = b"TCSHARD\0"
_TRAILER_MAGIC = b"TCSHEND\0"
_PACK_FLAG = 1
PLAIN_BIT = 1 << 31  # of a row's frame length: the bytes are stored as they are

SHARD_HEADER_BYTES = _HEADER.size + _CHECKSUM.size
SHARD_ROW_BYTES = _ROW.size
SHARD_TRAILER_BYTES = _TRAILER.size + _CHECKSUM.size
assert SHARD_HEADER_BYTES == 64
assert STRIPE_LIMIT_BYTES < PLAIN_BIT

_MANIFEST_NAME = re.compile(r"([0-9a-f]{40})\.([0-9a-f]{16})", re.ASCII)
_SHARD_NAME = re.compile(r"([0-9a-f]{40})\.([0-9a-f]{16})\.([0-9]{2})", re.ASCII)


class Geometry(msgspec.Struct, frozen=True):
    """k data and m parity pieces; any k of the k+m suffice."""

    data_count: int
    parity_count: int

    def __post_init__(self) -> None:
        if not (self.data_count >= 1 and self.parity_count >= 0 and self.shards_count <= SHARDS_LIMIT):
            raise ValueError(f"an erasure code has at least 1 data shard and at most {SHARDS_LIMIT} shards, not {self.text}")

    @property
    def shards_count(self) -> int:
        return self.data_count + self.parity_count

    @property
    def text(self) -> str:
        return f"{self.data_count}+{self.parity_count}"


def parse_geometry(text: str) -> Geometry:
    """'4+2'. ValueError for anything else."""
    found = re.fullmatch(r"([0-9]{1,3})\+([0-9]{1,3})", text.strip(), re.ASCII)
    if found is None:
        raise ValueError(f"an erasure code is written like 4+2 (data+parity shards), not {text!r}")
    return Geometry(int(found[1]), int(found[2]))


def make_generation(now_seconds: float, random_bits: int) -> Generation:
    """64 bits, Unix milliseconds first: the smaller of two is the older. Only the low 20 bits of `random_bits` count."""
    milliseconds = int(now_seconds * 1000)
    assert 0 <= milliseconds < 1 << (64 - _GENERATION_RANDOM_BITS)
    return Generation(milliseconds << _GENERATION_RANDOM_BITS | random_bits & ((1 << _GENERATION_RANDOM_BITS) - 1))


def generation_seconds(generation: Generation) -> float:
    """When it was made, in Unix seconds."""
    return (generation >> _GENERATION_RANDOM_BITS) / 1000


def fan_out(object_id: ObjectId) -> str:
    """The directory of an object below `shards` and `manifests`: one of 4,096."""
    return object_id.hex()[:3]


def copy_name(object_id: ObjectId, generation: Generation) -> str:
    assert len(object_id) == OBJECT_ID_BYTES
    return f"{object_id.hex()}.{generation:016x}"


def shard_path(object_id: ObjectId, generation: Generation, index: int) -> str:
    """Relative to the target."""
    return f"shards/{fan_out(object_id)}/{copy_name(object_id, generation)}.{index:02d}"


def manifest_path(object_id: ObjectId, generation: Generation, *, is_pack: bool) -> str:
    """Relative to the target."""
    directory = "packs" if is_pack else f"manifests/{fan_out(object_id)}"
    return f"{directory}/{copy_name(object_id, generation)}"


def parse_manifest_name(name: str) -> tuple[ObjectId, Generation] | None:
    """What the last part of a manifest's path says; None for a name that is none of ours."""
    found = _MANIFEST_NAME.fullmatch(name)
    return None if found is None else (ObjectId(bytes.fromhex(found[1])), Generation(int(found[2], 16)))


def parse_shard_name(name: str) -> tuple[ObjectId, Generation, int] | None:
    """What the last part of a shard's path says; None for a name that is none of ours."""
    found = _SHARD_NAME.fullmatch(name)
    if found is None or int(found[3]) >= SHARDS_LIMIT:
        return None
    return ObjectId(bytes.fromhex(found[1])), Generation(int(found[2], 16)), int(found[3])


class Stripe(msgspec.Struct, frozen=True):
    """One stripe of a copy. `digest` is xxh3-64 of its logical bytes, `checksums` those of its k+m pieces."""

    logical_bytes: int
    frame_bytes: int
    is_plain: bool
    digest: int
    piece_offset: int  # the same in every shard file
    checksums: tuple[int, ...]

    def piece_bytes(self, data_count: int) -> int:
        return piece_bytes(self.frame_bytes, data_count)

    @property
    def frame_field(self) -> int:
        """Length and form of the frame, as tables store them."""
        return self.frame_bytes | (PLAIN_BIT if self.is_plain else 0)


def piece_bytes(frame_bytes: int, data_count: int) -> int:
    """The length of each of a frame's k+m pieces; the last of the k is padded with zeros."""
    return -(-frame_bytes // data_count)


class ShardHeader(msgspec.Struct, frozen=True):
    object_id: ObjectId
    generation: Generation
    geometry: Geometry
    index: int
    is_pack: bool


class ShardRow(msgspec.Struct, frozen=True):
    """One stripe as a shard's own table has it: `checksum` is that of this shard's piece."""

    logical_bytes: int
    frame_bytes: int
    is_plain: bool
    digest: int
    checksum: int


def encode_shard_header(object_id: ObjectId, generation: Generation, geometry: Geometry, index: int, *, is_pack: bool) -> bytes:
    assert len(object_id) == OBJECT_ID_BYTES
    assert 0 <= index < geometry.shards_count
    flags = _PACK_FLAG if is_pack else 0
    counts = (geometry.data_count, geometry.parity_count)
    return sealed(_HEADER.pack(_HEADER_MAGIC, FORMAT_VERSION, *counts, index, flags, object_id, generation))


def decode_shard_header(raw: bytes) -> ShardHeader:
    """From the first 64 bytes of a shard file. Raises Damaged."""
    body = unsealed(raw, SHARD_HEADER_BYTES, "shard header")
    magic, version, data_count, parity_count, index, flags, object_id, generation = _HEADER.unpack(body)
    check_magic(magic, _HEADER_MAGIC, version, "shard header")
    geometry = checked_geometry(data_count, parity_count)
    if index >= geometry.shards_count or flags & ~_PACK_FLAG:
        raise errors.Damaged(f"shard header: shard {index} of {geometry.text}, flags {flags}")
    return ShardHeader(ObjectId(object_id), Generation(generation), geometry, index, flags == _PACK_FLAG)


def shard_footer_bytes(stripes_count: int) -> int:
    return stripes_count * SHARD_ROW_BYTES + SHARD_TRAILER_BYTES


def encode_shard_footer(stripes: Iterable[Stripe], index: int) -> bytes:
    """What follows the last piece in shard `index`: its table and the trailer."""
    table = bytearray()
    for stripe in stripes:
        table += _ROW.pack(stripe.logical_bytes, stripe.frame_field, stripe.digest, stripe.checksums[index])
    count = len(table) // SHARD_ROW_BYTES
    return sealed(bytes(table) + _TRAILER.pack(_TRAILER_MAGIC, FORMAT_VERSION, count))


def decode_shard_trailer(raw: bytes) -> int:
    """How many stripes the table has, from the last 32 bytes of a shard file; only the whole footer proves it. Raises Damaged."""
    if len(raw) != SHARD_TRAILER_BYTES:
        raise errors.Damaged(f"shard trailer: {len(raw)} bytes")
    magic, version, count = _TRAILER.unpack_from(raw)
    check_magic(magic, _TRAILER_MAGIC, version, "shard trailer")
    return int(count)


def decode_shard_footer(raw: bytes) -> list[ShardRow]:
    """From the whole footer, `shard_footer_bytes(decode_shard_trailer(...))` bytes. Raises Damaged."""
    count = decode_shard_trailer(raw[-SHARD_TRAILER_BYTES:])
    body = unsealed(raw, shard_footer_bytes(count), "shard footer")
    rows = []
    for logical_bytes, frame_field, digest, checksum in _ROW.iter_unpack(body[: count * SHARD_ROW_BYTES]):
        frame_bytes, is_plain = split_frame_field(logical_bytes, frame_field)
        rows.append(ShardRow(logical_bytes, frame_bytes, is_plain, digest, checksum))
    return rows


def sealed(body: bytes) -> bytes:
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def unsealed(raw: bytes, expected_bytes: int, what: str) -> bytes:
    """The bytes before a structure's checksum. Raises Damaged when length or checksum is not right."""
    if len(raw) != expected_bytes:
        raise errors.Damaged(f"{what}: {len(raw)} bytes instead of {expected_bytes}")
    body = raw[: -_CHECKSUM.size]
    if _CHECKSUM.unpack(raw[-_CHECKSUM.size :])[0] != xxhash.xxh3_64_intdigest(body):
        raise errors.Damaged(f"{what}: wrong checksum")
    return body


def check_magic(magic: bytes, expected: bytes, version: int, what: str) -> None:
    if magic != expected:
        raise errors.Damaged(f"{what}: not one (it begins with {magic!r})")
    if version != FORMAT_VERSION:
        raise errors.Damaged(f"{what}: format {version}", hint=f"this tiercache reads format {FORMAT_VERSION}: use a newer one")


def checked_geometry(data_count: int, parity_count: int) -> Geometry:
    try:
        return Geometry(data_count, parity_count)
    except ValueError as error:
        raise errors.Damaged(str(error)) from None


def split_frame_field(logical_bytes: int, frame_field: int) -> tuple[int, bool]:
    """(frame bytes, is plain) of a row. A frame is never longer than what it holds. Raises Damaged."""
    frame_bytes, is_plain = frame_field & ~PLAIN_BIT, bool(frame_field & PLAIN_BIT)
    if logical_bytes > STRIPE_LIMIT_BYTES or frame_bytes > logical_bytes or (is_plain and frame_bytes != logical_bytes):
        raise errors.Damaged(f"stripe: a frame of {frame_bytes} bytes for {logical_bytes}")
    return frame_bytes, is_plain
