"""Rules of pins: what a pin covers, whether it still counts, and whether there is room for it.

A pin covers one key (`exact`), or everything at and below a prefix. Prefixes match at '/' only: `train/a`
covers `train/a` and `train/a/0001.jpg`, never `train/ab`; `train/a/` covers what is below, not a key
`train/a`; the empty prefix covers the dataset.

A pin is a promise to keep bytes, so it is admitted only if they fit: all pinned bytes together leave
RESERVE_RATIO of the hot tier to everybody else. Sizes are whole file system blocks, and what several pins
cover counts once (`covered_bytes`). Without that reserve a node whose pins fill the disk
would stream every other read from the cold store for ever, and nothing would say why. Bytes that are already
hot count in full: they can no longer be evicted either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from tiercache.core.record import Pin

RESERVE_RATIO = 0.1


def covers(pin: Pin, dataset: str, key: str) -> bool:
    """Whether the key is one that the pin names; says nothing about expiry."""
    if pin.dataset != dataset:
        return False
    if pin.exact or key == pin.prefix:
        return key == pin.prefix
    below = pin.prefix if pin.prefix == "" or pin.prefix.endswith("/") else pin.prefix + "/"
    return key.startswith(below)


def is_live(pin: Pin, now_seconds: float) -> bool:
    """Whether the pin still counts at `now_seconds` (Unix seconds); one without expiry always does."""
    return pin.expires_seconds == 0 or now_seconds < pin.expires_seconds


def live(pins: Iterable[Pin], now_seconds: float) -> list[Pin]:
    """The pins that have not expired at `now_seconds` (Unix seconds)."""
    return [pin for pin in pins if is_live(pin, now_seconds)]


class Admitted(msgspec.Struct, frozen=True):
    """There is room. `fetch_bytes` are not hot yet; all pins will hold `pinned_bytes` of at most `limit_bytes`."""

    fetch_bytes: int
    pinned_bytes: int
    limit_bytes: int


class Refused(msgspec.Struct, frozen=True):
    """There is no room: `wanted_bytes` on top of `pinned_bytes` exceed `limit_bytes` by `short_bytes`."""

    wanted_bytes: int
    pinned_bytes: int
    limit_bytes: int
    short_bytes: int


def admits(
    wanted_bytes: int,
    already_hot_bytes: int,
    pinned_bytes: int,
    capacity_bytes: int,
    reserve_ratio: float = RESERVE_RATIO,
) -> Admitted | Refused:
    """Whether a new pin of `wanted_bytes` in all fits beside the `pinned_bytes` of others.

    `already_hot_bytes` of the wanted are in the hot tier. What two pins both cover is to be counted once: see `covered_bytes`.
    """
    limit_bytes = capacity_bytes - int(capacity_bytes * reserve_ratio)
    total_bytes = pinned_bytes + wanted_bytes
    if total_bytes > limit_bytes:
        return Refused(wanted_bytes, pinned_bytes, limit_bytes, total_bytes - limit_bytes)
    return Admitted(max(0, wanted_bytes - already_hot_bytes), total_bytes, limit_bytes)


def outermost(pins: Sequence[Pin]) -> list[Pin]:
    """Without those that another one of them covers whole."""
    prefixes = _by_prefix(pins)
    return [pin for pin in pins if _enclosing(pin, prefixes) is None]


def covered_bytes(pins: Sequence[Pin]) -> int:
    """What the pins hold together, by their sizes at admission. Pins are nested or have nothing in common.

    A pin of no known size (of the configuration) counts as much as those within it.
    """
    prefixes = _by_prefix(pins)
    within: dict[tuple[str, str], int] = {}
    total_bytes = 0
    for pin in sorted(pins, key=lambda pin: (len(pin.prefix), pin.exact), reverse=True):  # the inner ones first
        size_bytes = pin.bytes_at_admission
        if not pin.exact:
            size_bytes = max(size_bytes, within.get((pin.dataset, pin.prefix), 0))
        outer = _enclosing(pin, prefixes)
        if outer is None:
            total_bytes += size_bytes
        else:
            place = (outer.dataset, outer.prefix)
            within[place] = within.get(place, 0) + size_bytes
    return total_bytes


def _by_prefix(pins: Iterable[Pin]) -> dict[tuple[str, str], Pin]:
    return {(pin.dataset, pin.prefix): pin for pin in pins if not pin.exact}


def _enclosing(pin: Pin, prefixes: Mapping[tuple[str, str], Pin]) -> Pin | None:
    """The innermost of the prefix pins that covers all that `pin` does, other than itself."""
    found = (prefixes.get((pin.dataset, prefix)) for prefix in _prefixes_of(pin.prefix))
    return next((outer for outer in found if outer is not None and (pin.exact or outer.prefix != pin.prefix)), None)


class PinSet:
    """Hundreds of pins, asked for millions of keys: a look-up costs the depth of the key, not the number of pins.

    Immutable; build a new one when pins change. Expiry is judged at each look-up.
    """

    def __init__(self, pins: Iterable[Pin]) -> None:
        self._exact: dict[tuple[str, str], Pin] = {}
        self._prefixes: dict[str, dict[str, Pin]] = {}
        for pin in pins:
            if pin.exact:
                self._exact[pin.dataset, pin.prefix] = pin
            else:
                self._prefixes.setdefault(pin.dataset, {})[pin.prefix] = pin

    def __len__(self) -> int:
        return len(self._exact) + sum(map(len, self._prefixes.values()))

    def find(self, dataset: str, key: str, now_seconds: float) -> Pin | None:
        """A live pin that covers the key (the exact one, else the one with the longest prefix), or None."""
        exact = self._exact.get((dataset, key))
        if exact is not None and is_live(exact, now_seconds):
            return exact
        prefixes = self._prefixes.get(dataset)
        if prefixes is None:
            return None
        for prefix in _prefixes_of(key):
            pin = prefixes.get(prefix)
            if pin is not None and is_live(pin, now_seconds):
                return pin
        return None

    def covers(self, dataset: str, key: str, now_seconds: float) -> bool:
        return self.find(dataset, key, now_seconds) is not None


def _prefixes_of(key: str) -> Iterator[str]:
    """Every prefix that covers the key, longest first: the key, then up to and without each '/', then ''."""
    yield key
    end = key.rfind("/")
    while end >= 0:
        if end + 1 < len(key):
            yield key[: end + 1]
        yield key[:end]
        end = key.rfind("/", 0, end)
    if key and not key.startswith("/"):
        yield ""
