"""What a GET must bring, and how its bytes are taken.

A GET carries If-Match, but stores may ignore it, so before the first byte is handed over the status, the ETag, the
offset and total of Content-Range and the length are compared with what was asked. A GET of a whole object is also
compared with the ETag where that is an MD5: up to `HOLD_BACK_BYTES` before any byte is handed over; of a larger one
the last piece is held back until the verdict. A BadResponse raised after the sink took bytes means that these are in
doubt: its owner must throw them away and begin anew. (Holding back all of a larger object would cost memory per read,
or the reader's time to first byte.)
"""

from __future__ import annotations

import email.utils
import hashlib
import re

from tiercache.core.record import Listed, ObjectRef
from tiercache.errors import BadResponse, Unavailable, VersionChanged
from tiercache.tiers.cold.http import Head, Response
from tiercache.tiers.cold.listing import ARCHIVE_CLASSES, bare_etag
from tiercache.tiers.tier import Sink

PIECE_BYTES = 256 << 10  # received and handed over at once; less costs more system calls, more delays waiting readers
HOLD_BACK_BYTES = 1 << 20

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_PLAIN_MD5 = re.compile(r"[0-9a-f]{32}")
_HEADER_TEXT = re.compile(r"[\x20-\x7e\x80-\xff]*")
_OPAQUE_ENCRYPTION = frozenset({"aws:kms", "aws:kms:dsse"})  # their ETags are not the MD5 of the content
_CUSTOMER_KEY = "x-amz-server-side-encryption-customer-algorithm"


class Wanted:
    """The bytes [offset, offset + length) of one version of an object. `shown` names the object in messages."""

    def __init__(self, ref: ObjectRef, offset: int, length: int, shown: str) -> None:
        self._etag = ref.version.rpartition(":")[0]
        if not _HEADER_TEXT.fullmatch(self._etag):
            raise BadResponse(f"{shown} has an ETag that no header can carry: {self._etag!r}")
        self._size = ref.size_bytes
        self._offset = offset
        self.length = length
        self.shown = shown
        self._is_whole = offset == 0 and length == ref.size_bytes

    @property
    def status(self) -> int:
        return 200 if self._is_whole else 206

    @property
    def may_have_md5(self) -> bool:
        """Is the ETag the MD5 of what comes, unless the answer says that the object is encrypted?"""
        return self._is_whole and _PLAIN_MD5.fullmatch(self._etag) is not None

    @property
    def headers(self) -> dict[str, str]:
        match = {"if-match": f'"{self._etag}"'}
        return match if self._is_whole else {**match, "range": f"bytes={self._offset}-{self._offset + self.length - 1}"}

    def check(self, response: Head | Response) -> None:
        """Raises VersionChanged when the answer is about another version, BadResponse when it is not what was asked."""
        etag = bare_etag(response.headers.get("etag", ""))
        if not etag:
            raise BadResponse(f"the answer for {self.shown} has no ETag")
        if etag != self._etag:
            raise VersionChanged(f"{self.shown} is there in another version ({etag}, not {self._etag})")
        if self._is_whole:
            self._check_whole(response)
        else:
            self._check_range(response)

    def _check_whole(self, response: Head | Response) -> None:
        if response.status != 200:
            raise BadResponse(f"status {response.status} for all of {self.shown}, not 200")
        if int(response.headers.get("content-length", self.length)) != self.length:
            raise VersionChanged(f"{self.shown} has {response.headers['content-length']} bytes now, not {self._size}")

    def _check_range(self, response: Head | Response) -> None:
        if response.status != 206:
            raise BadResponse(
                f"status {response.status} for a range of {self.shown}, not 206", hint="the store must honour Range"
            )
        shown_range = response.headers.get("content-range", "")
        parsed = _CONTENT_RANGE.fullmatch(shown_range)
        if parsed is None:
            raise BadResponse(f"Content-Range {shown_range!r} for {self.shown}")
        first, last, total = (int(number) for number in parsed.groups())
        if total != self._size:
            raise VersionChanged(f"{self.shown} has {total} bytes now, not {self._size}")
        if (first, last) != (self._offset, self._offset + self.length - 1):
            raise BadResponse(f"{self.shown}: bytes {first}-{last} came, not {self._offset}-{self._offset + self.length - 1}")
        if int(response.headers.get("content-length", self.length)) != self.length:
            raise BadResponse(f"{self.shown}: {response.headers['content-length']} bytes announced, not {self.length}")

    def receive(self, response: Response, sink: Sink) -> None:
        """Raises Unavailable when the answer ends early: what the sink took is right."""
        if not self.has_md5(response):
            self._stream(response, sink)
        elif self.length <= HOLD_BACK_BYTES:
            self._verify_then_hand_over(response, sink)
        else:
            self._stream_and_verify(response, sink)

    def has_md5(self, response: Head | Response) -> bool:
        """Is the ETag the MD5 of what comes?"""
        encryption = response.headers.get("x-amz-server-side-encryption", "")
        return self.may_have_md5 and encryption not in _OPAQUE_ENCRYPTION and _CUSTOMER_KEY not in response.headers

    def _stream(self, response: Response, sink: Sink) -> None:
        left = self.length
        while left:
            count = self._next(response, sink.buffer(min(left, PIECE_BYTES)))
            sink.advance(count)
            left -= count

    def _verify_then_hand_over(self, response: Response, sink: Sink) -> None:
        lent = sink.buffer(self.length)
        memory = lent if len(lent) == self.length else memoryview(bytearray(self.length))
        filled = 0
        while filled < self.length:
            filled += self._next(response, memory[filled:])
        digest = hashlib.md5(memory, usedforsecurity=False)
        if digest.hexdigest() != self._etag:
            raise self._wrong_md5(digest.hexdigest())
        if memory is lent:
            sink.advance(self.length)
            return
        handed = 0
        while handed < self.length:
            lent = sink.buffer(self.length - handed)
            count = len(lent)  # asked before `advance`, which takes the loan back
            lent[:] = memory[handed : handed + count]
            sink.advance(count)
            handed += count

    def _stream_and_verify(self, response: Response, sink: Sink) -> None:
        digest = hashlib.md5(usedforsecurity=False)
        left = self.length
        while left:
            view = sink.buffer(min(left, PIECE_BYTES))
            count = self._next(response, view)
            digest.update(view[:count])
            left -= count
            if left == 0 and digest.hexdigest() != self._etag:
                raise self._wrong_md5(digest.hexdigest())
            sink.advance(count)

    def _next(self, response: Response, view: memoryview) -> int:
        count = response.readinto(view)
        if count == 0:
            raise Unavailable(f"the answer for {self.shown} ended early")
        return count

    def check_md5(self, head: Head, found: str) -> None:
        """Raises BadResponse when the bytes, whose MD5 is `found`, are not those of the ETag."""
        if self.has_md5(head) and found != self._etag:
            raise self._wrong_md5(found)

    def _wrong_md5(self, found: str) -> BadResponse:
        return BadResponse(
            f"{self.shown}: the bytes have MD5 {found}, the ETag is {self._etag}",
            hint="the store or something between damages data; compare with another client",
        )


def listed_from_headers(key: str, response: Response, shown: str) -> Listed:
    """From the answer to a HEAD or a GET without a range. Raises BadResponse when a needed header is missing."""
    headers = response.headers
    etag = bare_etag(headers.get("etag", ""))
    moment = email.utils.parsedate_tz(headers.get("last-modified", ""))
    if not etag or moment is None or "content-length" not in headers:
        raise BadResponse(f"the answer for {shown} lacks ETag, Last-Modified or Content-Length", hint="check the endpoint URL")
    size = int(headers["content-length"])
    is_restored = 'ongoing-request="false"' in headers.get("x-amz-restore", "")
    archived = headers.get("x-amz-storage-class", "") in ARCHIVE_CLASSES and not is_restored
    return Listed(key, f"{etag}:{size}", size, email.utils.mktime_tz(moment), archived)
