"""The sidecar log `objects.log`: enough to find the hot tier's files again when the index is damaged, and the pins.

The writer appends one frame when an object becomes complete, and one for each pin that comes or goes; one write() for all
frames of a transaction, after its commit. Not flushed to the disk, except with `commit(sync=True)`: what a power failure
takes from its end is fetched again, and recovered bytes are verified before they are served anyway.

One log instead of a sidecar file beside each hot file: a second file would double the creations, inodes and
directory entries of a cache of small files. Evictions are not logged: recovery asks whether the file is there with the right
size, and a wrong guess (evicted, fetched again in part) costs a verification, never a wrong byte.

A frame is MAGIC, length (4 B) and CRC-32 (4 B) of what follows, then a kind byte and the content. A damaged frame is skipped by
looking for the next MAGIC that begins a whole frame; a torn one at the end is the end. The last frame about an
id wins.

    b"o"  length of the record (4 B), HotRecord, then the chunks' digests (8 B each)
    b"p"  Pin                     b"u"  the DropPin that ended one
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from zlib import crc32

import msgspec

from tiercache.core.record import ChunkRecord, HotRecord, Pin
from tiercache.errors import HotSick
from tiercache.index.index import DropPin
from tiercache.index.records import Codec

LOG_NAME = "objects.log"
MAGIC = b"\xf1TCo"
HEADER_BYTES = len(MAGIC) + 8
DIGEST_BYTES = 8
MAX_FRAME_BYTES = 64 << 20
"""A longer length is damage. 64 MiB are the digests of 8 million chunks (64 TB with chunks of 8 MiB)."""
READ_BYTES = 1 << 20

_HOT = Codec(HotRecord)
_PIN = Codec(Pin)
_UNPIN = Codec(DropPin)


class LoggedObject(msgspec.Struct, frozen=True):
    """A complete object: its record, and the digest of each chunk from 0 on."""

    record: HotRecord
    digests: tuple[int, ...]


Logged = LoggedObject | Pin | DropPin


def encode_object(record: HotRecord, chunks: Iterable[tuple[bytes, ChunkRecord]]) -> bytes | None:
    """The frame of a complete object; None when a digest lacks (then it could not be verified, and is not worth keeping)."""
    expected = -(-record.size_bytes // record.chunk_bytes)
    digests = bytearray()
    for position, (key, chunk) in enumerate(chunks):
        if int.from_bytes(key[-4:], "big") != position:
            return None
        digests += chunk.digest.to_bytes(DIGEST_BYTES, "big")
    if len(digests) != expected * DIGEST_BYTES:
        return None
    body = _HOT.encode(record)
    return _frame(b"o" + len(body).to_bytes(4, "big") + body + digests)


def encode_pin(pin: Pin) -> bytes:
    return _frame(b"p" + _PIN.encode(pin))


def encode_unpin(change: DropPin) -> bytes:
    return _frame(b"u" + _UNPIN.encode(change))


def read_log(path: Path) -> Iterator[Logged]:
    """Everything whole in the log, in its order, in bounded memory; nothing when there is no log. Raises OSError."""
    if not path.exists():
        return
    with path.open("rb") as file:
        buffer = bytearray()
        while block := file.read(READ_BYTES):
            buffer += block
            yield from _take_frames(buffer, at_end=False)
        yield from _take_frames(buffer, at_end=True)


class ObjectLog:
    """The log, open for appending. Used by the writer thread only."""

    def __init__(self, path: Path) -> None:
        """Raises HotSick."""
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self.size_bytes = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise sick(path, error) from error

    def append(self, frames: Sequence[bytes]) -> None:
        """Raises HotSick; then a piece of the frames may be in the log, which readers skip."""
        whole = b"".join(frames)
        try:
            written = os.write(self._descriptor, whole)
            self.size_bytes += written
            while written < len(whole):
                more = os.write(self._descriptor, whole[written:])
                self.size_bytes += more
                written += more
        except OSError as error:
            raise sick(self.path, error) from error

    def sync(self) -> None:
        """Raises HotSick."""
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise sick(self.path, error) from error

    def close(self) -> None:
        os.close(self._descriptor)


def _frame(content: bytes) -> bytes:
    return MAGIC + len(content).to_bytes(4, "big") + crc32(content).to_bytes(4, "big") + content


def _take_frames(buffer: bytearray, *, at_end: bool) -> Iterator[Logged]:
    """Take whole frames off the front of the buffer; what may become one with more bytes stays."""
    position = 0
    while (position := _next_magic(buffer, position)) + HEADER_BYTES <= len(buffer):
        length = int.from_bytes(buffer[position + 4 : position + 8], "big")
        end = position + HEADER_BYTES + length
        if length > MAX_FRAME_BYTES:
            position += 1
        elif end > len(buffer):
            if not at_end:
                break
            position += 1
        else:
            logged = _decode(bytes(buffer[position + HEADER_BYTES : end]), bytes(buffer[position + 8 : position + 12]))
            position = position + 1 if logged is None else end
            if logged is not None:
                yield logged
    del buffer[:position]


def _next_magic(buffer: bytearray, position: int) -> int:
    """Where the next MAGIC begins, or where the beginning of one may be cut off by the end of the buffer."""
    found = buffer.find(MAGIC, position)
    return found if found >= 0 else max(position, len(buffer) - len(MAGIC) + 1)


def _decode(content: bytes, checksum: bytes) -> Logged | None:
    if crc32(content).to_bytes(4, "big") != checksum:
        return None
    try:
        match content[:1]:
            case b"o":
                end = 5 + int.from_bytes(content[1:5], "big")
                digests = (content[at : at + DIGEST_BYTES] for at in range(end, len(content), DIGEST_BYTES))
                return LoggedObject(_HOT.decode(content[5:end]), tuple(int.from_bytes(digest, "big") for digest in digests))
            case b"p":
                return _PIN.decode(content[1:])
            case b"u":
                return _UNPIN.decode(content[1:])
            case _:
                return None
    except ValueError:
        return None


def sick(path: Path, error: OSError) -> HotSick:
    return HotSick(f"index log {path}: {error.strerror}", hint="check the cache disk and its free space")
