"""What contradicts itself in a configuration although every single value is a possible one.

Paths are compared as they are written, without touching them: a path may lie on a file system
that hangs. The cache directory's claim compares them again as they really are when it opens them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tiercache.config.location import DirectoryLocation, parse_source
from tiercache.config.settings import Config, DatasetSettings
from tiercache.errors import UsageError

MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 2**16, 2**28
CHUNK_ALIGNMENT_BYTES = 4096  # a chunk's ends must be those of pages, or two fills would write one page
MIN_CHUNKS = 4  # what one reader, its read-ahead and one eviction need at the same time
MAX_SOCKET_PATH_BYTES = 107  # sun_path without its NUL
MAX_NAME_BYTES = 128
_NAME = re.compile(r"[^\W_][\w.+ -]*|_[\w.+ -]+")
MAX_SHARDS = 32  # of one object
MIN_TIMEOUT_SECONDS = 0.1  # less than a packet takes around the world
MIN_DEADLINE_SECONDS = 1.0
MAX_NEGATIVE_TTL_SECONDS = 86400.0
MIN_LOW_WATERMARK_RATIO, MIN_HIGH_WATERMARK_RATIO = 0.1, 0.5
MAX_READ_AHEAD_BYTES = 2**36  # it is memory as well
_REGION = re.compile(r"(?![0-9]+$)(?!-)[A-Za-z0-9-]{1,63}(?<!-)")  # what botocore takes
_OF_S3_ONLY = ("endpoint_url", "region", "profile", "anonymous", "requester_pays")


class Fault(msgspec.Struct, frozen=True):
    """`place` is the key ('hot.low_watermark')."""

    place: str
    message: str
    hint: str


def first_fault(config: Config, written: Mapping[str, Any], called: Callable[[str], str]) -> Fault | None:
    """`written`: the document as it was written, to tell what was asked for from what was inherited.

    `called`: what a key is called in a message (an option's name, when there was no file).
    """
    rules = (
        _text_faults(config),
        _path_faults(config),
        _range_faults(config),
        _limit_faults(config),
        _warm_faults(config, written.get("warm", {}), called),
        _dataset_faults(config, written.get("datasets", [])),
        _overlap_faults(config, called),
    )
    return next((fault for rule in rules for fault in rule), None)


def _texts(value: object, place: str) -> Iterator[tuple[str, str]]:
    """Every text of the configuration with the key that names it."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, tuple):
        for position, part in enumerate(value):
            yield from _texts(part, f"{place}[{position}]")
    elif isinstance(value, msgspec.Struct):
        for key, field in zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True):
            yield from _texts(getattr(value, field), f"{place}.{key}" if place else key)


def _text_faults(config: Config) -> Iterator[Fault]:
    """A text of nothing is a variable that was not set, and never a wish."""
    for place, text in _texts(config, ""):
        if not text.strip():
            yield Fault(place, "is empty", "write a value, or leave it out")
    regions = [("cold.region", config.cold.region)]
    regions += [(f"datasets[{position}].region", dataset.region) for position, dataset in enumerate(config.datasets)]
    for place, region in regions:
        if region is not None and _REGION.fullmatch(region) is None:
            yield Fault(place, f"{region!r} cannot be the name of a region", "write it as in eu-west-1")


def _range_faults(config: Config) -> Iterator[Fault]:
    """Numbers with which nothing would work, although they are numbers."""
    mount, hot, cold = config.mount, config.hot, config.cold
    for key, seconds, least_seconds in (
        ("deadline", cold.deadline_seconds, MIN_DEADLINE_SECONDS),
        ("connect_timeout", cold.connect_timeout_seconds, MIN_TIMEOUT_SECONDS),
        ("read_timeout", cold.read_timeout_seconds, MIN_TIMEOUT_SECONDS),
    ):
        if seconds < least_seconds:
            yield Fault(f"cold.{key}", f"{seconds:g} s is too short for any store", f"write at least {least_seconds:g}s")
    if mount.negative_ttl_seconds > MAX_NEGATIVE_TTL_SECONDS:
        yield Fault(
            "mount.negative_ttl",
            f"{mount.negative_ttl_seconds:g} s would hide new files for longer than a day",
            "write at most 1d",
        )
    for key, ratio, least_ratio in (
        ("high_watermark", hot.high_watermark_ratio, MIN_HIGH_WATERMARK_RATIO),
        ("low_watermark", hot.low_watermark_ratio, MIN_LOW_WATERMARK_RATIO),
    ):
        if ratio < least_ratio:
            yield Fault(f"hot.{key}", f"{ratio:g} would leave the cache all but empty", f"write {least_ratio:g} to 1")
    if config.policy.read_ahead_bytes > MAX_READ_AHEAD_BYTES:
        yield Fault(
            "policy.read_ahead", f"{config.policy.read_ahead_bytes} bytes is more than can be under way", "write at most 64GiB"
        )
    for key, mode, needed in (("file_mode", mount.file_mode, 0o444), ("dir_mode", mount.dir_mode, 0o555)):
        if not any(mode & needed & who == needed & who for who in (0o700, 0o070, 0o007)):
            yield Fault(f"mount.{key}", f"{mode:04o} lets nobody read", f'write "{needed:04o}", or less for group and others')


def _path_faults(config: Config) -> Iterator[Fault]:
    if not config.hot.paths:
        yield Fault("hot.paths", "is empty", "name at least one directory on a local disk, or leave the key out")
    for place, path in _directories(config):
        if "\0" in path:
            yield Fault(place, "holds a NUL character", "write the directory's path")
        if place.startswith("hot.") and not _is_utf8(path):
            yield Fault(place, f"{path!r} is not UTF-8", "choose another name: LMDB, which keeps the index, takes no other")
        if place.startswith("warm.") and not _is_utf8(path):
            yield Fault(place, f"{path!r} is not UTF-8", "choose another name: metrics, which name each target, take no other")
        if not path.startswith("/"):
            yield Fault(place, f"{path!r} is not an absolute path", "begin it with /")
    socket = config.admin.socket
    if socket is not None:
        if not socket.startswith("/"):
            yield Fault("admin.socket", f"{socket!r} is not an absolute path", "begin it with /")
        if len(os.fsencode(socket)) > MAX_SOCKET_PATH_BYTES:
            yield Fault(
                "admin.socket", f"longer than the {MAX_SOCKET_PATH_BYTES} bytes of a socket's path", "choose a shorter one"
            )
        if _inside(socket, config.mount.point) or _normal(socket) == _normal(config.mount.point):
            yield Fault(
                "admin.socket",
                f"{socket} lies inside the mount point {config.mount.point}",
                "choose a path outside it: the daemon would have to ask itself for its own socket",
            )


def _is_utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _limit_faults(config: Config) -> Iterator[Fault]:
    hot, cold = config.hot, config.cold
    if not hot.low_watermark_ratio <= hot.high_watermark_ratio:
        yield Fault(
            "hot.low_watermark",
            f"{hot.low_watermark_ratio} is above high_watermark {hot.high_watermark_ratio}",
            "reclaim starts at the high mark and stops at the low one: lower it",
        )
    if not MIN_CHUNK_BYTES <= hot.chunk_bytes <= MAX_CHUNK_BYTES or hot.chunk_bytes % CHUNK_ALIGNMENT_BYTES:
        yield Fault(
            "hot.chunk_size",
            f"{hot.chunk_bytes} bytes is not possible",
            "choose 64KiB to 256MiB, a multiple of 4KiB; 8MiB is usual",
        )
    each_bytes = hot.capacity_each_bytes
    if each_bytes is not None and each_bytes < MIN_CHUNKS * hot.chunk_bytes:
        yield Fault(
            "hot.capacity",
            f"{each_bytes} bytes for each of {len(hot.paths)} paths is less than {MIN_CHUNKS} chunks of {hot.chunk_bytes} bytes",
            "raise the capacity or lower hot.chunk_size",
        )
    for key, timeout_seconds in (("connect_timeout", cold.connect_timeout_seconds), ("read_timeout", cold.read_timeout_seconds)):
        if timeout_seconds > cold.deadline_seconds:
            yield Fault(
                f"cold.{key}",
                f"{timeout_seconds:g} s is longer than deadline {cold.deadline_seconds:g} s",
                "the deadline bounds an operation with all its retries: raise it",
            )
    yield from _endpoint_faults("cold.endpoint_url", cold.endpoint_url)


def _warm_faults(config: Config, own: Mapping[str, Any], called: Callable[[str], str]) -> Iterator[Fault]:
    warm, chunk_bytes = config.warm, config.hot.chunk_bytes
    if not warm.targets:
        for key in own:
            if key != "targets":
                yield Fault(
                    f"warm.{key}", f"has no meaning without {called('warm.targets')}", "name directories, or leave it out"
                )
        return
    if warm.shards_count > MAX_SHARDS:
        yield Fault(
            "warm.data_shards",
            f"{warm.data_shards}+{warm.parity_shards} is more than {MAX_SHARDS} shards",
            "choose fewer: 8+3 survives three lost targets",
        )
    if len(warm.targets) < warm.shards_count:
        yield Fault("warm.targets", _too_few(config), _more_or_fewer(config, called))
    if warm.pack_threshold_bytes > chunk_bytes:
        yield Fault(
            "warm.pack_threshold",
            f"{warm.pack_threshold_bytes} bytes is more than hot.chunk_size {chunk_bytes}",
            "lower it: an object in a pack is one chunk",
        )
    if warm.capacity_bytes is not None and warm.capacity_bytes < MIN_CHUNKS * chunk_bytes:
        yield Fault(
            "warm.capacity",
            f"{warm.capacity_bytes} bytes is less than {MIN_CHUNKS} chunks of {chunk_bytes} bytes",
            "raise it, or leave it out: then each file system is used until 10 % of it is free",
        )


def _too_few(config: Config) -> str:
    warm = config.warm
    named = "one directory is" if len(warm.targets) == 1 else f"{len(warm.targets)} directories are"
    return (
        f"{named} named, and {warm.data_shards}+{warm.parity_shards} shards need {warm.shards_count}, "
        "as each shard of an object lies on another one"
    )


def _more_or_fewer(config: Config, called: Callable[[str], str]) -> str:
    count = len(config.warm.targets)
    parity_count = min(config.warm.parity_shards, count // 3)
    keys = called("warm.data_shards")
    if keys.startswith("--"):
        fewer = f"{keys} {count - parity_count}+{parity_count}"
    else:
        fewer = f"data_shards = {count - parity_count} and parity_shards = {parity_count}"
    return f"name {config.warm.shards_count - count} more, or choose fewer shards, as in {fewer}"


def _endpoint_faults(place: str, url: str | None) -> Iterator[Fault]:
    if url is None:
        return
    hint = "write scheme and host, as in https://s3.example.org or http://127.0.0.1:9000"
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        usable = usable and not (parts.query or parts.fragment)
    except ValueError:  # a port that is no number, a bracket that is not closed
        usable = False
    if "@" in url:  # it is not repeated: what stands before the @ is a secret
        yield Fault(place, "holds a user name", "take out what stands before the @; credentials come as the AWS tools take them")
        return
    if not usable or any(character.isspace() for character in url):
        yield Fault(place, f"{url!r} is not the URL of an endpoint", hint)


def _dataset_faults(config: Config, written: Sequence[Mapping[str, Any]]) -> Iterator[Fault]:
    if not config.datasets:
        yield Fault("datasets", "there is none", "add a table [[datasets]] with name and cold")
    seen: dict[str, int] = {}
    for position, (dataset, own) in enumerate(zip(config.datasets, written, strict=True)):
        place = f"datasets[{position}]"
        if _NAME.fullmatch(dataset.name) is None or len(os.fsencode(dataset.name)) > MAX_NAME_BYTES:
            yield Fault(
                f"{place}.name",
                f"{dataset.name!r} cannot be the name of a directory of the mount",
                "begin with a letter or digit; letters, digits, blanks and . _ + - may follow",
            )
        if dataset.name in seen:
            yield Fault(
                f"{place}.name", f"{dataset.name!r} is the name of datasets[{seen[dataset.name]}] too", "rename one of them"
            )
        seen[dataset.name] = position
        yield from _source_faults(place, dataset, own)


def _source_faults(place: str, dataset: DatasetSettings, own: Mapping[str, Any]) -> Iterator[Fault]:
    try:
        location = parse_source(dataset.cold)
    except UsageError as error:
        yield Fault(f"{place}.cold", str(error), error.hint)
        return
    if isinstance(location, DirectoryLocation):
        for key in _OF_S3_ONLY:
            if key in own:
                yield Fault(f"{place}.{key}", f"has no meaning for {dataset.cold}", "leave it out: it is for s3:// only")
    yield from _endpoint_faults(f"{place}.endpoint_url", dataset.endpoint_url)
    if dataset.anonymous and dataset.profile is not None:
        yield Fault(f"{place}.anonymous", f"contradicts the profile {dataset.profile!r}", "leave one of them out")
    if dataset.anonymous and dataset.requester_pays:
        yield Fault(f"{place}.anonymous", "contradicts requester_pays: nobody could be billed", "leave one of them out")
    if dataset.immutable and "metadata_ttl" in own:
        yield Fault(f"{place}.metadata_ttl", "contradicts immutable: nothing ever expires", "leave one of them out")
    if "replica_trust" in own and dataset.replica is None:
        yield Fault(f"{place}.replica_trust", "has no meaning without a replica", "add replica, or leave it out")


def _directories(config: Config) -> Iterator[tuple[str, str]]:
    """Every directory of the configuration with the key that names it."""
    yield "mount.point", config.mount.point
    yield from ((f"hot.paths[{position}]", path) for position, path in enumerate(config.hot.paths))
    yield from ((f"warm.targets[{position}]", path) for position, path in enumerate(config.warm.targets))
    for position, dataset in enumerate(config.datasets):
        if dataset.replica is not None:
            yield f"datasets[{position}].replica", dataset.replica
        if dataset.cold.startswith("file://"):
            yield f"datasets[{position}].cold", dataset.cold.removeprefix("file://")


def _overlap_faults(config: Config, called: Callable[[str], str]) -> Iterator[Fault]:
    """Nobody's data is ever taken for a cache, and the mount never reads itself.

    Sources and replicas may overlap one another (a dataset of a directory and one of its parts).
    """
    for (place, path), (other_place, other) in combinations(_directories(config), 2):
        if place.startswith("datasets") and other_place.startswith("datasets"):
            if place.partition(".")[0] == other_place.partition(".")[0] and _normal(path) == _normal(other):
                yield Fault(place, f"{path} is the source itself", "leave the replica out: it would save nothing")
        elif _normal(path) == _normal(other):
            yield Fault(other_place, f"{other} is {called(place)} too", "choose a directory of its own")
        elif _inside(path, other):
            yield Fault(place, f"{path} lies inside {called(other_place)} {other}", "choose a directory outside it")
        elif _inside(other, path):
            yield Fault(other_place, f"{other} lies inside {called(place)} {path}", "choose a directory outside it")


def _normal(path: str) -> str:
    return os.path.normpath(path).replace("//", "/", 1)  # POSIX lets exactly two leading slashes stand


def _inside(path: str, parent: str) -> bool:
    above = _normal(parent)
    return _normal(path).startswith(above if above == "/" else above + "/")
