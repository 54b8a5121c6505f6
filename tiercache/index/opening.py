"""Opening an index whatever state it is in: judge, set aside, open, recover. Blocking steps run in a thread.

    clean mark fits the file ──────────────► open it as it is (a start after a clean stop reads no page twice)
    otherwise: a child process checks it ──► sound: open it
                                        └──► damaged: set aside as `<name>.damaged-<n>`, fresh index, recovery from the log

Trust. Bytes of hot files are not flushed one by one, so they are believed as long as the kernel that took them is the
same (boot id), or a clean stop flushed them (clean mark). Otherwise the epoch grows and every chunk is verified before it is
served; so it does, in whichever boot, when a clean mark is there that vouches for another file: somebody has put an older
copy in its place, and what it says of the hot files was true at another time. A rebuilt index starts at epoch 1 with its
recovered chunks at epoch 0: verified as well.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec
import trio

import tiercache
from tiercache.core.record import ChunkRecord, HotRecord, Pin
from tiercache.errors import HotSick, IndexDamaged
from tiercache.index.changes import Applying
from tiercache.index.cleanmark import CleanMark, read_mark, remove_mark
from tiercache.index.compaction import sync_directory
from tiercache.index.environment import DATA_NAME, LOCK_NAME, Environment, View
from tiercache.index.index import Change, DropHot, DropPin, Health, PutChunk, PutHot, PutPin
from tiercache.index.records import FORMAT_VERSION, META, META_KEY, PINS, RESTART, Meta
from tiercache.index.sidecar import LOG_NAME, Logged, LoggedObject, read_log
from tiercache.index.writer import Published

FIRST_EPOCH = 1
KEPT_DAMAGED_COUNT = 2
RECOVERY_BATCH = 16_000
"""Ids are hashes, so each transaction touches pages all over the file: few large ones write less. About 30 MB of memory."""
CHECK_START_SECONDS = 60.0
CHECK_BYTES_PER_SECOND = 4_000_000
"""A loaded machine checks ten times as fast; what is slower than this is a disk that hangs."""

Exists = Callable[[HotRecord], bool]


class Opened(msgspec.Struct, frozen=True):
    environment: Environment
    published: Published
    health: Health


async def open_in_any_state(directory: Path, boot_id: str, exists: Exists, map_bytes: int) -> Opened:
    """Raises HotSick when the disk does not let an index be opened or made."""
    in_thread = trio.to_thread.run_sync
    data = directory / DATA_NAME
    try:
        mark = await in_thread(_prepare, directory)
        fault, is_exchanged = "", False
        if not data.exists():
            if mark is None and not (directory / LOG_NAME).exists():
                return await in_thread(_open_fresh, directory, boot_id, map_bytes)
            fault = "the index file is missing"
        elif mark is None or not mark.describes(data):
            mark, is_exchanged = None, mark is not None
            fault = await judge(directory)
        if not is_exchanged:  # else it stays until the new epoch is on the disk
            await in_thread(remove_mark, directory)
        if not fault:
            try:
                opened = await in_thread(partial(_open_sound, directory, boot_id, map_bytes, mark, is_exchanged=is_exchanged))
            except IndexDamaged as damage:
                fault = str(damage)
            else:
                await in_thread(remove_mark, directory)
                return opened
        await in_thread(remove_mark, directory)
        await in_thread(_set_aside, directory)
        return await in_thread(_rebuild, directory, boot_id, exists, map_bytes, fault)
    except OSError as error:
        raise HotSick(f"index {directory}: {error.strerror}", hint="check the cache disk and its free space") from error


async def judge(directory: Path) -> str:
    """Check the index in a child process: '' when it is sound, else what is wrong. Raises OSError."""
    limit_seconds = CHECK_START_SECONDS + (directory / DATA_NAME).stat().st_size / CHECK_BYTES_PER_SECOND
    packages = [str(Path(tiercache.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with trio.move_on_after(limit_seconds):
        done = await trio.run_process(
            [sys.executable, "-P", "-m", "tiercache.index.check", str(directory)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(packages)},
            capture_stdout=True,
            check=False,
            stderr=subprocess.DEVNULL,
            deliver_cancel=_kill,
        )
        said = done.stdout.decode(errors="replace").strip()
        if done.returncode == 0 and not said:
            return ""
        if done.returncode < 0:
            return f"the check of the index died of {signal.Signals(-done.returncode).name}"
        return said or f"the check of the index ended with status {done.returncode}"
    return f"the check of the index did not end within {limit_seconds:.0f} seconds"


async def _kill(process: trio.Process) -> None:
    process.kill()


def _prepare(directory: Path) -> CleanMark | None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    (directory / LOCK_NAME).unlink(missing_ok=True)
    return read_mark(directory)


def _open_fresh(directory: Path, boot_id: str, map_bytes: int) -> Opened:
    environment = Environment(directory, map_bytes)
    meta = Meta(FORMAT_VERSION, boot_id, FIRST_EPOCH, FIRST_EPOCH, {}, 0)
    environment.write(lambda view: view.put(META, META_KEY, meta))
    environment.sync()
    return Opened(environment, Published(meta, {}), Health(FIRST_EPOCH, FIRST_EPOCH, unclean=False))


def _open_sound(directory: Path, boot_id: str, map_bytes: int, mark: CleanMark | None, *, is_exchanged: bool) -> Opened:
    environment = Environment(directory, max(map_bytes, _read_ahead(directory / DATA_NAME)))
    try:
        if mark is not None and mark.transaction != environment.last_transaction():
            raise IndexDamaged("the index is not the one that was closed", hint=RESTART)
        meta, pins = environment.write(lambda view: _begin_boot(view, boot_id, clean=mark is not None, is_exchanged=is_exchanged))
        environment.sync()
    except BaseException:
        environment.close()
        raise
    return Opened(environment, Published(meta, pins), Health(meta.epoch, meta.trusted_epoch, unclean=mark is None))


def _read_ahead(data: Path) -> int:
    """Ask for the whole file to be in memory before reads on the event loop touch its pages; its size."""
    with data.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        return os.fstat(file.fileno()).st_size


def _begin_boot(view: View, boot_id: str, *, clean: bool, is_exchanged: bool) -> tuple[Meta, dict[bytes, Pin]]:
    meta = view.get(META, META_KEY)
    if meta is None:
        raise IndexDamaged("the record about the whole is missing", hint=RESTART)
    if meta.format_version != FORMAT_VERSION:
        raise IndexDamaged(f"format {meta.format_version} is not {FORMAT_VERSION}: another version wrote it", hint=RESTART)
    epoch, trusted_epoch = meta.epoch, meta.trusted_epoch
    if is_exchanged or (not clean and boot_id != meta.boot_id):
        epoch = trusted_epoch = meta.epoch + 1
    meta = msgspec.structs.replace(meta, boot_id=boot_id, epoch=epoch, trusted_epoch=trusted_epoch)
    view.put(META, META_KEY, meta)
    return meta, dict(view.scan(PINS, b""))


def _set_aside(directory: Path) -> None:
    """Keep the damaged file for whoever wants to know why, the newest KEPT_DAMAGED_COUNT of them."""
    pattern = re.compile(re.escape(directory.name) + r"\.damaged-(\d+)")
    found = sorted((int(match[1]), path) for path in directory.parent.iterdir() if (match := pattern.fullmatch(path.name)))
    if (directory / DATA_NAME).exists():
        place = directory.parent / f"{directory.name}.damaged-{found[-1][0] + 1 if found else 1}"
        place.mkdir(mode=0o700)
        (directory / DATA_NAME).rename(place / DATA_NAME)
        for _, path in found[: max(0, len(found) + 1 - KEPT_DAMAGED_COUNT)]:
            shutil.rmtree(path)
        sync_directory(directory.parent)
    (directory / LOCK_NAME).unlink(missing_ok=True)
    sync_directory(directory)


def _rebuild(directory: Path, boot_id: str, exists: Exists, map_bytes: int, fault: str) -> Opened:
    opened = _open_fresh(directory, boot_id, map_bytes)
    environment, published = opened.environment, opened.published
    try:
        records = read_log(directory / LOG_NAME)
        while batch := list(islice(records, RECOVERY_BATCH)):
            changes = [change for logged in batch for change in _recovered(logged, exists)]
            published = environment.write(partial(_apply, changes=changes, published=published))
        environment.sync()
    except BaseException:
        environment.close()
        raise
    health = Health(FIRST_EPOCH, FIRST_EPOCH, unclean=True, rebuilt=fault, recovered_count=published.meta.hot_count)
    return Opened(environment, published, health)


def _recovered(logged: Logged, exists: Exists) -> list[Change]:
    match logged:
        case LoggedObject(record, digests):
            if not exists(record):
                return []
            chunks = [
                PutChunk(record.object_id, chunk, ChunkRecord(digest, FIRST_EPOCH - 1), 0, completes=False)
                for chunk, digest in enumerate(digests)
            ]
            return [DropHot(record.object_id), PutHot(record), *chunks]
        case Pin() as pin:
            return [PutPin(pin)]
        case DropPin() as drop:
            return [drop]


def _apply(view: View, changes: list[Change], published: Published) -> Published:
    applying = Applying(view, published.meta, published.pins)
    for change in changes:
        applying.apply(change)
    applying.finish()
    return Published(applying.meta, applying.pins)
