"""Reading ahead over files: are the small files of a directory opened in the order in which they are listed?

Inside a small file there is nothing to read ahead, and each of them costs a reader the store's whole latency. But copies,
checksums, and loaders that do not shuffle open the files of a directory one after the other, several of them at once and a
little out of order.

A `Course` is what is known of the opens in one directory. An open *goes on* when its name is one of the WINDOW_COUNT that
follow the furthest one so far. After START_COUNT of these the files behind it are worth fetching, if at least half of the files
that were passed were opened too: a sorted sample of a directory is in order as well, and wants next to nothing of what lies
between. Somebody who opens files at random in a directory of n names goes on by chance with a probability of WINDOW_COUNT / n;
any other open begins the course anew, and after MOST_MISSES of these the course is not even looked at for a while.

Only suffixes that were opened are fetched: who reads the .jpg files and not the .json beside them gets no .json.

Opens of files that are there already may not be seen. So of a batch that was asked for some files are *marks*, spread evenly, of
which the opens will be seen. When half of them have been opened the next batch is due, twice as large (as the kernel reads ahead
in pages). Who reads only here and there does not come so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

WINDOW_COUNT = 32
START_COUNT = 4
MOST_BEHIND = 32
"""Opens behind the furthest one, in a row: more are no disorder of parallel readers, somebody begins at the top."""
MOST_MISSES = 8
IGNORED_COUNT = 64
FIRST_BATCH = 16
LARGEST_BATCH = 128
MARKS_COUNT = 8
PASSED_COUNT = 64
"""Of so many files that were passed it is remembered how many were opened; what was before counts half."""
MOST_SUFFIXES = 8

Following = Callable[[bytes, int], Sequence[bytes]]
"""The names of the directory that come after one, in order, at most so many."""


def _marks_of(names: Sequence[bytes]) -> frozenset[bytes]:
    """Which files of a batch are to be its marks."""
    step = max(1, len(names) // MARKS_COUNT)
    return frozenset(names[step - 1 :: step])


class Course:
    """The opens in one directory. `last` is the furthest name that was opened or asked for."""

    def __init__(self) -> None:
        self.last = b""
        self.suffixes: set[bytes] = set()
        self._marks: set[bytes] = set()
        self._due_count = 0
        self._score = 0
        self._mark_weight = 0.0  # the files for which a mark stands
        self._opened_count = 0.0
        self._passed_count = 0.0
        self._behind_count = 0
        self._misses_count = 0
        self._ignored_count = 0
        self._batch_count = 0

    def opened(self, name: bytes, following: Following) -> int:
        """How many files after `last` to fetch now; `fetching` is to be called when something was."""
        if self._ignored_count:
            self._ignored_count -= 1
            return 0
        if len(self.suffixes) < MOST_SUFFIXES:
            self.suffixes.add(_suffix(name))
        if name <= self.last:
            return self._behind(name)
        names = following(self.last, WINDOW_COUNT) if self.last else ()
        if name not in names:
            self._begin(name)
            return 0
        self.last = name
        self._score += 1
        self._behind_count = self._misses_count = 0
        self._passed(sum(self.takes(each) for each in names if each <= name))
        self._opened_count += 1
        is_dense = 2 * self._opened_count >= self._passed_count
        return self._next_batch() if self._score >= START_COUNT and is_dense else 0

    def fetching(self, last: bytes, names: Sequence[bytes]) -> frozenset[bytes]:
        """What was due has been asked for: these files, up to `last`. Returns its marks."""
        marks = _marks_of(names)
        self.last = max(last, self.last)
        self._marks = set(marks)
        self._mark_weight = len(names) / max(1, len(marks))
        self._due_count = (len(marks) + 1) // 2
        self._passed(len(names))
        return marks

    def takes(self, name: bytes) -> bool:
        """Is it a file of the kind that is opened here?"""
        return _suffix(name) in self.suffixes

    def _behind(self, name: bytes) -> int:
        if name in self._marks:
            self._marks.discard(name)
            self._opened_count += self._mark_weight
            self._behind_count = 0
            self._due_count -= 1
            return self._next_batch() if self._due_count == 0 else 0
        if not self._batch_count:
            self._opened_count += 1
        self._behind_count += 1
        if self._behind_count > MOST_BEHIND:
            self._begin(name)
        return 0

    def _passed(self, count: int) -> None:
        if self._passed_count >= PASSED_COUNT:
            self._passed_count, self._opened_count = self._passed_count / 2, self._opened_count / 2
        self._passed_count += count

    def _next_batch(self) -> int:
        self._batch_count = min(max(2 * self._batch_count, FIRST_BATCH), LARGEST_BATCH)
        return self._batch_count

    def _begin(self, name: bytes) -> None:
        self.last = name
        self.suffixes = {_suffix(name)}
        self._marks.clear()
        self._score = self._behind_count = self._batch_count = 0
        self._opened_count = self._passed_count = 0.0
        self._misses_count += 1
        if self._misses_count > MOST_MISSES:
            self._misses_count, self._ignored_count = 0, IGNORED_COUNT


def _suffix(name: bytes) -> bytes:
    """b'' when there is none, or it is a number, as in `part.0001`."""
    suffix = name.rpartition(b".")[2] if b"." in name[1:] else b""
    return b"" if suffix.isdigit() else suffix
