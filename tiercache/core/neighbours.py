"""Reading ahead over files: are the small files of a directory opened in the order in which they are listed?

Inside a small file there is nothing to read ahead, and each of them costs a reader the store's whole latency. But copies,
checksums, and loaders that do not shuffle open the files of a directory one after the other, several of them at once and a
little out of order.

A `Course` is what is known of the opens in one directory. An open *goes on* when its name is one of the WINDOW_COUNT that follow
the furthest one so far; START_COUNT of these, and the files behind it are worth fetching. Somebody who opens files at random in a
directory of n names goes on by chance with a probability of WINDOW_COUNT / n; any other open begins the course anew, and after
MOST_MISSES of these the course is not even looked at for a while. (In a directory that is not much longer than the window
everything is fetched soon, which is what such a reader will want.)

Only suffixes that were opened are fetched: who reads the .jpg files and not the .json beside them gets no .json.

Opens of files that are there already may not be seen. So a batch that was asked for has a *mark* in its middle: a file of
which the open will be seen. When it is reached the next batch is due, twice as large (as the kernel reads ahead in pages).
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
MOST_SUFFIXES = 8

Following = Callable[[bytes, int], Sequence[bytes]]
"""The names of the directory that come after one, in order, at most so many."""


class Course:
    """The opens in one directory. `last` is the furthest name that was opened or asked for."""

    def __init__(self) -> None:
        self.last = b""
        self.suffixes: set[bytes] = set()
        self._mark = b""
        self._score = 0
        self._behind_count = 0
        self._misses_count = 0
        self._ignored_count = 0
        self._batch_count = 0

    def opened(self, name: bytes, following: Following) -> int:
        """How many files after `last` to fetch now; `fetching` is to be called when that is not 0."""
        if self._ignored_count:
            self._ignored_count -= 1
            return 0
        self._learn(name)
        if name <= self.last:
            return self._behind(name)
        if self.last and name in following(self.last, WINDOW_COUNT):
            self.last = name
            self._score += 1
            self._behind_count = self._misses_count = 0
            return self._next_batch() if self._score >= START_COUNT else 0
        self._begin(name)
        return 0

    def fetching(self, last: bytes, mark: bytes) -> None:
        """What was due has been asked for, up to `last`. `mark` is b'' when nothing of it had to be."""
        self.last = max(last, self.last)
        self._mark = mark

    def takes(self, name: bytes) -> bool:
        """Is it a file of the kind that is opened here?"""
        return _suffix(name) in self.suffixes

    def _behind(self, name: bytes) -> int:
        if self._mark and name >= self._mark:
            self._behind_count = 0
            return self._next_batch()
        self._behind_count += 1
        if self._behind_count > MOST_BEHIND:
            self._begin(name)
        return 0

    def _next_batch(self) -> int:
        self._mark = b""
        self._batch_count = min(max(2 * self._batch_count, FIRST_BATCH), LARGEST_BATCH)
        return self._batch_count

    def _begin(self, name: bytes) -> None:
        self.last = name
        self.suffixes = {_suffix(name)}
        self._mark = b""
        self._score = self._behind_count = self._batch_count = 0
        self._misses_count += 1
        if self._misses_count > MOST_MISSES:
            self._misses_count, self._ignored_count = 0, IGNORED_COUNT

    def _learn(self, name: bytes) -> None:
        if len(self.suffixes) < MOST_SUFFIXES:
            self.suffixes.add(_suffix(name))


def _suffix(name: bytes) -> bytes:
    """b'' when there is none, or it is a number, as in `part.0001`."""
    suffix = name.rpartition(b".")[2] if b"." in name[1:] else b""
    return b"" if suffix.isdigit() else suffix
