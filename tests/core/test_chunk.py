from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.core.chunk import chunk_count, chunk_span, chunks_of, fill_ranges, held_bytes

sizes = st.integers(0, 10**13)
chunk_sizes = st.integers(1, 4096).map(lambda pages: pages * 4096)


@given(st.integers(0, 4 * 1024**2), st.integers(1, 64).map(lambda pages: pages * 4096))
def test_spans_tile_the_object_without_gap_or_overlap(size: int, chunk_bytes: int) -> None:
    position = 0
    for chunk in range(chunk_count(size, chunk_bytes)):
        offset, length = chunk_span(size, chunk_bytes, chunk)
        assert offset == position
        assert 0 < length <= chunk_bytes
        position += length
    assert position == size


def test_case_16_empty_and_one_byte_objects() -> None:
    assert chunk_count(0, 8 * 1024**2) == 0
    assert held_bytes(0) == 0
    assert chunk_count(1, 8 * 1024**2) == 1
    assert chunk_span(1, 8 * 1024**2, 0) == (0, 1)
    assert held_bytes(1) == 4096
    assert fill_ranges(1, 8 * 1024**2, 0, 0) == [(0, 1)]


@pytest.mark.parametrize("chunk", [-1, 2])
def test_a_chunk_beyond_the_object_is_refused(chunk: int) -> None:
    with pytest.raises(AssertionError, match="no chunk"):
        chunk_span(8192, 4096, chunk)


@given(sizes.filter(bool), chunk_sizes, st.data())
def test_chunks_of_an_extent_are_those_whose_spans_meet_it(size: int, chunk_bytes: int, data: st.DataObject) -> None:
    offset = data.draw(st.integers(0, size - 1))
    length = data.draw(st.integers(1, min(size - offset, 20 * chunk_bytes)))
    chunks = chunks_of(offset, length, chunk_bytes)
    first, _ = chunk_span(size, chunk_bytes, chunks[0])
    last, last_length = chunk_span(size, chunk_bytes, chunks[-1])
    assert first <= offset < first + chunk_bytes
    assert last < offset + length <= last + last_length


@given(sizes, chunk_sizes)
def test_an_empty_extent_touches_no_chunk(offset: int, chunk_bytes: int) -> None:
    assert len(chunks_of(offset, 0, chunk_bytes)) == 0


@given(sizes, st.sampled_from([512, 4096, 65536]))
def test_held_bytes_are_the_fewest_whole_blocks(length: int, block_bytes: int) -> None:
    held = held_bytes(length, block_bytes)
    assert held % block_bytes == 0
    assert length <= held < length + block_bytes


@given(sizes.filter(bool), chunk_sizes, st.data())
def test_fill_ranges_tile_the_chunk_and_begin_on_the_page_of_the_reader(size: int, chunk_bytes: int, data: st.DataObject) -> None:
    chunk = data.draw(st.integers(0, chunk_count(size, chunk_bytes) - 1))
    begin, length = chunk_span(size, chunk_bytes, chunk)
    start = data.draw(st.integers(begin, begin + length - 1))
    ranges = fill_ranges(size, chunk_bytes, chunk, start)
    assert ranges[0][0] == start - start % 4096
    assert sum(ranges[0]) == begin + length
    ordered = sorted(ranges)
    assert ordered[0][0] == begin
    assert sum(part for _, part in ranges) == length
    assert all(part > 0 for _, part in ranges)
    assert len(ranges) == (1 if ranges[0][0] == begin else 2)


def test_a_start_outside_of_the_chunk_is_refused() -> None:
    with pytest.raises(AssertionError, match="not in chunk 1"):
        fill_ranges(10 * 8192, 8192, 1, 16384)
