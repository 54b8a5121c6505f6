from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache import errors
from tiercache.core.record import ObjectId
from tiercache.core.stripe import (
    SHARD_HEADER_BYTES,
    SHARD_TRAILER_BYTES,
    Generation,
    Geometry,
    Stripe,
    decode_shard_footer,
    decode_shard_header,
    decode_shard_trailer,
    encode_shard_footer,
    encode_shard_header,
    fan_out,
    generation_seconds,
    make_generation,
    manifest_path,
    parse_geometry,
    parse_manifest_name,
    parse_shard_name,
    piece_bytes,
    shard_footer_bytes,
    shard_path,
)

OBJECT = ObjectId(bytes(range(0xA0, 0xB4)))
GENERATION = Generation(0x0123456789ABCDEF)
FOUR_TWO = Geometry(4, 2)
STRIPES = [
    Stripe(1000, 500, False, 2**64 - 1, 64, (1, 2, 3, 4, 5, 2**64 - 1)),
    Stripe(77, 77, True, 0, 64 + 125, (6, 7, 8, 9, 10, 11)),
]


def test_geometry() -> None:
    assert (FOUR_TWO.shards_count, FOUR_TWO.text) == (6, "4+2")
    assert parse_geometry("8+3") == Geometry(8, 3)
    assert parse_geometry(" 1+0 ") == Geometry(1, 0)


@pytest.mark.parametrize("text", ["", "4", "4+", "+2", "4-2", "0+2", "60+5", "4+2+1", "٤+2", "-4+2"])
def test_what_is_no_geometry(text: str) -> None:
    with pytest.raises(ValueError, match="erasure code"):
        parse_geometry(text)


def test_an_older_generation_is_smaller() -> None:
    older = make_generation(1_700_000_000.001, 2**64 - 1)
    newer = make_generation(1_700_000_000.002, 0)
    assert older < newer < 2**64
    assert generation_seconds(newer) == pytest.approx(1_700_000_000.002, abs=0.0011)


def test_names_say_what_they_name() -> None:
    name = OBJECT.hex() + ".0123456789abcdef"
    assert fan_out(OBJECT) == "a0a"
    assert shard_path(OBJECT, GENERATION, 5) == f"shards/a0a/{name}.05"
    assert manifest_path(OBJECT, GENERATION, is_pack=False) == f"manifests/a0a/{name}"
    assert manifest_path(OBJECT, GENERATION, is_pack=True) == f"packs/{name}"
    assert parse_manifest_name(name) == (OBJECT, GENERATION)
    assert parse_shard_name(name + ".05") == (OBJECT, GENERATION, 5)


@pytest.mark.parametrize("wrong", ["", "x", ".05", OBJECT.hex(), OBJECT.hex().upper() + ".0123456789abcdef", OBJECT.hex() + ".1"])
def test_names_of_others(wrong: str) -> None:
    assert parse_manifest_name(wrong) is None
    assert parse_shard_name(wrong) is None
    assert parse_shard_name(OBJECT.hex() + ".0123456789abcdef.99") is None
    assert parse_shard_name(OBJECT.hex() + ".0123456789abcdef.05\n") is None


@settings(deadline=None)
@given(st.text())
def test_any_name_is_parsed(name: str) -> None:
    assert parse_manifest_name(name) is None or len(name) == 57
    assert parse_shard_name(name) is None or len(name) == 60


@settings(deadline=None)
@given(st.integers(0, 2**31 - 1), st.integers(1, 64))
def test_pieces_hold_the_frame_and_less_than_a_byte_each_more(frame_bytes: int, data_count: int) -> None:
    assert 0 <= piece_bytes(frame_bytes, data_count) * data_count - frame_bytes < data_count


@pytest.mark.parametrize("is_pack", [False, True])
def test_a_shard_header_comes_back(is_pack: bool) -> None:
    raw = encode_shard_header(OBJECT, GENERATION, FOUR_TWO, 5, is_pack=is_pack)
    assert len(raw) == SHARD_HEADER_BYTES
    header = decode_shard_header(raw)
    assert (header.object_id, header.generation, header.geometry) == (OBJECT, GENERATION, FOUR_TWO)
    assert (header.index, header.is_pack) == (5, is_pack)


@pytest.mark.parametrize("stripes", [STRIPES, []])
def test_a_shard_footer_comes_back(stripes: list[Stripe]) -> None:
    raw = encode_shard_footer(stripes, 5)
    assert decode_shard_trailer(raw[-SHARD_TRAILER_BYTES:]) == len(stripes)
    assert len(raw) == shard_footer_bytes(len(stripes))
    found = [(row.logical_bytes, row.frame_bytes, row.is_plain, row.digest, row.checksum) for row in decode_shard_footer(raw)]
    assert found == [(s.logical_bytes, s.frame_bytes, s.is_plain, s.digest, s.checksums[5]) for s in stripes]


def test_every_flipped_bit_is_found() -> None:
    for raw, decode in (
        (encode_shard_header(OBJECT, GENERATION, FOUR_TWO, 1, is_pack=False), decode_shard_header),
        (encode_shard_footer(STRIPES, 1), decode_shard_footer),
    ):
        for bit in range(len(raw) * 8):
            flipped = bytearray(raw)
            flipped[bit // 8] ^= 1 << bit % 8
            with pytest.raises(errors.Damaged):
                decode(bytes(flipped))  # type: ignore[operator]
        for length in range(len(raw)):
            with pytest.raises(errors.Damaged):
                decode(raw[:length])  # type: ignore[operator]


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_survived(raw: bytes) -> None:
    for decode in (decode_shard_header, decode_shard_trailer, decode_shard_footer):
        with pytest.raises(errors.Damaged):
            decode(raw)  # type: ignore[operator]
