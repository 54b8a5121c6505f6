"""The namespace: what a name leads to, as fresh as the dataset's time to live asks for.

Names come from the index while they are fresh (`core/freshness`), else from the cold store. Three ways lead there:

* `lookup` of a name whose directory was not listed lately: **one LIST** with prefix = directory + name, delimiter '/',
  LOOKUP_LIMIT names. The exact key sorts before everything else with that prefix and a directory shows as the prefix `name/`,
  so the answer tells file, directory or neither. Only when it is cut short before `name/` could show (sixteen siblings
  such as `name-1`, since '-' sorts before '/') a second LIST with prefix `name/` tells. Rejected: HEAD and LIST. Two
  requests instead of one, a HEAD needs s3:GetObject where a LIST needs what the mount needs anyway, and its 404 may
  mean a missing bucket. The same LIST renews a name that is known but out of its time.
* a listing of the whole directory, for opendir, or once lookups have paid for it (`engine/listing`).
* `walk`, a recursive listing (`engine/walk`).

So an open in a directory of 20,000 objects that was never listed costs one LIST a path component and its GET.

Concurrent lookups of a name share a request, and so do opendirs of a directory. A failure is delivered to all
who wait and stored nowhere. Everything synchronous here reads the index inline, some microseconds a call.

**Sources.** The index may stem from a mount of another source, or of several: the inode of a dataset's root tells its source
(`engine/recorder`), and is kept under the root directory's name b'' (one dataset) or the dataset's name. Where it differs, the
first operation forgets all names of the root, and with them all that is below.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import trio

from tiercache.core.freshness import kernel_seconds, remaining_seconds
from tiercache.core.naming import Absent, DirectoryName, Named, Undecided, components, decide, decode, encode, fault
from tiercache.core.record import ROOT_INODE, Entry, Inode, Kind, Link, ObjectId
from tiercache.engine.dataset import Dataset
from tiercache.engine.flight import Flights
from tiercache.engine.listing import DirectoryStream, FixedStream, ListedStream, Listing, Listings, RememberedStream
from tiercache.engine.names import NameChange, Names, Place
from tiercache.engine.outage import Outages
from tiercache.engine.recorder import BATCH, Means, Recorder
from tiercache.engine.refreshing import Refreshed, Refreshing
from tiercache.engine.walk import Walk, WalkedFile
from tiercache.errors import NotFound, VersionChanged
from tiercache.index.index import DropDirectory, DropEntry, Index, PutEntry

LOOKUP_LIMIT = 16
STALE_SECONDS = 1.0  # for so long the kernel may believe a name that could not be asked for (`engine/outage`)
MAX_DENIED = 4096  # negative answers remembered, so that a refresh can take them back from the kernel

__all__ = ["DirectoryStream", "NameNotFound", "Namespace", "Refreshed"]


class NameNotFound(NotFound):
    """The store said that the name does not exist; the kernel may believe it for `negative_ttl_seconds`."""

    def __init__(self, message: str, *, hint: str = "", negative_ttl_seconds: float = 0.0) -> None:
        super().__init__(message, hint=hint)
        self.negative_ttl_seconds = negative_ttl_seconds


class Namespace:
    """`clock` gives Unix seconds. Work that several tasks wait for runs in `nursery`.

    `on_unreachable(dataset, count)` is told how many keys without a POSIX name are in the directories that were listed, whenever
    that changes; `outdated` is told of each file whose name leads elsewhere from now on. With `single` the only dataset
    is the root directory, else each dataset is a directory in it.
    """

    def __init__(
        self,
        index: Index,
        datasets: Sequence[Dataset],
        *,
        single: bool,
        negative_ttl_seconds: float,
        clock: Callable[[], float],
        on_unreachable: Callable[[str, int], None],
        nursery: trio.Nursery,
        outdated: Callable[[Entry], None] = lambda _entry: None,
    ) -> None:
        assert not single or len(datasets) == 1
        self._names = Names(index)
        self._recorder = Recorder(self._names, outdated)
        self._datasets = {dataset.name: dataset for dataset in datasets}
        self._negative_ttl_seconds = negative_ttl_seconds
        self._clock = clock
        self._on_unreachable = on_unreachable
        self._flights: Flights[tuple[Inode, bytes], Entry] = Flights(nursery)
        self._preparing: Flights[Inode, bool] = Flights(nursery)
        self._prepared = False
        self._listings = Listings(self._names, self._recorder, clock, nursery, exists=self.revalidate, ended=self._listing_ended)
        self._outages = Outages(nursery)
        self._denied: OrderedDict[tuple[Inode, bytes], None] = OrderedDict()
        self._unreachable: dict[str, dict[Inode, int]] = {dataset.name: {} for dataset in datasets}
        self._single = single
        self._markers = [
            self._recorder.root_entry(dataset, ROOT_INODE, b"" if single else encode(dataset.name)) for dataset in datasets
        ]
        self._roots = {ROOT_INODE: _root(datasets[0] if single else None)}
        self._places: dict[Inode, Place] = {}
        for dataset, marker in zip(datasets, self._markers, strict=True):
            inode = ROOT_INODE if single else marker.inode
            self._places[inode] = Place(inode, dataset, dataset.prefix)
            if not single:
                self._roots[inode] = marker

    # -- what is known, without a request

    def entry(self, inode: Inode) -> Entry | None:
        """The entry of an inode that was ever given out, the root and datasets included; also of one that is superseded."""
        return self._roots.get(inode) or self._names.entry(inode)

    def is_current(self, entry: Entry) -> bool:
        """Whether its name still leads to it, as far as the index knows."""
        if entry.inode in self._roots:
            return True
        if self._recorder.is_dead(entry.parent):
            return False
        link = self._names.link(entry.parent, entry.name)
        return link is not None and link.inode == entry.inode

    def following_names(self, directory: Inode, after: bytes, limit: int) -> list[bytes]:
        """Names that are known in a directory and come after one, in byte order. No request."""
        return self._names.names(directory, after, limit)

    def following(self, directory: Inode, after: bytes, limit: int) -> list[Entry]:
        """What they lead to."""
        return [entry for entry in self._names.children(directory, after, limit)[1] if entry is not None]

    def is_superseded(self, dataset: str, key: str, version: str) -> bool:
        """Whether the key is known to have another version now; False when nothing is known of it. No request."""
        entry = self.known(dataset, key)
        return entry is not None and entry.version not in ("", version)

    def known(self, dataset: str, key: str) -> Entry | None:
        """What the key led to when it was last looked at; None when nothing is known of it. No request."""
        root = self._datasets.get(dataset)
        if root is None or not key.startswith(root.prefix):
            return None
        entry: Entry | None = self._dataset_entry(dataset)
        for name in components(key.removeprefix(root.prefix)):
            entry = self._names.child(entry.inode, name) if entry is not None else None
        return entry

    def is_silent(self, dataset: str) -> bool:
        """Whether the store of the dataset does not answer, so that known names are believed beyond their time."""
        return self._outages.is_silent(dataset)

    def ttl_seconds(self, entry: Entry) -> float:
        """For how long the kernel may go on from now to believe that the name leads to this entry."""
        if entry.inode in self._roots:
            return kernel_seconds(math.inf)
        link = self._names.link(entry.parent, entry.name)
        if link is None or link.inode != entry.inode:
            return 0.0
        return kernel_seconds(self._remaining(self._place(entry.parent), entry.name, link))

    def age_seconds(self, entry: Entry) -> float:
        """Since when the cold store has not confirmed the entry; infinite when it is not what its name leads to."""
        if entry.inode in self._roots:
            return 0.0
        link = self._names.link(entry.parent, entry.name)
        if link is None or link.inode != entry.inode:
            return math.inf
        now = self._clock()
        past = [seconds for seconds in self._confirmations(entry.parent, entry.name, link) if seconds <= now]
        return now - max(past, default=-math.inf)

    def _confirmations(self, parent: Inode, name: bytes, link: Link) -> list[float]:
        state = self._names.directory(parent)
        listed = [] if state is None else [state.listed_seconds]
        return [link.checked_seconds, *listed, *self._listings.confirmed(parent, name)]

    def _remaining(self, place: Place, name: bytes, link: Link) -> float:
        if self._recorder.is_dead(place.inode):
            return 0.0
        now, ttl = self._clock(), place.dataset.metadata_ttl_seconds
        return max(remaining_seconds(at, ttl, now) for at in self._confirmations(place.inode, name, link))

    def _listed_remaining(self, place: Place) -> float:
        """For how long the directory's last listing answers for names that are not there."""
        state = self._names.directory(place.inode)
        if state is None or self._recorder.is_dead(place.inode):
            return 0.0
        return remaining_seconds(state.listed_seconds, place.dataset.metadata_ttl_seconds, self._clock())

    def _place(self, inode: Inode) -> Place:
        """Raises VersionChanged for an inode that is not known (any more): the kernel then looks up its path again."""
        if place := self._places.get(inode):
            return place
        entry = self._names.entry(inode)
        dataset = None if entry is None else self._datasets.get(entry.dataset)
        if entry is None or dataset is None or not entry.key.startswith(dataset.prefix):
            raise VersionChanged(f"directory inode {inode} is not known any more", hint="enter the directory again")
        if entry.kind is not Kind.DIRECTORY:
            raise NotFound(f"{entry.dataset}/{entry.key} is a file, not a directory")
        return Place(inode, dataset, entry.key)

    # -- lookup

    async def lookup(self, parent: Inode, name: bytes) -> tuple[Entry, float]:
        """What a name leads to, and for how many seconds the kernel may believe it.

        Raises NameNotFound when it does not exist, another TierError when that could not be found out.
        """
        await self._ready()
        if parent == ROOT_INODE and not self._single:
            return self._dataset_root(name), kernel_seconds(math.inf)
        place = self._place(parent)
        if fault(name) is not None:
            raise self._absent(place, name, self._negative_ttl_seconds)
        link = self._names.link(parent, name)
        known = None if link is None else self._names.entry(link.inode)
        if link is not None and known is not None and (remaining := self._remaining(place, name, link)) > 0:
            return known, kernel_seconds(remaining)
        if link is None and (remaining := self._listed_remaining(place)) > 0:
            raise self._absent(place, name, min(self._negative_ttl_seconds, remaining))
        ask = partial(self._flights.join, (parent, name), partial(self._ask, place, name))
        entry = await ask() if known is None else await self._outages.renewed(place.dataset.name, ask)
        if entry is not None:
            return entry, self.ttl_seconds(entry)
        assert known is not None
        return known, STALE_SECONDS

    async def revalidate(self, entry: Entry) -> Entry:
        """What the entry's name leads to now, by a request that starts now. Raises like `lookup`."""
        await self._ready()
        if entry.inode in self._roots:
            return entry
        return await self._anew(self._place(entry.parent), entry.name)

    async def _anew(self, place: Place, name: bytes) -> Entry:
        return await self._flights.anew((place.inode, name), partial(self._ask, place, name))

    async def _ask(self, place: Place, name: bytes) -> Entry:
        asked_seconds = self._clock()
        with self._recorder.asking(place.inode, name) as ticket:
            seen = await self._see(place, name)
            self._outages.heard(place.dataset.name)
            if self._listed_remaining(place) <= 0:
                self._listings.paid(place)
            if isinstance(seen, Absent):
                await self._recorder.drop(place, name, ticket)
            else:
                await self._recorder.record(place, [seen], ticket=ticket, checked_seconds=asked_seconds, means=Means.LOOKUP)
        entry = self._names.child(place.inode, name)
        if entry is None:
            raise self._absent(place, name, self._negative_ttl_seconds)
        return entry

    async def _see(self, place: Place, name: bytes) -> Named | Absent:
        cold = place.dataset.cold
        key = place.prefix + decode(name)
        verdict = decide(place.prefix, name, await cold.list(key, limit=LOOKUP_LIMIT))
        if not isinstance(verdict, Undecided):
            return verdict
        below = await cold.list(f"{key}/", limit=1)
        return DirectoryName(name) if below.objects or below.prefixes else verdict.otherwise

    def _absent(self, place: Place, name: bytes, ttl_seconds: float) -> NameNotFound:
        self._denied[place.inode, name] = None
        self._denied.move_to_end((place.inode, name))
        if len(self._denied) > MAX_DENIED:
            self._denied.popitem(last=False)
        return NameNotFound(f"{place.label}{decode(name)} does not exist", negative_ttl_seconds=ttl_seconds)

    def _dataset_root(self, name: bytes) -> Entry:
        for marker in self._markers:
            if marker.name == name:
                return marker
        raise NameNotFound(f"there is no dataset {decode(name)!r}", negative_ttl_seconds=self._negative_ttl_seconds)

    # -- directories

    async def open_directory(self, inode: Inode) -> DirectoryStream:
        """The names of a directory: at once where its listing is fresh, else as the pages of one listing arrive."""
        await self._ready()
        if inode == ROOT_INODE and not self._single:
            return FixedStream(self._markers)
        place = self._place(inode)
        state = self._names.directory(inode)
        if state is not None and self._listed_remaining(place) > 0:
            self._count_unreachable(place, state.unreachable_count)
            return RememberedStream(self._names, inode)
        listing = self._listings.demand(place)
        if state is not None and await self._outages.renewed(place.dataset.name, partial(listing.beyond, 0)) is None:
            return RememberedStream(self._names, inode)
        return ListedStream(listing, self._names)

    async def reopen_directory(self, inode: Inode, *, is_listed: bool) -> DirectoryStream:
        """What a predecessor's `open_directory` gave out, in the same order: `is_listed` as its stream said."""
        await self._ready()
        if inode == ROOT_INODE and not self._single:
            return FixedStream(self._markers)
        if is_listed:
            return ListedStream(self._listings.demand(self._place(inode)), self._names)
        return RememberedStream(self._names, inode)

    def _listing_ended(self, listing: Listing) -> None:
        self._outages.heard(listing.place.dataset.name)
        self._count_unreachable(listing.place, listing.level.unreachable_count)

    def _count_unreachable(self, place: Place, count: int) -> None:
        counts = self._unreachable[place.dataset.name]
        former = counts.pop(place.inode, 0)
        if count:
            counts[place.inode] = count
        if count != former:
            self._on_unreachable(place.dataset.name, sum(counts.values()))

    # -- paths

    async def resolve(self, dataset: str, path: str) -> Entry:
        """The entry of a path below a dataset ('' is the dataset itself), component by component. Raises like `lookup`."""
        entry = self._dataset_entry(dataset)
        for name in components(path):
            entry, _ = await self.lookup(entry.inode, name)
        return entry

    def _dataset_entry(self, dataset: str) -> Entry:
        if dataset not in self._datasets:
            raise NotFound(f"there is no dataset {dataset!r}", hint="`tiercache status` lists the datasets")
        return self._roots[ROOT_INODE] if self._single else self._dataset_root(encode(dataset))

    async def refresh(self, dataset: str, path: str) -> Refreshed:
        """Ask the store now for a path, and list again what was listed at and below it.

        The caller takes the names in `stale` back from the kernel. Raises NotFound for a path that is not there
        and was not known before either.
        """
        await self._ready()
        self._flights.close_boarding()
        self._recorder.doubt()
        run = Refreshing(self._names, self._recorder, self._listings, self._place, self._anew, self._denied)
        return await run.refresh(self._dataset_entry(dataset), components(path))

    async def walk(self, dataset: str, prefix: str, *, exact: bool = False) -> Walk | WalkedFile:
        """The files that a pin of this key prefix covers (`core/pin`): full keys, as in `Entry.key`; '' is all of the dataset.

        Raises NotFound when `prefix` does not end in '/' and is neither a file nor a directory, or is not in the dataset.
        """
        await self._ready()
        root = self._place(self._dataset_entry(dataset).inode)
        path = "" if prefix in ("", root.prefix.removesuffix("/")) else prefix
        if path and not path.startswith(root.prefix):
            raise NotFound(f"no key of dataset {dataset!r} begins with {prefix!r}: they begin with {root.prefix!r}")
        path = path[len(root.prefix) :]
        if exact or (path and not path.endswith("/")):
            entry = await self.revalidate(await self.resolve(dataset, path))
            if entry.kind is Kind.FILE or exact:
                return WalkedFile([entry] if entry.kind is Kind.FILE else [])
            path += "/"
        names = components(path)
        if any(fault(name) is not None for name in names):
            return WalkedFile([])
        return Walk(self._recorder, self._clock, root, names, root.prefix + path)

    # -- the source of the index

    async def _ready(self) -> None:
        if not self._prepared:
            self._prepared = await self._preparing.join(ROOT_INODE, self._prepare)

    async def _prepare(self) -> bool:
        links = [self._names.link(ROOT_INODE, marker.name) for marker in self._markers]
        if [link.inode for link in links if link is not None] == [marker.inode for marker in self._markers]:
            return True
        changes: list[NameChange] = [DropDirectory(ROOT_INODE), DropEntry(ROOT_INODE, b"")]
        after = b""
        while batch := self._names.names(ROOT_INODE, after, BATCH):
            after = batch[-1]
            await self._names.commit([*changes, *(DropEntry(ROOT_INODE, name) for name in batch)])
        await self._names.commit([*changes, *(PutEntry(marker, self._clock()) for marker in self._markers)])
        return True


def _root(dataset: Dataset | None) -> Entry:
    name, prefix = ("", "") if dataset is None else (dataset.name, dataset.prefix)
    return Entry(ROOT_INODE, ROOT_INODE, b"", Kind.DIRECTORY, name, prefix, "", 0, 0, ObjectId(b""))
