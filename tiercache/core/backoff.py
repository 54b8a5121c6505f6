"""When to try again: full-jitter exponential back-off with a total deadline. Pure.

After the n-th failure in a row the wait is drawn evenly from [0, first * 2**(n-1)], capped by a
ceiling ("full jitter"): of the usual schemes it spreads a herd of nodes that failed together best, for the
fewest requests. A floor keeps the draw from being an immediate retry, which an overloaded store must
never see. A store that names a time itself (Retry-After) is obeyed, plus one jittered first step, or
the herd would come back in the same second.

The deadline is the time that the caller may be kept waiting without a single new byte. A wait that
would not end before it is not begun: the caller hears the last error at once. The count of attempts is
bounded as well, because a read that gains a byte before each failure renews the deadline every time.
"""

from __future__ import annotations

import msgspec


class Backoff(msgspec.Struct, frozen=True):
    """The policy. `attempts_count` counts the first one too."""

    first_seconds: float = 0.1
    ceiling_seconds: float = 5.0
    floor_seconds: float = 0.01
    deadline_seconds: float = 30.0
    attempts_count: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.floor_seconds <= self.first_seconds <= self.ceiling_seconds:
            raise ValueError("need 0 < floor_seconds <= first_seconds <= ceiling_seconds")
        if self.deadline_seconds <= 0 or self.attempts_count < 1:
            raise ValueError("need deadline_seconds > 0 and attempts_count >= 1")


class Again(msgspec.Struct, frozen=True):
    """Wait, then try again."""

    after_seconds: float


class GiveUp(msgspec.Struct, frozen=True):
    """Tell the caller; `reason` is 'deadline' or 'attempts'."""

    reason: str


def delay_seconds(policy: Backoff, failures_count: int, draw: float, retry_after_seconds: float | None = None) -> float:
    """The wait after the `failures_count`-th failure (from 1); `draw` is random in [0, 1)."""
    assert failures_count >= 1
    assert 0.0 <= draw <= 1.0
    if retry_after_seconds is not None:
        return max(0.0, retry_after_seconds) + max(policy.floor_seconds, draw * policy.first_seconds)
    doublings = min(failures_count - 1, 63)  # 2**63 first steps are past any ceiling; floats stay finite
    return max(policy.floor_seconds, draw * min(policy.ceiling_seconds, policy.first_seconds * 2.0**doublings))


def after_failure(
    policy: Backoff, failures_count: int, waited_seconds: float, draw: float, retry_after_seconds: float | None = None
) -> Again | GiveUp:
    """What to do after the `failures_count`-th failure, `waited_seconds` after the start or the last new byte."""
    if failures_count >= policy.attempts_count:
        return GiveUp("attempts")
    after_seconds = delay_seconds(policy, failures_count, draw, retry_after_seconds)
    if waited_seconds + after_seconds >= policy.deadline_seconds:
        return GiveUp("deadline")
    return Again(after_seconds)
