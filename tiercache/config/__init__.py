"""What the operator decided: the tables of `tiercache.toml`, or the options of `tiercache mount`.

Both ways go through one path: a document (nested dicts with TOML's spelling) is checked for unknown
keys, its texts become numbers, datasets inherit what they leave out, msgspec checks types and ranges,
and `rules` checks what no type can say. So an option and its key cannot drift apart.

Every complaint is a UsageError that names the culprit's key (or option) and its file, and what to
write instead. `config/tiercache.toml` shows every key with its default.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tiercache.config.location import DirectoryLocation, Location, S3Location, parse_source
from tiercache.config.quantity import parse_address, parse_duration, parse_mode, parse_shards, parse_size
from tiercache.config.rules import first_fault
from tiercache.config.settings import (
    DEFAULT_METADATA_TTL_SECONDS,
    AdminSettings,
    ColdSettings,
    Config,
    DatasetSettings,
    HotSettings,
    MountSettings,
    PolicySettings,
    WarmSettings,
)
from tiercache.errors import UsageError

__all__ = [
    "AdminSettings",
    "ColdSettings",
    "Config",
    "DatasetSettings",
    "HotSettings",
    "MountSettings",
    "PolicySettings",
    "WarmSettings",
    "decode",
    "default_hot_path",
    "encode",
    "from_mount",
    "load",
    "parse_duration",
    "parse_size",
]

MAX_FILE_BYTES = 2**20  # of a configuration file: more is a data file given by mistake

Document = dict[str, Any]

_TABLES: dict[str, type[msgspec.Struct]] = {
    "mount": MountSettings,
    "hot": HotSettings,
    "warm": WarmSettings,
    "cold": ColdSettings,
    "policy": PolicySettings,
    "admin": AdminSettings,
}


def load(path: str | os.PathLike[str], *, socket: str | None = None) -> Config:
    """Read a configuration file. Raises UsageError that names file, key (or line) and what to write.

    `socket` (that of an option or of the environment) goes before `admin.socket`.
    """
    name = os.fspath(path)
    document = _parse_toml(name)
    if socket is not None and isinstance(document.get("admin", {}), dict):
        document["admin"] = {**document.get("admin", {}), "socket": socket}
        return _Reading(f"{name}: ", {"admin.socket": "--socket"}).config(document, single=False)
    return _Reading(f"{name}: ", {}).config(document, single=False)


def from_mount(
    source: str,
    mountpoint: str,
    *,
    hot: Sequence[str] = (),
    hot_size: str | None = None,
    replica: str | None = None,
    warm_targets: Sequence[str] = (),
    ec: str | None = None,
    endpoint_url: str | None = None,
    region: str | None = None,
    profile: str | None = None,
    anonymous: bool = False,
    requester_pays: bool = False,
    immutable: bool = False,
    name: str | None = None,
    allow_other: bool | None = None,
    uid: int | None = None,
    gid: int | None = None,
    file_mode: str | None = None,
    dir_mode: str | None = None,
    read_path: str | None = None,
    socket: str | None = None,
) -> Config:
    """The configuration of `tiercache mount`: one dataset, shown at the root. Relative paths are the caller's.

    Texts are those of the options (`hot_size` "100GB", `ec` "4+2", modes in octal). Raises UsageError that names the option.
    """
    point = os.path.abspath(mountpoint)
    dataset = {
        "name": _default_name(parse_source(source)) if name is None else name,
        "cold": source,
        "replica": None if replica is None else _absolute(replica),
        "endpoint_url": endpoint_url,
        "region": region,
        "profile": profile,
        "anonymous": anonymous,
        "requester_pays": requester_pays,
        "immutable": immutable,
    }
    modes = {
        "allow_other": allow_other,
        "uid": uid,
        "gid": gid,
        "file_mode": file_mode,
        "dir_mode": dir_mode,
        "read_path": read_path,
    }
    document = {
        "mount": {"point": point, **_given(modes)},
        "hot": _given({"paths": [_absolute(path) for path in hot] or None, "capacity": hot_size}),
        "warm": _warm_table(warm_targets, ec),
        "admin": _given({"socket": socket}),
        "datasets": [{key: value for key, value in _given(dataset).items() if value is not False}],
    }
    return _Reading("", _OPTIONS).config(document, single=True)


def _warm_table(targets: Sequence[str], ec: str | None) -> Document:
    table: Document = {"targets": [_absolute(path) for path in targets]} if targets else {}
    if ec is not None:
        try:
            table["data_shards"], table["parity_shards"] = parse_shards(ec)
        except UsageError as error:
            raise UsageError(f"--ec: {error}", hint=error.hint) from error
    return table


def _absolute(path: str) -> str:
    """An empty path stays one, to be refused: a variable that was not set must not mean the working directory."""
    return os.path.abspath(path) if path else path


def default_hot_path(mountpoint: str) -> str:
    """A directory per mount point: below /var/cache/tiercache for root, else below $XDG_CACHE_HOME/tiercache.

    Readable, and never the same for two mount points: their last component and a hash of the whole.
    """
    if os.geteuid() == 0:
        parent = "/var/cache"
    else:
        parent = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    point = os.path.abspath(mountpoint)
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(point)).strip(".-")[:40] or "root"
    digest = hashlib.blake2b(os.fsencode(point), digest_size=4).hexdigest()
    return os.path.join(parent, "tiercache", f"{label}-{digest}")


def encode(config: Config) -> bytes:
    """JSON for the process that is to serve it. A path that is not UTF-8 survives (lone surrogates as \\u escapes)."""
    return json.dumps(msgspec.to_builtins(config)).encode("ascii")


def decode(raw: bytes) -> Config:
    """The inverse of `encode`. Raises UsageError when it is not what `encode` wrote."""
    try:
        return msgspec.convert(json.loads(raw), Config)
    except (ValueError, msgspec.ValidationError) as error:
        raise UsageError(f"the configuration that was handed over is damaged: {error}") from error


def _parse_toml(name: str) -> Document:
    try:
        with open(name, "rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}", hint="give the path of a readable configuration file") from error
    if len(raw) > MAX_FILE_BYTES:
        raise UsageError(f"{name}: larger than 1 MiB", hint="give the path of a configuration file")
    try:
        return tomllib.loads(raw.decode())
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{name}: not UTF-8 text (at line {line})", hint="save the file as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{name}: {error}", hint="correct the TOML there; texts, sizes and times need quotes") from error


def _given(table: Document) -> Document:
    return {key: value for key, value in table.items() if value is not None}


def _default_name(location: Location) -> str:
    match location:
        case S3Location(bucket, prefix):
            label = prefix.rstrip("/").rpartition("/")[2] or bucket
        case DirectoryLocation(path):
            label = os.path.basename(path)
    return re.sub(r"[^\w.+-]+", "-", label).strip(".-")[:64] or "dataset"


_OPTIONS = {
    "mount.point": "MOUNTPOINT",
    "mount.allow_other": "-o allow_other",
    "mount.uid": "-o uid",
    "mount.gid": "-o gid",
    "mount.file_mode": "-o file_mode",
    "mount.dir_mode": "-o dir_mode",
    "mount.read_path": "-o read_path",
    "admin.socket": "--socket",
    "hot.paths": "--hot",
    "hot.capacity": "--hot-size",
    "warm.targets": "--warm-target",
    "warm.data_shards": "--ec",
    "warm.parity_shards": "--ec",
    "datasets[0].name": "--name",
    "datasets[0].cold": "SOURCE",
    "datasets[0].replica": "--replica",
    "datasets[0].endpoint_url": "--endpoint-url",
    "datasets[0].region": "--region",
    "datasets[0].profile": "--profile",
    "datasets[0].anonymous": "--no-sign-request",
    "datasets[0].requester_pays": "--requester-pays",
    "datasets[0].immutable": "--immutable",
}


class _Reading:
    """One document on its way to a Config. `origin` begins every complaint; `options` names keys as options."""

    def __init__(self, origin: str, options: Mapping[str, str]) -> None:
        self._origin = origin
        self._options = options

    def config(self, document: Document, *, single: bool) -> Config:
        self._check_shape(document)
        tables = {name: self._numbers(document.get(name, {}), name, table) for name, table in _TABLES.items()}
        datasets = [
            self._numbers(dataset, f"datasets[{position}]", DatasetSettings)
            for position, dataset in enumerate(document.get("datasets", []))
        ]
        _inherit(tables, datasets)
        try:
            config = msgspec.convert({**tables, "datasets": datasets, "single": single}, Config)
        except msgspec.ValidationError as error:
            raise self._of_validation(error) from error
        fault = first_fault(config, document, self._called)
        if fault is not None:
            raise self._fault(fault.place, fault.message, fault.hint)
        return config

    def _check_shape(self, document: Document) -> None:
        self._check_keys(document, "", [*_TABLES, "datasets"])
        for name, table in _TABLES.items():
            if name in document:
                self._check_table(document[name], name, table)
        datasets = document.get("datasets", [])
        if not isinstance(datasets, list):
            raise self._fault("datasets", "must be a list of tables", "begin each dataset with [[datasets]] (two brackets)")
        for position, dataset in enumerate(datasets):
            self._check_table(dataset, f"datasets[{position}]", DatasetSettings)

    def _check_table(self, value: object, place: str, table: type[msgspec.Struct]) -> None:
        if not isinstance(value, dict):
            raise self._fault(place, f"must be a table, not {type(value).__name__}", f"write [{place}] and its keys below")
        self._check_keys(value, place, list(table.__struct_encode_fields__))

    def _check_keys(self, table: Document, place: str, allowed: Sequence[str]) -> None:
        for key in table:
            if key not in allowed:
                near = difflib.get_close_matches(key, allowed, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]}?" if near else f"possible here: {', '.join(allowed)}"
                raise self._fault(f"{place}.{key}" if place else key, "unknown key", hint)

    def _numbers(self, table: Document, place: str, settings: type[msgspec.Struct]) -> Document:
        """The table with its texts for sizes, times, modes and addresses turned into what the fields hold."""
        names = dict(zip(settings.__struct_encode_fields__, settings.__struct_fields__, strict=True))
        return {key: self._number(value, f"{place}.{key}", names[key]) for key, value in table.items()}

    def _number(self, value: object, place: str, field: str) -> object:
        try:
            match value:
                case str() if field.endswith("_bytes"):
                    return parse_size(value)
                case str() if field.endswith("_seconds"):
                    return parse_duration(value)
                case str() if field.endswith("_mode"):
                    return parse_mode(value)
                case str() if field == "http":
                    return parse_address(value)
                case float() if not math.isfinite(value):
                    raise UsageError(f"{value} is not a number to work with", hint="write a finite number")
                case int() if field.endswith("_mode"):
                    raise UsageError("must be a text", hint='write the permission bits in octal, as in "0444"')
        except UsageError as error:
            raise self._fault(place, str(error), error.hint) from error
        return value

    def _of_validation(self, error: msgspec.ValidationError) -> UsageError:
        message, _, path = str(error).partition(" - at `$")
        place = path.rstrip("`").removeprefix(".")
        missing = re.fullmatch(r"Object missing required field `(\w+)`", message)
        if missing is not None:
            return self._fault(f"{place}.{missing[1]}".lstrip("."), "is missing", "it has no default: write it")
        message = message.replace("`", "").replace(" | null", "").replace("Expected", "expected")
        return self._fault(place, message, "config/tiercache.toml shows every key with an example")

    def _fault(self, place: str, message: str, hint: str) -> UsageError:
        return UsageError(f"{self._origin}{self._called(place)}: {message}", hint=hint)

    def _called(self, place: str) -> str:
        return self._options.get(place) or self._options.get(re.sub(r"\[\d+\]$", "", place)) or place


def _inherit(tables: dict[str, Document], datasets: list[Document]) -> None:
    """Defaults that follow from other keys or from who runs the daemon."""
    mount, hot, warm, cold = tables["mount"], tables["hot"], tables["warm"], tables["cold"]
    mount.setdefault("allow_other", os.geteuid() == 0)
    if isinstance(mount.get("point"), str):
        hot.setdefault("paths", [default_hot_path(mount["point"])])
    if isinstance(warm.get("targets"), list) and len(warm["targets"]) == 1 and not {"data_shards", "parity_shards"} & warm.keys():
        warm.update(data_shards=1, parity_shards=0)
    if isinstance(hot.get("chunk_size"), int):
        warm.setdefault("pack_threshold", min(WarmSettings().pack_threshold_bytes, hot["chunk_size"]))
    deadline_seconds = cold.get("deadline")
    if isinstance(deadline_seconds, int | float):
        cold.setdefault("connect_timeout", min(ColdSettings().connect_timeout_seconds, deadline_seconds))
        cold.setdefault("read_timeout", min(ColdSettings().read_timeout_seconds, deadline_seconds))
    for dataset in datasets:
        dataset.setdefault("metadata_ttl", mount.get("metadata_ttl", DEFAULT_METADATA_TTL_SECONDS))
        for key in ("endpoint_url", "region"):
            if key in cold:
                dataset.setdefault(key, cold[key])
