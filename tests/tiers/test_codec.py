from __future__ import annotations

import itertools
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache import errors
from tiercache.core.stripe import Stripe
from tiercache.tiers.warm.codec import EncodedStripe, decode_stripe, encode_stripe, verify_piece
from tiercache.tiers.warm.isal import ErasureCode

CODES = {(k, m): ErasureCode(k, m) for k, m in [(1, 0), (1, 1), (4, 2), (8, 3)]}
TEXT = b"".join(b"line %d of a text that shrinks\n" % number for number in range(5000))
NOISE = random.Random(1).randbytes(100_003)


def row_of(encoded: EncodedStripe, **changes: object) -> Stripe:
    fields = ("logical_bytes", "frame_bytes", "is_plain", "digest", "checksums")
    known: dict[str, object] = {name: getattr(encoded, name) for name in fields}
    return Stripe(**{**known, "piece_offset": 64, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("geometry", CODES)
@pytest.mark.parametrize("chunk", [b"", b"a", b"aaaaaaaaaa", TEXT, NOISE], ids=["empty", "byte", "ten", "text", "noise"])
def test_a_chunk_comes_back_from_any_k_pieces(geometry: tuple[int, int], chunk: bytes) -> None:
    code = CODES[geometry]
    encoded = encode_stripe(chunk, 3, code)
    assert encoded.logical_bytes == len(chunk)
    row = row_of(encoded)
    assert [len(piece) for piece in encoded.pieces] == [row.piece_bytes(code.data_count)] * sum(geometry)
    assert all(map(verify_piece, encoded.pieces, encoded.checksums))
    for present in itertools.combinations(range(sum(geometry)), code.data_count):
        assert decode_stripe(row, {number: encoded.pieces[number] for number in present}, code) == chunk


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(1, 40), st.sampled_from(sorted(CODES)), st.booleans())
def test_any_bytes_come_back(raw: bytes, times: int, geometry: tuple[int, int], compress: bool) -> None:
    code = CODES[geometry]
    chunk = raw * times
    encoded = encode_stripe(chunk, 1, code, compress=compress)
    assert encoded.frame_bytes <= encoded.logical_bytes
    assert compress or encoded.is_plain
    pieces = dict(enumerate(encoded.pieces))
    assert decode_stripe(row_of(encoded), pieces, code) == chunk


def test_what_does_not_shrink_is_stored_as_it_is() -> None:
    code = CODES[4, 2]
    assert encode_stripe(TEXT, 3, code).is_plain is False
    encoded = encode_stripe(NOISE, 3, code)
    assert (encoded.is_plain, encoded.frame_bytes) == (True, len(NOISE))
    barely = encode_stripe(NOISE[:-4000] + bytes(4000), 3, code)  # shrinks by 4 %
    assert barely.is_plain
    assert not encode_stripe(NOISE[:-6000] + bytes(6000), 3, code).is_plain


def test_data_pieces_are_views_of_the_chunk_where_nothing_is_compressed() -> None:
    chunk = bytearray(NOISE)
    pieces = encode_stripe(memoryview(chunk), 3, CODES[4, 2]).pieces
    assert [getattr(piece, "obj", None) is chunk for piece in pieces] == [True, True, True, False, False, False]
    assert encode_stripe(NOISE, 3, CODES[1, 0]).pieces[0].obj is NOISE  # type: ignore[union-attr]


def test_the_last_pieces_are_padded_with_zeros() -> None:
    pieces = encode_stripe(b"abcde", 3, CODES[4, 2], compress=False).pieces
    assert [bytes(piece) for piece in pieces[:4]] == [b"ab", b"cd", b"e\0", b"\0\0"]


def test_a_piece_that_changed_is_noticed() -> None:
    encoded = encode_stripe(TEXT, 3, CODES[4, 2])
    flipped = bytearray(encoded.pieces[2])
    flipped[100] ^= 1
    assert not verify_piece(flipped, encoded.checksums[2])


@pytest.mark.parametrize("chunk", [TEXT, NOISE], ids=["text", "noise"])
@pytest.mark.parametrize("missing", [None, 0, 3])
def test_wrong_pieces_never_become_wrong_bytes(chunk: bytes, missing: int | None) -> None:
    code = CODES[4, 2]
    encoded = encode_stripe(chunk, 3, code)
    source = random.Random(2)
    for _ in range(50):
        number = source.choice([each for each in range(5) if each != missing])
        present = {each: piece for each, piece in enumerate(encoded.pieces) if each != missing}
        damaged = bytearray(present[number])
        damaged[source.randrange(len(damaged))] ^= 1 << source.randrange(8)
        present[number] = damaged
        try:
            found = decode_stripe(row_of(encoded), present, code)
        except errors.Damaged:
            continue
        assert found == chunk


def test_a_wrong_row_never_becomes_wrong_bytes() -> None:
    code = CODES[4, 2]
    encoded = encode_stripe(TEXT, 3, code)
    pieces = dict(enumerate(encoded.pieces))
    changes = [
        {"digest": encoded.digest ^ 1},
        {"logical_bytes": encoded.logical_bytes + 1},
        {"frame_bytes": encoded.frame_bytes - 1},
        {"is_plain": True},
    ]
    for change in changes:
        with pytest.raises(errors.Damaged):
            decode_stripe(row_of(encoded, **change), pieces, code)


def test_frames_that_follow_each_other_are_a_file_for_the_zstd_program(tmp_path: Path) -> None:
    """What docs/formats.md promises to who has lost tiercache."""
    if shutil.which("zstd") is None:
        pytest.skip("no zstd program")
    chunks = [TEXT, TEXT[:1000], TEXT[::-1]]
    packed = tmp_path / "object.zst"
    with packed.open("wb") as file:
        for chunk in chunks:
            encoded = encode_stripe(chunk, 3, CODES[4, 2])
            file.write(b"".join(encoded.pieces[:4])[: encoded.frame_bytes])
    subprocess.run(["zstd", "-q", "-t", packed], check=True)
    unpacked = subprocess.run(["zstd", "-q", "-d", "-c", packed], check=True, capture_output=True).stdout
    assert unpacked == b"".join(chunks)


def test_the_digest_is_of_the_logical_bytes() -> None:
    assert encode_stripe(TEXT, 3, CODES[4, 2]).digest == xxhash.xxh3_64_intdigest(TEXT)


def test_a_large_chunk_of_which_a_part_shrinks_is_compressed_and_noise_is_not() -> None:
    code = ErasureCode(4, 2)
    noise = random.Random(1).randbytes(4 << 20)
    mixed = noise[: 2 << 20] + b"all work and no play " * 100_000
    assert encode_stripe(noise, 3, code).is_plain
    encoded = encode_stripe(mixed, 3, code)
    assert not encoded.is_plain
    assert encoded.frame_bytes < len(mixed) * 0.95
