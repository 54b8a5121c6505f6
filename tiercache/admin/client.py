"""The command line's side of the admin interface: one method a request, each bounded in time.

An error that the daemon answers is raised here as the class it was there, with its hint. A daemon that cannot be
reached is NoDaemon; one that listens but does not answer in time is Unavailable, because it exists and
starting another one would not help.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import msgspec

from tiercache import errors
from tiercache.admin.messages import (
    ErrorAnswer,
    EvictRequest,
    HandingOver,
    JobStarted,
    JobStatus,
    Message,
    Paths,
    PinAnswer,
    PinProgress,
    PinRequest,
    Pins,
    RefreshAnswer,
    ScrubRequest,
    Status,
    Stopping,
    TargetsAnswer,
    Unpinned,
    WhereAnswer,
    decode,
    encode,
)
from tiercache.admin.socket import MAX_SOCKET_PATH_BYTES, Answer, answer_of, peer_pid
from tiercache.errors import AccessDenied, NoDaemon, TiercacheError, Unavailable, UsageError

QUICK_SECONDS = 5.0  # what the daemon answers from memory
STORE_SECONDS = 60.0  # a few requests to the cold store, each with its own deadline
LISTING_SECONDS = 3600.0  # a refresh or a pin lists everything below its paths: about 1,000 keys a second at worst
SYNC_SECONDS = 600.0  # what was written to the cache disks is flushed first
BATCH_COUNT = 100  # paths a request, so that no answer takes longer than its time allows

_CLASSES: dict[str, type[TiercacheError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, TiercacheError)
}


class Client:
    """A connection to one daemon. Use it as a context manager."""

    def __init__(self, socket_path: str | os.PathLike[str]) -> None:
        self.socket_path = os.fspath(socket_path)
        if len(os.fsencode(self.socket_path)) > MAX_SOCKET_PATH_BYTES or "\0" in self.socket_path:
            raise UsageError(
                f"{self.socket_path!r} cannot be a socket",
                hint=f"its path may have {MAX_SOCKET_PATH_BYTES} bytes, none of them NUL",
            )
        transport = httpx.HTTPTransport(uds=self.socket_path)
        self._http = httpx.Client(transport=transport, base_url="http://tiercache", trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()

    def status(self) -> Status:
        return self._ask("GET", "/v1/status", Status)

    def where(self, paths: Sequence[str]) -> WhereAnswer:
        answers = [self._ask("POST", "/v1/where", WhereAnswer, Paths(batch), STORE_SECONDS) for batch in _batches(paths)]
        return WhereAnswer(
            [file for answer in answers for file in answer.files], [f for answer in answers for f in answer.failures]
        )

    def refresh(self, paths: Sequence[str]) -> RefreshAnswer:
        answers = [self._ask("POST", "/v1/refresh", RefreshAnswer, Paths(batch), LISTING_SECONDS) for batch in _batches(paths)]
        refreshed = [one for answer in answers for one in answer.refreshed]
        return RefreshAnswer(refreshed, [failure for answer in answers for failure in answer.failures])

    def pin(self, request: PinRequest) -> PinAnswer:
        return self._ask("POST", "/v1/pin", PinAnswer, request, LISTING_SECONDS)

    def unpin(self, paths: Sequence[str]) -> Unpinned:
        return self._ask("POST", "/v1/unpin", Unpinned, Paths(list(paths)), STORE_SECONDS)

    def pins(self) -> Pins:
        return self._ask("GET", "/v1/pins", Pins)

    def pin_progress(self, paths: Sequence[str]) -> PinProgress:
        return self._ask("POST", "/v1/pins/progress", PinProgress, Paths(list(paths)))

    def evict(self, request: EvictRequest) -> JobStarted:
        return self._ask("POST", "/v1/evict", JobStarted, request)

    def scrub(self, request: ScrubRequest) -> JobStarted:
        return self._ask("POST", "/v1/scrub", JobStarted, request)

    def rebuild_index(self) -> JobStarted:
        return self._ask("POST", "/v1/rebuild-index", JobStarted)

    def job(self, number: int) -> JobStatus:
        return self._ask("GET", f"/v1/jobs/{number}", JobStatus)

    def targets(self) -> TargetsAnswer:
        return self._ask("GET", "/v1/targets", TargetsAnswer)

    def stop(self) -> Stopping:
        return self._ask("POST", "/v1/stop", Stopping, None, STORE_SECONDS)

    def upgrade(self) -> HandingOver:
        return self._ask("POST", "/v1/upgrade", HandingOver, None, SYNC_SECONDS)

    def metrics(self) -> bytes:
        """Prometheus text format."""
        return self._send("GET", "/metrics", None, QUICK_SECONDS)

    def _ask(
        self,
        method: str,
        route: str,
        kind: type[Message],
        body: msgspec.Struct | None = None,
        answer_seconds: float = QUICK_SECONDS,
    ) -> Message:
        raw = self._send(method, route, body, answer_seconds)
        try:
            return decode(raw, kind)
        except ValueError as error:
            raise TiercacheError(
                f"the daemon on {self.socket_path} answered {route} in a way that this version does not understand: {error}",
                hint="use the `tiercache` that the daemon was started with, or mount again",
            ) from error

    def _send(self, method: str, route: str, body: msgspec.Struct | None, answer_seconds: float) -> bytes:
        self._check_reachable()
        content = None if body is None else encode(body)
        timeout = httpx.Timeout(QUICK_SECONDS, read=answer_seconds)
        try:
            answer = self._http.request(method, route, content=content, timeout=timeout)
        except httpx.ConnectError as error:
            raise self._nobody() from error
        except httpx.TimeoutException as error:
            raise self._silent(route, answer_seconds) from error
        except httpx.TransportError as error:
            raise Unavailable(
                f"the daemon on {self.socket_path} went away while it answered {route}: {error}", hint="look at its log"
            ) from error
        if answer.status_code == 200:
            return answer.content
        raise self._refused(route, answer)

    def _check_reachable(self) -> None:
        """Tells 'nobody' from 'not for you', which httpx wraps beyond recognition (and leaks a socket at)."""
        match answer_of(Path(self.socket_path)):
            case Answer.DEAD:
                raise self._nobody()
            case Answer.DENIED:
                raise AccessDenied(
                    f"no permission to talk to the daemon on {self.socket_path}",
                    hint="ask its owner, who can set admin.group to a group of yours",
                )

    def _nobody(self) -> NoDaemon:
        return NoDaemon(f"no daemon answers on {self.socket_path}", hint="start one with `tiercache mount`")

    def _silent(self, route: str, answer_seconds: float) -> Unavailable:
        try:
            pid = peer_pid(Path(self.socket_path))
        except OSError:
            pid = None
        return Unavailable(
            f"the daemon on {self.socket_path} did not answer {route} within {answer_seconds:.0f} s",
            hint="look at its log" + ("" if pid is None else f", or end it (kill {pid})"),
        )

    def _refused(self, route: str, answer: httpx.Response) -> TiercacheError:
        try:
            message = decode(answer.content, ErrorAnswer)
        except ValueError:
            return TiercacheError(
                f"the daemon on {self.socket_path} failed at {route} (HTTP {answer.status_code})", hint="its log has the reason"
            )
        return _CLASSES.get(message.kind, TiercacheError)(message.error, hint=message.hint)


def socket_path_of(option: str | None) -> Path | None:
    """The socket that the user chose with `--socket` or TIERCACHE_SOCKET, if any."""
    chosen = option or os.environ.get("TIERCACHE_SOCKET", "")
    return Path(os.path.abspath(chosen)) if chosen else None


def _batches(paths: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(paths), BATCH_COUNT):
        yield list(paths[start : start + BATCH_COUNT])
