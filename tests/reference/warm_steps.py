"""What can happen in the model of the warm tier."""

from __future__ import annotations

from dataclasses import dataclass

from tests.warm.nodes import CHUNK_BYTES, PACKED_BYTES

KEYS = ("a", "b", "c", "d/e", "d/f")
SIZES = (1, 4096, PACKED_BYTES - 1, PACKED_BYTES, PACKED_BYTES + 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 777)
NODES_COUNT = 2
LOSSES: tuple[str, ...] = ("deleted", "emptied", "noise", "away")  # what is away comes back as it was
WEATHERS: tuple[str, ...] = ("failing", "read-only", "full", "hanging", "mute")


@dataclass(frozen=True)
class Overwrite:
    key: str
    size_bytes: int
    seed: int


@dataclass(frozen=True)
class Read:
    node: int
    key: str
    fresh: bool  # not from the hot tier


@dataclass(frozen=True)
class Survive:
    """The store gives nothing, and everything is read all the same."""

    node: int


@dataclass(frozen=True)
class Demote:
    node: int
    fill: bool  # everything is read before
    evict: bool


@dataclass(frozen=True)
class Trouble:
    target: int
    kind: str


@dataclass(frozen=True)
class Damage:
    """To one file: of all there are, the one at this share."""

    place: float
    kind: int


@dataclass(frozen=True)
class Recover:
    target: int


@dataclass(frozen=True)
class Probe:
    node: int


@dataclass(frozen=True)
class Scrub:
    node: int
    repair: bool


@dataclass(frozen=True)
class MakeRoom:
    """The oldest copies go."""

    node: int
    need_bytes: int


@dataclass(frozen=True)
class Crash:
    """While it demotes, repairs, or idles: after so many calls of its on targets."""

    node: int
    calls_count: int
    work: str
    amid: bool  # while the other node reads and demotes


@dataclass(frozen=True)
class Cold:
    is_down: bool


@dataclass(frozen=True)
class Storm:
    seed: int


@dataclass(frozen=True)
class Mend:
    node: int


Step = Overwrite | Read | Survive | Demote | Trouble | Damage | Recover | Probe | Scrub | MakeRoom | Crash | Cold | Storm | Mend
