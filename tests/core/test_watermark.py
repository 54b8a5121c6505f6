from hypothesis import given
from hypothesis import strategies as st

from tiercache.core import watermark

SIZES = st.integers(0, 1 << 50)
RATIOS = st.floats(0, 1)


@given(SIZES, st.sampled_from([512, 1024, 4096, 65536]))
def test_blocks_is_the_smallest_whole_number_of_blocks_that_suffices(length: int, block: int) -> None:
    rounded = watermark.blocks(length, block)
    assert rounded % block == 0
    assert rounded - block < length <= rounded


def test_case_6_one_byte_occupies_a_block() -> None:
    assert sum(watermark.blocks(1, 4096) for _ in range(1000)) == 4_096_000


@given(SIZES, SIZES, SIZES)
def test_default_capacity_leaves_a_tenth_and_takes_at_most_four_fifths(free: int, used: int, others: int) -> None:
    total = free + used + others
    capacity = watermark.default_capacity_bytes(free, total, used)
    assert 0 <= capacity <= 0.8 * (free + used)
    assert capacity == 0 or free + used - capacity >= watermark.default_min_free_bytes(total)


@given(SIZES, SIZES, SIZES)
def test_case_8_default_capacity_is_the_same_after_a_restart_with_a_warm_cache(free: int, others: int, filled: int) -> None:
    total = free + others
    first = watermark.default_capacity_bytes(free, total, 0)
    held = min(filled, first)
    assert watermark.default_capacity_bytes(free - held, total, held) == first


def test_default_capacity_of_a_disk_that_others_have_filled_is_nothing() -> None:
    assert watermark.default_capacity_bytes(9, 100, 0) == 0


@given(SIZES, SIZES, st.integers(-(1 << 50), 1 << 50), SIZES)
def test_limit_keeps_to_the_capacity_and_to_the_free_space(capacity: int, used: int, free: int, min_free: int) -> None:
    limit = watermark.limit_bytes(capacity, used, free, min_free)
    assert 0 <= limit <= capacity
    growth = limit - used
    assert limit == 0 or free - growth >= min_free


@given(SIZES, SIZES, RATIOS)
def test_reclaiming_the_excess_ends_below_the_watermark(used: int, limit: int, ratio: float) -> None:
    excess = watermark.excess_bytes(used, limit, ratio)
    assert 0 <= excess <= used
    assert not watermark.over(used - excess, limit, ratio)


@given(SIZES, SIZES, RATIOS, RATIOS)
def test_whoever_is_over_high_has_something_to_reclaim(used: int, limit: int, one: float, other: float) -> None:
    low, high = sorted((one, other))
    if watermark.over(used, limit, high):
        assert watermark.excess_bytes(used, limit, low) > 0
