"""The records that travel between tiers, index, engine and FUSE, and the names of things.

Keys are `str` in UTF-8 with `surrogateescape` (PEP 383): any byte string that a directory or a
store may hold as a name survives the round trip. Names (one path component) are `bytes`, because
that is what the kernel speaks.
"""

from __future__ import annotations

import enum
from hashlib import blake2b
from typing import NewType

import msgspec

ObjectId = NewType("ObjectId", bytes)
Inode = NewType("Inode", int)

OBJECT_ID_BYTES = 20
ROOT_INODE = Inode(1)  # fixed by the FUSE protocol (FUSE_ROOT_ID)


def object_id(source_id: str, key: str, version: str) -> ObjectId:
    """BLAKE2b-160 of (source id, key, version tag), each length-prefixed so that none can run into the next.

    `source_id` is the same on every node (see DESIGN: endpoint host + bucket), so equal objects have
    equal ids everywhere without any exchange between nodes.
    """
    digest = blake2b(digest_size=OBJECT_ID_BYTES, person=b"tiercache-object")
    for part in (source_id, key, version):
        raw = part.encode("utf-8", "surrogateescape")
        digest.update(len(raw).to_bytes(4, "big"))
        digest.update(raw)
    return ObjectId(digest.digest())


def inode_number(dataset: str, path: str, version: str, attempt: int = 0) -> Inode:
    """A 63-bit number for one version of a file (or, with version '', for a directory).

    Computed from the name alone: a lost index gives every live file its old number again, and
    never gives that number to another one. `attempt` > 0 resolves a collision, which the index
    records. 0 and 1 are the kernel's.
    """
    digest = blake2b(digest_size=8, person=b"tiercache-inode", salt=attempt.to_bytes(4, "big"))
    for part in (dataset, path, version):
        raw = part.encode("utf-8", "surrogateescape")
        digest.update(len(raw).to_bytes(4, "big"))
        digest.update(raw)
    number = int.from_bytes(digest.digest(), "big") >> 1
    return Inode(number if number > ROOT_INODE else number + 2)


class ObjectRef(msgspec.Struct, frozen=True):
    """One file of a dataset in one version: all that a tier needs to find and check its bytes.

    `version` is the version tag: for S3 the ETag without quotes, ':' and the size; for
    directories 'size-mtime_ns-ctime_ns'. `object_id` follows from the rest and is kept because it is asked for often.
    """

    dataset: str
    key: str
    version: str
    size_bytes: int
    mtime_seconds: int
    object_id: ObjectId


class Listed(msgspec.Struct, frozen=True):
    """One object as a cold store lists it. `restored` matters only when `archived`."""

    key: str
    version: str
    size_bytes: int
    mtime_seconds: int
    archived: bool = False


class Page(msgspec.Struct, frozen=True):
    """One page of a listing: objects and, with a delimiter, the prefixes below (each ends in '/').

    `token` continues the listing; '' when this is the last page.
    """

    objects: tuple[Listed, ...]
    prefixes: tuple[str, ...]
    token: str


class Kind(enum.IntEnum):
    FILE = 0
    DIRECTORY = 1


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One name in the namespace, as the index keeps it under its inode number.

    `key` is the object's full key for a file; for a directory the prefix that lists it ('' or
    ending in '/'). `object_id` is b'' and `version` '' for directories.
    """

    inode: Inode
    parent: Inode
    name: bytes
    kind: Kind
    dataset: str
    key: str
    version: str
    size_bytes: int
    mtime_seconds: int
    object_id: ObjectId
    archived: bool = False

    @property
    def ref(self) -> ObjectRef:
        return ObjectRef(self.dataset, self.key, self.version, self.size_bytes, self.mtime_seconds, self.object_id)


class Link(msgspec.Struct, frozen=True, array_like=True):
    """What (parent inode, name) leads to, and when the cold store last confirmed it (Unix seconds)."""

    inode: Inode
    checked_seconds: float


class DirectoryState(msgspec.Struct, frozen=True, array_like=True):
    """When a directory was last listed to its end (Unix seconds), and what of it POSIX cannot name.

    `unreachable_count` keys lie directly in it and have no name; `example` is one of them.
    """

    listed_seconds: float
    entry_count: int
    unreachable_count: int
    example: str = ""


class HotRecord(msgspec.Struct, frozen=True, array_like=True):
    """One object in the hot tier. Its chunks are separate records, so that a commit stays small.

    `directory` is the position of the hot directory that holds the file. `held_bytes` is what its
    committed chunks occupy (whole filesystem blocks).
    """

    object_id: ObjectId
    dataset: str
    key: str
    version: str
    size_bytes: int
    chunk_bytes: int
    directory: int
    held_bytes: int
    complete: bool
    accessed_seconds: int
    access_count: int


class ChunkRecord(msgspec.Struct, frozen=True, array_like=True):
    """xxh3-64 of a committed chunk, and the boot epoch in which it was written or last verified."""

    digest: int
    epoch: int


class Pin(msgspec.Struct, frozen=True):
    """Exclusion from eviction of all keys of `dataset` under `prefix` ('' = all; a file's own key is a prefix too).

    `exact` pins one key only. `expires_seconds` is 0 for never (Unix seconds).
    """

    dataset: str
    prefix: str
    exact: bool
    owner: str
    reason: str
    created_seconds: int
    expires_seconds: int
    bytes_at_admission: int
