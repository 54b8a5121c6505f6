"""How long what the cold store once said may be believed.

Every fact about a name carries the Unix time at which the *request* that confirmed it was started, never
when its answer came: the answer may be as old as the start. A name is confirmed by a lookup of its
own, or by a complete listing of its directory; it stays fresh until the later of the two plus the
dataset's time to live. What the kernel may cache is the rest of that time, so the two caches together
never exceed one time to live.

A wall clock may step back. A confirmation that lies in the future proves nothing and counts as
stale: one more request, instead of a name that stays stale for as long as the step was.

**When to list instead of looking up.** A lookup costs one request, a listing one request a page, and
nobody knows how many lookups will follow, or how many pages there are: the ski-rental problem.
After FREE_LOOKUPS lookups each further one pays for one page of a listing in the background. So
the total is never more than twice the lookups' own cost, and a directory of n pages is listed to its
end (and answers everything from the index) after n + FREE_LOOKUPS - 1 lookups. Rejected: listing at the first
lookup (opening one file in a directory of ten million costs 10,000 requests), and never listing
(2,000 opens in a directory of one page cost 2,000 requests).
"""

from __future__ import annotations

import math

NEVER_SECONDS = -math.inf  # the confirmation time of what must be asked again
KERNEL_LIMIT_SECONDS = 86_400.0  # the kernel takes no infinite time, and a day's worth of lookups costs nothing
FREE_LOOKUPS = 8


def remaining_seconds(confirmed_seconds: float, ttl_seconds: float, now_seconds: float) -> float:
    """For how long a confirmation still holds; 0 when it does not. `ttl_seconds` may be infinite."""
    if confirmed_seconds == NEVER_SECONDS:
        return 0.0
    if math.isinf(ttl_seconds):
        return math.inf
    if confirmed_seconds > now_seconds:
        return 0.0
    return max(0.0, ttl_seconds - (now_seconds - confirmed_seconds))


def kernel_seconds(remaining: float) -> float:
    """For how long the kernel may cache what is fresh for `remaining` seconds."""
    return min(remaining, KERNEL_LIMIT_SECONDS)


def pages_due(lookups_count: int) -> int:
    """How many pages of a background listing that many lookups in one directory have paid for."""
    return max(0, lookups_count - FREE_LOOKUPS + 1)
