"""Small reads without a task: begun by one call, ended by another.

The GET of a small object costs the event loop less than the task, the scopes and the coroutines of four wrappers that it went
through (0.14 ms of CPU a file, of 0.3 in all). So a tier may offer

    begin(ref, sink, ended) -> Begun | None

besides `read`: all of the object into the sink, under the contract of `read`. None: nothing was begun, because something would
have to be waited for (a slot, credentials) or the object is not small. Otherwise `ended` is called once, on the event loop, in
no task, and never from within `begin`:

* with None: all bytes have landed;
* with `Anew`: ask again by `read`, this was no attempt;
* with what `read` would have raised: a `read` into the same sink goes on from there, with this as its first failed attempt.

So only what goes well at once goes this way, and everything else has one place, in `read`. The wrappers do for it what they do
for a read: the same slots, the same figures, the same deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tiercache.core.record import ObjectRef
from tiercache.tiers.tier import Sink


class Anew(Exception):
    """The read has to be asked for again, by `read`."""


class BrokenOff(Exception):
    """The read was cancelled. Inside a `Retrying` only, which knows why."""


Ended = Callable[[Exception | None], None]


class Begun(Protocol):
    def look(self) -> None:
        """To be called about once a second: ends what has taken too long. Only a tier that has a deadline does anything."""

    def cancel(self) -> None:
        """End it as soon as possible; `ended` is called then. Idempotent."""

    def abandon(self) -> None:
        """It was cancelled a while ago and has not ended: call `ended` now, and leave the thread to the disk that holds it up."""


Begin = Callable[[ObjectRef, Sink, Ended], Begun | None]


def begin_of(tier: object) -> Begin:
    found: Begin = getattr(tier, "begin", _never)
    return found


def _never(_ref: ObjectRef, _sink: Sink, _ended: Ended) -> None:
    """Of a tier that cannot."""
