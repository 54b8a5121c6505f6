"""Arithmetic of chunks: which bytes of an object a chunk holds, and in which order they are fetched.

Chunk `i` of an object holds the bytes [i * chunk_bytes, (i + 1) * chunk_bytes), cut at the end of the
object. An empty object has no chunk. All offsets are absolute (from the start of the object), so that
nobody has to know relative to what a number is.

Space is counted in whole filesystem blocks, since that is what the disk gives away: a one-byte object
occupies a block. 4096 bytes is the block of ext4 and XFS as they are made, and the page of the kernel.
"""

from __future__ import annotations

PAGE_BYTES = 4096


def chunk_count(size_bytes: int, chunk_bytes: int) -> int:
    """How many chunks an object of `size_bytes` has: 0 when it is empty."""
    return -(-size_bytes // chunk_bytes)


def chunk_span(size_bytes: int, chunk_bytes: int, chunk: int) -> tuple[int, int]:
    """Offset and length in bytes of one chunk; the last one may be shorter than the others."""
    assert 0 <= chunk < chunk_count(size_bytes, chunk_bytes), f"object of {size_bytes} bytes has no chunk {chunk}"
    offset = chunk * chunk_bytes
    return offset, min(chunk_bytes, size_bytes - offset)


def chunks_of(offset: int, length: int, chunk_bytes: int) -> range:
    """The chunks that the extent [offset, offset + length) touches; none for an empty extent."""
    if length == 0:
        return range(0)
    return range(offset // chunk_bytes, (offset + length - 1) // chunk_bytes + 1)


def held_bytes(length: int, block_bytes: int = PAGE_BYTES) -> int:
    """What `length` bytes occupy on disk: whole blocks."""
    return -(-length // block_bytes) * block_bytes


def fill_ranges(size_bytes: int, chunk_bytes: int, chunk: int, start: int) -> list[tuple[int, int]]:
    """In which order a fill fetches a chunk: (offset, length) of one or two ranges.

    It begins at `start`, the offset that a reader waits for (rounded down to a whole page, because a
    page that is half there is not there), and goes to the end of the chunk; what lies before comes last. A fill
    that began at the start of the chunk would make a reader of its last page wait for the whole of it:
    for 8 MiB over one connection of 100 MB/s, 80 ms instead of the time to the first byte.
    """
    begin, length = chunk_span(size_bytes, chunk_bytes, chunk)
    assert begin <= start < begin + length, f"offset {start} is not in chunk {chunk}"
    first = max(begin, start - start % PAGE_BYTES)
    ranges = [(first, begin + length - first)]
    if first > begin:
        ranges.append((begin, first - begin))
    return ranges
