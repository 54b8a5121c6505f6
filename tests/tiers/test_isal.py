from __future__ import annotations

import itertools
import random
import threading

import pytest

from tiercache.tiers.warm import isal
from tiercache.tiers.warm.isal import ErasureCode

GEOMETRIES = [(1, 0), (1, 1), (1, 2), (2, 1), (3, 3), (4, 2), (8, 3), (10, 4)]


def data_pieces(count: int, length: int) -> list[bytes]:
    source = random.Random(count * 1000 + length)
    return [source.randbytes(length) for _ in range(count)]


@pytest.mark.parametrize(("data_count", "parity_count"), GEOMETRIES)
@pytest.mark.parametrize("length", [1, 31, 1000])
def test_any_k_pieces_give_all(data_count: int, parity_count: int, length: int) -> None:
    code = ErasureCode(data_count, parity_count)
    data = data_pieces(data_count, length)
    pieces = [*data, *code.encode(data)]
    assert [len(piece) for piece in pieces] == [length] * (data_count + parity_count)
    everything = range(len(pieces))
    for present in itertools.combinations(everything, data_count):
        wanted = [number for number in everything if number not in present]
        found = code.reconstruct({number: pieces[number] for number in present}, wanted)
        assert found == {number: pieces[number] for number in wanted}


def test_with_one_data_piece_parity_is_a_copy() -> None:
    assert ErasureCode(1, 1).encode([b"abc"]) == [b"abc"]


def test_more_pieces_than_needed_do_no_harm() -> None:
    code = ErasureCode(4, 2)
    data = data_pieces(4, 100)
    parity = code.encode(data)
    assert code.reconstruct({0: data[0], 1: data[1], 3: data[3], 4: parity[0], 5: parity[1]}, [2]) == {2: data[2]}


def test_empty_pieces() -> None:
    code = ErasureCode(4, 2)
    assert code.encode([b""] * 4) == [b"", b""]
    assert code.reconstruct({2: b"", 3: b"", 4: b"", 5: b""}, [0, 1]) == {0: b"", 1: b""}


def test_every_kind_of_buffer_is_read_in_place() -> None:
    code = ErasureCode(4, 2)
    data = data_pieces(4, 100)
    whole = b"x" + data[2] + data[3]
    kinds = [data[0], bytearray(data[1]), memoryview(whole)[1:101], memoryview(bytearray(whole))[101:]]
    assert code.encode(kinds) == code.encode(data)
    kinds[1] += b"free again"  # a bytearray that is exported could not grow


def test_pieces_of_different_lengths_are_a_bug() -> None:
    with pytest.raises(AssertionError):
        ErasureCode(2, 1).encode([b"abc", b"ab"])


def test_the_code_never_changes_between_releases() -> None:
    """What was written once must stay readable."""
    pieces = [bytes([1, 2, 3]), bytes([50, 60, 70]), bytes([255, 0, 9]), bytes([7, 7, 7])]
    assert [piece.hex() for piece in ErasureCode(4, 2).encode(pieces)] == ["4a8302", "a92713"]


def product(left: int, right: int) -> int:
    """In GF(256) with the polynomial that docs/formats.md names."""
    result = 0
    while right:
        result ^= left if right & 1 else 0
        left = left << 1 ^ (0x11D if left & 0x80 else 0)
        right >>= 1
    return result


@pytest.mark.parametrize(("data_count", "parity_count"), [(1, 1), (4, 2), (8, 3)])
def test_the_code_is_the_documented_one(data_count: int, parity_count: int) -> None:
    inverse = {left: right for left in range(1, 256) for right in range(1, 256) if product(left, right) == 1}
    data = data_pieces(data_count, 40)
    expected = []
    for parity in range(data_count, data_count + parity_count):
        piece = bytearray(40)
        for number, source in enumerate(data):
            for position, value in enumerate(source):
                piece[position] ^= product(inverse[parity ^ number], value)
        expected.append(piece)
    assert ErasureCode(data_count, parity_count).encode(data) == expected


def test_threads_share_a_code() -> None:
    code = ErasureCode(4, 2)
    data = data_pieces(4, 100_000)
    expected = code.encode(data)
    pieces = dict(enumerate([*data, *expected]))
    wrong: list[int] = []

    def work(missing: int) -> None:
        for _ in range(20):
            rest = {number: piece for number, piece in pieces.items() if number != missing}
            if code.encode(data) != expected or code.reconstruct(rest, [missing]) != {missing: pieces[missing]}:
                wrong.append(missing)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_library_of_the_wheel_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    data = data_pieces(8, 5000)
    expected = ErasureCode(8, 3).encode(data)
    monkeypatch.setattr(isal, "_SYSTEM_LIBRARY", "libisal-that-is-nowhere.so.2")
    monkeypatch.setattr(isal, "library", isal.library.__wrapped__)
    code = ErasureCode(8, 3)
    assert "pyeclib" in code._library._name
    assert code.encode(data) == expected
    monkeypatch.setattr(isal, "_WHEEL", "nothing-of-that-name")
    with pytest.raises(isal.errors.SetupError, match="ISA-L"):
        isal.library()
