"""Which keys of an object store POSIX can name, and how.

A store has a flat set of keys; a filesystem has a tree of components that are 1 to 255 bytes long,
are neither '.' nor '..', and hold neither '/' nor NUL. A key is split at '/', and is reachable under
exactly its own bytes when every component is such a name. Nothing is escaped or normalised: an
escaped name could collide with a real key, and a program that writes a manifest of keys finds its
files under the very same strings. The rest is *unreachable*, is counted where it lies, and never
disturbs its siblings:

* a component that POSIX cannot name: everything below it is unreachable. With a delimiter the store
  shows it as one prefix (`a//` or `../`), so it counts as one, however many keys are below;
* a key that is also a prefix (`x` beside `x/1`): the directory wins, since it leads to more keys;
* the content of a marker object (`dir/`): the directory exists, its bytes have no name. An empty
  marker loses nothing and is not counted.

A listing shows `x` before `x/`, with names such as `x-1` between them (bytes 0x01 to 0x2e sort
before '/'), perhaps on different pages. A file is therefore *held back* until the listing has passed
`x/` or ended: otherwise `x` would be a file for a moment in every listing, and everything that is open
below the directory would break. What is held back is always a chain of prefixes of the last key of the page,
so it is a handful of names at most. In a store that lists out of order the directory still wins, only later.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

import msgspec

from tiercache.core.record import Kind, Listed, Page
from tiercache.errors import BadResponse

NAME_MAX_BYTES = 255


class Fault(enum.Enum):
    """Why POSIX has no name for a component."""

    EMPTY = "it is empty"
    DOT = "it is '.' or '..'"
    LONG = f"it is longer than {NAME_MAX_BYTES} bytes"
    FORBIDDEN = "it holds NUL or '/'"


class FileName(msgspec.Struct, frozen=True):
    name: bytes
    listed: Listed


class DirectoryName(msgspec.Struct, frozen=True):
    name: bytes


class Absent(msgspec.Struct, frozen=True):
    """Neither the key nor anything below it exists."""


class Undecided(msgspec.Struct, frozen=True):
    """The answer ended before `name/` could show: a directory if anything is below it, else `otherwise`."""

    otherwise: FileName | Absent


class Leaf(msgspec.Struct, frozen=True):
    """A file of a recursive listing; `parents` are the directories above it, outermost first."""

    parents: tuple[bytes, ...]
    file: FileName


class Branch(msgspec.Struct, frozen=True):
    """A directory that a recursive listing shows by its marker object only."""

    parents: tuple[bytes, ...]


Named = FileName | DirectoryName


def encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def decode(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def fault(name: bytes) -> Fault | None:
    """Why POSIX cannot name this component, or None when it can."""
    if not name:
        return Fault.EMPTY
    if name in (b".", b".."):
        return Fault.DOT
    if len(name) > NAME_MAX_BYTES:
        return Fault.LONG
    if b"\0" in name or b"/" in name:
        return Fault.FORBIDDEN
    return None


def components(path: str) -> list[bytes]:
    """A path below a dataset as names; '' is the dataset itself, one '/' at the end is allowed. Faults are left in."""
    return [encode(part) for part in path.removesuffix("/").split("/")] if path.removesuffix("/") else []


def passed(key: str, last: str) -> bool:
    """Whether a listing that has come from `key` to `last` must have shown `key + '/'` if it is there.

    Only strings that begin with `key` lie between `key` and `key + '/'` in byte order, so one comparison decides.
    """
    return last != "" and (not last.startswith(key) or last[len(key) : len(key) + 1] >= "/")


def last_of(page: Page) -> str:
    """The greatest name of a page, in byte order; '' when it is empty."""
    ends = [page.objects[-1].key] if page.objects else []
    ends += page.prefixes[-1:]
    return max(ends, key=encode, default="")


def below(prefix: str, key: str) -> str:
    """The part of a listed key after the prefix that was asked for."""
    if not key.startswith(prefix):
        raise BadResponse(f"the store answered key {key!r} to a listing of prefix {prefix!r}")
    return key[len(prefix) :]


def decide(prefix: str, name: bytes, page: Page) -> Named | Absent | Undecided:
    """What `name` is, from the first names that the store lists for the key `prefix + name`, with delimiter '/'."""
    key = prefix + decode(name)
    for text in (*(listed.key for listed in page.objects), *page.prefixes):
        below(key, text)
    if f"{key}/" in page.prefixes or any(listed.key == f"{key}/" for listed in page.objects):
        return DirectoryName(name)
    found: FileName | Absent = Absent()
    for listed in page.objects:
        if listed.key == key:
            found = FileName(name, listed)
    if page.token and not passed(key, last_of(page)):
        return Undecided(found)
    return found


class Level:
    """Turns the pages of one directory's listing (with delimiter) into names.

    `exists` tells that anything at all was listed; `unreachable_count` and `example` what of it has no name.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.exists = False
        self.unreachable_count = 0
        self.example = ""
        self._seen: dict[bytes, Kind] = {}
        self._held: dict[str, FileName] = {}

    def __contains__(self, name: bytes) -> bool:
        """Whether this listing has shown the name and decided what it is."""
        return name in self._seen

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def held(self) -> frozenset[bytes]:
        """Names that are held back: when they are decided, what is known of them is as old as an earlier page."""
        return frozenset(file.name for file in self._held.values())

    def take(self, page: Page) -> list[Named]:
        """The names that are decided now. A name comes again only when it turned out to be something else."""
        self.exists = self.exists or bool(page.objects or page.prefixes)
        found: list[Named] = []
        for prefix in page.prefixes:
            rest = below(self.prefix, prefix)
            if not rest.endswith("/"):
                raise BadResponse(f"the store answered prefix {prefix!r}, which does not end in '/'")
            found.extend(self._directory(rest[:-1]))
        for listed in page.objects:
            found.extend(self._object(listed))
        found.extend(self._release(last_of(page), ended=not page.token))
        return found

    def _directory(self, text: str) -> Iterator[DirectoryName]:
        name = encode(text)
        key = self.prefix + text
        if fault(name) is not None:
            self._unreachable(f"{key}/")
            return
        if self._held.pop(key, None) is not None or self._seen.get(name) is Kind.FILE:
            self._unreachable(key)
        if self._seen.get(name) is not Kind.DIRECTORY:
            self._seen[name] = Kind.DIRECTORY
            yield DirectoryName(name)

    def _object(self, listed: Listed) -> Iterator[DirectoryName]:
        text = below(self.prefix, listed.key)
        name = encode(text)
        if not text:
            if listed.size_bytes:
                self._unreachable(listed.key)
        elif text.endswith("/") and "/" not in text[:-1]:
            # Some stores list a marker as an object where S3 shows a prefix.
            yield from self._directory(text[:-1])
        elif fault(name) is not None or self._seen.get(name) is Kind.DIRECTORY:
            self._unreachable(listed.key)
        else:
            self._held[listed.key] = FileName(name, listed)

    def _release(self, last: str, *, ended: bool) -> list[FileName]:
        free = [key for key in self._held if ended or passed(key, last)]
        found = [self._held.pop(key) for key in free]
        for file in found:
            self._seen[file.name] = Kind.FILE
        return found

    def _unreachable(self, key: str) -> None:
        self.unreachable_count += 1
        self.example = self.example or key


class Tree:
    """Turns the pages of a recursive listing (no delimiter) into files with their directories."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.unreachable_count = 0
        self.example = ""
        self._held: list[Leaf] = []

    @property
    def held(self) -> frozenset[str]:
        """Keys that are held back, as in `Level`."""
        return frozenset(leaf.file.listed.key for leaf in self._held)

    def take(self, page: Page) -> list[Leaf | Branch]:
        """The files and markers that are decided now."""
        found: list[Leaf | Branch] = []
        for listed in page.objects:
            text = below(self.prefix, listed.key)
            found.extend(self._settle(listed.key))
            if not text:
                if listed.size_bytes:
                    self._unreachable(listed.key)
                continue
            names = [encode(part) for part in text.split("/")]
            marker = not names[-1]
            if any(fault(name) is not None for name in (names[:-1] if marker else names)):
                self._unreachable(listed.key)
            elif marker:
                found.append(Branch(tuple(names[:-1])))
                if listed.size_bytes:
                    self._unreachable(listed.key)
            else:
                self._held.append(Leaf(tuple(names[:-1]), FileName(names[-1], listed)))
        if not page.token:
            found.extend(self._held)
            self._held.clear()
        return found

    def _settle(self, key: str) -> Iterator[Leaf]:
        """Let go of the files held back that `key` decides: those that turn out to be directories are unreachable."""
        while self._held:
            held = self._held[-1].file.listed.key
            if key.startswith(f"{held}/"):
                self._unreachable(held)
                self._held.pop()
            elif passed(held, key):
                yield self._held.pop()
            else:
                return

    def _unreachable(self, key: str) -> None:
        self.unreachable_count += 1
        self.example = self.example or key
