"""What an S3 error answer means: from status, code and headers to one of tiercache's errors.

    404 NoSuchKey, and any 404 of a HEAD           NotFound (a HEAD has no body to say more)
    404 anything else                              Unavailable: a bucket that vanished or a wrong address is not "no such file"
    412, 416                                       VersionChanged
    403 InvalidObjectState                         Archived
    403 others, 401, expired or unknown keys       AccessDenied, naming the permission
    301, 307, wrong signing region                 AccessDenied, naming the region (307 without a region: Unavailable)
    429, 5xx, SlowDown and its relatives           Unavailable, with Retry-After
    anything else                                  BadResponse

The text of a message is the store's own where it has one.
"""

from __future__ import annotations

import email.utils
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass

from tiercache.errors import AccessDenied, Archived, BadResponse, NotFound, TierError, Unavailable, VersionChanged
from tiercache.tiers.cold.chain import CREDENTIALS_HINT
from tiercache.tiers.cold.endpoint import Endpoint
from tiercache.tiers.cold.http import Head, Response

MAX_ERROR_BYTES = 64 << 10
MAX_RETRY_AFTER_SECONDS = 3600.0
EXPIRED_CODES = frozenset({"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "RequestExpired"})
_BUSY_CODES = frozenset(
    {"SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "OperationAborted", "TooManyRequests"}
)
_BUSY_CODES |= {"Throttling", "ThrottlingException", "RequestLimitExceeded", "RequestThrottled"}
_NO_OBJECT_CODES = frozenset({"NoSuchKey", "NoSuchVersion"})
_BAD_KEY_CODES = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch"})
_REGION_CODES = frozenset({"AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"})


@dataclass(frozen=True)
class Request:
    """What was asked. `permission` is what a 403 means to lack; `shown` names the thing asked for."""

    method: str
    permission: str
    shown: str
    bucket: str
    server: str
    region: str


@dataclass(frozen=True)
class Refusal:
    """An error answer, read to its end. `code`, `message`, `region` are '' where the store said nothing."""

    status: int
    code: str
    message: str
    region: str
    retry_after_seconds: float | None
    date: str
    speaks_tls: bool

    @classmethod
    def read(cls, response: Response) -> Refusal:
        """Reads the body. Raises Unavailable when the connection breaks, BadResponse when the body is absurdly long."""
        return cls.of(Head(response.status, response.headers), response.rest(MAX_ERROR_BYTES))

    @classmethod
    def of(cls, head: Head, body: bytes) -> Refusal:
        fields = _fields(body)
        return cls(
            status=head.status,
            code=fields.get("Code", ""),
            message=fields.get("Message", ""),
            region=head.headers.get("x-amz-bucket-region", "") or fields.get("Region", ""),
            retry_after_seconds=_retry_after(head.headers.get("retry-after", "")),
            date=head.headers.get("date", ""),
            speaks_tls=not fields and b"https" in body.lower(),
        )

    @property
    def is_expired(self) -> bool:
        return self.code in EXPIRED_CODES

    @property
    def reason(self) -> str:
        named = " ".join(part for part in (self.code, f"({self.message.strip().rstrip('.')})" if self.message else "") if part)
        return f"{self.status} {named}".strip()

    def error(self, request: Request, endpoint: Endpoint) -> TierError:
        wrong_region = self.region not in ("", request.region)
        if self.code == "InvalidObjectState":
            return Archived(f"{request.shown} is in an archive class", hint="restore it first (aws s3api restore-object)")
        if self.code == "NoSuchBucket":
            return Unavailable(
                f"bucket {request.bucket!r} does not exist at {request.server}", hint="check its name and the endpoint URL"
            )
        if wrong_region and (self.status in (301, 307, 400, 403) or self.code in _REGION_CODES):
            return AccessDenied(
                f"bucket {request.bucket!r} is in region {self.region}, not {request.region}",
                hint=f"set region {self.region} (AWS_REGION)",
            )
        if self.code in _BUSY_CODES or self.status == 429 or self.status >= 500 or self.status == 307:
            return Unavailable(f"{request.server} answers {self.reason}", retry_after_seconds=self.retry_after_seconds)
        if self.code == "RequestTimeTooSkewed":
            return AccessDenied(
                f"this machine's clock is {self._skew()} the store's", hint="set the clock (timedatectl set-ntp true)"
            )
        if self.status in (401, 403) or self.is_expired:
            return self._denied(request, endpoint)
        return self._wrong_object(request)

    def _denied(self, request: Request, endpoint: Endpoint) -> AccessDenied:
        if self.is_expired:
            return AccessDenied(
                f"the credentials have expired: {self.reason}", hint="log in again (aws sso login, or what issued them)"
            )
        if self.code in _BAD_KEY_CODES:
            return AccessDenied(f"{request.server} does not accept the credentials: {self.reason}", hint=CREDENTIALS_HINT)
        if endpoint.anonymous:
            return AccessDenied(
                f"{request.shown} is not public: {self.reason}", hint="leave --no-sign-request away and give credentials"
            )
        payer = "" if endpoint.requester_pays else ", or pass --requester-pays if the bucket wants that"
        return AccessDenied(
            f"no permission {request.permission} on {request.shown}: {self.reason}",
            hint=f"grant {request.permission} to these credentials{payer}",
        )

    def _wrong_object(self, request: Request) -> TierError:
        if self.status == 404 and (request.method == "HEAD" or self.code in _NO_OBJECT_CODES):
            return NotFound(f"{request.shown} does not exist")
        if self.status == 404:
            return Unavailable(f"{request.server} answers {self.reason} for {request.shown}", hint="check the endpoint URL")
        if self.status in (412, 416):
            return VersionChanged(f"{request.shown} is there in another version")
        hint = "write https:// in --endpoint-url" if self.speaks_tls else "check the endpoint URL"
        return BadResponse(f"{request.server} answers {self.reason} for {request.shown}", hint=hint)

    def _skew(self) -> str:
        there = email.utils.parsedate_tz(self.date)
        if there is None:
            return "too far from"
        difference = time.time() - email.utils.mktime_tz(there)
        return f"{abs(difference) / 60:.0f} minutes {'ahead of' if difference > 0 else 'behind'}"


def _fields(body: bytes) -> dict[str, str]:
    """The children of the answer's <Error>; {} when the body is no XML, as a proxy's error page is not."""
    try:
        root = ET.fromstring(body)
    except (ET.ParseError, LookupError, ValueError):
        return {}
    return {child.tag.rpartition("}")[2]: child.text or "" for child in root}


def _retry_after(value: str) -> float | None:
    """Seconds or an HTTP date; None when absent or unreadable. At most an hour: no answer stops the tier for longer."""
    if value.isdecimal():
        return min(float(value), MAX_RETRY_AFTER_SECONDS)
    moment = email.utils.parsedate_tz(value)
    if moment is None:
        return None
    return min(max(0.0, email.utils.mktime_tz(moment) - time.time()), MAX_RETRY_AFTER_SECONDS)
