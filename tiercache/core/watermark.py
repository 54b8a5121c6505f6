"""The arithmetic of limits: how much a hot directory may use, when reclaim starts and where it stops.

Two limits hold at once: the operator's capacity, and a minimum of free space in the file system, which
others may fill too. They meet in one figure, `limit_bytes`: the most that the cache may use *now*. The watermarks
are ratios of that figure, so that a file system filled by others makes the cache give way in time and
not only when it is full.

All sizes are whole file system blocks (`blocks`): 1,000 one-byte objects occupy 4 MB.
"""

from __future__ import annotations

DEFAULT_CAPACITY_RATIO = 0.8  # of what is free or already ours
DEFAULT_MIN_FREE_RATIO = 0.1  # of the whole file system


def blocks(length_bytes: int, block_bytes: int) -> int:
    """`length_bytes` rounded up to whole blocks, in bytes."""
    return -(-length_bytes // block_bytes) * block_bytes


def default_min_free_bytes(total_bytes: int) -> int:
    """What a cache without a stated minimum leaves free in a file system of `total_bytes`."""
    return int(total_bytes * DEFAULT_MIN_FREE_RATIO)


def default_capacity_bytes(free_bytes: int, total_bytes: int, used_bytes: int) -> int:
    """Capacity of a cache for which none was given; 0 when the file system is too full for one.

    `used_bytes` is what the cache already uses of it: counted as free, else the cache would shrink at every mount.
    """
    available_bytes = free_bytes + used_bytes
    by_ratio = int(available_bytes * DEFAULT_CAPACITY_RATIO)
    return max(0, min(by_ratio, available_bytes - default_min_free_bytes(total_bytes)))


def limit_bytes(capacity_bytes: int, used_bytes: int, free_bytes: int, min_free_bytes: int) -> int:
    """The most that the cache may use now. `free_bytes` is what is free when all of `used_bytes` is written."""
    return max(0, min(capacity_bytes, used_bytes + free_bytes - min_free_bytes))


def over(used_bytes: int, limit: int, high_ratio: float) -> bool:
    """Whether reclaim has to start."""
    return used_bytes > limit * high_ratio


def excess_bytes(used_bytes: int, limit: int, low_ratio: float) -> int:
    """What must go to reach the low watermark; 0 below it."""
    return max(0, used_bytes - int(limit * low_ratio))
