"""Everything that tiercache raises on purpose.

    TiercacheError
    ├── UsageError            the user asked for something contradictory or misspelt (exit 2)
    ├── SetupError            the machine, the source or the credentials do not allow the mount (exit 1)
    ├── NoDaemon              no daemon answers on the socket (exit 3)
    ├── TierError             a tier could not do what was asked
    │   ├── NotFound          the key does not exist there
    │   ├── VersionChanged    the key exists, but not in the version that was asked for
    │   ├── Archived          the object is in an archive class and must be restored first
    │   ├── AccessDenied      the credentials do not suffice (carries the permission that lacked)
    │   ├── Unavailable       unreachable, overloaded, timed out: worth trying again
    │   ├── BadResponse       the store answered something that cannot be right: bytes are not used
    │   ├── Damaged           what was read is not what was written: not served, mended where there is redundancy
    │   ├── TargetFull        a warm target has no room
    │   └── NotHeld           this tier has no trustworthy copy: ask the next one
    └── HotTierError
        ├── HotFull           no room, and nothing can be evicted: stream past the hot tier
        ├── HotSick           the cache disk failed: stream past the hot tier
        └── IndexDamaged      the index cannot be used: set it aside and rebuild

A class answers two questions: is it worth trying again (`retryable`), and what should the
operator do (`hint`). Errors become errno in one place only, `fuse/errnos.py`; anything that is
not a TiercacheError is a bug and is allowed to crash.

Messages quote what users write and what libraries say, and either may be a URL with a password in it. So the root masks
that, once for terminal, JSON, status and log.
"""

from __future__ import annotations

import re

_SECRET = re.compile(r"(?<=://)[^\s/@:]*(?::\S*)?@")


def masked(text: str) -> str:
    """The text with what stands before the `@` of a URL's host left out. A key may hold `/`; a path may hold `@`."""
    return _SECRET.sub("***@", text) if "@" in text else text


class TiercacheError(Exception):
    """Root. `str()` is one line that names the culprit; `hint` says what to do next ('' if obvious)."""

    retryable = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(masked(message))
        self.hint = masked(hint)

    @property
    def line(self) -> str:
        """Message and hint as the one line that a user sees."""
        return f"{self}; {self.hint}" if self.hint else str(self)


class UsageError(TiercacheError):
    pass


class SetupError(TiercacheError):
    pass


class NoDaemon(TiercacheError):
    pass


class TierError(TiercacheError):
    pass


class NotFound(TierError):
    pass


class VersionChanged(TierError):
    pass


class Archived(TierError):
    pass


class AccessDenied(TierError):
    pass


class Unavailable(TierError):
    """`retry_after_seconds` is what the store asked for (Retry-After), or None."""

    retryable = True

    def __init__(self, message: str, *, hint: str = "", retry_after_seconds: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_seconds = retry_after_seconds


class BadResponse(TierError):
    retryable = True


class Damaged(TierError):
    pass


class TargetFull(TierError):
    pass


class NotHeld(TierError):
    pass


class HotTierError(TiercacheError):
    pass


class HotFull(HotTierError):
    pass


class HotSick(HotTierError):
    pass


class IndexDamaged(HotTierError):
    pass
