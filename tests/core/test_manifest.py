from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache import errors
from tiercache.core.manifest import MANIFEST_HEADER_BYTES, Manifest, ManifestDraft, Member, decode_manifest
from tiercache.core.record import ObjectId, ObjectRef, object_id
from tiercache.core.stripe import (
    SHARD_HEADER_BYTES,
    Generation,
    Geometry,
    Stripe,
    encode_shard_footer,
    sealed,
)

SOURCE = "s3.example.com/bucket"
GENERATION = Generation(0x0123456789ABCDEF)
FOUR_TWO = Geometry(4, 2)
TARGETS = [bytes([number]) * 16 for number in range(1, 7)]
CHUNK_BYTES = 1000

keys = st.binary(max_size=60).map(lambda raw: raw.decode("utf-8", "surrogateescape"))


def ref_of(key: str, size_bytes: int) -> ObjectRef:
    version = f"etag:{size_bytes}"
    return ObjectRef("dataset", key, version, size_bytes, -5, object_id(SOURCE, key, version))


def checksums_of(number: int) -> tuple[int, ...]:
    return tuple(2**64 - 1 - number * 10 - index for index in range(6))


def draft_of(key: str, size_bytes: int) -> ManifestDraft:
    draft = ManifestDraft.of_object(ref_of(key, size_bytes), SOURCE, GENERATION, FOUR_TWO, chunk_bytes=CHUNK_BYTES)
    for number, offset in enumerate(range(0, size_bytes, CHUNK_BYTES)):
        logical_bytes = min(CHUNK_BYTES, size_bytes - offset)
        is_plain = bool(number % 2)
        frame_bytes = logical_bytes if is_plain else logical_bytes // 3
        draft.add(logical_bytes, frame_bytes, is_plain=is_plain, digest=number, checksums=checksums_of(number))
    return draft


def pack_of(sizes: list[int], *, key: str = "small", is_sole: bool = False) -> Manifest:
    draft = ManifestDraft(ObjectId(b"\xaa" * 20), GENERATION, FOUR_TWO, is_sole=is_sole)
    for number, size_bytes in enumerate(sizes):
        ref = ref_of(f"{key}/{number}", size_bytes)
        member = Member(ref.object_id, SOURCE, ref.key, ref.version, size_bytes, number)
        draft.add(size_bytes, size_bytes, is_plain=True, digest=number, checksums=checksums_of(number), member=member)
    return draft.finish(TARGETS)


@settings(deadline=None)
@given(keys, st.integers(0, 20 * CHUNK_BYTES))
def test_the_manifest_of_an_object_comes_back(key: str, size_bytes: int) -> None:
    draft = draft_of(key, size_bytes)
    placed = [*TARGETS[:5], None]
    manifest = decode_manifest(draft.finish(placed).encode())
    ref = ref_of(key, size_bytes)
    assert (manifest.object_id, manifest.generation, manifest.geometry) == (ref.object_id, GENERATION, FOUR_TWO)
    assert (manifest.source_id, manifest.key, manifest.version) == (SOURCE, key, ref.version)
    assert (manifest.size_bytes, manifest.mtime_seconds, manifest.chunk_bytes) == (size_bytes, -5, CHUNK_BYTES)
    assert (manifest.is_pack, manifest.is_sole, manifest.placed, len(manifest.members)) == (False, False, tuple(placed), 0)
    assert manifest.stripes_count == -(-size_bytes // CHUNK_BYTES)
    rows = [manifest.stripe(number) for number in range(manifest.stripes_count)]
    assert rows == list(manifest.stripes()) == list(draft.stripes())
    assert sum(row.logical_bytes for row in rows) == size_bytes
    assert [row.checksums for row in rows] == [checksums_of(number) for number in range(len(rows))]
    footer = encode_shard_footer(draft.stripes(), 3)
    pieces_bytes = sum(row.piece_bytes(4) for row in rows)
    assert manifest.shard_bytes() == SHARD_HEADER_BYTES + pieces_bytes + len(footer)


def test_a_row_is_what_was_added() -> None:
    manifest = draft_of("key", 2500).finish(TARGETS)
    assert manifest.stripe(0) == Stripe(1000, 333, False, 0, 64, checksums_of(0))
    assert manifest.stripe(1) == Stripe(1000, 1000, True, 1, 64 + 84, checksums_of(1))
    assert manifest.stripe(2) == Stripe(500, 166, False, 2, 64 + 84 + 250, checksums_of(2))
    for number in (-1, 3):
        with pytest.raises(IndexError):
            manifest.stripe(number)


@pytest.mark.parametrize("is_sole", [False, True])
def test_the_manifest_of_a_pack_comes_back(is_sole: bool) -> None:
    manifest = decode_manifest(pack_of([10, 0, 3000], is_sole=is_sole).encode())
    assert (manifest.is_pack, manifest.is_sole, manifest.size_bytes, manifest.stripes_count) == (True, is_sole, 3010, 3)
    ids = [ref_of(f"small/{number}", size_bytes).object_id for number, size_bytes in enumerate([10, 0, 3000])]
    assert [member.object_id for member in manifest.members] == [manifest.member_id(number) for number in range(3)] == ids
    assert manifest.members[2] == Member(ids[2], SOURCE, "small/2", "etag:3000", 3000, 2)
    assert list(manifest.members[1:]) == [manifest.members[1], manifest.members[2]]
    assert [stripe.logical_bytes for stripe in manifest.stripes()] == [10, 0, 3000]
    with pytest.raises(IndexError):
        manifest.members[3]


def test_an_empty_object_has_a_manifest() -> None:
    manifest = draft_of("empty", 0).finish(TARGETS)
    assert (manifest.stripes_count, list(manifest.stripes())) == (0, [])


def test_shards_that_moved_change_nothing_else() -> None:
    manifest = pack_of([10, 20])
    placed = (None, *TARGETS[1:])
    moved = manifest.moved(placed)
    assert moved.placed == placed
    assert moved.moved(TARGETS) == manifest
    assert moved.members[1] == manifest.members[1]


def test_every_flipped_bit_and_every_truncation_is_found() -> None:
    for raw in (draft_of("key", 2500).finish(TARGETS).encode(), pack_of([10, 20]).encode()):
        for bit in range(len(raw) * 8):
            flipped = bytearray(raw)
            flipped[bit // 8] ^= 1 << bit % 8
            with pytest.raises(errors.Damaged):
                decode_manifest(bytes(flipped))
        for length in range(len(raw)):
            with pytest.raises(errors.Damaged):
                decode_manifest(raw[:length])


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_survived(raw: bytes) -> None:
    with pytest.raises(errors.Damaged):
        decode_manifest(raw)


@settings(deadline=None)
@given(st.data(), st.booleans())
def test_wrong_numbers_under_a_right_checksum_are_survived(data: st.DataObject, is_pack: bool) -> None:
    """What a bug of another release may have written: refused, or read without another exception."""
    manifest = pack_of([10, 20, 30]) if is_pack else draft_of("key", 2500).finish(TARGETS)
    body = bytearray(manifest.encode()[:-8])
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(8, len(body) - 1))
        body[start : start + 4] = data.draw(st.binary(min_size=1, max_size=4))
    try:
        found = decode_manifest(sealed(bytes(body)))
        assert found.shard_bytes() >= 0
        assert all(stripe.logical_bytes >= 0 for stripe in found.stripes())
        assert all(member.size_bytes >= 0 for member in found.members)
    except errors.Damaged:
        pass


def test_another_format_says_so() -> None:
    body = bytearray(draft_of("key", 10).finish(TARGETS).encode()[:-8])
    body[8] = 9
    with pytest.raises(errors.Damaged, match="format 9") as caught:
        decode_manifest(sealed(bytes(body)))
    assert "newer" in caught.value.hint


def test_an_id_of_another_object_is_refused() -> None:
    body = bytearray(draft_of("key", 10).finish(TARGETS).encode()[:-8])
    key_offset = body.index(b"key", MANIFEST_HEADER_BYTES)
    body[key_offset : key_offset + 3] = b"kez"
    with pytest.raises(errors.Damaged, match="not what its id says"):
        decode_manifest(sealed(bytes(body)))


def test_a_member_with_the_id_of_another_is_refused_alone() -> None:
    body = bytearray(pack_of([10, 20]).encode()[:-8])
    position = body.index(b"small/1")
    body[position : position + 7] = b"small/2"
    manifest = decode_manifest(sealed(bytes(body)))
    assert manifest.members[0].key == "small/0"
    with pytest.raises(errors.Damaged, match="not what its id says"):
        manifest.members[1]
