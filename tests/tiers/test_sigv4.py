"""Our signatures are botocore's, byte for byte."""

from __future__ import annotations

import datetime
from urllib.parse import quote

import botocore.auth
import pytest
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st

from tiercache.tiers.cold.sigv4 import Keys, encode_path, encode_query, sign

NOW = datetime.datetime(2024, 2, 29, 23, 59, 58, tzinfo=datetime.UTC)
KEYS = st.binary(max_size=60).map(lambda raw: raw.decode("utf-8", "surrogateescape"))


@given(
    key=KEYS,
    method=st.sampled_from(["GET", "HEAD"]),
    query=st.dictionaries(st.sampled_from(["prefix", "list-type", "continuation-token", "delimiter"]), KEYS),
    token=st.none() | st.just("tok/en+="),
    extra=st.sampled_from([{}, {"x-amz-request-payer": "requester"}]),
)
def test_signature_is_botocores(key: str, method: str, query: dict[str, str], token: str | None, extra: dict[str, str]) -> None:
    keys = Keys("AKID", "se/cr+et", token)
    path, question = f"/bucket/{encode_path(key)}", encode_query(query)
    ours = sign(method, "store.example:9000", path, question, extra, keys, "eu-north-1", NOW.timestamp())
    request = AWSRequest(method=method, url=f"http://store.example:9000{path}{'?' if question else ''}{question}", headers=extra)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.auth, "get_current_datetime", lambda: NOW)
        botocore.auth.S3SigV4Auth(Credentials("AKID", "se/cr+et", token), "s3", "eu-north-1").add_auth(request)
    assert {name.lower(): value for name, value in request.headers.items()} == ours


@given(KEYS)
def test_path_is_encoded_as_boto3_does_where_boto3_can(key: str) -> None:
    assert encode_path(key) == quote(key.encode("utf-8", "surrogateescape"), safe="/~")
    assert encode_path(key).isascii()
    assert not set(encode_path(key)) & set(" ?#+\r\n\x00")


def test_secret_never_shows() -> None:
    assert "hidden" not in repr(Keys("AKID", "hidden", "hidden"))
