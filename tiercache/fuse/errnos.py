"""The one place where an error becomes an errno.

A bug is not in this table: an exception that is not a TiercacheError ends the daemon, because going on with a state
that nobody understands is how wrong bytes are served.
"""

from __future__ import annotations

import errno

from tiercache import errors
from tiercache.tiers.tier import SinkClosed

ERRNOS: tuple[tuple[type[errors.TiercacheError], int], ...] = (
    (errors.NotFound, errno.ENOENT),
    (errors.VersionChanged, errno.ESTALE),
    (errors.Archived, errno.EREMOTEIO),
    (errors.AccessDenied, errno.EACCES),
    (errors.TierError, errno.EIO),
    (errors.HotTierError, errno.EIO),
    (SinkClosed, errno.EIO),
)


def errno_of(error: errors.TiercacheError) -> int:
    """The first row that fits. Raises the error itself when none does."""
    for kind, number in ERRNOS:
        if isinstance(error, kind):
            return number
    raise error
