"""Small files are fetched before they are opened, where a directory's files are opened in order (`core/neighbours.py`).

An open of a small cold file waits for a whole GET, and is most of what Python does for it. A file that was fetched ahead is
published as soon as it is whole: its opens are answered without Python, as those of any hot file. Only the marked one of each
batch is not, so that its open is seen here and the next batch begun.

Nothing is given up for what may never be read: no room is made, the store's background slots are used, and what is under way
comes out of the readers' budget. When one of these fetches fails the rest is dropped; readers find out for themselves why.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial

from tiercache.core.neighbours import Course
from tiercache.core.prefetch import Budget
from tiercache.core.record import Entry, Inode, Kind
from tiercache.engine.fill import VERIFIED_BYTES, Fill, Filler
from tiercache.engine.holdings import Holdings
from tiercache.engine.namespace import Namespace
from tiercache.engine.publication import Publication
from tiercache.errors import NotFound, VersionChanged

RUNNING_COUNT = 16
COURSES_COUNT = 256


class Neighbours:
    """`in_trouble` tells of a dataset whether its store failed a moment ago, `fetched` is told how many bytes came."""

    def __init__(
        self,
        namespace: Namespace,
        holdings: Holdings,
        filler: Filler,
        publication: Publication,
        budget: Budget,
        *,
        in_trouble: Callable[[str], bool],
        fetched: Callable[[int], None],
    ) -> None:
        self._namespace = namespace
        self._holdings = holdings
        self._filler = filler
        self._publication = publication
        self._budget = budget
        self._in_trouble = in_trouble
        self._fetched = fetched
        self._courses: OrderedDict[Inode, Course] = OrderedDict()
        self._waiting: deque[tuple[Entry, bool]] = deque()
        self._running_count = 0
        self._ahead_bytes = 0

    def opened(self, entry: Entry) -> None:
        """Somebody opens this file. Never waits."""
        if entry.size_bytes > VERIFIED_BYTES:
            return
        course = self._courses.get(entry.parent)
        if course is None:
            course = self._courses[entry.parent] = Course()
            if len(self._courses) > COURSES_COUNT:
                self._courses.popitem(last=False)
        else:
            self._courses.move_to_end(entry.parent)
        count = course.opened(entry.name, partial(self._namespace.following_names, entry.parent))
        if count and not self._in_trouble(entry.dataset) and not self._holdings.room.scarce:
            self._fetch(course, entry.parent, count)

    def _fetch(self, course: Course, directory: Inode, count: int) -> None:
        """The next `count` files, as far as the budget reaches."""
        last, wanted = course.last, []
        for entry in self._namespace.following(directory, course.last, count):
            if self._is_wanted(course, entry):
                granted_bytes = self._budget.grant(entry.size_bytes, self._ahead_bytes)
                self._ahead_bytes += granted_bytes
                if granted_bytes < entry.size_bytes:
                    self._give_back(granted_bytes)
                    break
                wanted.append(entry)
            last = entry.name
        middle = len(wanted) // 2
        self._waiting.extend((entry, position == middle) for position, entry in enumerate(wanted))
        course.fetching(last, wanted[middle].name if wanted else b"")
        self._go_on()

    def _is_wanted(self, course: Course, entry: Entry) -> bool:
        is_small = entry.kind is Kind.FILE and 0 < entry.size_bytes <= VERIFIED_BYTES and not entry.archived
        return is_small and course.takes(entry.name)

    def _go_on(self) -> None:
        while self._waiting and self._running_count < RUNNING_COUNT:
            entry, is_mark = self._waiting.popleft()
            held = self._holdings.acquire_new(entry.ref)
            if held is None:  # it is hot, or will be
                self._give_back(entry.size_bytes)
                if is_mark and self._waiting:  # the open of that one may never be seen
                    self._waiting[0] = self._waiting[0][0], True
                continue
            self._running_count += 1
            fill = self._filler.start(held, 0, 0, background=True)
            fill.ended = partial(self._ended, fill, entry, is_mark)
            self._holdings.release(held)

    def _ended(self, fill: Fill, entry: Entry, is_mark: bool) -> None:
        self._running_count -= 1
        self._give_back(entry.size_bytes)
        held = fill.held
        if fill.error is None:
            self._fetched(entry.size_bytes)
        elif not isinstance(fill.error, NotFound | VersionChanged):  # those are the file's own
            for waiting, _ in self._waiting:
                self._give_back(waiting.size_bytes)
            self._waiting.clear()
        if held.complete and held.file is not None and not is_mark and self._namespace.is_current(entry):
            self._publication.publish(entry, held.file.directory)
        self._go_on()

    def _give_back(self, count: int) -> None:
        self._ahead_bytes -= count
        self._budget.give_back(count)
