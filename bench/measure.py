"""A row: one way of reading, done on the mount and on what it is compared with, in turns.

Turns go ABBA: a pair begins with the mount, the next one with the reference. A machine that gets slower or faster
meanwhile thus does so for both, and the ratio is taken within each pair before the median is. The spread is the smallest and the
largest value; with few pairs nothing finer would be honest.
"""

from __future__ import annotations

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

    @property
    def figures(self) -> Summary:
        return summary([take.figure for take in self.mount])

    @property
    def reference_figures(self) -> Summary:
        return summary([take.figure for take in self.reference])

    @property
    def ratios(self) -> Summary:
        """Mount to reference: above 1 is better for a rate and worse for a time."""
        return summary([ours.figure / theirs.figure for ours, theirs in zip(self.mount, self.reference, strict=True)])


@dataclass(frozen=True)
class Target:
    """`figure` of the result must be at least (or at most) `limit`."""

    figure: Callable[[Result], float]
    limit: float
    at_least: bool
    wording: str

    def verdict(self, result: Result) -> str:
        """'ok' or 'BELOW', and the numbers."""
        figure = self.figure(result)
        met = figure >= self.limit if self.at_least else figure <= self.limit
        sign = ">=" if self.at_least else "<="
        return f"{'ok' if met else 'BELOW'}: {figure:.2f} {self.wording}, target {sign} {self.limit:g}"


@dataclass(frozen=True)
class Row:
    """`measure(lab, pairs)` does all takes. `cpu_unit` is e.g. 's/GiB': seconds (or ms) by `Take.work`."""

    name: str
    title: str
    unit: str
    reference: str
    measure: Callable[[Lab, int], Result]
    cpu_unit: str = ""
    target: Target | None = None
    needs_root: bool = False


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
