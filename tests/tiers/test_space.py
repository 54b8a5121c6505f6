import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from tiercache.errors import HotFull
from tiercache.tiers.space import Ledger, Reservation

BLOCK = 4096


def ledger(capacity: int = 100 * BLOCK, *, min_free: int = 0, held: int = 0, free: int = 1 << 40) -> Ledger:
    return Ledger(
        "/cache",
        capacity_bytes=capacity,
        min_free_bytes=min_free,
        high_ratio=0.95,
        low_ratio=0.9,
        block_bytes=BLOCK,
        held_bytes=held,
        free_bytes=free,
        total_bytes=1 << 41,
    )


def test_case_6_one_byte_takes_a_block() -> None:
    space = ledger(2 * BLOCK)
    assert space.reserve(1).reserved_bytes == BLOCK
    space.reserve(1)
    with pytest.raises(HotFull, match=r"/cache has no room for 4096 bytes: 8192 of 8192 are used"):
        space.reserve(1)


def test_case_6_running_fills_count_before_they_have_written() -> None:
    space = ledger(10 * BLOCK)
    running = [space.reserve(BLOCK) for _ in range(10)]
    with pytest.raises(HotFull):
        space.reserve(1)
    running[0].cancel()
    space.reserve(BLOCK)


def test_case_6_evicted_but_open_files_count_until_they_are_closed() -> None:
    space = ledger(10 * BLOCK, held=10 * BLOCK)
    space.unlinked(4 * BLOCK)
    assert space.free_bytes == 0
    with pytest.raises(HotFull, match="evicted but still open"):
        space.reserve(1)
    space.gone(4 * BLOCK)
    assert space.free_bytes == 4 * BLOCK


def test_case_6_index_and_log_count() -> None:
    space = ledger(10 * BLOCK, held=5 * BLOCK)
    space.overhead_bytes = 5 * BLOCK
    with pytest.raises(HotFull, match="20480 overhead"):
        space.reserve(1)


def test_case_7_minimum_free_space_of_the_file_system_is_kept() -> None:
    space = ledger(1 << 40, min_free=10 * BLOCK, free=12 * BLOCK)
    space.reserve(2 * BLOCK).settle(2 * BLOCK)
    with pytest.raises(HotFull, match=r"its file system has 40960 of \d+ bytes free, and 40960 must stay free"):
        space.reserve(1)


def test_observation_replaces_what_was_estimated_since_the_last_one() -> None:
    space = ledger(1 << 40, free=100 * BLOCK)
    space.reserve(30 * BLOCK).settle(30 * BLOCK)
    assert space.filesystem_free_bytes == 70 * BLOCK
    space.observe_filesystem(50 * BLOCK, 1 << 41)
    assert space.filesystem_free_bytes == 50 * BLOCK
    space.release(10 * BLOCK)
    assert space.filesystem_free_bytes == 60 * BLOCK
    space.unlinked(10 * BLOCK)
    assert space.filesystem_free_bytes == 60 * BLOCK
    space.gone(10 * BLOCK)
    assert space.filesystem_free_bytes == 70 * BLOCK


def test_case_7_a_file_system_that_others_fill_makes_the_cache_give_way() -> None:
    space = ledger(100 * BLOCK, held=50 * BLOCK, free=100 * BLOCK, min_free=20 * BLOCK)
    assert not space.over_high
    space.observe_filesystem(5 * BLOCK, 1 << 41)
    assert space.over_high
    assert space.free_bytes == 0
    victims = space.to_low_bytes()
    assert victims >= 15 * BLOCK
    space.release(victims)
    assert not space.over_high
    space.reserve(1)


def test_bytes_on_their_way_out_are_not_reclaimed_twice() -> None:
    space = ledger(100 * BLOCK, held=100 * BLOCK)
    victims = space.to_low_bytes()
    assert victims == 10 * BLOCK
    space.unlinked(victims)
    assert space.over_high
    assert space.to_low_bytes() == 0


def test_a_reservation_is_given_back_when_its_block_fails() -> None:
    space = ledger()
    with pytest.raises(ValueError, match="broken"), space.reserve(BLOCK):
        raise ValueError("broken")
    assert space.used_bytes == 0
    with space.reserve(BLOCK) as reservation:
        reservation.settle(BLOCK)
    assert space.held_bytes == BLOCK


def test_a_reservation_is_concluded_once() -> None:
    reservation = ledger().reserve(BLOCK)
    reservation.cancel()
    with pytest.raises(AssertionError, match="once"):
        reservation.settle(0)


def test_a_fill_cannot_hold_more_than_it_reserved() -> None:
    with pytest.raises(AssertionError, match="more than it had reserved"):
        ledger().reserve(BLOCK).settle(2 * BLOCK)


def test_case_7_rewriting_what_a_broken_fill_left_needs_no_room() -> None:
    ledger(BLOCK, held=BLOCK).reserve(0).settle(0)


class LedgerMachine(RuleBasedStateMachine):
    """A ledger against a disk on which every fill writes when it settles and every eviction frees.

    `disk_free` may also be written to by others; the ledger learns that at the next observation.
    """

    reservations = Bundle("reservations")
    files = Bundle("files")
    zombies = Bundle("zombies")

    def __init__(self) -> None:
        super().__init__()
        self.capacity = 64 * BLOCK
        self.disk_free = 80 * BLOCK
        self.disk_used_by_us = 0
        self.promised = 0
        self.others_wrote = False
        self.overhead = 0
        self.space = ledger(self.capacity, min_free=8 * BLOCK, free=self.disk_free)

    @rule(target=reservations, length=st.integers(0, 20 * BLOCK))
    def reserve(self, length: int) -> object:
        before = self.space.used_bytes, self.space.free_bytes
        try:
            reservation = self.space.reserve(length)
        except HotFull:
            assert (self.space.used_bytes, self.space.free_bytes) == before
            assert length > before[1]
            return multiple()
        assert reservation.reserved_bytes <= before[1]
        self.promised += reservation.reserved_bytes
        return reservation

    @rule(target=files, reservation=consumes(reservations), part=st.floats(0, 1))
    def settle(self, reservation: Reservation, part: float) -> int:
        held = int(reservation.reserved_bytes * part) // BLOCK * BLOCK
        reservation.settle(held)
        self.promised -= reservation.reserved_bytes
        self.disk_free -= held
        self.disk_used_by_us += held
        return held

    @rule(reservation=consumes(reservations))
    def cancel(self, reservation: Reservation) -> None:
        reservation.cancel()
        self.promised -= reservation.reserved_bytes

    @rule(held=consumes(files))
    def evict(self, held: int) -> None:
        self.space.release(held)
        self.disk_free += held
        self.disk_used_by_us -= held

    @rule(target=zombies, held=consumes(files))
    def evict_open(self, held: int) -> int:
        self.space.unlinked(held)
        return held

    @rule(held=consumes(zombies))
    def close(self, held: int) -> None:
        self.space.gone(held)
        self.disk_free += held
        self.disk_used_by_us -= held

    @precondition(lambda self: self.disk_free > 0)
    @rule(share=st.floats(0, 1))
    def others_write(self, share: float) -> None:
        self.disk_free -= int(self.disk_free * share) // BLOCK * BLOCK
        self.others_wrote = True

    @precondition(lambda self: self.disk_free >= 0)
    @rule()
    def observe(self) -> None:
        self.space.observe_filesystem(self.disk_free, 1 << 41)
        self.others_wrote = False

    @invariant()
    def nothing_is_negative_and_the_sum_is_right(self) -> None:
        assert self.space.held_bytes >= 0
        assert self.space.reserved_bytes == self.promised
        assert self.space.unlinked_bytes >= 0
        assert self.space.used_bytes == self.disk_used_by_us + self.promised
        assert 0 <= self.space.free_bytes <= self.capacity

    @invariant()
    def capacity_is_never_passed(self) -> None:
        assert self.space.used_bytes <= self.capacity

    @invariant()
    def what_is_promised_fits_on_the_disk(self) -> None:
        if not self.others_wrote:
            assert self.space.filesystem_free_bytes <= self.disk_free - self.promised

    @invariant()
    def reclaim_reaches_the_low_watermark(self) -> None:
        if self.space.over_high and not self.space.unlinked_bytes:
            assert 0 < self.space.to_low_bytes() <= self.space.used_bytes


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
