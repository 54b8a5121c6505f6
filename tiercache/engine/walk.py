"""All files below a prefix, from a recursive listing, page by page: for pins and other work on whole subtrees.

One request gives a thousand files, whatever directories they are in; listing each directory would cost a request a
directory. Entries are recorded as they come, and those of the directories above them as needed, so that what was
walked can be looked up without a request. Names that vanished are not dropped and no directory counts as listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tiercache.core.naming import Branch, DirectoryName, FileName, Leaf, Tree
from tiercache.core.record import Entry
from tiercache.engine.names import Place
from tiercache.engine.recorder import Means, Recorder
from tiercache.errors import BadResponse

Path = tuple[bytes, ...]


class Walk:
    """`start` are the directories from `root` (a dataset's own) to the prefix that is listed."""

    def __init__(self, recorder: Recorder, clock: Callable[[], float], root: Place, start: Sequence[bytes], prefix: str) -> None:
        self._recorder = recorder
        self._clock = clock
        self._root = root
        self._start = tuple(start)
        self._tree = Tree(prefix)
        self._began = (recorder.ticket(), clock())
        self._token = ""
        self._ended = False

    @property
    def unreachable_count(self) -> int:
        """Keys so far that no path can name."""
        return self._tree.unreachable_count

    async def page(self) -> list[Entry]:
        """The next files, up to a thousand; [] at the end. After an error of the store the same page may be asked for again."""
        while not self._ended:
            ticket, asked_seconds = self._recorder.ticket(), self._clock()
            page = await self._root.dataset.background.list(self._tree.prefix, delimiter=False, token=self._token)
            if page.token and page.token == self._token:
                raise BadResponse(f"the store gave the same page of {self._tree.prefix!r} twice")
            self._token, self._ended = page.token, not page.token
            held = self._tree.held
            decided = self._tree.take(page)
            late = [item for item in decided if isinstance(item, Leaf) and item.file.listed.key in held]
            timely = [item for item in decided if not (isinstance(item, Leaf) and item.file.listed.key in held)]
            found = await self._record(late, *self._began) + await self._record(timely, ticket, asked_seconds)
            if found:
                return found
        return []

    async def _record(self, found: Sequence[Leaf | Branch], ticket: int, asked_seconds: float) -> list[Entry]:
        files: dict[Path, list[FileName]] = {}
        for item in found:
            group = files.setdefault(self._start + item.parents, [])
            if isinstance(item, Leaf):
                group.append(item.file)
        places = await self._directories(files, ticket, asked_seconds)
        entries: list[Entry] = []
        for path, names in files.items():
            recorded = await self._recorder.record(
                places[path], names, ticket=ticket, checked_seconds=asked_seconds, means=Means.WALK
            )
            entries += recorded.entries
        return entries

    async def _directories(self, paths: Iterable[Path], ticket: int, asked_seconds: float) -> dict[Path, Place]:
        """The places of these directories and of all above them, parents first, one commit a parent."""
        children: dict[Path, dict[bytes, None]] = {}
        for path in paths:
            for depth in range(len(path)):
                children.setdefault(path[:depth], {})[path[depth]] = None
        places: dict[Path, Place] = {(): self._root}
        for parent in sorted(children, key=len):
            named = [DirectoryName(name) for name in children[parent]]
            recorded = await self._recorder.record(
                places[parent], named, ticket=ticket, checked_seconds=asked_seconds, means=Means.WALK
            )
            for entry in recorded.entries:
                places[*parent, entry.name] = Place(entry.inode, self._root.dataset, entry.key)
        return places


class WalkedFile:
    """A walk over one file, or none."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = entries

    async def page(self) -> list[Entry]:
        found, self._entries = self._entries, []
        return found
