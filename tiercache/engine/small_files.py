"""Small cold files: opened without a task, and fetched before they are opened where a directory's files are opened in order.

An open of a small cold file waits for a whole GET. Here the open is a function that is called when the GET has ended (`open`): a
task for each, with its scopes and coroutines, would be a third of what Python does for such a file. Whatever does not go straight
is told to come again by `Reader.open`, which waits and looks again; what failed for good is told so.

What is opened in order (`core/neighbours.py`) is fetched ahead, and published as soon as it is whole: its opens are answered
without Python, as those of any hot file. Only the marks of each batch are not, so that their opens are seen here and the next
batch begun. That is for what only the cold store has. Nothing is given up for what may never be read: no room is made, the
store's background slots are used, and what is under way comes out of the readers' budget. When one of these fetches fails the
rest is dropped.

Nobody waits here for what is raised. So where the index cannot be read an open goes the long way, and nothing is fetched ahead.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

from tiercache.core.neighbours import Course
from tiercache.core.prefetch import Budget
from tiercache.core.record import Entry, Inode, Kind, ObjectRef
from tiercache.engine.fill import VERIFIED_BYTES, Fill, Filler
from tiercache.engine.held import Held
from tiercache.engine.holdings import Holdings
from tiercache.engine.namespace import Namespace
from tiercache.engine.publication import Publication
from tiercache.errors import BadResponse, HotTierError, NotFound, TiercacheError, Unavailable, VersionChanged

AHEAD_COUNT = 16  # fetched ahead at once
COURSES_COUNT = 256
CAPACITY_PART = 8
"""What is fetched ahead takes an eighth of the hot tier at most: in a tiny one it would push out what was fetched before it."""

Answer = Callable[[bool, TiercacheError | None], None]
"""True: the open is the publication's, as `Reader.open` says. False: it failed with this error, or (None) that has to do it."""


class Owner(Protocol):
    """The reader, as far as it is concerned."""

    def in_trouble(self, dataset: str) -> bool:
        """Has the store of the dataset failed a moment ago?"""

    def is_only_cold(self, ref: ObjectRef) -> bool:
        """Would no tier above the cold store be asked for it?"""

    def opened_small(self, entry: Entry, held: Held) -> None:
        """An open has waited for this file, and is the publication's."""

    def fetched_ahead(self, count: int) -> None:
        """So many bytes came."""


class _Running:
    """A file on its way, and the opens that wait for it."""

    __slots__ = ("entry", "is_ahead", "is_mark", "waiting")

    def __init__(self, entry: Entry, *, is_ahead: bool, is_mark: bool) -> None:
        self.entry = entry
        self.is_ahead = is_ahead
        self.is_mark = is_mark
        self.waiting: list[Answer] = []


class SmallFiles:
    """Used on the event loop only; nothing here waits."""

    def __init__(
        self,
        owner: Owner,
        namespace: Namespace,
        holdings: Holdings,
        filler: Filler,
        publication: Publication,
        budget: Budget,
    ) -> None:
        self._owner = owner
        self._namespace = namespace
        self._holdings = holdings
        self._filler = filler
        self._publication = publication
        self._budget = budget
        self._courses: OrderedDict[Inode, Course] = OrderedDict()
        self._next: deque[tuple[Entry, bool]] = deque()
        self._running: dict[Inode, _Running] = {}
        self._ahead_count = 0
        self._ahead_bytes = 0

    def open(self, inode: Inode, answer: Answer) -> bool:
        """`answer` is called later. False: it will not be, this is no open of a small cold file that goes straight."""
        running = self._running.get(inode)
        if running is None:
            try:
                found = self._find(inode)
            except HotTierError:
                return False
            if found is None:
                return False
            running = self._begin(*found, is_ahead=False)
        running.waiting.append(answer)
        self.opened(running.entry)
        return True

    def _find(self, inode: Inode) -> tuple[Entry, Held] | None:
        entry = self._namespace.entry(inode)
        if entry is None or not _is_small(entry) or not self._namespace.is_current(entry):
            return None
        held = None if self._owner.in_trouble(entry.dataset) else self._holdings.acquire_new(entry.ref)
        return None if held is None else (entry, held)

    def opened(self, entry: Entry) -> None:
        """Somebody opens this file, here or elsewhere."""
        if _is_small(entry):
            with suppress(HotTierError):
                self._follow(entry)

    def _follow(self, entry: Entry) -> None:
        course = self._courses.get(entry.parent)
        if course is None:
            course = self._courses[entry.parent] = Course()
            if len(self._courses) > COURSES_COUNT:
                self._courses.popitem(last=False)
        else:
            self._courses.move_to_end(entry.parent)
        count = course.opened(entry.name, partial(self._namespace.following_names, entry.parent))
        if count and not self._owner.in_trouble(entry.dataset) and not self._holdings.room.scarce:
            self._fetch(course, entry.parent, count)

    def _fetch(self, course: Course, directory: Inode, count: int) -> None:
        """The next `count` files, as far as the budget reaches."""
        last, wanted = course.last, []
        most_bytes = self._holdings.room.capacity_bytes // CAPACITY_PART
        for entry in self._namespace.following(directory, course.last, count):
            if self._is_wanted(course, entry):
                granted_bytes = self._budget.grant(entry.size_bytes, self._ahead_bytes)
                self._ahead_bytes += granted_bytes
                if granted_bytes < entry.size_bytes or self._ahead_bytes > most_bytes:
                    self._give_back(granted_bytes)
                    break
                wanted.append(entry)
            last = entry.name
        marks = course.fetching(last, [entry.name for entry in wanted])
        self._next.extend((entry, entry.name in marks) for entry in wanted)
        self._go_on()

    def _is_wanted(self, course: Course, entry: Entry) -> bool:
        if not _is_small(entry) or not course.takes(entry.name) or self._holdings.is_known(entry.object_id):
            return False
        return self._owner.is_only_cold(entry.ref)  # what is nearer comes soon enough, and is not made to look slow

    def _go_on(self) -> None:
        while self._next and self._ahead_count < AHEAD_COUNT:
            entry, is_mark = self._next.popleft()
            held = None
            with suppress(HotTierError):
                if self._holdings.room.has_room(entry.size_bytes):
                    held = self._holdings.acquire_new(entry.ref)
            if held is None:  # or it is hot by now, or will be
                self._give_back(entry.size_bytes)
                continue
            self._ahead_count += 1
            self._begin(entry, held, is_ahead=True, is_mark=is_mark)

    def _begin(self, entry: Entry, held: Held, *, is_ahead: bool, is_mark: bool = False) -> _Running:
        running = self._running[entry.inode] = _Running(entry, is_ahead=is_ahead, is_mark=is_mark)
        fill = self._filler.start(held, 0, 0, background=is_ahead)
        fill.ended = partial(self._ended, running, fill)
        self._holdings.release(held)
        return running

    def _ended(self, running: _Running, fill: Fill) -> None:
        entry, held = running.entry, fill.held
        del self._running[entry.inode]
        is_published = False
        is_to_be_seen = running.is_mark and not running.waiting
        if held.complete and held.file is not None and not is_to_be_seen:
            with suppress(HotTierError):
                is_published = self._namespace.is_current(entry) and self._publication.publish(entry, held.file.directory)
        is_lost = isinstance(fill.error, Unavailable | BadResponse)  # another request, with a deadline of its own, tells no more
        for answer in running.waiting:
            is_open = is_published and self._publication.hand_over(entry)
            if is_open:
                self._owner.opened_small(entry, held)
            answer(is_open, copy.copy(fill.error) if is_lost else None)
        if running.is_ahead:
            self._ended_ahead(entry, fill)

    def _ended_ahead(self, entry: Entry, fill: Fill) -> None:
        self._ahead_count -= 1
        self._give_back(entry.size_bytes)
        if fill.error is None:
            self._owner.fetched_ahead(entry.size_bytes)
        elif not isinstance(fill.error, NotFound | VersionChanged):  # those are the file's own
            for left, _ in self._next:
                self._give_back(left.size_bytes)
            self._next.clear()
        self._go_on()

    def _give_back(self, count: int) -> None:
        self._ahead_bytes -= count
        self._budget.give_back(count)


def _is_small(entry: Entry) -> bool:
    return entry.kind is Kind.FILE and 0 < entry.size_bytes <= VERIFIED_BYTES and not entry.archived
