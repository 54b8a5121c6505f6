"""The LMDB environment below the index: opening, short reads, transactions that grow the map, errors in our words.

Flags. `metasync=False`: one flush per transaction; a power failure may undo the last one, which `commit(sync=True)`
prevents by a flush of its own. No WRITEMAP: a stray write of this process cannot reach the file. LMDB's lock file
is on (it keeps readers' pages from being reused) but thrown away at every opening: the daemon has locked
the cache directory, nobody else is inside, and a damaged lock file is a way to hang.

Growth. LMDB can replace its map only while no transaction of this process is open. So every read of
this process happens inside `reading`, which holds a plain lock for its microseconds (60 ns when nobody waits), and
growing takes the same lock. A read transaction that is left open across an await would also keep old pages from being
reused; `reading` being a `with` block makes that visible at the call site. A huge map from the start, the usual advice,
counts against address-space limits of containers and batch systems, and only postpones the question.

Measured (CPU time on one busy core of a small VM, 1,000,000 records): a read of one record in random order 3.0 us, of which
LMDB 1.1, lock, transaction and context 0.6, checksum and decoding 1.2.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

import lmdb
import msgspec

from tiercache.errors import HotSick, HotTierError, IndexDamaged
from tiercache.index.records import RESTART, TABLES, Table

DATA_NAME = "data.mdb"
LOCK_NAME = "lock.mdb"
MAX_DOUBLINGS = 40

DAMAGE = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.IncompatibleError,
    lmdb.ProblemError,
    lmdb.BadTxnError,
    lmdb.CursorFullError,
    lmdb.PageFullError,
)
"""What LMDB says when its pages do not make sense (or, PanicError, when it could not write the page that names the root)."""

T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R")
Transaction: TypeAlias = "lmdb.Transaction[memoryview]"


class View:
    """The tables as one transaction sees them. Values are decoded before they leave: no memory of the map escapes."""

    def __init__(self, transaction: Transaction, databases: dict[bytes, Any]) -> None:
        self._transaction = transaction
        self._databases = databases

    def get(self, table: Table[T], key: bytes) -> T | None:
        raw = self._transaction.get(key, db=self._databases[table.name])
        return None if raw is None else table.unpack(key, raw)

    def scan(self, table: Table[T], start: bytes, prefix: bytes = b"") -> Iterator[tuple[bytes, T]]:
        """Records in key order from `start` on, while their keys begin with `prefix`."""
        cursor = self._transaction.cursor(db=self._databases[table.name])
        if not cursor.set_range(start):
            return
        length = len(prefix)
        for key, raw in cursor:
            if key[:length] != prefix:
                return
            yield bytes(key), table.unpack(key, raw)

    def has(self, table: Table[Any], key: bytes) -> bool:
        return self._transaction.get(key, db=self._databases[table.name]) is not None

    def put(self, table: Table[T], key: bytes, value: T) -> None:
        self._transaction.put(key, table.pack(key, value), db=self._databases[table.name])

    def delete(self, table: Table[Any], key: bytes) -> bool:
        """Was it there?"""
        return self._transaction.delete(key, db=self._databases[table.name])


class Environment:
    """An open index file. Raises IndexDamaged when it is no index, HotSick when the disk does not let it be opened."""

    def __init__(self, directory: Path, map_bytes: int) -> None:
        self._path = directory / DATA_NAME
        self._lock = threading.Lock()
        try:
            self._lmdb = lmdb.open(
                str(directory), map_bytes, metasync=False, mode=0o700, max_dbs=len(TABLES), max_spare_txns=1, readahead=True
            )
            self._databases: dict[bytes, Any] = {table.name: self._lmdb.open_db(table.name) for table in TABLES}
        except lmdb.Error as error:
            raise self.fault(error) from error
        self.reading = Reading(self, self._lmdb, self._databases, self._lock)

    def write(self, step: Callable[[View], R]) -> R:
        """Run `step` in one transaction and commit it; its result. When the map is full, grow it and run `step` again.

        Whatever `step` or LMDB raises leaves the index as it was. LMDB's own errors become HotSick or IndexDamaged.
        """
        try:
            for _ in range(MAX_DOUBLINGS):
                try:
                    with self._lmdb.begin(write=True, buffers=True) as transaction:
                        return step(View(transaction, self._databases))
                except lmdb.MapFullError:
                    self._grow()
        except lmdb.Error as error:
            raise self.fault(error) from error
        raise IndexDamaged(f"index {self._path} does not fit after {MAX_DOUBLINGS} doublings of its map", hint=RESTART)

    @contextmanager
    def reading_as_writer(self) -> Iterator[View]:
        """A read transaction that may take its time: for the one thread that writes, and so is not growing the map meanwhile."""
        try:
            with self._lmdb.begin(buffers=True) as transaction:
                yield View(transaction, self._databases)
        except lmdb.Error as error:
            raise self.fault(error) from error

    def sync(self) -> None:
        """Everything committed is on the disk when this returns."""
        try:
            self._lmdb.sync(True)
        except lmdb.Error as error:
            raise self.fault(error) from error

    def used_bytes(self) -> int:
        with self._lock:
            return (self._lmdb.info()["last_pgno"] + 1) * self._lmdb.stat()["psize"]

    def map_bytes(self) -> int:
        with self._lock:
            return self._lmdb.info()["map_size"]

    def last_transaction(self) -> int:
        with self._lock:
            return self._lmdb.info()["last_txnid"]

    def close(self) -> None:
        with self._lock:
            self._lmdb.close()

    def fault(self, error: lmdb.Error) -> HotTierError:
        """The LMDB error in our words; a wrong call (which is a bug) is raised as it is."""
        if isinstance(error, DAMAGE):
            return IndexDamaged(f"index {self._path}: {error}", hint=RESTART)
        code = getattr(error, "code", 0)
        if isinstance(error, lmdb.DiskError | lmdb.MemoryError | lmdb.LockError) or code > 0:
            return HotSick(f"index {self._path}: {error}", hint="check the cache disk and its free space")
        raise error

    def _grow(self) -> None:
        with self._lock:
            self._lmdb.set_mapsize(2 * self._lmdb.info()["map_size"])


class Reading:
    """`with environment.reading as view:` one read transaction, for microseconds, on any thread.

    One object for all reads: the lock makes them exclusive, so the transaction can be kept in it.
    """

    def __init__(self, owner: Environment, env: lmdb.Environment, databases: dict[bytes, Any], lock: threading.Lock) -> None:
        self._owner = owner
        self._lmdb = env
        self._databases = databases
        self._lock = lock
        self._transaction: Transaction | None = None

    def __enter__(self) -> View:
        self._lock.acquire()
        try:
            self._transaction = transaction = self._lmdb.begin(buffers=True)
        except lmdb.Error as error:
            self._lock.release()
            raise self._owner.fault(error) from error
        except BaseException:
            self._lock.release()
            raise
        return View(transaction, self._databases)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        transaction, self._transaction = self._transaction, None
        assert transaction is not None
        transaction.abort()
        self._lock.release()
        if isinstance(error, lmdb.Error):
            raise self._owner.fault(error) from error
