"""GETs whose bytes never meet the interpreter: the Python side of `_fetch.c`.

Threads in C receive the body and put it into its place in a hot file or in memory. Here an order is posted, its answer judged
by the same code as any other (`wanted.py`, `refusal.py`, the strict parsing of `http.py`), and the sink told what has landed.

* A small order (`_is_held`) is heard of once, at its end: its head is checked, then its MD5, then its bytes count.
* Of any other the head is checked when the first piece has landed; no byte counts before that. One that is not
  approved is cancelled. What such an order left in the place does not count, and is overwritten by whoever fills it.
* Where all of an object was asked for and its ETag is an MD5, the last bytes count only after it was compared.

One task waits for the eventfd of the pool and wakes the readers whose orders have changed, all of them in one go. That wait and
the switch of tasks are most of what a GET costs the event loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import IntEnum

import trio

from tiercache.errors import BadResponse, HotFull, HotSick, TiercacheError, TierError, Unavailable
from tiercache.tiers.begun import BrokenOff
from tiercache.tiers.cold import _fetch
from tiercache.tiers.cold.dial import Timeouts, no_tls, untrusted
from tiercache.tiers.cold.endpoint import Route
from tiercache.tiers.cold.http import HEAD_BYTES, MAX_IDLE_SECONDS, Head, parse_head
from tiercache.tiers.cold.refusal import MAX_ERROR_BYTES, Refusal
from tiercache.tiers.cold.wanted import HOLD_BACK_BYTES, Wanted
from tiercache.tiers.hot import refusal
from tiercache.tiers.tier import FilePlace, Place, Sink

Judged = Callable[[Refusal | Exception | None], None]

MAX_THREADS = 1024
QUIET_BYTES = 128 << 10  # of what comes in one go there is nothing to tell before its end
GRACE_SECONDS = 1.0  # for a cancelled order to end; only one inside a system call of a hanging disk takes longer

assert HOLD_BACK_BYTES <= _fetch.HELD_BYTES
assert MAX_ERROR_BYTES == _fetch.REFUSAL_BYTES


class Stop(IntEnum):
    """Why a thread broke a transfer off; `enum stop` of `_fetch.c`."""

    NONE = 0
    CANCELLED = 1
    SILENT = 2
    HEAD = 3
    BODY = 4
    EXCESS = 5
    CREATE = 6
    WRITE = 7


class Code(IntEnum):
    """Those of libcurl that mean something of their own."""

    OK = 0
    UNSUPPORTED_PROTOCOL = 1  # HTTP/0.9: bytes that are no HTTP
    COULDNT_RESOLVE_PROXY = 5
    COULDNT_RESOLVE_HOST = 6
    COULDNT_CONNECT = 7
    WEIRD_SERVER_REPLY = 8
    PARTIAL_FILE = 18
    OPERATION_TIMEDOUT = 28
    SSL_CONNECT_ERROR = 35
    GOT_NOTHING = 52
    PEER_FAILED_VERIFICATION = 60


class Small:
    """A small order that no task waits for (`begun.py`): `judged` hears how it ended."""

    __slots__ = ("_fetcher", "_is_cancelled", "_judged", "_order", "_place", "_sink", "_wanted")

    def __init__(self, fetcher: Fetcher, order: _fetch.Order, wanted: Wanted, place: Place, sink: Sink, judged: Judged) -> None:
        self._fetcher = fetcher
        self._order = order
        self._wanted = wanted
        self._place = place
        self._sink = sink
        self._judged = judged
        self._is_cancelled = False

    def changed(self) -> None:
        """A held order changes once, at its end."""
        outcome: Refusal | Exception | None
        _adopt(self._order, self._place)
        try:
            outcome = self._fetcher.conclude(self._order, None, self._wanted, 0, self._place, self._sink)
        except TiercacheError as error:
            outcome = BrokenOff() if self._is_cancelled else error
        self._judged(outcome)

    def look(self) -> None:
        """Its deadline is a matter of who has one."""

    def cancel(self) -> None:
        self._is_cancelled = True
        self._order.cancel()

    def abandon(self) -> None:
        if self._order.task is None:
            return
        self._order.task = None
        if isinstance(self._place, FilePlace):
            self._place.is_stuck = self._order.at_disk
        self._judged(BrokenOff())


class Fetcher:
    """GETs over one route. Raises OSError when the process has no descriptor left."""

    def __init__(self, route: Route, timeouts: Timeouts, limiter: trio.CapacityLimiter) -> None:
        proxy = route.proxy
        authorities = route.authorities
        tunnelled = proxy is not None and authorities is not None
        host = f"[{route.host}]" if ":" in route.host else route.host
        self._pool = _fetch.Pool(
            url=f"{'https' if authorities else 'http'}://{host}:{route.port}/",
            proxy=f"http://{proxy.host}:{proxy.port}" if proxy else "",
            proxy_header=f"Proxy-Authorization: {proxy.authorization}" if tunnelled and proxy and proxy.authorization else None,
            authorities=authorities.pem if authorities else None,
            authority_directory=authorities.directory if authorities else None,
            connect_seconds=timeouts.connect_seconds,
            silence_seconds=timeouts.read_seconds,
            max_idle_seconds=MAX_IDLE_SECONDS,
            threads=int(min(limiter.total_tokens, MAX_THREADS)),
        )
        self._route = route
        self._timeouts = timeouts
        self._limiter = limiter
        self._is_listening = False

    @property
    def idle_count(self) -> int:
        return self._pool.idle_count

    def close(self) -> None:
        """Running GETs end with Unavailable. Idempotent."""
        self._pool.close()

    async def get(self, target: bytes, lines: bytes, wanted: Wanted, sink: Sink) -> Refusal | None:
        """Puts the wanted bytes into the sink's place; returns what the store said instead, if it refused.

        `target` and `lines` (each ended by CRLF) go over the wire as they are. Raises TierError, HotFull, HotSick, SinkClosed;
        what the sink was told of before that is right.
        """
        place = sink.place(wanted.length)
        if isinstance(place, FilePlace) and place.file.fd < 0 and not place.is_alone:
            await self._ensure(place)
        order = self._post(target, lines, wanted, place)
        try:
            return await self._attend(order, wanted, place, sink)
        except BaseException:
            await self._end(order, place)
            raise

    def begin(self, target: bytes, lines: bytes, wanted: Wanted, sink: Sink, judged: Judged) -> Small | None:
        """As `get`, without a task. None: the order is not small, or cannot be posted; `get` says why."""
        if not _is_held(wanted):
            return None
        place = sink.place(wanted.length)
        if isinstance(place, FilePlace) and place.file.fd < 0 and not place.is_alone:
            return None
        try:
            order = self._post(target, lines, wanted, place)
        except TiercacheError:
            return None
        order.task = small = Small(self, order, wanted, place, sink, judged)
        return small

    async def _ensure(self, place: FilePlace) -> None:
        place.is_stuck = True
        await trio.to_thread.run_sync(place.file.ensure, abandon_on_cancel=True, limiter=self._limiter)
        place.is_stuck = False

    def _post(self, target: bytes, lines: bytes, wanted: Wanted, place: Place) -> _fetch.Order:
        if not isinstance(place, FilePlace):
            where: memoryview | tuple[int, int] | tuple[int, str, int] = place
        elif place.file.fd < 0:
            where = place.file.birth()
        else:
            where = (place.file.fd, place.offset)
        if not self._is_listening:
            self._is_listening = True
            trio.lowlevel.spawn_system_task(self._listen)
        try:
            return self._pool.post(
                None, target, lines, wanted.status, wanted.length, _is_held(wanted), wanted.may_have_md5, where
            )
        except RuntimeError as error:
            raise self._closed() from error
        except OSError as error:  # no descriptor is left, or no thread
            if isinstance(place, FilePlace):
                raise refusal(error, "open", place.file.path) from error
            raise Unavailable(f"no GET can be started: {error.strerror or error}") from error

    async def _listen(self) -> None:
        """Wakes whose orders have changed, until the pool is closed and the last order has ended."""
        try:
            while not self._pool.is_over:
                await trio.lowlevel.wait_readable(self._pool.fileno())
                for order in self._pool.changed():
                    waiting = order.task
                    order.task = None
                    if isinstance(waiting, Small):
                        waiting.changed()
                    elif waiting is not None:
                        trio.lowlevel.reschedule(waiting)
        finally:
            self._is_listening = False

    @staticmethod
    async def _change(order: _fetch.Order) -> None:
        """Until something is new about the order. A change before the call is not missed: the listener cannot have run since."""

        def give_up(_: object) -> trio.lowlevel.Abort:
            order.task = None
            return trio.lowlevel.Abort.SUCCEEDED

        order.task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(give_up)

    async def _attend(self, order: _fetch.Order, wanted: Wanted, place: Place, sink: Sink) -> Refusal | None:
        told_bytes = 0
        head: Head | None = None
        while True:
            await self._change(order)
            landed_bytes, is_done = order.progress()
            _adopt(order, place)
            if is_done:
                return self.conclude(order, head, wanted, told_bytes, place, sink)
            if landed_bytes > told_bytes:
                if head is None:
                    head = self._head(order)
                    wanted.check(head)
                sink.landed(landed_bytes - told_bytes)
                told_bytes = landed_bytes

    def conclude(
        self, order: _fetch.Order, head: Head | None, wanted: Wanted, told_bytes: int, place: Place, sink: Sink
    ) -> Refusal | None:
        """The order has ended."""
        if head is None:
            if order.head is None or order.stop in (Stop.HEAD, Stop.CANCELLED):
                raise self._failure(order)
            head = self._head(order)
            if order.status not in (200, 206):
                return self._refusal(order, head)
            wanted.check(head)
        landed_bytes, _ = order.progress()
        is_whole = landed_bytes == wanted.length
        if is_whole and wanted.may_have_md5:
            wanted.check_md5(head, (order.md5 or b"").hex())
        if landed_bytes > told_bytes:
            sink.landed(landed_bytes - told_bytes, order.digest if is_whole else None)
        if is_whole:
            return None
        if isinstance(place, FilePlace) and order.stop in (Stop.CREATE, Stop.WRITE):
            raise _disk_failure(order, place)
        if order.code == Code.OK:
            raise Unavailable(f"the answer for {wanted.shown} ended early")
        raise self._failure(order)

    def _head(self, order: _fetch.Order) -> Head:
        text = order.head or ""
        try:
            return parse_head(text)
        except ValueError as error:
            raise self._not_http(repr(text[:40])) from error

    def _refusal(self, order: _fetch.Order, head: Head) -> Refusal:
        body = order.refusal
        if len(body) > MAX_ERROR_BYTES:
            raise BadResponse(f"{self._route.server} sent a malformed answer: more than {MAX_ERROR_BYTES} bytes")
        if order.code != Code.OK and order.stop != Stop.BODY:
            raise self._failure(order)
        return Refusal.of(head, body)

    async def _end(self, order: _fetch.Order, place: Place) -> None:
        """Cancels the order and waits until its thread has let go of the place, if that is not held up by a disk."""
        order.cancel()
        with trio.move_on_after(GRACE_SECONDS, shield=True):
            while not order.progress()[1]:
                await self._change(order)
        if isinstance(place, FilePlace):
            if order.progress()[1]:
                _adopt(order, place)
            else:
                place.is_stuck = order.at_disk

    def _closed(self) -> Unavailable:
        return Unavailable(f"the tier of {self._route.server} is closed")

    def _not_http(self, found: str) -> BadResponse:
        hint = "check the endpoint URL" if self._route.tls else "check the endpoint URL; if that port speaks TLS, write https://"
        return BadResponse(f"{self._route.server} does not answer in HTTP: {found}", hint=hint)

    def _failure(self, order: _fetch.Order) -> TierError:
        """What a transfer that broke off means, in the words of `dial.py` and `http.py`."""
        server = self._route.server
        if order.stop == Stop.CANCELLED:
            return self._closed()
        if order.stop == Stop.SILENT:
            return Unavailable(f"{server} was silent for {self._timeouts.read_seconds:g} s")
        if order.stop == Stop.HEAD:
            return BadResponse(f"{server} sent more than {HEAD_BYTES} bytes of headers")
        if not order.was_sent:
            return self._no_connection(order)
        message = order.message
        if order.code in (Code.UNSUPPORTED_PROTOCOL, Code.WEIRD_SERVER_REPLY):
            return self._not_http(message)
        if order.code == Code.GOT_NOTHING:
            hint = "" if self._route.tls else "if that port speaks TLS, write https:// in --endpoint-url"
            return Unavailable(f"{server} closed the connection without an answer", hint=hint)
        if order.code in (Code.OK, Code.PARTIAL_FILE):  # OK: the connection ended before the head did
            return Unavailable(f"{server} ended its answer early")
        if "chunk" in message:
            return BadResponse(f"{server} sent a malformed chunk: {message}")
        return Unavailable(f"the connection to {server} broke: {message}")

    def _no_connection(self, order: _fetch.Order) -> Unavailable:
        route, message = self._route, order.message
        peer, what, check = route.proxy or route, "", "check the endpoint URL"
        if route.proxy is not None:
            what, check = "proxy ", "check HTTP_PROXY, HTTPS_PROXY and NO_PROXY"
        if order.code in (Code.COULDNT_RESOLVE_HOST, Code.COULDNT_RESOLVE_PROXY):
            return Unavailable(f"{what}host name {peer.host!r} cannot be resolved", hint=f"{check} and DNS")
        if order.tunnel_status not in (0, 200):
            refused = f"{what}{peer.address} refuses a tunnel to {route.address}: status {order.tunnel_status}"
            return Unavailable(refused, hint="check HTTPS_PROXY and NO_PROXY")
        if order.code == Code.PEER_FAILED_VERIFICATION:
            return untrusted(route, message.removeprefix("SSL certificate problem: "))
        if order.code == Code.SSL_CONNECT_ERROR:
            return no_tls(route, message)
        reason = os.strerror(order.errno) if order.errno else message
        if order.code == Code.OPERATION_TIMEDOUT:
            reason = f"no answer within {self._timeouts.connect_seconds:g} s"
            if message.startswith("SSL"):
                return no_tls(route, reason)
        up = "the proxy" if route.proxy else "the store"
        return Unavailable(f"{what}{peer.address} cannot be reached: {reason}", hint=f"{check} and that {up} is up")


def _is_held(wanted: Wanted) -> bool:
    """Without a checksum to wait for, a slow store's bytes count as they come: a reader's patience ends without any."""
    return wanted.length <= (HOLD_BACK_BYTES if wanted.may_have_md5 else QUIET_BYTES)


def _adopt(order: _fetch.Order, place: Place) -> None:
    if isinstance(place, FilePlace) and place.file.fd < 0 and (fd := order.take_fd()) >= 0:
        place.file.adopt(fd)


def _disk_failure(order: _fetch.Order, place: FilePlace) -> HotFull | HotSick:
    path = place.file.path
    if order.errno == 0:
        return HotSick(f"{path} takes no bytes", hint="check the disk (kernel log)")
    return refusal(OSError(order.errno, os.strerror(order.errno)), "create" if order.stop == Stop.CREATE else "write", path)
