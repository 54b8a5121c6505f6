"""Memory that comes back by itself: never while somebody can still read or fill it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import trio

from tiercache.tiers.warm.loans import LEAST_BYTES, Loans

MIB = 1 << 20


def test_what_nobody_refers_to_is_lent_again() -> None:
    loans = Loans()
    loan = loans.take(MIB)
    loan[:] = bytes([7]) * MIB
    del loan
    assert loans.idle_bytes == MIB
    again = loans.take(MIB - 100)
    assert loans.idle_bytes == 0
    assert len(again) == MIB - 100
    assert again[0] == 7, "the same pages"


def test_a_view_that_was_cut_from_it_keeps_it() -> None:
    loans = Loans()
    piece = loans.take(2 * MIB)[MIB : MIB + 10]
    assert loans.idle_bytes == 0
    piece[:] = b"0123456789"
    other = loans.take(2 * MIB)
    other[:] = bytes(2 * MIB)
    assert bytes(piece) == b"0123456789"
    del piece
    assert loans.idle_bytes == 2 * MIB


async def test_a_thread_that_was_given_up_keeps_it() -> None:
    loans, go_on, has_ended = Loans(), threading.Event(), threading.Event()

    def fill(memory: memoryview) -> None:
        go_on.wait(10)
        memory[:] = bytes([9]) * MIB
        has_ended.set()

    with trio.move_on_after(0.01):
        await trio.to_thread.run_sync(fill, loans.take(MIB), abandon_on_cancel=True)
    other = loans.take(MIB)
    other[:] = bytes(MIB)
    go_on.set()
    assert await trio.to_thread.run_sync(has_ended.wait, 10)
    assert bytes(other) == bytes(MIB)


def test_what_is_idle_is_bounded_and_goes_when_nobody_asks() -> None:
    loans = Loans(idle_bytes=4 * MIB)
    lent = [loans.take(MIB) for _ in range(9)]
    lent.clear()
    assert loans.idle_bytes == 4 * MIB
    loans.rest()
    assert loans.idle_bytes == 4 * MIB, "it was used since the last time"
    loans.rest()
    assert loans.idle_bytes == 0


def test_small_ones_and_none_at_all() -> None:
    loans = Loans()
    for size in (0, 1, LEAST_BYTES - 1):
        assert len(loans.take(size)) == size
    assert loans.idle_bytes == 0


def test_many_threads_never_share_one() -> None:
    loans = Loans()
    problems: list[int] = []

    def work(number: int) -> None:
        mark = bytes([number]) * MIB
        for _ in range(50):
            memory = loans.take(MIB)
            memory[:] = mark
            if bytes(memory) != mark:
                problems.append(number)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert not problems
