"""What is right and what is wrong with one warm copy, found by reading all of it.

Each shard file that lies on some target is compared with the manifest: its size, its header and its footer byte by byte, every
piece by its checksum. The files are read side by side, a run of stripes at a time, so that memory is bounded and readers get
their turn.

A target that cannot be asked proves nothing: its files are neither right nor missing, and nothing is concluded about the copy
as a whole.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial

import msgspec
import trio
import xxhash

from tiercache.core.manifest import Manifest
from tiercache.core.record import ObjectId
from tiercache.core.stripe import (
    SHARD_HEADER_BYTES,
    Generation,
    Stripe,
    encode_shard_footer,
    encode_shard_header,
    fan_out,
    parse_shard_name,
    shard_footer_bytes,
    shard_path,
)
from tiercache.errors import Damaged, NotHeld, TierError
from tiercache.tiers.warm.target import Target
from tiercache.tiers.warm.targets import Targets

RUN_BYTES = 1 << 20
"""How much of each shard file is read at once; a longer piece is read alone."""

AfterRead = Callable[[int], Awaitable[None]]
"""Awaited with the bytes that were read: returns when it is time to go on."""


class Pace:
    """At most `rate_bytes` a second over all targets; 0: as fast as it goes. An `AfterRead`."""

    def __init__(self, rate_bytes: int) -> None:
        self._rate_bytes = rate_bytes
        self._due = 0.0

    async def __call__(self, read_bytes: int) -> None:
        if self._rate_bytes:
            self._due = max(self._due, trio.current_time()) + read_bytes / self._rate_bytes
            await trio.sleep_until(self._due)
        else:
            await trio.lowlevel.checkpoint()


class ShardFile(msgspec.Struct, frozen=True):
    """A file that has the name of a shard of the copy."""

    index: int
    target: Target
    size_bytes: int

    @property
    def key(self) -> tuple[int, str]:
        return self.index, self.target.path


class Fault(msgspec.Struct, frozen=True):
    """`kind`: missing_shard, truncated, too_long, bad_header, bad_footer, bad_piece: of a file the first that was found.

    `target` is None where there is no file.
    """

    kind: str
    index: int
    target: Target | None


class Condition:
    """What examining found. `unanswered`: targets that could not be asked, or not to the end."""

    def __init__(self, manifest: Manifest, files: Sequence[ShardFile], unanswered: set[str]) -> None:
        self.manifest = manifest
        self.files = list(files)
        self.unanswered = unanswered
        self.faults: list[Fault] = []
        self.read_bytes = 0
        self.is_lost = False  # a stripe has fewer than k valid pieces, and every target could be asked
        self._bad_files: set[tuple[int, str]] = set()
        self._bad_pieces: set[tuple[int, str, int]] = set()

    def blame(self, file: ShardFile, kind: str, number: int | None = None) -> None:
        if file.key not in self._bad_files:
            self.faults.append(Fault(kind, file.index, file.target))
        self._bad_files.add(file.key)
        if number is not None:
            self._bad_pieces.add((*file.key, number))

    def mended(self, index: int, target: Target) -> None:
        """There is a right file of the shard now."""
        file = ShardFile(index, target, self.manifest.shard_bytes())
        self._bad_files.discard(file.key)
        self._bad_pieces = {piece for piece in self._bad_pieces if piece[:2] != file.key}
        if all(other.key != file.key for other in self.files):
            self.files.append(file)

    def good(self, index: int) -> list[Target]:
        """Those whose file is right from its first to its last byte."""
        return [
            file.target
            for file in self.files
            if file.index == index and file.key not in self._bad_files and file.target.path not in self.unanswered
        ]

    def bad(self, index: int) -> list[Target]:
        return [file.target for file in self.files if file.index == index and file.key in self._bad_files]

    def holders(self, number: int) -> list[tuple[int, Target]]:
        """(index, target) of every valid piece of a stripe, whole files first."""
        valid = [
            file for file in self.files if (*file.key, number) not in self._bad_pieces and file.target.path not in self.unanswered
        ]
        valid.sort(key=lambda file: (file.key in self._bad_files, file.index))
        return [(file.index, file.target) for file in valid]

    def count(self, number: int) -> int:
        """Of how many shards there is a valid piece of the stripe."""
        return len({index for index, _ in self.holders(number)})

    @property
    def wanting(self) -> list[int]:
        """Shards of which there is no good file, as far as all targets could be asked."""
        unknown = {file.index for file in self.files if file.target.path in self.unanswered}
        return [index for index in range(self.manifest.geometry.shards_count) if index not in unknown and not self.good(index)]

    @property
    def is_whole(self) -> bool:
        return all(self.good(index) for index in range(self.manifest.geometry.shards_count))


async def locate(targets: Targets, object_id: ObjectId, generation: Generation) -> tuple[list[ShardFile], set[str]]:
    """The files of a copy on all targets, and which targets could not be asked."""
    files: list[ShardFile] = []
    unanswered: set[str] = set()

    async def look(target: Target) -> None:
        try:
            entries = await target.scan(f"shards/{fan_out(object_id)}")
        except TierError:
            unanswered.add(target.path)
            return
        for entry in entries:
            found = parse_shard_name(entry.name)
            if found is not None and found[:2] == (object_id, generation) and entry.is_regular:
                files.append(ShardFile(found[2], target, entry.size_bytes))

    async with trio.open_nursery() as nursery:
        for target in targets.all:
            nursery.start_soon(look, target)
    return files, unanswered


async def examine(manifest: Manifest, files: Sequence[ShardFile], unanswered: set[str], pace: AfterRead) -> Condition:
    """Read everything. `pace` is awaited with the bytes of each run. Raises Damaged when the manifest's own rows are wrong."""
    files = [file for file in files if file.index < manifest.geometry.shards_count]
    condition = Condition(manifest, files, set(unanswered))
    expected_bytes = manifest.shard_bytes()
    for index in range(manifest.geometry.shards_count):
        if not any(file.index == index for file in files):
            condition.faults.append(Fault("missing_shard", index, None))
    for file in files:
        if file.size_bytes != expected_bytes:
            condition.blame(file, "truncated" if file.size_bytes < expected_bytes else "too_long")
    await _each(files, partial(_examine_ends, condition))
    await pace(condition.read_bytes)
    first = 0
    for run in runs(manifest):
        read_before = condition.read_bytes
        await _each(files, partial(_examine_run, condition, first, run))
        numbers = range(first, first + len(run))
        condition.is_lost = condition.is_lost or any(condition.count(number) < manifest.geometry.data_count for number in numbers)
        first += len(run)
        await pace(condition.read_bytes - read_before)
    condition.is_lost = condition.is_lost and not condition.unanswered
    return condition


async def _each(files: Sequence[ShardFile], job: Callable[[ShardFile], Awaitable[None]]) -> None:
    async with trio.open_nursery() as nursery:
        for file in files:
            nursery.start_soon(job, file)


def runs(manifest: Manifest) -> Iterator[list[Stripe]]:
    run: list[Stripe] = []
    length = 0
    for stripe in manifest.stripes():
        piece_bytes = stripe.piece_bytes(manifest.geometry.data_count)
        if run and length + piece_bytes > RUN_BYTES:
            yield run
            run, length = [], 0
        run.append(stripe)
        length += piece_bytes
    if run:
        yield run


async def _examine_ends(condition: Condition, file: ShardFile) -> None:
    """Header and footer, byte by byte."""
    manifest = condition.manifest
    header = shard_header(manifest, file.index)
    footer = await trio.to_thread.run_sync(encode_shard_footer, manifest.stripes(), file.index)
    footer_offset = manifest.shard_bytes() - shard_footer_bytes(manifest.stripes_count)
    for kind, offset, expected in (("bad_header", 0, header), ("bad_footer", footer_offset, footer)):
        await _compare(condition, file, kind, offset, expected)


async def _compare(condition: Condition, file: ShardFile, kind: str, offset: int, expected: bytes) -> None:
    path = shard_path(condition.manifest.object_id, condition.manifest.generation, file.index)
    try:
        await file.target.read(path, offset, len(expected), checksum=xxhash.xxh3_64_intdigest(expected))
        condition.read_bytes += len(expected)
    except (Damaged, NotHeld):
        condition.blame(file, kind)
    except TierError:
        condition.unanswered.add(file.target.path)


async def _examine_run(condition: Condition, first: int, run: Sequence[Stripe], file: ShardFile) -> None:
    if file.target.path in condition.unanswered:
        return
    data_count = condition.manifest.geometry.data_count
    begin = run[0].piece_offset
    length = sum(stripe.piece_bytes(data_count) for stripe in run)
    if length == 0:
        return
    path = shard_path(condition.manifest.object_id, condition.manifest.generation, file.index)
    try:
        data = await file.target.read(path, begin, length)
    except (Damaged, NotHeld):  # it ends in this run, or is gone
        if len(run) == 1:
            condition.blame(file, "bad_piece", first)
            return
        for at, stripe in enumerate(run):
            await _examine_run(condition, first + at, [stripe], file)
        return
    except TierError:
        condition.unanswered.add(file.target.path)
        return
    condition.read_bytes += length
    for at in await trio.to_thread.run_sync(_wrong, data, run, data_count, file.index):
        condition.blame(file, "bad_piece", first + at)


def _wrong(view: memoryview, run: Sequence[Stripe], data_count: int, index: int) -> list[int]:
    """Which of the run's pieces are not what was written. Blocks."""
    begin = run[0].piece_offset
    wrong = []
    for at, stripe in enumerate(run):
        start = stripe.piece_offset - begin
        piece = view[start : start + stripe.piece_bytes(data_count)]
        if xxhash.xxh3_64_intdigest(piece) != stripe.checksums[index]:
            wrong.append(at)
    return wrong


def shard_header(manifest: Manifest, index: int) -> bytes:
    header = encode_shard_header(manifest.object_id, manifest.generation, manifest.geometry, index, is_pack=manifest.is_pack)
    assert len(header) == SHARD_HEADER_BYTES
    return header
