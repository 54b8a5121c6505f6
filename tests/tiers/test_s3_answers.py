"""What the S3 tier makes of answers that a real server seldom gives, wrong ones included."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from pathlib import Path

import pytest
import trio

from tests.servers.s3 import S3Account
from tests.servers.scripted import Answer, Asked, error_reply, in_order, reply, running_scripted
from tests.tiers.s3_tier import open_s3, read, ref_of
from tiercache.core.record import Listed, ObjectRef
from tiercache.errors import AccessDenied, Archived, BadResponse, NotFound, SetupError, TierError, Unavailable, VersionChanged
from tiercache.tiers.tier import MemorySink

pytestmark = pytest.mark.usefixtures("fetching")

BODY = random.Random(3).randbytes(300_000)
MD5 = hashlib.md5(BODY).hexdigest()
MODIFIED = "Mon, 06 May 2024 07:08:09 GMT"
LISTED = Listed("dir/key", f"{MD5}:{len(BODY)}", len(BODY), 1714979289)
NO_MD5 = Listed("dir/key", f"{MD5}-3:{len(BODY)}", len(BODY), 1714979289)


@pytest.fixture(autouse=True)
def credentials() -> Iterator[None]:
    with S3Account("", "testkey", "testsecret").in_environment():
        yield


def whole(body: bytes = BODY, **headers: str) -> Answer:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return reply(200, {"etag": f'"{MD5}"', "last-modified": MODIFIED, **given}, body)


def part(first: int, last: int, body: bytes, total: int = len(BODY), **headers: str) -> Answer:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return reply(206, {"etag": f'"{MD5}"', "content-range": f"bytes {first}-{last}/{total}", **given}, body)


async def read_from(answer: Answer, offset: int = 0, length: int = len(BODY), listed: Listed = LISTED) -> MemorySink:
    """The sink after a read that was answered so. Whatever is raised comes with nothing asked twice."""
    sink = MemorySink(length)
    with running_scripted(lambda _: answer) as server:
        async with open_s3(server.endpoint_url, read_seconds=0.3) as tier:
            try:
                await tier.read(ref_of(tier, listed), offset, length, sink)
            except TierError as error:
                error.sink = sink  # type: ignore[attr-defined]
                raise
            finally:
                assert server.methods == ["GET"]
    return sink


async def failed_read(
    kind: type[TierError], answer: Answer, offset: int = 0, length: int = len(BODY), listed: Listed = LISTED, accepted: int = 0
) -> TierError:
    with pytest.raises(kind) as caught:
        await read_from(answer, offset, length, listed)
    assert type(caught.value) is kind
    sink = caught.value.sink  # type: ignore[attr-defined]
    assert sink.received_bytes == accepted
    assert bytes(sink.view) == BODY[offset : offset + accepted]
    return caught.value


async def test_what_is_asked() -> None:
    with running_scripted(in_order([whole(), part(5, 9, BODY[5:10])])) as server:
        async with open_s3(server.endpoint_url) as tier:
            ref = ref_of(tier, LISTED)
            assert await read(tier, ref) == BODY
            assert await read(tier, ref, 5, 5) == BODY[5:10]
    first, second = server.asked
    assert (first.method, first.target) == ("GET", "/bucket/dir/key")
    assert first.headers["if-match"] == second.headers["if-match"] == f'"{MD5}"'
    assert "range" not in first.headers
    assert second.headers["range"] == "bytes=5-9"
    assert first.connection == second.connection
    assert first.headers["accept-encoding"] == "identity"


async def test_anonymous_requests_are_not_signed_and_requester_pays_is() -> None:
    with running_scripted(lambda _: whole()) as server:
        async with open_s3(server.endpoint_url, anonymous=True) as tier:
            await tier.head("dir/key")
        async with open_s3(server.endpoint_url, requester_pays=True) as tier:
            await tier.head("dir/key")
    anonymous, paying = server.asked
    assert not [name for name in anonymous.headers if name.startswith("x-amz-") or name == "authorization"]
    assert paying.headers["x-amz-request-payer"] == "requester"
    assert "x-amz-request-payer" in paying.headers["authorization"]


async def test_case_3_other_etag_from_a_store_that_ignores_if_match() -> None:
    await failed_read(VersionChanged, whole(etag='"other"'))
    await failed_read(VersionChanged, part(0, 9, BODY[:10], etag='"other"'), 0, 10)


async def test_case_3_other_total_or_length_is_another_version() -> None:
    await failed_read(VersionChanged, part(0, 9, BODY[:10], total=len(BODY) + 1), 0, 10)
    await failed_read(VersionChanged, whole(BODY + b"more"))
    await failed_read(VersionChanged, whole(BODY[:-1]))


async def test_case_3_preconditions_and_impossible_ranges_are_another_version() -> None:
    await failed_read(VersionChanged, error_reply(412, "PreconditionFailed"))
    await failed_read(VersionChanged, error_reply(416, "InvalidRange"), 5, 10)


@pytest.mark.parametrize(
    "answer",
    [
        part(1, 10, BODY[1:11]),
        part(0, 8, BODY[:9]),
        part(0, 9, BODY[:9]),
        part(0, 9, BODY[:10], content_range=""),
        part(0, 9, BODY[:10], content_range="bytes 0-9/*"),
        part(0, 9, BODY[:10], etag=""),
        whole(),
        Answer(part(0, 9, BODY[:10]).raw.replace(b" 206 ", b" 200 ")),
        Answer(b"220 smtp.example ESMTP\r\n\r\n", "close"),
        Answer(b"HTTP/1.1 206 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", "close"),
        Answer(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", "close"),
        reply(304),
        reply(418, {}, b"teapot"),
    ],
)
async def test_case_3_answers_that_cannot_be_right_give_no_byte(answer: Answer) -> None:
    await failed_read(BadResponse, answer, 0, 10)


async def test_whole_object_is_checked_before_its_first_byte() -> None:
    damaged = BODY[:1000] + b"?" + BODY[1001:]
    error = await failed_read(BadResponse, whole(damaged))
    assert MD5 in str(error)


async def test_larger_whole_object_is_checked_before_its_last_byte() -> None:
    large = random.Random(4).randbytes(3_000_000)
    md5 = hashlib.md5(large).hexdigest()
    listed = Listed("k", f"{md5}:{len(large)}", len(large), 0)
    assert bytes((await read_from(whole(large, etag=f'"{md5}"'), 0, len(large), listed)).view) == large
    damaged = b"?" + large[1:]
    with pytest.raises(BadResponse) as caught:
        await read_from(whole(damaged, etag=f'"{md5}"'), 0, len(large), listed)
    assert 0 < caught.value.sink.received_bytes < len(large)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "headers",
    [
        {"x_amz_server_side_encryption": "aws:kms"},
        {"x_amz_server_side_encryption_customer_algorithm": "AES256"},
        {"etag": f'"{MD5}-3"'},
    ],
)
async def test_etag_that_is_no_md5_is_not_compared(headers: Mapping[str, str]) -> None:
    listed = NO_MD5 if "etag" in headers else LISTED
    assert bytes((await read_from(whole(BODY[::-1], **headers), listed=listed)).view) == BODY[::-1]


async def test_etag_that_a_proxy_made_weak_is_the_same_version() -> None:
    assert bytes((await read_from(whole(etag=f'W/"{MD5}"'))).view) == BODY
    with running_scripted(lambda _: Answer(whole(etag=f'W/"{MD5}"').raw.removesuffix(BODY))) as server:
        async with open_s3(server.endpoint_url) as tier:
            assert await tier.head("dir/key") == LISTED


async def test_sink_that_lends_little_gets_all_in_order() -> None:
    class Lending(MemorySink):
        def buffer(self, wanted_bytes: int) -> memoryview:
            return super().buffer(min(wanted_bytes, 1000))

    sink = Lending(len(BODY))
    with running_scripted(lambda _: whole()) as server:
        async with open_s3(server.endpoint_url) as tier:
            await tier.read(ref_of(tier, LISTED), 0, len(BODY), sink)
    assert bytes(sink.view) == BODY


async def test_premature_end_keeps_what_came() -> None:
    cut = Answer(part(0, 9_999, BODY[:10_000]).raw[:-4000], "close")
    error = await failed_read(Unavailable, cut, 0, 10_000, accepted=6_000)
    assert "ended its answer early" in str(error)


async def test_case_10_silence_in_the_middle_keeps_what_came() -> None:
    silent = Answer(part(0, 9_999, BODY[:10_000]).raw[:-4000], "stall")
    error = await failed_read(Unavailable, silent, 0, 10_000, accepted=6_000)
    assert "silent for 0.3 s" in str(error)


async def test_chunked_bodies_are_read() -> None:
    pieces = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(piece), piece) for piece in (BODY[:7], BODY[7:200_000], BODY[200_000:]))
    for coded in (pieces + b"0\r\n\r\n", pieces + b"0\r\nx-trailer: 1\r\n\r\n"):
        chunked = whole(b"", content_length="", transfer_encoding="chunked")
        assert bytes((await read_from(Answer(chunked.raw + coded))).view) == BODY
    bad = Answer(part(0, 9, b"", content_length="", transfer_encoding="chunked").raw + b"zz\r\n")
    await failed_read(BadResponse, bad, 0, 10)


async def test_body_that_ends_with_the_connection_and_interim_answers_are_read() -> None:
    assert bytes((await read_from(Answer(whole(content_length="").raw, "close"))).view) == BODY
    assert bytes((await read_from(Answer(b"HTTP/1.1 100 Continue\r\n\r\n" + whole().raw))).view) == BODY


@pytest.mark.parametrize(
    ("answer", "retry_after_seconds"),
    [
        (error_reply(503, "SlowDown", {"retry-after": "7"}), 7.0),
        (error_reply(503, "SlowDown"), None),
        (error_reply(429, "TooManyRequests", {"retry-after": "soon"}), None),
        (error_reply(500, "InternalError"), None),
        (reply(502, {}, b"<html>Bad Gateway</html>"), None),
        (reply(504), None),
        (error_reply(400, "RequestTimeout"), None),
        (error_reply(503, "SlowDown", {"retry-after": "999999999"}), 3600.0),
    ],
)
async def test_case_11_overload_is_unavailable_once_and_never_not_found(
    answer: Answer, retry_after_seconds: float | None
) -> None:
    error = await failed_read(Unavailable, answer)
    assert isinstance(error, Unavailable)
    assert error.retryable
    assert error.retry_after_seconds == retry_after_seconds
    with running_scripted(lambda _: answer) as server:
        async with open_s3(server.endpoint_url) as tier:
            with pytest.raises(Unavailable):
                await tier.list("dir/")
            assert server.methods == ["GET"]


async def test_case_11_retry_after_as_a_date() -> None:
    error = await failed_read(
        Unavailable, error_reply(503, "SlowDown", {"retry-after": formatdate(time.time() + 60, usegmt=True)})
    )
    assert isinstance(error, Unavailable)
    assert error.retry_after_seconds is not None
    assert 50 < error.retry_after_seconds <= 60


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_case_11_head_without_a_body_is_unavailable(status: int) -> None:
    with running_scripted(lambda _: reply(status)) as server:
        async with open_s3(server.endpoint_url) as tier:
            with pytest.raises(Unavailable):
                await tier.head("dir/key")
    assert server.methods == ["HEAD"]


async def test_not_found_only_when_the_store_says_so() -> None:
    await failed_read(NotFound, error_reply(404, "NoSuchKey"))
    await failed_read(Unavailable, reply(404, {}, b"<html>404 page not found</html>"))
    error = await failed_read(Unavailable, error_reply(404, "NoSuchBucket"))
    assert "bucket 'bucket' does not exist" in str(error)


async def refused(answer: Answer, *, region: str | None = None) -> TierError:
    with running_scripted(lambda _: answer) as server:
        async with open_s3(server.endpoint_url, region=region) as tier:
            with pytest.raises(TierError) as caught:
                await tier.list("dir/")
    return caught.value


async def test_denied_names_the_permission() -> None:
    listing = await refused(error_reply(403, "AccessDenied"))
    assert type(listing) is AccessDenied
    assert "s3:ListBucket" in listing.line
    getting = await failed_read(AccessDenied, error_reply(403, "AccessDenied"))
    assert "s3:GetObject on s3://bucket/dir/key" in str(getting)
    assert "--requester-pays" in getting.hint


@pytest.mark.parametrize(
    "answer",
    [
        error_reply(301, "PermanentRedirect", {"x-amz-bucket-region": "eu-west-3"}),
        error_reply(307, "TemporaryRedirect", {"x-amz-bucket-region": "eu-west-3"}),
        error_reply(400, "AuthorizationHeaderMalformed", None, "expecting 'eu-west-3'", Region="eu-west-3"),
    ],
)
async def test_wrong_region_names_the_right_one(answer: Answer) -> None:
    error = await refused(answer, region="us-east-1")
    assert type(error) is AccessDenied
    assert "is in region eu-west-3, not us-east-1" in str(error)
    assert "eu-west-3" in error.hint


async def test_plain_request_to_a_tls_port() -> None:
    """As Go's, nginx's and bare TLS stacks answer it."""
    talkative = reply(400, {}, b"Client sent an HTTP request to an HTTPS server.\n", then="close")
    for answer in (talkative, Answer(b"\x15\x03\x01\x00\x02\x02\x16", "close"), Answer(b"", "close")):
        error = await refused(answer)
        assert "https://" in error.hint


async def test_case_12_clock_skew_has_its_own_message() -> None:
    skewed = {"date": formatdate(time.time() - 20 * 60, usegmt=True)}
    error = await refused(error_reply(403, "RequestTimeTooSkewed", skewed))
    assert type(error) is AccessDenied
    assert "this machine's clock is 20 minutes ahead of the store's" in str(error)
    assert "timedatectl" in error.hint


def expiring(good_key: str, answer: Answer) -> Callable[[Asked], Answer]:
    def script(asked: Asked) -> Answer:
        if f"Credential={good_key}/" in asked.headers["authorization"]:
            return answer
        return reply(400) if asked.method == "HEAD" else error_reply(400, "ExpiredToken", None, "The provided token has expired")

    return script


def write_credentials(path: Path, access_key: str) -> None:
    path.write_text(f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = s\naws_session_token = t\n")


@pytest.fixture
def credentials_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    write_credentials(path, "OLD")
    return path


async def test_case_12_rewritten_credentials_are_taken_without_a_restart(credentials_file: Path) -> None:
    keys = ["OLD"]
    with running_scripted(lambda asked: expiring(keys[0], whole())(asked)) as server:
        async with open_s3(server.endpoint_url) as tier:
            ref = ref_of(tier, LISTED)
            assert await read(tier, ref) == BODY
            for renewed in ("SECOND", "THIRD"):
                keys[0] = renewed
                write_credentials(credentials_file, renewed)
                assert await tier.head("dir/key") == LISTED if renewed == "SECOND" else await read(tier, ref) == BODY
    assert server.asked[-1].headers["x-amz-security-token"] == "t"


async def test_case_12_expired_credentials_that_nobody_renews(credentials_file: Path) -> None:
    with running_scripted(expiring("NEVER", whole())) as server:
        async with open_s3(server.endpoint_url) as tier:
            for _ in range(3):
                with pytest.raises(AccessDenied, match="credentials have expired"):
                    await read(tier, ref_of(tier, LISTED))
    assert server.methods == ["GET"] * 3  # one request a read: no second try with the same keys


async def test_case_12_credentials_are_renewed_once_a_request(credentials_file: Path) -> None:
    def script(asked: Asked) -> Answer:
        write_credentials(credentials_file, f"NEW{len(server.asked)}")
        return error_reply(400, "ExpiredToken")

    with running_scripted(script) as server:
        async with open_s3(server.endpoint_url) as tier:
            with trio.fail_after(5), pytest.raises(AccessDenied, match="credentials have expired"):
                await read(tier, ref_of(tier, LISTED))
    assert len(server.asked) == 2


@pytest.fixture
def issued(credentials_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Credentials come from a program that always gives the same; the file has a word for each time it ran."""
    runs, issuer, configuration = tmp_path / "runs", tmp_path / "issuer", tmp_path / "config"
    issuer.write_text(
        f"#!/bin/sh\necho run >> {runs}\n"
        'echo \'{"Version": 1, "AccessKeyId": "STALE", "SecretAccessKey": "s", "SessionToken": "t"}\'\n'
    )
    issuer.chmod(0o700)
    credentials_file.unlink()
    configuration.write_text(f"[default]\ncredential_process = {issuer}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(configuration))
    return runs


async def test_case_12_a_chain_that_brings_nothing_new_is_left_in_peace(issued: Path) -> None:
    with running_scripted(expiring("NEVER", whole())) as server:
        async with open_s3(server.endpoint_url) as tier:
            for _ in range(5):
                with pytest.raises(AccessDenied, match="credentials have expired"):
                    await read(tier, ref_of(tier, LISTED))
    assert len(server.asked) == 5
    assert (await trio.Path(issued).read_text()).split() == ["run", "run"]  # the first, and one after the first complaint


@pytest.mark.parametrize("nonsense", ["<html>", "[]", '{"Version": 1, "AccessKeyId": "A"}', ""])
async def test_case_12_an_issuer_that_answers_nonsense_is_a_refusal(issued: Path, tmp_path: Path, nonsense: str) -> None:
    (tmp_path / "answer").write_text(nonsense)
    (tmp_path / "issuer").write_text(f"#!/bin/sh\ncat {tmp_path}/answer\n")
    with running_scripted(lambda _: whole()) as server:
        async with open_s3(server.endpoint_url) as tier:
            with pytest.raises(AccessDenied, match=r"^credentials: "):
                await tier.head("dir/key")
    assert server.asked == []


async def test_case_12_an_issuer_that_breaks_later_is_waited_for(issued: Path, tmp_path: Path) -> None:
    """The credentials are always about to expire, so each request asks for others first."""
    soon = (datetime.now(UTC) + timedelta(minutes=5)).isoformat()
    good = json.dumps({"Version": 1, "AccessKeyId": "A", "SecretAccessKey": "s", "SessionToken": "t", "Expiration": soon})
    answer = tmp_path / "answer"
    answer.write_text(good)
    (tmp_path / "issuer").write_text(f"#!/bin/sh\ncat {answer}\n")
    with running_scripted(lambda _: whole()) as server:
        async with open_s3(server.endpoint_url) as tier:
            await read(tier, ref_of(tier, LISTED))
            answer.write_text("<html>")
            with pytest.raises(Unavailable, match="credentials cannot be refreshed"):
                await read(tier, ref_of(tier, LISTED))
            answer.write_text(good)
            await read(tier, ref_of(tier, LISTED))


async def test_case_12_a_token_file_that_is_missing_is_waited_for(
    credentials_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await trio.Path(credentials_file).unlink()
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/nonexistent/token")
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/x")
    with running_scripted(lambda _: whole()) as server:
        async with open_s3(server.endpoint_url) as tier:
            with pytest.raises(Unavailable, match="/nonexistent/token"):
                await tier.head("dir/key")


async def test_case_10_unreachable_metadata_endpoint_is_a_bounded_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    with running_scripted(lambda _: Answer(b"", "stall")) as metadata, running_scripted(lambda _: whole()) as server:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.endpoint_url)
        async with open_s3(server.endpoint_url) as tier:
            for seconds in (5.0, 0.5):  # the second is told what the first found out
                with trio.fail_after(seconds), pytest.raises(AccessDenied, match="found, and the instance metadata service did"):
                    await tier.head("dir/key")
    assert server.asked == []


async def test_case_17_archived_object_says_restore() -> None:
    error = await failed_read(Archived, error_reply(403, "InvalidObjectState"))
    assert "restore" in error.hint


@pytest.mark.parametrize(
    ("headers", "archived"),
    [
        ({"x_amz_storage_class": "GLACIER"}, True),
        ({"x_amz_storage_class": "DEEP_ARCHIVE", "x_amz_restore": 'ongoing-request="true"'}, True),
        ({"x_amz_storage_class": "GLACIER", "x_amz_restore": 'ongoing-request="false"'}, False),
        ({"x_amz_storage_class": "GLACIER_IR"}, False),
    ],
)  # fmt: skip
async def test_case_17_head_knows_archived_from_restored(headers: Mapping[str, str], archived: bool) -> None:
    with running_scripted(lambda _: Answer(whole(BODY, **headers).raw.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")) as server:
        async with open_s3(server.endpoint_url) as tier:
            found = await tier.head("dir/key")
    assert found == Listed(LISTED.key, LISTED.version, LISTED.size_bytes, LISTED.mtime_seconds, archived)


async def test_case_17_listing_with_archived_objects_asks_for_their_restore_status() -> None:
    entry = (
        "<ListBucketResult><Contents><Key>k</Key><LastModified>2024-05-06T07:08:09Z</LastModified><ETag>a</ETag><Size>1</Size>"
        "<StorageClass>GLACIER</StorageClass>{}</Contents></ListBucketResult>"
    )
    restored = "<RestoreStatus><RestoreExpiryDate>2040</RestoreExpiryDate></RestoreStatus>"

    def script(asked: Asked) -> Answer:
        wanted = asked.headers.get("x-amz-optional-object-attributes") == "RestoreStatus"
        return reply(200, {}, entry.format(restored if wanted else "").encode())

    with running_scripted(script) as server:
        async with open_s3(server.endpoint_url) as tier:
            page = await tier.list("")
    assert [listed.archived for listed in page.objects] == [False]
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    "answer", [error_reply(403, "AccessDenied"), error_reply(404, "NoSuchBucket"), reply(200, {}, b"<html/>"), reply(404)]
)
async def test_case_5_listing_that_failed_is_never_an_empty_page(answer: Answer) -> None:
    error = await refused(answer)
    assert not isinstance(error, NotFound)


async def test_head_that_is_refused_learns_why_from_a_get() -> None:
    def script(asked: Asked) -> Answer:
        return reply(403) if asked.method == "HEAD" else error_reply(403, "InvalidAccessKeyId")

    with running_scripted(script) as server:
        async with open_s3(server.endpoint_url) as tier:
            with pytest.raises(AccessDenied, match="InvalidAccessKeyId"):
                await tier.head("dir/key")
    assert server.methods == ["HEAD", "GET"]


async def test_probe_names_a_missing_get_permission() -> None:
    listing = (
        b"<ListBucketResult><Contents><Key>p/</Key><LastModified>2024-05-06T07:08:09Z</LastModified><ETag>a</ETag><Size>0</Size></Contents>"
        b"<Contents><Key>p/k</Key><LastModified>2024-05-06T07:08:09Z</LastModified><ETag>a</ETag><Size>1</Size></Contents></ListBucketResult>"
    )

    def script(asked: Asked) -> Answer:
        return reply(200, {}, listing) if "list-type" in asked.target else error_reply(403, "AccessDenied")

    with running_scripted(script) as server:
        async with open_s3(server.endpoint_url, prefix="p/") as tier:
            with pytest.raises(SetupError) as caught:
                await tier.probe()
    assert "no permission s3:GetObject on s3://bucket/p/k" in caught.value.line
    assert server.methods == ["GET", "GET"]  # nothing but a listing and a GET is ever needed


async def test_etag_that_no_header_can_carry_is_refused() -> None:
    with running_scripted(lambda _: whole()) as server:
        async with open_s3(server.endpoint_url) as tier:
            ref = ObjectRef("data", "k", "a\r\nx-injected: 1:5", 5, 0, ref_of(tier, LISTED).object_id)
            with pytest.raises(BadResponse):
                await read(tier, ref)
    assert server.asked == []
