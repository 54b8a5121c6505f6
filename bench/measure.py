"""A row: one way of reading, done on the mount and on what it is compared with, in turns.

Turns go ABBA: a pair begins with the mount, the next one with the reference. A machine that gets slower or faster
meanwhile thus does so for both, and the ratio is taken within each pair before the median is. How sure the median is says its
90 % interval (`interval`): a target is missed only when the whole interval lies on the wrong side of it.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.usage import Usage

if TYPE_CHECKING:
    from bench.lab import Lab


@dataclass(frozen=True)
class Take:
    """One measurement of one side: a rate, or a time in ms, as the row's unit says.

    `work` is what CPU seconds are divided by: GiB, files or reads. `usage` is the daemon's, on the side of the mount.
    """

    figure: float
    work: float = 0.0
    readers_seconds: float = 0.0
    server_seconds: float = 0.0
    usage: Usage | None = None


@dataclass(frozen=True)
class Summary:
    median: float
    least: float
    most: float


def summary(values: Sequence[float]) -> Summary:
    return Summary(statistics.median(values), min(values), max(values))


CONFIDENCE = 0.9
LEAST_PAIRS = 5  # fewer values have no 90 % interval: all of four lie on one side of the median with probability 1/8


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 90 % interval of the median, by order statistics (Hettmansperger and Sheather 1986); None with fewer than 5 values.

    It supposes nothing about the distribution: between the k-th smallest and the k-th largest of n values the median lies
    with a probability that the binomial distribution gives, and between the two k around 90 % is interpolated.
    """
    count = len(values)
    if count < LEAST_PAIRS:
        return None

    def coverage(rank: int) -> float:
        return 1 - 2 * sum(math.comb(count, below) for below in range(rank)) / 2**count

    rank = max(rank for rank in range(1, count // 2 + 1) if coverage(rank) >= CONFIDENCE)
    excess = (coverage(rank) - CONFIDENCE) / (coverage(rank) - coverage(rank + 1))
    inner = (count - rank) * excess / (rank + (count - 2 * rank) * excess)
    ordered = sorted(values)
    low = (1 - inner) * ordered[rank - 1] + inner * ordered[rank]
    high = (1 - inner) * ordered[-rank] + inner * ordered[-rank - 1]
    return low, high


@dataclass(frozen=True)
class Sampled:
    """What py-spy found in an extra take: the part of the daemon's CPU that held the GIL, or why there is no answer."""

    ratio: float | None
    complaint: str = ""


@dataclass
class Result:
    """Takes of the mount and of the reference, pair by pair."""

    mount: list[Take] = field(default_factory=list)
    reference: list[Take] = field(default_factory=list)
    sampled: Sampled | None = None
    remarks: list[str] = field(default_factory=list)

    @property
    def figures(self) -> Summary:
        return summary([take.figure for take in self.mount])

    @property
    def reference_figures(self) -> Summary:
        return summary([take.figure for take in self.reference])

    @property
    def ratios(self) -> list[float]:
        """Mount to reference, by pair: above 1 is better for a rate and worse for a time."""
        return [ours.figure / theirs.figure for ours, theirs in zip(self.mount, self.reference, strict=True)]

    @property
    def differences(self) -> list[float]:
        """Mount minus reference, by pair."""
        return [ours.figure - theirs.figure for ours, theirs in zip(self.mount, self.reference, strict=True)]

    @property
    def daemon_seconds(self) -> list[float]:
        """CPU of the daemon by unit of work, by take."""
        return [take.usage.total_seconds / take.work for take in self.mount if take.usage is not None]


class Verdict(enum.Enum):
    OK = "ok"
    NOT_MISSED = "ok within the interval"
    MISSED = "MISSED"
    UNDECIDED = f"undecided (fewer than {LEAST_PAIRS} pairs)"


@dataclass(frozen=True)
class Target:
    """The median of `values` is to be at least (or at most) `limit`."""

    values: Callable[[Result], Sequence[float]]
    limit: float
    at_least: bool
    wording: str

    def verdict(self, result: Result) -> Verdict:
        values = self.values(result)
        found = interval(values)
        if found is None:
            return Verdict.UNDECIDED
        if self._is_met(statistics.median(values)):
            return Verdict.OK
        return Verdict.NOT_MISSED if self._is_met(found[1] if self.at_least else found[0]) else Verdict.MISSED

    def _is_met(self, figure: float) -> bool:
        return figure >= self.limit if self.at_least else figure <= self.limit


def never() -> str:
    return ""


@dataclass(frozen=True)
class Row:
    """`measure(lab, pairs)` does all takes. `cpu_unit` is e.g. 's/GiB': seconds (or ms) by `Take.work`.

    `obstacle` says why this cannot be measured here; '' when it can.
    """

    name: str
    title: str
    unit: str
    reference: str
    measure: Callable[[Lab, int], Result]
    cpu_unit: str = ""
    targets: tuple[Target, ...] = ()
    obstacle: Callable[[], str] = never


Side = Callable[["Lab"], Take]


def alternated(mount: Side, reference: Side, *, profiled: bool = False) -> Callable[[Lab, int], Result]:
    """Measure both in ABBA turns; with `profiled` one more take of the mount under py-spy, where there is one."""

    def measure(lab: Lab, pairs: int) -> Result:
        result = Result()
        for pair in range(pairs):
            turns = [(mount, result.mount), (reference, result.reference)]
            for side, takes in turns if pair % 2 == 0 else reversed(turns):
                takes.append(side(lab))
        if profiled:
            result.sampled = lab.sampled(mount)
        return result

    return measure
