"""The typed form of the configuration: one struct a table, one field a key, unit last.

A key of the TOML file is the field's name without its unit: the field `capacity_bytes` is the key
`capacity` and takes "3.5TB"; `metadata_ttl_seconds` is `metadata_ttl` and takes "1m". One rule
instead of two lists that have to be kept equal (structs of texts beside structs of numbers).
`config/__init__.py` makes these from a file or from options, and checks them.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec

from tiercache.config.location import Location, parse_source
from tiercache.config.quantity import MAX_DURATION_SECONDS, MAX_SIZE_BYTES

MIB = 2**20
DEFAULT_METADATA_TTL_SECONDS = 60.0

Ratio = Annotated[float, msgspec.Meta(gt=0, le=1)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE_BYTES)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_DURATION_SECONDS)]
Timeout = Annotated[float, msgspec.Meta(gt=0, le=3600)]  # a reader that waits for longer than an hour hangs
Id = Annotated[int, msgspec.Meta(ge=0, lt=2**32 - 1)]  # (uid_t)-1 means "leave as it is" to chown(2)


ReadPath = Literal["auto", "plain", "python"]


def _key_of(field: str) -> str:
    return re.sub(r"_(bytes|seconds|ratio)$", "", field)


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename=_key_of):
    pass


class MountSettings(_Table, frozen=True, kw_only=True):
    """`[mount]`. `uid` and `gid` own every file (None: the daemon's own).

    `read_path` is the best path that reads of hot files may take: the kernel's own (auto), the daemon's threads (plain), Python.
    """

    point: str
    allow_other: bool
    uid: Id | None = None
    gid: Id | None = None
    file_mode: int = 0o444
    dir_mode: int = 0o555
    metadata_ttl_seconds: Seconds = DEFAULT_METADATA_TTL_SECONDS
    negative_ttl_seconds: Seconds = 5.0  # short: a file that a job waits for appears soon
    read_path: ReadPath = "auto"


class HotSettings(_Table, frozen=True, kw_only=True):
    """`[hot]`. `capacity_bytes` is that of all paths together, each having an equal part.

    None for `capacity_bytes`: 80 % of what is free there; for `min_free_bytes`: 10 % of each file
    system. Both depend on the disk, so that the hot tier works them out, not this file.
    """

    paths: tuple[str, ...]
    capacity_bytes: Bytes | None = None
    min_free_bytes: Bytes | None = None
    high_watermark_ratio: Ratio = 0.95
    low_watermark_ratio: Ratio = 0.90
    chunk_bytes: Bytes = msgspec.field(default=8 * MIB, name="chunk_size")
    scrub_rate_bytes: Bytes = 32_000_000  # a second; 3.5 TB in 30 hours

    @property
    def capacity_each_bytes(self) -> int | None:
        return None if self.capacity_bytes is None else self.capacity_bytes // len(self.paths)


class WarmSettings(_Table, frozen=True, kw_only=True):
    """`[warm]`. Without targets there is no warm tier. An object's shards lie on `shards_count` of the targets, one on each.

    None for `capacity_bytes`, which is that of all targets together: until 10 % of a target's file system is free.
    Objects of up to `pack_threshold_bytes` share packs; 0: none do.
    """

    targets: tuple[str, ...] = ()
    data_shards: Annotated[int, msgspec.Meta(ge=1, le=32)] = 4
    parity_shards: Annotated[int, msgspec.Meta(ge=0, le=8)] = 2
    zstd_level: Annotated[int, msgspec.Meta(ge=1, le=19)] = 3
    capacity_bytes: Bytes | None = None
    pack_threshold_bytes: Bytes = msgspec.field(default=MIB, name="pack_threshold")
    scrub_rate_bytes: Bytes = 64_000_000  # a second, of all targets together; 100 TB in 18 days

    @property
    def shards_count(self) -> int:
        return self.data_shards + self.parity_shards


class ColdSettings(_Table, frozen=True, kw_only=True):
    """`[cold]`: what all datasets share. `deadline_seconds` bounds an operation with all its retries."""

    endpoint_url: str | None = None
    region: str | None = None
    concurrency: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 32
    connect_timeout_seconds: Timeout = 5.0
    read_timeout_seconds: Timeout = 15.0
    deadline_seconds: Timeout = 30.0


class PolicySettings(_Table, frozen=True, kw_only=True):
    """`[policy]`. `read_ahead_bytes` is one budget for all streams; smaller files than `whole_file_bytes` are filled whole."""

    read_ahead_bytes: Bytes = 256 * MIB
    whole_file_bytes: Bytes = 64 * MIB


class AdminSettings(_Table, frozen=True, kw_only=True):
    """`[admin]`. `socket` None: a name made from the mount point; `http` None: no TCP port."""

    socket: str | None = None
    group: str | None = None
    http: tuple[str, int] | None = None


class DatasetSettings(_Table, frozen=True, kw_only=True):
    """`[[datasets]]`, with what it leaves out taken from `[cold]` and `[mount]`.

    `id` replaces the source id that is otherwise endpoint host and bucket.
    """

    name: str
    cold: str
    replica: str | None = None
    replica_trust: Literal["verify", "mtime"] = "verify"
    pin: bool = False
    immutable: bool = False
    metadata_ttl_seconds: Seconds
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    anonymous: bool = False
    requester_pays: bool = False
    id: str | None = None

    @property
    def location(self) -> Location:
        return parse_source(self.cold)


class Config(_Table, frozen=True, kw_only=True):
    """`single`: the one dataset is shown at the root of the mount, not in a directory of its name."""

    mount: MountSettings
    hot: HotSettings
    warm: WarmSettings = WarmSettings()
    cold: ColdSettings
    policy: PolicySettings
    admin: AdminSettings
    datasets: tuple[DatasetSettings, ...]
    single: bool = False
