"""When the next files of a directory are worth fetching."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.core.neighbours import (
    FIRST_BATCH,
    IGNORED_COUNT,
    LARGEST_BATCH,
    MOST_MISSES,
    START_COUNT,
    WINDOW_COUNT,
    Course,
)


class Directory:
    """Names, and who reads them: what was fetched is opened without the course, but for the marks."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = sorted(name.encode() for name in names)
        self.course = Course()
        self.fetched: list[bytes] = []
        self.looked_count = 0
        self._unseen: set[bytes] = set()

    def following(self, after: bytes, limit: int) -> list[bytes]:
        self.looked_count += 1
        return [name for name in self.names if name > after][:limit]

    def open(self, name: bytes) -> None:
        if name in self._unseen:
            return
        if count := self.course.opened(name, self.following):
            batch = [each for each in self.names if each > self.course.last][:count]
            wanted = [each for each in batch if self.course.takes(each)]
            marks = self.course.fetching(batch[-1] if batch else self.course.last, wanted)
            self.fetched += wanted
            self._unseen |= {*wanted} - marks


def numbered(count: int, form: str = "{:06}.bin") -> list[str]:
    return [form.format(number) for number in range(count)]


def test_files_in_order_are_fetched_ahead_in_growing_batches() -> None:
    directory = Directory(numbered(1000))
    for name in directory.names:
        directory.open(name)
    assert directory.fetched == directory.names[START_COUNT + 1 :]


@pytest.mark.parametrize("readers_count", [2, 16])
def test_parallel_readers_who_are_a_little_out_of_order(readers_count: int) -> None:
    rng = random.Random(1)
    directory = Directory(numbered(2000))
    waiting, opened = list(directory.names), 0
    while waiting:
        directory.open(waiting.pop(rng.randrange(min(readers_count, len(waiting)))))
        opened += 1
    assert len(directory.fetched) > 1900
    assert len(directory.fetched) == len({*directory.fetched})


def test_what_is_fetched_for_nothing_is_bounded_by_what_was_read() -> None:
    for stops_at in range(1, 300):
        directory = Directory(numbered(2000))
        for name in directory.names[:stops_at]:
            directory.open(name)
        unread_count = len([name for name in directory.fetched if name > directory.names[stops_at - 1]])
        assert unread_count <= max(FIRST_BATCH, 4 * stops_at)
        assert unread_count <= LARGEST_BATCH + LARGEST_BATCH // 2
        if stops_at <= START_COUNT:
            assert unread_count == 0


def test_random_opens_in_a_large_directory_fetch_next_to_nothing() -> None:
    rng = random.Random(2)
    directory = Directory(numbered(20_000))
    for _ in range(5000):
        directory.open(rng.choice(directory.names))
    assert len(directory.fetched) <= 2 * FIRST_BATCH
    assert directory.looked_count < 2 * 5000 * (MOST_MISSES + 1) / IGNORED_COUNT  # and do not cost a look each


@pytest.mark.parametrize(("step", "readers_count"), [(30, 1), (10, 1), (10, 4), (3, 1), (3, 4)])
def test_who_reads_only_some_files_in_order_gets_next_to_nothing_else(step: int, readers_count: int) -> None:
    rng = random.Random(6)
    directory = Directory(numbered(5000))
    waiting = directory.names[::step]
    while waiting:
        directory.open(waiting.pop(rng.randrange(min(readers_count, len(waiting)))))
    assert len(directory.fetched) <= 2 * FIRST_BATCH


@pytest.mark.parametrize("ratio", [0.05, 0.3])
def test_nor_does_who_reads_a_sorted_sample(ratio: float) -> None:
    rng = random.Random(7)
    directory = Directory(numbered(5000))
    sample = sorted(rng.sample(directory.names, int(ratio * 5000)))
    for name in sample:
        directory.open(name)
    assert len(directory.fetched) <= 0.2 * len(sample) + FIRST_BATCH


def test_whoever_stops_reading_everything_stops_being_followed() -> None:
    directory = Directory(numbered(5000))
    for name in directory.names[:1000]:
        directory.open(name)
    before = len(directory.fetched)
    for name in directory.names[1000::20]:
        directory.open(name)
    assert len(directory.fetched) - before <= 2 * LARGEST_BATCH


def test_order_is_found_again_after_random_opens() -> None:
    rng = random.Random(3)
    directory = Directory(numbered(20_000))
    for _ in range(1000):
        directory.open(rng.choice(directory.names))
    before = len(directory.fetched)
    for name in directory.names[5000:5300]:
        directory.open(name)
    assert len(directory.fetched) - before > 150


def test_whoever_begins_at_the_top_again_is_followed() -> None:
    directory = Directory(numbered(3 * WINDOW_COUNT))
    for name in directory.names[-20:]:
        directory.open(name)
    directory.fetched.clear()
    for name in directory.names[:60]:
        directory.open(name)
    assert directory.names[50] in directory.fetched


def test_only_files_of_the_kinds_that_are_opened() -> None:
    names = [f"{number:06}.{suffix}" for number in range(500) for suffix in ("jpg", "json", "txt")]
    directory = Directory(names)
    for name in directory.names:
        if name.endswith((b".jpg", b".txt")):
            directory.open(name)
    assert len(directory.fetched) > 900
    assert not [name for name in directory.fetched if name.endswith(b".json")]


def test_numbers_are_no_kind_of_file() -> None:
    for form in ("part.{:06}", "part-{:06}", ".{:06}"):
        directory = Directory(numbered(200, form))
        for name in directory.names:
            directory.open(name)
        assert len(directory.fetched) > 150


@given(opens=st.lists(st.integers(0, 299), max_size=400))
def test_nothing_is_asked_for_twice_while_the_course_goes_on(opens: list[int]) -> None:
    directory = Directory(numbered(300))
    last = b""
    for position in opens:
        before = len(directory.fetched)
        directory.open(directory.names[position])
        for name in directory.fetched[before:]:
            assert name > directory.names[position]
        assert directory.fetched[before:] == sorted(directory.fetched[before:])
        if directory.course.last < last:  # it began anew
            last = b""
        assert all(name > last for name in directory.fetched[before:])
        last = directory.course.last
