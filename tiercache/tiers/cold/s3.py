"""The cold tier over S3.

GETs of objects' bytes go over threads in C (`native.py`) where the extension `_fetch` was built: there they cost a
third of the CPU, and none of it under the interpreter lock but the order and the verdict. Where it is missing, and for listings
and HEADs, which are few and whose answers the interpreter has to read anyway, requests go over `http.py` in worker threads.
`S3Cold.fetching` says which it is. boto3's session says where to and with which
credentials (`endpoint.py`). boto3's client was rejected for all three: it costs 4 times as much CPU per GET and HEAD
(0.7 ms against 0.18), 46 ms against 9 per page of 1,000 names, most of it under the interpreter lock, and a call of it
cannot be cancelled. One path also means one mapping of errors (`refusal.py`), one set of timeouts and one pool. What
makes an answer trustworthy stands in `wanted.py`.

Version tags are ETag without quotes, ':', size. Objects in an archive class are `archived`; a listing that contains any is
asked for once more with their restore status, which few stores know and AWS only gives on demand.

Cancellation shuts the socket down, so that the thread ends at once; it is then waited for, `GRACE_SECONDS` at most
(a host name look-up cannot be broken off), because the sink is the caller's again afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import trio

from tiercache import __version__
from tiercache.core.record import Listed, ObjectRef, Page
from tiercache.errors import AccessDenied, BadResponse, NotFound, SetupError, TierError
from tiercache.tiers.begun import Anew, Begun, Ended
from tiercache.tiers.cold.dial import Abort, Timeouts
from tiercache.tiers.cold.endpoint import Endpoint
from tiercache.tiers.cold.http import Pool, Response
from tiercache.tiers.cold.listing import parse_page
from tiercache.tiers.cold.refusal import Refusal, Request
from tiercache.tiers.cold.sigv4 import Keys, encode_path, encode_query, sign
from tiercache.tiers.cold.wanted import Wanted, listed_from_headers
from tiercache.tiers.tier import MAX_PAGE, Sink

if TYPE_CHECKING:
    from tiercache.tiers.cold import native
else:
    try:
        from tiercache.tiers.cold import native
    except ImportError:  # `_fetch` was not built, or a library that it needs is not here
        native = None

FETCHING: Literal["native", "python"] = "python" if native is None else "native"
MAX_IDLE = 64  # connections kept open between requests, if the limiter allows as many
MAX_KEY_BYTES = 1024  # S3's limit: a longer key cannot exist
MAX_LISTING_BYTES = 16 << 20  # 1,000 keys of 1,024 bytes, each byte percent-encoded, are 4 MiB
PROBE_SECONDS = 3.5  # the whole `mount` command has failed after five, start of two interpreters included
PROBE_COUNT = 10  # keys looked at for one with content: the first is often an empty directory marker
GRACE_SECONDS = 1.0

NOTHING: Mapping[str, str] = {}

T = TypeVar("T")

_PROBE_HINT = "check the endpoint URL, its scheme (http or https), the proxy and the network"
_HEAD_PERMISSION = "s3:GetObject (or s3:ListBucket, without which S3 denies keys that do not exist)"


class S3Cold:
    """One bucket. Keys and prefixes are full keys of the bucket; `prefix` is what `probe` looks at.

    `source_id` is the endpoint's host, '/' and the bucket unless one is given. `threads` bounds the requests that run
    at once; tiers may share it.
    Raises SetupError when the settings contradict themselves; sends nothing yet.
    """

    name = "cold"

    def __init__(
        self,
        bucket: str,
        prefix: str,
        endpoint: Endpoint,
        *,
        dataset: str,
        source_id: str | None = None,
        timeouts: Timeouts = Timeouts(),  # noqa: B008 - frozen
        threads: trio.CapacityLimiter,
    ) -> None:
        self.bucket = bucket
        self.prefix = prefix
        self.dataset = dataset
        self.source_id = source_id if source_id is not None else f"{endpoint.host}/{bucket}"
        self._endpoint = endpoint
        self._route = endpoint.route(bucket)
        self._pool = Pool(self._route, timeouts, max_idle=int(min(threads.total_tokens, MAX_IDLE)))
        self._threads = threads
        self.fetching = FETCHING
        self._fetcher = native.Fetcher(self._route, timeouts, threads) if FETCHING == "native" else None
        self._running: set[Abort] = set()
        self._always = {"x-amz-request-payer": "requester"} if endpoint.requester_pays else {}
        plain_proxy = self._route.proxy if self._route.tls is None else None
        self._target_start = f"http://{self._route.authority}" if plain_proxy else ""
        self._fixed_headers = f"accept-encoding: identity\r\nuser-agent: tiercache/{__version__}\r\n"
        if plain_proxy and plain_proxy.authorization:
            self._fixed_headers += f"proxy-authorization: {plain_proxy.authorization}\r\n"

    async def read(self, ref: ObjectRef, offset: int, length: int, sink: Sink) -> None:
        """See `tier.py`, and `wanted.py` for what a BadResponse means for bytes that were handed over already."""
        if self._fetcher is None:
            await self._in_thread(partial(self._read, ref, offset, length, sink))
        else:
            await self._fetch(self._fetcher, ref, offset, length, sink)

    def begin(self, ref: ObjectRef, sink: Sink, ended: Ended) -> Begun | None:
        """See `begun.py`."""
        if self._fetcher is None or not self._endpoint.has_keys_at_hand:
            return None
        try:
            wanted = Wanted(ref, 0, ref.size_bytes, self._shown(ref.key))
        except BadResponse:
            return None

        def judged(outcome: Refusal | Exception | None) -> None:
            if isinstance(outcome, Refusal):  # other credentials would have to be waited for
                is_over = not outcome.is_expired
                outcome = outcome.error(self._asked("GET", "s3:GetObject", ref.key), self._endpoint) if is_over else Anew()
            ended(outcome)

        target, lines = self._question("GET", ref.key, self._endpoint.keys(), wanted.headers)
        return self._fetcher.begin(target.encode(), lines.encode("latin-1"), wanted, sink, judged)

    async def list(self, prefix: str, *, delimiter: bool = True, token: str = "", limit: int = MAX_PAGE) -> Page:
        if len(prefix.encode("utf-8", "surrogateescape")) > MAX_KEY_BYTES:
            return Page((), (), "")
        query = {"list-type": "2", "encoding-type": "url", "prefix": prefix, "max-keys": str(min(limit, MAX_PAGE))}
        if delimiter:
            query["delimiter"] = "/"
        if token:
            query["continuation-token"] = token
        return await self._in_thread(partial(self._list, prefix, query))

    async def head(self, key: str) -> Listed:
        """Raises NotFound for keys over 1,024 bytes too, without asking: S3 would call the request malformed."""
        if len(key.encode("utf-8", "surrogateescape")) > MAX_KEY_BYTES:
            raise NotFound(f"{self._shown(key)[:80]}... does not exist: S3 keys have at most {MAX_KEY_BYTES} bytes")
        return await self._in_thread(partial(self._head, key))

    async def probe(self) -> bool:
        """First contact: lists the prefix and reads one byte of what is there; is there anything? Needs no other permission.

        Raises SetupError with cause and fix in one line, within `PROBE_SECONDS`.
        """
        try:
            with trio.fail_after(PROBE_SECONDS):
                page = await self._in_thread(
                    partial(self._list, self.prefix, {"list-type": "2", "encoding-type": "url", "prefix": self.prefix,
                                                      "max-keys": str(PROBE_COUNT)})
                )  # fmt: skip
                with_content = [listed for listed in page.objects if listed.size_bytes and not listed.archived]
                if with_content:
                    await self._in_thread(partial(self._read_first_byte, with_content[0].key))
                return any(listed.key != self.prefix for listed in page.objects)
        except TierError as error:
            raise SetupError(str(error), hint=error.hint or _PROBE_HINT) from error
        except trio.TooSlowError as error:
            raise SetupError(f"{self._route.server} gave no answer within {PROBE_SECONDS:g} s", hint=_PROBE_HINT) from error

    @property
    def idle_connection_count(self) -> int:
        return self._pool.idle_count + (0 if self._fetcher is None else self._fetcher.idle_count)

    async def aclose(self) -> None:
        self._pool.close()
        if self._fetcher is not None:
            self._fetcher.close()
        for abort in self._running:
            abort.fire()
        await trio.lowlevel.checkpoint()

    async def _in_thread(self, work: Callable[[Abort], T]) -> T:
        abort = Abort()
        ended = trio.Event()
        token = trio.lowlevel.current_trio_token()

        def run() -> T:
            abort.begin()
            try:
                return work(abort)
            finally:
                if abort.finish():
                    with suppress(trio.RunFinishedError):  # the event loop is gone: nobody waits
                        token.run_sync_soon(ended.set)

        self._running.add(abort)
        try:
            return await trio.to_thread.run_sync(run, abandon_on_cancel=True, limiter=self._threads)
        except trio.Cancelled:
            if abort.fire():
                with trio.move_on_after(GRACE_SECONDS, shield=True):
                    await ended.wait()
            raise
        finally:
            self._running.discard(abort)

    def _shown(self, key: str) -> str:
        return f"s3://{self.bucket}/{key.encode('utf-8', 'backslashreplace').decode()}"

    @contextmanager
    def _answer(
        self,
        method: str,
        key: str,
        abort: Abort,
        *,
        permission: str,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        amz_headers: Mapping[str, str] | None = None,
    ) -> Iterator[Response]:
        """An answer of status 200 or 206; any other is raised as the error that it means.

        `headers` travel unsigned. Credentials that the store calls expired are renewed once.
        """
        may_renew = True
        while True:
            keys = self._endpoint.keys()
            target, lines = self._question(method, key, keys, headers or {}, query or {}, amz_headers or {})
            request = f"{method} {target} HTTP/1.1\r\n{lines}\r\n"
            with self._pool.ask(request.encode("latin-1"), abort, bodyless=method == "HEAD") as response:
                if response.status in (200, 206):
                    yield response
                    return
                refusal = Refusal.read(response)
            if refusal.is_expired and may_renew and keys is not None and self._endpoint.renew(keys):
                may_renew = False
                continue
            raise refusal.error(self._asked(method, permission, key), self._endpoint)

    def _question(
        self,
        method: str,
        key: str,
        keys: Keys | None,
        headers: Mapping[str, str],
        query: Mapping[str, str] = NOTHING,
        amz_headers: Mapping[str, str] = NOTHING,
    ) -> tuple[str, str]:
        """Request target and header lines, signed now."""
        route = self._route
        path = f"{route.base_path}/{encode_path(key)}"
        question = encode_query(query)
        signed: Mapping[str, str] = {**self._always, **amz_headers}
        if keys is not None:
            signed = sign(method, route.authority, path, question, signed, keys, route.region, time.time())
        lines = "".join([f"{name}: {value}\r\n" for name, value in (*signed.items(), *headers.items())])
        target = f"{self._target_start}{path}{'?' if question else ''}{question}"
        return target, f"host: {route.authority}\r\n{lines}{self._fixed_headers}"

    def _list(self, prefix: str, query: Mapping[str, str], abort: Abort) -> Page:
        shown = self._shown(prefix)
        page = self._list_once(shown, query, {}, abort)
        if any(listed.archived for listed in page.objects):
            page = self._list_once(shown, query, {"x-amz-optional-object-attributes": "RestoreStatus"}, abort)
        return page

    def _list_once(self, shown: str, query: Mapping[str, str], amz_headers: Mapping[str, str], abort: Abort) -> Page:
        with self._answer("GET", "", abort, permission="s3:ListBucket", query=query, amz_headers=amz_headers) as response:
            body = response.rest(MAX_LISTING_BYTES)
        return parse_page(body, shown)

    def _head(self, key: str, abort: Abort) -> Listed:
        """A refused HEAD has no body that says why. The GET sent then does; if it is not refused, its headers will do as well."""
        try:
            with self._answer("HEAD", key, abort, permission=_HEAD_PERMISSION) as response:
                return listed_from_headers(key, response, self._shown(key))
        except (AccessDenied, BadResponse):
            with self._answer("GET", key, abort, permission=_HEAD_PERMISSION) as response:
                return listed_from_headers(key, response, self._shown(key))

    def _read_first_byte(self, key: str, abort: Abort) -> None:
        with self._answer("GET", key, abort, permission="s3:GetObject", headers={"range": "bytes=0-0"}) as response:
            response.rest(1)

    def _read(self, ref: ObjectRef, offset: int, length: int, sink: Sink, abort: Abort) -> None:
        wanted = Wanted(ref, offset, length, self._shown(ref.key))
        with self._answer("GET", ref.key, abort, permission="s3:GetObject", headers=wanted.headers) as response:
            wanted.check(response)
            wanted.receive(response, sink)

    async def _fetch(self, fetcher: native.Fetcher, ref: ObjectRef, offset: int, length: int, sink: Sink) -> None:
        """As `_read`, but on the event loop and without a thread, unless credentials have to be waited for."""
        wanted = Wanted(ref, offset, length, self._shown(ref.key))
        may_renew = True
        while True:
            if self._endpoint.has_keys_at_hand:
                keys = self._endpoint.keys()
            else:
                keys = await self._in_thread(lambda _: self._endpoint.keys())
            target, lines = self._question("GET", ref.key, keys, wanted.headers)
            refusal = await fetcher.get(target.encode(), lines.encode("latin-1"), wanted, sink)
            if refusal is None:
                return
            if refusal.is_expired and may_renew and keys is not None:
                stale = keys
                if await self._in_thread(lambda _: self._endpoint.renew(stale)):  # noqa: B023 - it runs within this turn
                    may_renew = False
                    continue
            raise refusal.error(self._asked("GET", "s3:GetObject", ref.key), self._endpoint)

    def _asked(self, method: str, permission: str, key: str) -> Request:
        return Request(method, permission, self._shown(key), self.bucket, self._route.server, self._route.region)
