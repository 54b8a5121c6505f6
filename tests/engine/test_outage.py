"""What is believed of names while a store does not answer (CASES 10)."""

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tiercache.engine.outage import WAIT_SECONDS, Outages
from tiercache.errors import NotFound, Unavailable


class Store:
    """Answers 'fresh', fails, or hangs, as told."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.hangs = False
        self.asked_count = 0

    async def ask(self) -> str:
        self.asked_count += 1
        if self.hangs:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        if self.error is not None:
            raise self.error
        return "fresh"


async def test_case_10_a_store_that_answers_is_asked_each_time() -> None:
    store = Store()
    async with trio.open_nursery() as nursery:
        outages = Outages(nursery)
        assert [await outages.renewed("data", store.ask) for _ in range(3)] == ["fresh"] * 3
    assert store.asked_count == 3


async def test_case_10_a_silent_store_costs_one_wait_and_is_noticed_when_it_returns() -> None:
    store = Store()
    store.error = Unavailable("connection refused")
    async with trio.open_nursery() as nursery:
        outages = Outages(nursery)
        assert await outages.renewed("data", store.ask) is None
        await wait_all_tasks_blocked()
        store.error = None
        assert await outages.renewed("data", store.ask) is None, "answered at once, the question goes on in the background"
        await wait_all_tasks_blocked()
        assert await outages.renewed("data", store.ask) == "fresh"


async def test_case_10_an_answer_is_no_silence() -> None:
    store = Store()
    store.error = NotFound("gone")
    async with trio.open_nursery() as nursery:
        outages = Outages(nursery)
        for _ in range(2):
            with pytest.raises(NotFound):
                await outages.renewed("data", store.ask)


async def test_case_10_another_dataset_is_not_silent(autojump_clock: MockClock) -> None:
    hung, healthy = Store(), Store()
    hung.hangs = True
    async with trio.open_nursery() as nursery:
        outages = Outages(nursery)
        began = trio.current_time()
        assert await outages.renewed("hung", hung.ask) is None
        assert trio.current_time() - began == pytest.approx(WAIT_SECONDS)
        assert [await outages.renewed("hung", hung.ask) for _ in range(5)] == [None] * 5
        assert trio.current_time() - began == pytest.approx(WAIT_SECONDS), "only the first question was waited for"
        await wait_all_tasks_blocked()
        assert hung.asked_count == 2, "one question at a time goes on in the background"
        assert await outages.renewed("healthy", healthy.ask) == "fresh"
        nursery.cancel_scope.cancel()
