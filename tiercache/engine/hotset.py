"""The hot directories of one mount, opened: claimed, measured, with the index that knows what is in them.

The index lies in the directory that was the first when it was made. A record names a hot directory by its position, and the
positions are those of `directories.json` beside the index (a list of the directories' uuids), not those of the configuration:
paths may be listed in another order or be renamed. When a directory of that list is missing, the index is started anew, because
its records would point to files of others: it recovers pins, and what is still where it was, from its log; the rest is swept, and
so is a directory that the list did not name.

Closing order, the reason why the clean mark can be believed: hot files are synced, then the index is closed with its mark, then
the claims are given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog
import trio

from tiercache.config import HotSettings
from tiercache.core.record import HotRecord
from tiercache.core.watermark import default_capacity_bytes, default_min_free_bytes
from tiercache.errors import HotTierError, NotHeld, SetupError
from tiercache.index.environment import DATA_NAME
from tiercache.index.lmdb import LmdbIndex, open_index
from tiercache.tiers.claim import Claim, claim
from tiercache.tiers.hot import HotDirectory, HotTier
from tiercache.tiers.space import Ledger

log = structlog.get_logger()

INDEX = "index"
DIRECTORIES = "directories.json"
MIN_CHUNKS = 4
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass
class HotSet:
    """`paths` by position. `notices` are for the operator; `sweep` says that files without a record may lie around."""

    paths: list[str]
    claims: list[Claim]
    files: HotTier
    index: LmdbIndex
    ledgers: list[Ledger]
    notices: list[str]
    sweep: bool

    async def close(self, *, clean: bool) -> None:
        """`clean`: the index knows all that the files hold. What cannot be synced is not marked as clean either."""
        with trio.CancelScope(shield=True):
            for directory in range(len(self.paths)):
                try:
                    await trio.to_thread.run_sync(self.files.syncfs, directory)
                except HotTierError as error:
                    log.error("hot_directory_not_synced", path=self.paths[directory], error=error.line)
                    clean = False
            await self.index.aclose(clean=clean)
            _release(self.claims)

    def stopping(self) -> None:
        """Tell a successor that it is worth waiting. Best effort: a full disk must not keep the daemon from ending."""
        for each in self.claims:
            try:
                each.stopping()
            except SetupError as error:
                log.warning("successor_not_told", error=error.line)


async def open_hot(settings: HotSettings, mountpoint: str, others: Sequence[tuple[str, str]]) -> HotSet:
    """`others` are (what it is, path) of directories that a cache must keep away from. Raises SetupError."""
    claims: list[Claim] = []
    try:
        for path in settings.paths:
            apart = [(what, Path(where)) for what, where in others]
            apart += [("hot directory", each.path) for each in claims]
            claims.append(await trio.to_thread.run_sync(lambda: claim(Path(path), mountpoint=Path(mountpoint), others=apart)))  # noqa: B023
        return await _open(settings, claims)
    except HotTierError as error:
        _release(claims)
        raise SetupError(str(error), hint=error.hint) from error
    except OSError as error:
        _release(claims)
        raise SetupError(
            f"cache directory {settings.paths[0]} cannot be used ({error.strerror})",
            hint="free space there or choose another with --hot",
        ) from error
    except BaseException:
        _release(claims)
        raise


def _release(claims: Sequence[Claim]) -> None:
    for each in claims:
        each.release()


async def _open(settings: HotSettings, claims: list[Claim]) -> HotSet:
    home = next((each.path for each in claims if (each.path / INDEX / DIRECTORIES).exists()), claims[0].path)
    ordered, notices, adopted = await trio.to_thread.run_sync(_in_stored_order, home, claims)
    files = await trio.to_thread.run_sync(
        lambda: HotTier([HotDirectory(position, each.path) for position, each in enumerate(ordered)])
    )

    def exists(record: HotRecord) -> bool:
        try:
            files.open(record.object_id, record.size_bytes, record.directory)
        except (NotHeld, HotTierError, IndexError):
            return False
        return True

    boot_id = (await trio.Path(BOOT_ID).read_text()).strip()
    is_new = not await trio.Path(home / INDEX / DATA_NAME).exists()  # removed by hand: then nobody knows of the files
    index = await open_index(home / INDEX, boot_id=boot_id, exists=exists)
    health = index.health
    if health.rebuilt:
        notices.append(f"the index was rebuilt ({health.rebuilt}); {health.recovered_count} objects were recovered")
    if health.unclean and not health.rebuilt:
        notices.append("the last stop was not clean: what the machine may have lost is verified before it is served")
    try:
        ledgers = [await _ledger(settings, files, index, position) for position in range(len(ordered))]
        for ledger in ledgers:
            _refuse_full(ledger, settings.chunk_bytes)
    except BaseException:
        await index.aclose(clean=False)
        raise
    sweep = health.unclean or bool(health.rebuilt) or bool(notices) or adopted or is_new
    return HotSet([str(each.path) for each in ordered], claims, files, index, ledgers, notices, sweep)


def _in_stored_order(home: Path, claims: list[Claim]) -> tuple[list[Claim], list[str], bool]:
    """The claims by position, what had to be done to the index for it, and whether there are some that it does not know."""
    (home / INDEX).mkdir(mode=0o700, exist_ok=True)
    path = home / INDEX / DIRECTORIES
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=list[str])
    except (FileNotFoundError, msgspec.DecodeError):
        stored = []
    present = {each.uuid: each for each in claims}
    notices = []
    if any(uuid not in present for uuid in stored):
        (home / INDEX / DATA_NAME).unlink(missing_ok=True)
        stored = []
        notices.append("a hot directory is not configured any more: the index was started anew")
    uuids = stored + [each.uuid for each in claims if each.uuid not in stored]
    draft = path.with_suffix(".new")
    draft.write_bytes(msgspec.json.encode(uuids))
    draft.rename(path)
    return [present[uuid] for uuid in uuids], notices, uuids != stored


async def _ledger(settings: HotSettings, files: HotTier, index: LmdbIndex, position: int) -> Ledger:
    filesystem = await trio.to_thread.run_sync(files.filesystem, position)
    free_bytes, total_bytes = filesystem.free_bytes, filesystem.total_bytes
    held_bytes = index.held_bytes(position)
    capacity_bytes = settings.capacity_each_bytes
    min_free_bytes = settings.min_free_bytes
    if min_free_bytes is None:
        min_free_bytes = default_min_free_bytes(total_bytes)
    if capacity_bytes is None:
        capacity_bytes = default_capacity_bytes(free_bytes, total_bytes, held_bytes)
    home = files.directories[position]
    return Ledger(
        str(home.path),
        capacity_bytes=capacity_bytes,
        min_free_bytes=min_free_bytes,
        high_ratio=settings.high_watermark_ratio,
        low_ratio=settings.low_watermark_ratio,
        block_bytes=home.block_bytes,
        held_bytes=held_bytes,
        free_bytes=free_bytes,
        total_bytes=total_bytes,
    )


def _refuse_full(ledger: Ledger, chunk_bytes: int) -> None:
    """A cache without room for a few chunks would stream everything past itself, and nobody would know why."""
    wanted_bytes = MIN_CHUNKS * chunk_bytes
    if ledger.capacity_bytes < wanted_bytes:
        raise SetupError(
            f"the {ledger.capacity_bytes} bytes of cache directory {ledger.name} are too few: {MIN_CHUNKS} chunks "
            f"of {chunk_bytes} bytes must fit",
            hint="give it more with --hot-size (hot.capacity), or a disk with more free space",
        )
    if ledger.limit_bytes < wanted_bytes:
        raise SetupError(
            f"the disk of cache directory {ledger.name} is too full for a cache: {ledger.filesystem_free_bytes} of "
            f"{ledger.filesystem_total_bytes} bytes are free, of which {ledger.min_free_bytes} must stay free",
            hint="free space there or choose another with --hot",
        )
