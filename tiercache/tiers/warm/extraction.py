"""Objects out of warm targets, from nothing but the directories: no daemon, no index, no configuration. Never writes to a target.

Targets may be missing or damaged. Every piece is verified against the manifest and every chunk against its digest; a chunk that
one copy cannot give any more is taken from the next one, oldest first, since all copies of one object id have the same bytes.

Blocking, and without the deadlines and threads that the daemon has for targets that hang: who waits here can interrupt.
"""

from __future__ import annotations

import functools
import os
import secrets
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from tiercache import errors
from tiercache.core.manifest import Manifest, Member, decode_manifest
from tiercache.core.record import ObjectId
from tiercache.core.stripe import Generation, copy_name, parse_manifest_name, parse_shard_name
from tiercache.tiers.warm.codec import decode_stripe, verify_piece
from tiercache.tiers.warm.isal import Buffer, ErasureCode

Name = tuple[ObjectId, Generation]
State = Literal["complete", "degraded", "unreadable"]

_MANIFEST_LIMIT_BYTES = 1 << 30
_MANIFESTS, _PACKS, _SHARDS = "manifests", "packs", "shards"


class Copy(msgspec.Struct, frozen=True):
    """One object in one copy, as names and sizes on the targets show it: no piece has been read."""

    content: Member
    manifest: Manifest
    number: int | None  # in a pack
    manifests_count: int  # files of the right size
    shards: tuple[tuple[Path, ...], ...]  # by index: the files of that name
    whole_count: int  # how many shards have a file of the right size

    @property
    def state(self) -> State:
        geometry = self.manifest.geometry
        if self.whole_count == geometry.shards_count and self.manifests_count > geometry.parity_count:
            return "complete"
        return "degraded" if self.whole_count >= geometry.data_count else "unreadable"

    def read_from(self, position: int) -> memoryview:
        """The bytes from `position` to the end of the chunk that it lies in. Raises Damaged."""
        manifest = self.manifest
        if position >= self.content.size_bytes:
            raise errors.Damaged("the manifest does not go so far")
        number, start = self.number, 0
        if number is None:
            number = position // manifest.chunk_bytes
            start = number * manifest.chunk_bytes
        stripe = manifest.stripe(number)
        data_count = manifest.geometry.data_count
        present: dict[int, Buffer] = {}
        for index, paths in enumerate(self.shards):
            piece = _piece(paths, stripe.piece_offset, stripe.piece_bytes(data_count), stripe.checksums[index])
            if piece is not None:
                present[index] = piece
            if len(present) == data_count:
                chunk = decode_stripe(stripe, present, _code(data_count, manifest.geometry.parity_count))
                return memoryview(chunk)[position - start :]
        raise errors.Damaged(f"{len(present)} of {data_count} pieces that are needed can be read")


class Archive:
    """Warm targets, read as they lie there. `problems` fills with what could not be read, one line each, as it is met."""

    def __init__(self, targets: Sequence[Path]) -> None:
        self.problems: list[str] = []
        self.lost_count = 0  # copies of which no manifest is valid
        self._targets = [target for target in _different(targets) if self._is_readable(target)]
        if not self._targets:
            raise errors.SetupError(
                f"{self.problems[0]}: no target can be read", hint="name the directories that hold tiercache-target.json"
            )

    def copies(self, object_id: ObjectId | None = None) -> Iterator[Copy]:
        """All copies of one object, or of all."""
        plain = {object_id.hex()[:3]} if object_id is not None else self._fan_outs(_MANIFESTS)
        packs: dict[str, dict[Name, list[Path]]] = defaultdict(dict)
        for name, paths in self._manifests(_PACKS).items():
            packs[name[0].hex()[:3]][name] = paths
        for fan_out in sorted(plain | packs.keys()):
            names = packs.get(fan_out, {})
            if fan_out in plain:
                names = names | self._manifests(f"{_MANIFESTS}/{fan_out}")
            shards: dict[Name, dict[int, list[Path]]] | None = None
            for name in sorted(names):
                manifest = self._valid_manifest(name, names[name])
                if manifest is None or not _concerns(manifest, object_id):
                    continue
                shards = self._shards(fan_out) if shards is None else shards
                manifests_count = sum(_size_bytes(path) == len(manifest.encode()) for path in names[name])
                yield from self._copies_in(manifest, manifests_count, shards.get(name, {}), object_id)

    def _copies_in(
        self, manifest: Manifest, manifests_count: int, files: dict[int, list[Path]], object_id: ObjectId | None
    ) -> Iterator[Copy]:
        shards = tuple(tuple(files.get(index, ())) for index in range(manifest.geometry.shards_count))
        shard_bytes = manifest.shard_bytes()
        whole_count = sum(any(_size_bytes(path) == shard_bytes for path in paths) for paths in shards)
        seen = (manifests_count, shards, whole_count)
        if not manifest.is_pack:
            yield Copy(manifest.content, manifest, None, *seen)
            return
        for number in range(len(manifest.members)):
            if object_id is not None and manifest.member_id(number) != object_id:
                continue
            try:
                content = manifest.members[number]
            except errors.Damaged as error:
                self.problems.append(str(error))
                continue
            yield Copy(content, manifest, number, *seen)

    def _valid_manifest(self, name: Name, paths: Sequence[Path]) -> Manifest | None:
        for path in paths:
            try:
                manifest = decode_manifest(_contents(path, 0, _MANIFEST_LIMIT_BYTES))
                if (manifest.object_id, manifest.generation) != name or manifest.is_pack != (path.parent.name == _PACKS):
                    raise errors.Damaged("the manifest of another copy")
                manifest.shard_bytes()
            except (OSError, errors.Damaged) as error:
                self.problems.append(f"{path}: {_reason(error)}")
                continue
            return manifest
        self.lost_count += 1
        self.problems.append(f"copy {copy_name(*name)}: none of its manifests can be read")
        return None

    def _is_readable(self, target: Path) -> bool:
        try:
            os.listdir(target)
        except OSError as error:
            self.problems.append(f"{target}: {_reason(error)}")
            return False
        return True

    def _fan_outs(self, directory: str) -> set[str]:
        return {path.name for path in self._listed(directory) if len(path.name) == 3}

    def _manifests(self, directory: str) -> dict[Name, list[Path]]:
        found: dict[Name, list[Path]] = defaultdict(list)
        for path in self._listed(directory):
            if name := parse_manifest_name(path.name):
                found[name].append(path)
        return found

    def _shards(self, fan_out: str) -> dict[Name, dict[int, list[Path]]]:
        found: dict[Name, dict[int, list[Path]]] = defaultdict(lambda: defaultdict(list))
        for path in self._listed(f"{_SHARDS}/{fan_out}"):
            if parsed := parse_shard_name(path.name):
                object_id, generation, index = parsed
                found[object_id, generation][index].append(path)
        return found

    def _listed(self, directory: str) -> Iterator[Path]:
        """What lies in this directory of each target; one that is not there is empty."""
        for target in self._targets:
            try:
                names = os.listdir(target / directory)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                self.problems.append(f"{target / directory}: {_reason(error)}")
                continue
            yield from (target / directory / name for name in names)


def by_object(copies: Iterable[Copy]) -> dict[ObjectId, list[Copy]]:
    """The copies of each object, oldest first."""
    found: dict[ObjectId, list[Copy]] = defaultdict(list)
    for copy in copies:
        found[copy.content.object_id].append(copy)
    return {object_id: sorted(each, key=lambda copy: copy.manifest.generation) for object_id, each in found.items()}


def chunks(copies: Sequence[Copy]) -> Iterator[memoryview]:
    """All bytes of an object in order, from its copies; each part is verified before it is handed over. Raises Damaged."""
    position, size_bytes = 0, copies[0].content.size_bytes
    while position < size_bytes:
        part = _part(copies, position)
        yield part
        position += len(part)


def _part(copies: Sequence[Copy], position: int) -> memoryview:
    reasons = set()
    for copy in copies:
        try:
            part = copy.read_from(position)
        except errors.Damaged as error:
            reasons.add(str(error))
            continue
        return part
    raise errors.Damaged(
        f"{copies[0].content.key}: byte {position} cannot be read: {'; '.join(sorted(reasons))}",
        hint="name more of the targets, if there are more; nothing wrong was written",
    )


def write_file(copies: Sequence[Copy], path: Path, *, force: bool, update: Callable[[int, int], None]) -> None:
    """The object as a file, under a temporary name until it is whole and on the disk. Raises UsageError, SetupError, Damaged."""
    _refuse_existing(path, force)
    draft = path.with_name(f".tiercache-extract-{secrets.token_hex(8)}")
    content = copies[0].content
    written_bytes = 0
    try:
        with draft.open("xb") as file:
            for part in chunks(copies):
                file.write(part)
                written_bytes += len(part)
                update(written_bytes, content.size_bytes)
            file.flush()
            os.fsync(file.fileno())
        os.utime(draft, (content.mtime_seconds, content.mtime_seconds))
        _refuse_existing(path, force)
        draft.replace(path)
    except OSError as error:
        raise errors.SetupError(f"{path}: {_reason(error)}", hint="choose another place with --output") from error
    finally:
        with suppress(OSError):
            draft.unlink()


def _refuse_existing(path: Path, force: bool) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise errors.SetupError(f"{path}: {_reason(error)}", hint="choose another place with --output") from error
    if stat.S_ISDIR(mode):
        raise errors.UsageError(f"{path} is a directory", hint="give --output the name of a file")
    if not force:
        raise errors.UsageError(f"{path} exists already", hint="choose another name with --output, or overwrite it with --force")


def _piece(paths: Sequence[Path], offset: int, length: int, checksum: int) -> bytes | None:
    """From the first of the files that has it right."""
    for path in paths:
        try:
            piece = _contents(path, offset, length)
        except OSError:
            continue
        if len(piece) == length and verify_piece(piece, checksum):
            return piece
    return None


def _contents(path: Path, offset: int, length: int) -> bytes:
    """As many of `length` bytes as there are. Does not wait for what is no file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        size_bytes = os.fstat(descriptor).st_size
        return os.pread(descriptor, min(length, max(size_bytes - offset, 0)), offset)
    finally:
        os.close(descriptor)


def _different(targets: Sequence[Path]) -> list[Path]:
    """Without those that are named twice."""
    return list({os.path.realpath(target): target for target in reversed(targets)}.values())[::-1]


def _concerns(manifest: Manifest, object_id: ObjectId | None) -> bool:
    if object_id is None or not manifest.is_pack:
        return object_id in (None, manifest.object_id)
    return any(manifest.member_id(number) == object_id for number in range(len(manifest.members)))


def _size_bytes(path: Path) -> int:
    try:
        found = path.stat()
    except OSError:
        return -1
    return found.st_size if stat.S_ISREG(found.st_mode) else -1


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


@functools.cache
def _code(data_count: int, parity_count: int) -> ErasureCode:
    return ErasureCode(data_count, parity_count)
