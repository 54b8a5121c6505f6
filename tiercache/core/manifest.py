"""The manifest of a warm copy: what the object is, how it is cut, where its shards are. Byte tables: docs/formats.md.

A copy exists when one valid manifest does. It is written once and never changed, but for where the shards lie, which is a hint.
The manifest of a pack also names its members; member n is stripe n, so a small object is read like a chunk.

Tables stay encoded and a row is decoded when it is asked for: an object of 800 GB has 100,000 stripes, 7 MB as bytes and
ten times that as Python objects, and most readers want one row. The checksum over the whole is verified at once, what a row says
when it is decoded.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import overload

import msgspec

from tiercache import errors
from tiercache.core.chunk import chunk_count
from tiercache.core.record import OBJECT_ID_BYTES, ObjectId, ObjectRef, object_id
from tiercache.core.stripe import (
    FORMAT_VERSION,
    SHARD_HEADER_BYTES,
    SHARDS_LIMIT,
    STRIPE_LIMIT_BYTES,
    Generation,
    Geometry,
    Stripe,
    check_magic,
    checked_geometry,
    piece_bytes,
    sealed,
    shard_footer_bytes,
    split_frame_field,
    unsealed,
)

UUID_BYTES = 16

_MAGIC = b"TCMANIF\0"
_HEADER = struct.Struct("<8sHBBB3x20sIQQqIIIII4xQ")
_MEMBER = struct.Struct("<20sIHHHxxQq")
_ROW_LAYOUTS = [struct.Struct(f"<IIQQ{shards_count}Q") for shards_count in range(SHARDS_LIMIT + 1)]
_SEAL_BYTES = 8
_PACK_FLAG, _SOLE_FLAG = 1, 2
_NOWHERE = bytes(UUID_BYTES)

MANIFEST_HEADER_BYTES = _HEADER.size
assert MANIFEST_HEADER_BYTES == 96
assert _MEMBER.size == 48


class Member(msgspec.Struct, frozen=True):
    """One object that a copy holds: alone, or among others in a pack."""

    object_id: ObjectId
    source_id: str
    key: str
    version: str
    size_bytes: int
    mtime_seconds: int


class Manifest(msgspec.Struct, frozen=True):
    """Made by `decode_manifest` and `ManifestDraft.finish` only. A pack has no source, key, version and chunks of its own."""

    object_id: ObjectId
    generation: Generation
    geometry: Geometry
    is_pack: bool
    is_sole: bool  # it existed nowhere else when it was written: never reclaimed
    source_id: str
    key: str
    version: str
    size_bytes: int  # of a pack: of its members together
    mtime_seconds: int
    chunk_bytes: int
    placed: tuple[bytes | None, ...]  # uuid of the target that got each shard; None: it was not written
    stripes_count: int
    raw: bytes
    table_offset: int
    members_offset: int

    def __repr__(self) -> str:
        return f"<Manifest {self.object_id.hex()}.{self.generation:016x} {self.geometry.text} {self.key!r}>"

    def encode(self) -> bytes:
        return self.raw

    def stripe(self, number: int) -> Stripe:
        """Raises Damaged when the row cannot be right."""
        if not 0 <= number < self.stripes_count:
            raise IndexError(f"{self!r} has no stripe {number}")
        expected_offset = SHARD_HEADER_BYTES
        if number:
            before = self._row(number - 1)
            expected_offset = before.piece_offset + before.piece_bytes(self.geometry.data_count)
        return self._checked(number, self._row(number), expected_offset)

    def stripes(self) -> Iterator[Stripe]:
        """All of them, in order. Raises Damaged."""
        expected_offset = SHARD_HEADER_BYTES
        for number in range(self.stripes_count):
            stripe = self._checked(number, self._row(number), expected_offset)
            expected_offset = stripe.piece_offset + stripe.piece_bytes(self.geometry.data_count)
            yield stripe

    def shard_bytes(self) -> int:
        """The size of each whole shard file. Raises Damaged."""
        pieces_end = SHARD_HEADER_BYTES
        if self.stripes_count:
            last = self.stripe(self.stripes_count - 1)
            pieces_end = last.piece_offset + last.piece_bytes(self.geometry.data_count)
        return pieces_end + shard_footer_bytes(self.stripes_count)

    @property
    def members(self) -> Members:
        """Empty unless it is a pack."""
        return Members(self)

    @property
    def content(self) -> Member:
        """What it is a copy of, unless it is a pack."""
        assert not self.is_pack
        names = (self.source_id, self.key, self.version)
        return Member(self.object_id, *names, self.size_bytes, self.mtime_seconds)

    def member_id(self, number: int) -> ObjectId:
        """As the table has it, unchecked: for those who index many."""
        start = self.members_offset + number * _MEMBER.size
        return ObjectId(self.raw[start : start + OBJECT_ID_BYTES])

    def moved(self, placed: Sequence[bytes | None]) -> Manifest:
        """The same copy with its shards elsewhere."""
        start, end = MANIFEST_HEADER_BYTES, MANIFEST_HEADER_BYTES + UUID_BYTES * self.geometry.shards_count
        return decode_manifest(sealed(self.raw[:start] + _encode_placed(placed, self.geometry) + self.raw[end:-_SEAL_BYTES]))

    def _row(self, number: int) -> Stripe:
        return _row(_row_layout(self.geometry), self.raw, number, self.table_offset)

    def _checked(self, number: int, stripe: Stripe, expected_offset: int) -> Stripe:
        if self.is_pack:
            expected_bytes = stripe.logical_bytes
        else:
            expected_bytes = min(self.chunk_bytes, self.size_bytes - number * self.chunk_bytes)
        if stripe.piece_offset != expected_offset or stripe.logical_bytes != expected_bytes:
            raise errors.Damaged(f"{self!r}: stripe {number} does not follow the one before")
        return stripe


class Members(Sequence[Member]):
    """The objects in a pack; each is decoded when it is asked for, which raises Damaged when it cannot be right."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def __len__(self) -> int:
        return self._manifest.stripes_count if self._manifest.is_pack else 0

    @overload
    def __getitem__(self, number: int) -> Member: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Member]: ...
    def __getitem__(self, number: int | slice) -> Member | Sequence[Member]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(f"{self._manifest!r} has no member {number}")
        manifest = self._manifest
        row = _MEMBER.unpack_from(manifest.raw, manifest.members_offset + number * _MEMBER.size)
        identity, text_offset, source_bytes, key_bytes, version_bytes, size_bytes, mtime_seconds = row
        texts_end = len(manifest.raw) - _SEAL_BYTES
        start = manifest.members_offset + len(self) * _MEMBER.size + text_offset
        if start + source_bytes + key_bytes + version_bytes > texts_end:
            raise errors.Damaged(f"{manifest!r}: member {number} has its names outside")
        source_id, key, version = _texts(manifest.raw, start, source_bytes, key_bytes, version_bytes)
        if identity != object_id(source_id, key, version) or size_bytes != manifest._row(number).logical_bytes:
            raise errors.Damaged(f"{manifest!r}: member {number} is not what its id says")
        return Member(ObjectId(identity), source_id, key, version, size_bytes, mtime_seconds)


class ManifestDraft:
    """A manifest that grows with its copy: `add` every stripe in order, then `finish`."""

    def __init__(self, identity: ObjectId, generation: Generation, geometry: Geometry, *, is_sole: bool = False) -> None:
        """Of a pack. `identity`: 20 random bytes."""
        assert len(identity) == OBJECT_ID_BYTES
        self.object_id = identity
        self.generation = generation
        self.geometry = geometry
        self.is_pack = True
        self.stripes_count = 0
        self.pieces_end = SHARD_HEADER_BYTES  # in every shard file: where the next piece goes
        self._is_sole = is_sole
        self._names = ("", "", "")
        self._size_bytes = 0
        self._mtime_seconds = 0
        self._chunk_bytes = 0
        self._layout = _row_layout(geometry)
        self._table = bytearray()
        self._members = bytearray()
        self._members_text = bytearray()

    @classmethod
    def of_object(
        cls,
        ref: ObjectRef,
        source_id: str,
        generation: Generation,
        geometry: Geometry,
        *,
        chunk_bytes: int,
        is_sole: bool = False,
    ) -> ManifestDraft:
        """Of one object, one stripe a chunk."""
        assert ref.object_id == object_id(source_id, ref.key, ref.version)
        assert 0 < chunk_bytes <= STRIPE_LIMIT_BYTES
        draft = cls(ref.object_id, generation, geometry, is_sole=is_sole)
        draft.is_pack = False
        draft._names = (source_id, ref.key, ref.version)
        draft._size_bytes, draft._mtime_seconds = ref.size_bytes, ref.mtime_seconds
        draft._chunk_bytes = chunk_bytes
        return draft

    def add(
        self,
        logical_bytes: int,
        frame_bytes: int,
        *,
        is_plain: bool,
        digest: int,
        checksums: Sequence[int],
        member: Member | None = None,
    ) -> Stripe:
        """The next stripe; its pieces go to `piece_offset` of each shard file. In a pack it is the object `member`."""
        assert self.is_pack == (member is not None)
        assert len(checksums) == self.geometry.shards_count
        assert frame_bytes <= logical_bytes <= STRIPE_LIMIT_BYTES
        stripe = Stripe(logical_bytes, frame_bytes, is_plain, digest, self.pieces_end, tuple(checksums))
        self._table += self._layout.pack(logical_bytes, stripe.frame_field, self.pieces_end, digest, *checksums)
        if member is not None:
            assert member.size_bytes == logical_bytes
            self._add_member(member)
        self.stripes_count += 1
        self.pieces_end += piece_bytes(frame_bytes, self.geometry.data_count)
        return stripe

    def stripes(self) -> Iterator[Stripe]:
        """Those that were added: for the footers of the shard files."""
        return (_row(self._layout, self._table, number) for number in range(self.stripes_count))

    def finish(self, placed: Sequence[bytes | None]) -> Manifest:
        """`placed`: the uuid of the target of each shard. All stripes of an object must have been added."""
        assert self.is_pack or self.stripes_count == chunk_count(self._size_bytes, self._chunk_bytes)
        texts = [text.encode("utf-8", "surrogateescape") for text in self._names]
        body: list[bytes | bytearray] = [
            _encode_placed(placed, self.geometry),
            *texts,
            self._table,
            self._members,
            self._members_text,
        ]
        header = _HEADER.pack(
            _MAGIC,
            FORMAT_VERSION,
            self.geometry.data_count,
            self.geometry.parity_count,
            (_PACK_FLAG if self.is_pack else 0) | (_SOLE_FLAG if self._is_sole else 0),
            self.object_id,
            self.stripes_count,
            self.generation,
            self._size_bytes,
            self._mtime_seconds,
            self._chunk_bytes,
            *map(len, texts),
            len(self._members_text),
            MANIFEST_HEADER_BYTES + sum(map(len, body)) + _SEAL_BYTES,
        )
        return decode_manifest(sealed(b"".join([header, *body])))

    def _add_member(self, member: Member) -> None:
        names = (member.source_id, member.key, member.version)
        assert member.object_id == object_id(*names)
        texts = [text.encode("utf-8", "surrogateescape") for text in names]
        row = (member.object_id, len(self._members_text), *map(len, texts), member.size_bytes, member.mtime_seconds)
        self._members += _MEMBER.pack(*row)
        self._members_text += b"".join(texts)
        self._size_bytes += member.size_bytes


def decode_manifest(raw: bytes) -> Manifest:
    """Raises Damaged for anything that is not a whole manifest."""
    if len(raw) < MANIFEST_HEADER_BYTES + _SEAL_BYTES:
        raise errors.Damaged(f"manifest: {len(raw)} bytes")
    fields = _HEADER.unpack_from(raw)
    magic, version, data_count, parity_count, flags, identity, stripes_count, generation, size_bytes, mtime_seconds = fields[:10]
    chunk_bytes, source_bytes, key_bytes, version_bytes, members_text_bytes, file_bytes = fields[10:]
    check_magic(magic, _MAGIC, version, "manifest")
    unsealed(raw, file_bytes, "manifest")
    geometry = checked_geometry(data_count, parity_count)
    is_pack = bool(flags & _PACK_FLAG)
    texts_offset = MANIFEST_HEADER_BYTES + UUID_BYTES * geometry.shards_count
    table_offset = texts_offset + source_bytes + key_bytes + version_bytes
    members_offset = table_offset + stripes_count * _row_layout(geometry).size
    members_bytes = stripes_count * _MEMBER.size + members_text_bytes if is_pack else members_text_bytes
    if members_offset + members_bytes + _SEAL_BYTES != file_bytes or flags & ~(_PACK_FLAG | _SOLE_FLAG):
        raise errors.Damaged("manifest: its parts do not add up")
    source_id, key, version_tag = _texts(raw, texts_offset, source_bytes, key_bytes, version_bytes)
    if not is_pack:
        if identity != object_id(source_id, key, version_tag):
            raise errors.Damaged("manifest: the object is not what its id says")
        if not 0 < chunk_bytes <= STRIPE_LIMIT_BYTES or stripes_count != chunk_count(size_bytes, chunk_bytes):
            raise errors.Damaged(f"manifest: {stripes_count} chunks of {chunk_bytes} bytes for {size_bytes}")
    return Manifest(
        ObjectId(identity),
        Generation(generation),
        geometry,
        is_pack,
        bool(flags & _SOLE_FLAG),
        source_id,
        key,
        version_tag,
        size_bytes,
        mtime_seconds,
        chunk_bytes,
        _decode_placed(raw[MANIFEST_HEADER_BYTES:texts_offset]),
        stripes_count,
        raw,
        table_offset,
        members_offset,
    )


def _row_layout(geometry: Geometry) -> struct.Struct:
    return _ROW_LAYOUTS[geometry.shards_count]


def _row(layout: struct.Struct, raw: bytes | bytearray, number: int, table_offset: int = 0) -> Stripe:
    logical_bytes, field, piece_offset, digest, *checksums = layout.unpack_from(raw, table_offset + number * layout.size)
    frame_bytes, is_plain = split_frame_field(logical_bytes, field)
    return Stripe(logical_bytes, frame_bytes, is_plain, digest, piece_offset, tuple(checksums))


def _texts(raw: bytes, start: int, *lengths: int) -> tuple[str, ...]:
    texts = []
    for length in lengths:
        texts.append(raw[start : start + length].decode("utf-8", "surrogateescape"))
        start += length
    return tuple(texts)


def _encode_placed(placed: Sequence[bytes | None], geometry: Geometry) -> bytes:
    assert len(placed) == geometry.shards_count
    assert all(uuid is None or (len(uuid) == UUID_BYTES and uuid != _NOWHERE) for uuid in placed)
    return b"".join(uuid or _NOWHERE for uuid in placed)


def _decode_placed(raw: bytes) -> tuple[bytes | None, ...]:
    uuids = [raw[start : start + UUID_BYTES] for start in range(0, len(raw), UUID_BYTES)]
    return tuple(None if uuid == _NOWHERE else uuid for uuid in uuids)
