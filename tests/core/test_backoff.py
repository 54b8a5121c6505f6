from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.core.backoff import Again, Backoff, GiveUp, after_failure, delay_seconds

policies = st.builds(
    lambda floor, first, ceiling, deadline, attempts: Backoff(
        floor_seconds=floor,
        first_seconds=floor + first,
        ceiling_seconds=floor + first + ceiling,
        deadline_seconds=deadline,
        attempts_count=attempts,
    ),
    st.floats(0.001, 1),
    st.floats(0, 10),
    st.floats(0, 100),
    st.floats(0.01, 1000),
    st.integers(1, 100),
)
draws = st.floats(0, 1, exclude_max=True)


@given(policies, st.integers(1, 10_000), draws)
def test_case_11_never_an_immediate_retry_and_never_over_the_ceiling(policy: Backoff, failures: int, draw: float) -> None:
    assert policy.floor_seconds <= delay_seconds(policy, failures, draw) <= policy.ceiling_seconds


@given(policies, st.integers(1, 60), draws)
def test_equal_draws_never_wait_less_after_more_failures(policy: Backoff, failures: int, draw: float) -> None:
    assert delay_seconds(policy, failures, draw) <= delay_seconds(policy, failures + 1, draw)


@given(policies, st.integers(1, 60), draws, st.floats(-5, 10_000))
def test_retry_after_is_obeyed_plus_jitter(policy: Backoff, failures: int, draw: float, asked: float) -> None:
    delay = delay_seconds(policy, failures, draw, asked)
    assert max(asked, 0) < delay <= max(asked, 0) + policy.first_seconds + 1e-6


def test_jitter_is_full() -> None:
    policy = Backoff(first_seconds=1.0, ceiling_seconds=64.0, floor_seconds=0.001)
    rng = random.Random(1)
    waits = [delay_seconds(policy, 4, rng.random()) for _ in range(4000)]
    tenths = [sum(1 for wait in waits if tenth * 0.8 <= wait < (tenth + 1) * 0.8) for tenth in range(10)]
    assert sum(tenths) == 4000
    assert min(tenths) > 300


@given(policies, draws, st.lists(st.floats(0, 5), max_size=300), st.none() | st.floats(0, 60))
def test_waiting_never_passes_the_deadline_nor_the_attempts(
    policy: Backoff, draw: float, calls: list[float], asked: float | None
) -> None:
    """However long the calls take, no wait is begun that would end after the deadline."""
    now = 0.0
    for failures, call_seconds in enumerate(calls, start=1):
        now += call_seconds
        verdict = after_failure(policy, failures, now, draw, asked)
        if isinstance(verdict, GiveUp):
            assert verdict.reason in ("deadline", "attempts")
            return
        assert failures < policy.attempts_count
        now += verdict.after_seconds
        assert now < policy.deadline_seconds


@given(policies, st.integers(1, 100), draws)
def test_patience_left_means_again_until_attempts_run_out(policy: Backoff, failures: int, draw: float) -> None:
    verdict = after_failure(policy, failures, -policy.ceiling_seconds, draw)
    if failures >= policy.attempts_count:
        assert verdict == GiveUp("attempts")
    else:
        assert verdict == Again(delay_seconds(policy, failures, draw))


def test_a_retry_after_beyond_the_deadline_is_not_waited_for() -> None:
    assert after_failure(Backoff(deadline_seconds=30), 1, 0.0, 0.5, 31.0) == GiveUp("deadline")


@pytest.mark.parametrize(
    "wrong",
    [
        {"floor_seconds": 0.0},
        {"first_seconds": 0.001},
        {"ceiling_seconds": 0.05},
        {"deadline_seconds": 0.0},
        {"attempts_count": 0},
    ],
)
def test_contradicting_numbers_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="need"):
        Backoff(**wrong)  # type: ignore[arg-type]
