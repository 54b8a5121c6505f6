"""All of the engine, put together: what the daemon serves from, and what the model tests drive without a kernel.

The parts get each other here and nowhere else. Everything that runs by itself is started in the nursery by `start`, and
stops when that is cancelled.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from tiercache.core.record import HotRecord, ObjectRef
from tiercache.engine.census import Census
from tiercache.engine.dataset import Dataset
from tiercache.engine.demotion import Demotion
from tiercache.engine.facts import Facts
from tiercache.engine.fill import Filler
from tiercache.engine.holdings import Holdings
from tiercache.engine.namespace import Namespace
from tiercache.engine.outgoing import Outgoing
from tiercache.engine.pinning import Pinning
from tiercache.engine.promotion import Promotion
from tiercache.engine.publication import NothingPublished, Publication
from tiercache.engine.reader import Reader
from tiercache.engine.room import Room
from tiercache.engine.scrubbing import Scrub
from tiercache.engine.source import Source, WarmCopies
from tiercache.engine.upkeep import Upkeep
from tiercache.engine.warm_work import controls_of
from tiercache.engine.warmset import WarmSet
from tiercache.index.index import Index
from tiercache.metrics.tally import Tally
from tiercache.tiers.hot import HotTier
from tiercache.tiers.space import Ledger


@dataclass(frozen=True)
class Limits:
    """The numbers that the operator chose."""

    chunk_bytes: int
    whole_file_bytes: int
    read_ahead_bytes: int
    negative_ttl_seconds: float
    scrub_bytes: int = 0


class Engine:
    def __init__(
        self,
        nursery: trio.Nursery,
        datasets: Sequence[Dataset],
        index: Index,
        files: HotTier,
        ledgers: Sequence[Ledger],
        limits: Limits,
        tally: Tally,
        *,
        single: bool,
        sweep: bool = False,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        publication: Publication | None = None,
        warm: WarmSet | None = None,
    ) -> None:
        publication = publication or NothingPublished()
        self.nursery = nursery
        self.datasets = datasets
        self.index = index
        self.facts = Facts(index, limits.chunk_bytes, warm.copies.known if warm is not None else lambda _: False)
        self.warm = warm
        copies = WarmCopies(warm.tier, warm.reads.lacks, warm.reads.has) if warm is not None else None
        sources = {dataset.name: Source(dataset, tally.served, tally.passed, copies) for dataset in datasets}
        self.namespace = Namespace(
            index,
            datasets,
            single=single,
            negative_ttl_seconds=limits.negative_ttl_seconds,
            clock=clock,
            on_unreachable=tally.unreachable,
            nursery=nursery,
            outdated=publication.withdraw,
        )
        self.room = Room(ledgers, rng or random.Random(), tally.evicted)
        chunk_bytes = limits.chunk_bytes
        outgoing = Outgoing(len(ledgers))
        self.holdings = Holdings(nursery, index, files, self.room, publication, outgoing, chunk_bytes, clock, self._protected)
        source_of = sources.__getitem__
        self.filler = Filler(
            nursery, self.holdings, source_of, streamed=tally.streamed, filled=tally.filled, failed=tally.fill_failed
        )
        self.promotion = Promotion(self.holdings, self.filler)
        self.demotion = self._demotion(warm, files, outgoing, tally, clock) if warm is not None else None
        self.warm_controls = controls_of(warm, self.demotion) if warm is not None and self.demotion is not None else None
        names = [dataset.name for dataset in datasets]
        self.pinning = Pinning(nursery, index, self.namespace, self.promotion, names, self.room, clock)
        self.census = Census(index, names, len(ledgers))
        self.reader = Reader(
            nursery,
            self.namespace,
            self.holdings,
            self.filler,
            source_of,
            tally,
            clock=clock,
            promote=self._promote,
            whole_file_bytes=limits.whole_file_bytes,
            read_ahead_bytes=limits.read_ahead_bytes,
            publication=publication,
        )
        self.scrub = Scrub(index, files, self.holdings, tally, limits.scrub_bytes, rng or random.Random(), self._promote)
        self.upkeep = Upkeep(index, files, self.holdings, late=tally.late, harvest=self.reader.harvest, sweep=sweep)

    def _demotion(
        self, warm: WarmSet, files: HotTier, outgoing: Outgoing, observer: Tally, clock: Callable[[], float]
    ) -> Demotion:
        return Demotion(
            self.index,
            files,
            self.holdings,
            outgoing,
            self.namespace,
            self.datasets,
            warm.copies,
            warm.writer,
            observer,
            pack_threshold_bytes=warm.pack_threshold_bytes,
            busy=lambda: self.filler.running_count > 0,
            wrote=warm.wrote,
            clock=clock,
        )

    def start(self) -> None:
        """Everything that runs by itself."""
        self.nursery.start_soon(self.promotion.run)
        self.nursery.start_soon(self.pinning.run)
        self.nursery.start_soon(self.upkeep.run)
        self.nursery.start_soon(self.census.run)
        self.nursery.start_soon(self.scrub.run)
        if self.warm is not None:
            self.nursery.start_soon(self.warm.run)
        if self.demotion is not None:
            self.nursery.start_soon(self.demotion.run)

    def _protected(self, record: HotRecord) -> bool:
        """Pinned, and not an old version of what is pinned."""
        if not self.pinning.protects(record.dataset, record.key):
            return False
        return not self.namespace.is_superseded(record.dataset, record.key, record.version)

    def _promote(self, ref: ObjectRef) -> None:
        self.promotion.wish(ref)
