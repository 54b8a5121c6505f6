"""Time to live: what holds for how long, and when a listing has been paid for."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tiercache.core.freshness import (
    FREE_LOOKUPS,
    KERNEL_LIMIT_SECONDS,
    NEVER_SECONDS,
    kernel_seconds,
    pages_due,
    remaining_seconds,
)

times = st.floats(0, 4e9)


@given(times, st.floats(0, 1e6), times)
def test_the_daemon_and_the_kernel_together_never_exceed_one_time_to_live(confirmed: float, ttl: float, now: float) -> None:
    rest = remaining_seconds(confirmed, ttl, now)
    assert 0 <= rest <= ttl
    assert kernel_seconds(rest) <= rest
    if rest > 0:
        assert now + rest <= confirmed + ttl + 1e-3


@given(times, times)
def test_immutable_names_hold_for_ever_but_the_kernel_gets_a_finite_time(confirmed: float, now: float) -> None:
    assert remaining_seconds(confirmed, math.inf, now) == math.inf
    assert kernel_seconds(math.inf) == KERNEL_LIMIT_SECONDS


@given(st.floats(0, math.inf), times)
def test_what_was_never_confirmed_does_not_hold(ttl: float, now: float) -> None:
    assert remaining_seconds(NEVER_SECONDS, ttl, now) == 0


def test_a_clock_that_stepped_back_makes_names_stale_and_not_eternal() -> None:
    assert remaining_seconds(5000.0, 60.0, 4000.0) == 0
    assert remaining_seconds(5000.0, 60.0, 5000.0) == 60


def test_the_time_to_live_ends_exactly() -> None:
    assert remaining_seconds(1000.0, 60.0, 1059.5) == 0.5
    assert remaining_seconds(1000.0, 60.0, 1060.0) == 0
    assert remaining_seconds(1000.0, 0.0, 1000.0) == 0


@given(st.integers(0, 10_000))
def test_background_pages_never_cost_more_than_the_lookups(lookups: int) -> None:
    assert pages_due(lookups) <= lookups
    assert (pages_due(lookups) > 0) == (lookups >= FREE_LOOKUPS)
    assert pages_due(lookups + 1) - pages_due(lookups) in (0, 1)
