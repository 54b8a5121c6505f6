"""Names while a store cannot be reached: what was known before goes on being believed.

A job that reads from the hot tier must not stop because a store is down and a time to live has run out meanwhile. So a name that
was known is asked for again when its time is up, but only the first such question is waited for, and not longer than
WAIT_SECONDS. From then on the dataset counts as silent: known names are answered at once, and one question at a time
goes on in the background. The first answer of the store, whatever it says, ends the silence.

Only Unavailable (unreachable, overloaded, timed out) is silence; "not found" and "access denied" are answers. Names
that were not known still wait for the store and fail with its error: an outage is never turned into "not found".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog
import trio

from tiercache.errors import TiercacheError, Unavailable

log = structlog.get_logger()
T = TypeVar("T")

WAIT_SECONDS = 5.0


class Outages:
    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._silent: set[str] = set()
        self._asking: set[str] = set()

    def is_silent(self, dataset: str) -> bool:
        return dataset in self._silent

    def heard(self, dataset: str) -> None:
        """The store has answered, whoever asked."""
        if dataset in self._silent:
            log.info("store_answers_again", dataset=dataset)
            self._silent.discard(dataset)

    async def renewed(self, dataset: str, ask: Callable[[], Awaitable[T]]) -> T | None:
        """What the store says now; None when it is silent. Raises what it answers. `ask` goes on when it is not waited for."""
        if dataset not in self._silent:
            try:
                with trio.move_on_after(WAIT_SECONDS):
                    return await ask()
            except Unavailable as error:
                log.warning("store_silent", dataset=dataset, error=error.line)
            else:
                log.warning("store_silent", dataset=dataset, waited_seconds=WAIT_SECONDS)
            self._silent.add(dataset)
        if dataset not in self._asking:
            self._asking.add(dataset)
            self._nursery.start_soon(self._listen, dataset, ask)
        return None

    async def _listen(self, dataset: str, ask: Callable[[], Awaitable[object]]) -> None:
        try:
            await ask()
        except Unavailable:
            return
        except TiercacheError:
            self.heard(dataset)
        else:
            self.heard(dataset)
        finally:
            self._asking.discard(dataset)
