"""What the command line and the daemon say to each other.

`status --json` and the other `--json` outputs are these structures as they are, so a field is
part of the contract that scripts depend on: fields may be added, never renamed or given another
meaning. Sizes are bytes, times are Unix seconds, durations are seconds; `None` means "not known"
or "no limit", as each field says.

Paths and keys may hold any bytes. In memory they are `str` with `surrogateescape` (see
`core/record.py`); on the wire a byte that is not UTF-8 travels as the JSON escape of its lone
surrogate (`"\\udcff"`), which every JSON parser accepts and `os.fsencode` turns back. The fast
encoder of msgspec refuses such strings, hence `json` for the text and msgspec for the types: an
admin request a second does not care.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal, NoReturn, TypeVar

import msgspec

from tiercache.config.quantity import MAX_DURATION_SECONDS

TierState = Literal["ok", "degraded", "down", "absent"]
"""ok; degraded: works, but not fully (full, slow, one of several gone); down: not used now; absent: not configured."""

PathKind = Literal["plain", "passthrough"]
FileKind = Literal["file", "directory"]


class ReadPath(msgspec.Struct, frozen=True):
    """How the kernel gets the bytes of a complete hot file, and why not in the faster way (or '')."""

    kind: PathKind
    reason: str = ""


class HotDirectory(msgspec.Struct, frozen=True):
    path: str
    used_bytes: int
    capacity_bytes: int
    state: TierState
    detail: str = ""


class TierStatus(msgspec.Struct, frozen=True):
    """`capacity_bytes` is None where nobody knows it (a store, a replica). `detail` says why a state is not ok."""

    used_bytes: int
    capacity_bytes: int | None
    state: TierState
    detail: str = ""
    directories: list[HotDirectory] = []


class Tiers(msgspec.Struct, frozen=True):
    hot: TierStatus
    warm: TierStatus
    cold: TierStatus


class DatasetStatus(msgspec.Struct, frozen=True):
    """`reads` and `read_bytes` count by the tier that gave the bytes ('hot', 'replica', 'cold') since the daemon started.

    `hits_ratio` is the part of the opens that found the whole file hot, None before the first open.
    `unreachable_count` keys have no POSIX name, as far as directories were listed.
    """

    name: str
    source: str
    replica: str | None
    immutable: bool
    hot_objects_count: int
    hot_bytes: int
    hits_ratio: float | None
    opens_count: int
    reads: dict[str, int]
    read_bytes: dict[str, int]
    unreachable_count: int
    pinned_bytes: int


class Status(msgspec.Struct, frozen=True):
    """`notices` are lines that an operator should read, such as 'index was damaged and rebuilt'.

    `supervisor` starts the daemon again when it dies, and has done so `restarts_count` times; None: nobody does. `stall_seconds`
    is how long readers waited for this daemon when it took over from the one before, None when it mounted freshly or cannot know.
    """

    pid: int
    version: str
    mountpoint: str
    socket: str
    uptime_seconds: float
    path: ReadPath
    tiers: Tiers
    datasets: list[DatasetStatus]
    notices: list[str] = []
    supervisor: Literal["keeper", "systemd"] | None = None
    restarts_count: int = 0
    stall_seconds: float | None = None


class PinStatus(msgspec.Struct, frozen=True):
    """One pin. `path` is 'dataset/key'; `exact` pins that key only, otherwise all below it.

    `expires_seconds` is None for never. `wanted_bytes` was counted when the pin was admitted, of
    which `hot_bytes` are on the local disk now.
    """

    path: str
    dataset: str
    prefix: str
    exact: bool
    owner: str
    reason: str
    created_seconds: int
    expires_seconds: int | None
    wanted_bytes: int
    hot_bytes: int


class Where(msgspec.Struct, frozen=True):
    """Where one file's bytes are. `path` is as it was asked for.

    `residency` names the tiers with a whole copy ('hot', 'replica', 'warm', 'cold'); a partial hot copy shows
    in `hot_bytes` and the chunk counts. A directory has no version, no residency and no chunks.
    """

    path: str
    kind: FileKind
    dataset: str
    key: str
    version: str
    size_bytes: int
    inode: int
    residency: list[str]
    hot_bytes: int
    chunks_present: int
    chunks_total: int
    replica: bool
    pin: PinStatus | None = None


class Failure(msgspec.Struct, frozen=True):
    """Why one of several paths got no answer; `kind` is the class name in `tiercache.errors`."""

    path: str
    kind: str
    error: str
    hint: str = ""


class Paths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request about paths: each absolute and under the mount point, or 'dataset/key'."""

    paths: list[str]


class WhereAnswer(msgspec.Struct, frozen=True):
    files: list[Where]
    failures: list[Failure] = []


class Refreshed(msgspec.Struct, frozen=True):
    """What looking again found: names whose version changed or that are new, and names that are gone."""

    path: str
    changed_count: int
    dropped_count: int


class RefreshAnswer(msgspec.Struct, frozen=True):
    refreshed: list[Refreshed]
    failures: list[Failure] = []


class PinRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`ttl_seconds` None pins until `unpin`. With `dry_run` only the numbers are wanted."""

    paths: list[str]
    owner: str
    reason: str = ""
    ttl_seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_DURATION_SECONDS)] | None = None
    dry_run: bool = False


class PinAnswer(msgspec.Struct, frozen=True):
    """All paths of one request are admitted together or not at all.

    `wanted_bytes` of `objects_count` objects were asked for, of which `hot_bytes` are hot already.
    `pinned_bytes` were pinned before, of `pinnable_bytes` that may be (a part of the capacity stays
    free for the unpinned). `refusal` says in one line why not ('' when admitted); `pins` are the
    pins that exist now because of the request (none for a dry run or a refusal).
    """

    admitted: bool
    refusal: str
    dry_run: bool
    objects_count: int
    wanted_bytes: int
    hot_bytes: int
    pinned_bytes: int
    pinnable_bytes: int
    pins: list[PinStatus] = []


class PinProgress(msgspec.Struct, frozen=True):
    """How far the background fetch of some pins is. `done` also when nothing more will come (`failed_count` > 0).

    `last_error` explains the newest failure ('' without one).
    """

    objects_count: int
    hot_objects_count: int
    wanted_bytes: int
    hot_bytes: int
    failed_count: int
    last_error: str
    done: bool


class Unpinned(msgspec.Struct, frozen=True):
    """The pins that were removed, and the paths that were not pinned (no error: they are not pinned now)."""

    removed: list[PinStatus]
    not_pinned: list[str] = []


class Pins(msgspec.Struct, frozen=True):
    pins: list[PinStatus]


class EvictRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`to` None: to the warm tier when there is one, else the hot copies are just dropped."""

    paths: list[str]
    to: Literal["warm", "drop"] | None = None


class ScrubRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tier` None: the warm tier when there is one, else the hot one."""

    tier: Literal["hot", "warm"] | None = None
    repair: bool = False


class JobStarted(msgspec.Struct, frozen=True):
    """`joined`: it was running already, with the same options."""

    job: int
    kind: str
    joined: bool = False


class JobStatus(msgspec.Struct, frozen=True):
    """How far a job is, or was when it ended. `kind` is what it does, as in 'scrub of the warm tier'.

    A job that was given up is 'failed', `error` and `hint` say why; one in which single things failed is 'done'. `counts` are
    what it has done or found, by kind; `failures` and `lines` (findings) hold the first ones only, `failed_count` all. Of
    `damaged_count` damaged things `repaired_count` are whole again.
    """

    job: int
    kind: str
    state: Literal["running", "done", "failed"]
    total_count: int
    done_count: int
    total_bytes: int
    done_bytes: int
    counts: dict[str, int] = {}
    failed_count: int = 0
    failures: list[Failure] = []
    lines: list[str] = []
    damaged_count: int = 0
    repaired_count: int = 0
    error: str = ""
    hint: str = ""


class TargetStatus(msgspec.Struct, frozen=True):
    """One warm target. `used_bytes` is what tiercache has there; None for what is not known, as while the target is down."""

    path: str
    uuid: str
    state: Literal["up", "suspect", "down"]
    detail: str
    used_bytes: int | None
    free_bytes: int | None
    total_bytes: int | None
    errors_count: int
    is_full: bool
    is_writable: bool


class TargetsAnswer(msgspec.Struct, frozen=True):
    """No targets: there is no warm tier."""

    data_shards: int
    parity_shards: int
    targets: list[TargetStatus]


class Stopping(msgspec.Struct, frozen=True):
    """The filesystem is unmounted and the daemon on its way out."""

    pid: int
    mountpoint: str


class HandingOver(msgspec.Struct, frozen=True):
    """The daemon ends in a moment, its process goes on with the program that is installed now, of version `successor`."""

    pid: int
    mountpoint: str
    version: str
    successor: str


class ErrorAnswer(msgspec.Struct, frozen=True):
    """The body of every answer that is not 200; `kind` is the class name in `tiercache.errors`."""

    error: str
    hint: str = ""
    kind: str = "TiercacheError"


class StartReport(msgspec.Struct, frozen=True):
    """What a daemon that was just started tells the one who started it, once: it is mounted, or why not."""

    ready: Status | None = None
    error: str = ""
    hint: str = ""


Message = TypeVar("Message", bound=msgspec.Struct)


def encode(message: msgspec.Struct) -> bytes:
    """ASCII JSON; never fails, whatever bytes the names hold."""
    return json.dumps(msgspec.to_builtins(message), separators=(",", ":")).encode("ascii")


def decode(raw: bytes, kind: type[Message]) -> Message:
    """Raises ValueError (of which msgspec's and json's errors are) with a text that says what is wrong where."""
    try:
        return msgspec.convert(json.loads(raw, parse_constant=_not_a_number), kind)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


def _not_a_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")
