"""Replays synthetic traces through `SampledLru`, exact LRU and Belady's optimum, all with objects of one size.

The cache drives `choose` as the engine does: random samples from its records, fresh ones until there is room,
victims checked against the present record. One read a second keeps the freshness rule out of the way.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import accumulate

import pytest

from tiercache.core.eviction import Candidate, SampledLru
from tiercache.core.record import ObjectId

Trace = list[int]

OBJECTS = 4000
CACHE = 400
READS = 40_000
SAMPLE = 64


def _object_id(number: int) -> ObjectId:
    return ObjectId(number.to_bytes(20, "big"))


class _SampledCache:
    """Records in a list, for even draws, and where each is in it."""

    def __init__(self, capacity: int, rng: random.Random) -> None:
        self._capacity = capacity
        self._rng = rng
        self._policy = SampledLru()
        self._numbers: list[int] = []
        self._places: dict[int, int] = {}
        self._accessed: dict[int, int] = {}

    def read(self, number: int, now_seconds: int) -> bool:
        hit = number in self._accessed
        if not hit:
            while len(self._numbers) >= self._capacity:
                self._reclaim(now_seconds)
            self._places[number] = len(self._numbers)
            self._numbers.append(number)
        self._accessed[number] = now_seconds
        return hit

    def _reclaim(self, now_seconds: int) -> None:
        """Frees a 50th of the cache at a time, as between a high and a low watermark."""
        drawn = self._rng.sample(self._numbers, min(SAMPLE, len(self._numbers)))
        sample = [Candidate(_object_id(number), 1, self._accessed[number], 1, 1) for number in drawn]
        for victim in self._policy.choose(sample, self._capacity // 50, now_seconds, lambda object_id: False):
            number = int.from_bytes(victim.object_id, "big")
            if self._accessed.get(number) == victim.accessed_seconds:
                self._drop(number)

    def _drop(self, number: int) -> None:
        del self._accessed[number]
        place, last = self._places.pop(number), self._numbers.pop()
        if last != number:
            self._numbers[place] = last
            self._places[last] = place


def sampled_hits(trace: Trace, capacity: int = CACHE, seed: int = 1) -> float:
    cache = _SampledCache(capacity, random.Random(seed))
    return sum(cache.read(number, now) for now, number in enumerate(trace, start=10)) / len(trace)


def lru_hits(trace: Trace, capacity: int = CACHE) -> float:
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for number in trace:
        if number in cache:
            hits += 1
            cache.move_to_end(number)
            continue
        if len(cache) >= capacity:
            cache.popitem(last=False)
        cache[number] = None
    return hits / len(trace)


def belady_hits(trace: Trace, capacity: int = CACHE) -> float:
    """Evicts what is read again last; nobody who must keep what he reads can do better."""
    following = [len(trace)] * len(trace)
    seen: dict[int, int] = {}
    for position in range(len(trace) - 1, -1, -1):
        following[position] = seen.get(trace[position], len(trace) + position)
        seen[trace[position]] = position
    cached: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    hits = 0
    for position, number in enumerate(trace):
        if number in cached:
            hits += 1
        else:
            while len(cached) >= capacity:
                negative, other = heappop(farthest)
                if cached.get(other) == -negative:
                    del cached[other]
        cached[number] = following[position]
        heappush(farthest, (-following[position], number))
    return hits / len(trace)


def uniform(rng: random.Random) -> Trace:
    return [rng.randrange(OBJECTS) for _ in range(READS)]


def zipf(rng: random.Random) -> Trace:
    weights = list(accumulate(1 / rank for rank in range(1, OBJECTS + 1)))
    ranks = rng.choices(range(OBJECTS), cum_weights=weights, k=READS)
    names = rng.sample(range(OBJECTS), OBJECTS)
    return [names[rank] for rank in ranks]


def drifting_zipf(rng: random.Random) -> Trace:
    """The popular objects become others in the course of the trace."""
    return [(number + position // 20) % OBJECTS for position, number in enumerate(zipf(rng))]


def zipf_with_scans(rng: random.Random) -> Trace:
    """Every 4,000 reads somebody goes through 500 objects that nobody else wants."""
    trace: Trace = []
    scanned = OBJECTS
    for number in zipf(rng):
        trace.append(number)
        if len(trace) % 4000 == 0:
            trace.extend(range(scanned, scanned + 500))
            scanned += 500
    return trace[:READS]


def shuffled_epochs(rng: random.Random, objects: int = OBJECTS) -> Trace:
    """A training job: every object once an epoch, in a new order each time."""
    trace: Trace = []
    while len(trace) < READS:
        trace.extend(rng.sample(range(objects), objects))
    return trace[:READS]


@pytest.mark.parametrize("make", [uniform, zipf, drifting_zipf, zipf_with_scans, shuffled_epochs])
def test_sampled_lru_hits_like_exact_lru_and_less_than_the_optimum(make: Callable[[random.Random], Trace]) -> None:
    trace = make(random.Random(7))
    sampled, exact, optimum = sampled_hits(trace), lru_hits(trace), belady_hits(trace)
    figures = f"sampled {sampled:.4f}, LRU {exact:.4f}, Belady {optimum:.4f}"
    assert exact * 0.98 <= sampled <= optimum, figures
    assert exact <= optimum, figures


def test_random_eviction_would_show() -> None:
    """The bound above tells a good policy from a bad one: victims drawn blindly miss it."""
    trace = zipf(random.Random(7))
    assert _blind_hits(trace) < 0.98 * lru_hits(trace)


def _blind_hits(trace: Trace) -> float:
    rng = random.Random(1)
    cached: set[int] = set()
    numbers: list[int] = []
    hits = 0
    for number in trace:
        if number in cached:
            hits += 1
            continue
        cached.add(number)
        if len(numbers) < CACHE:
            numbers.append(number)
            continue
        place = rng.randrange(CACHE)
        cached.discard(numbers[place])
        numbers[place] = number
    return hits / len(trace)


def test_what_fits_is_never_evicted() -> None:
    trace = shuffled_epochs(random.Random(7), objects=CACHE)
    assert sampled_hits(trace) == lru_hits(trace) == belady_hits(trace) == (READS - CACHE) / READS


def test_belady_is_optimal_on_a_trace_solved_by_hand() -> None:
    assert belady_hits([1, 2, 3, 1, 2, 3], capacity=2) == pytest.approx(2 / 6)
    assert lru_hits([1, 2, 3, 1, 2, 3], capacity=2) == 0
