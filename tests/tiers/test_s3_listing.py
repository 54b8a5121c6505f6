"""A page of a listing, from bytes to records."""

from __future__ import annotations

from html import escape
from urllib.parse import quote_from_bytes, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.core.record import Listed
from tiercache.errors import BadResponse
from tiercache.tiers.cold.listing import parse_page

RAW_KEYS = st.lists(st.binary(min_size=1, max_size=40), max_size=5)


def page(*contents: bytes, more: bytes = b"") -> bytes:
    return (
        b'<?xml version="1.0" encoding="UTF-8"?>\n<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        + more
        + b"".join(b"<Contents>" + content + b"</Contents>" for content in contents)
        + b"</ListBucketResult>"
    )


def content(key: bytes, more: bytes = b"") -> bytes:
    return b"<Key>" + key + b'</Key><LastModified>2024-05-06T07:08:09.987Z</LastModified><ETag>"abc"</ETag><Size>7</Size>' + more


def text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


@given(RAW_KEYS)
def test_case_15_any_bytes_survive_the_url_encoding(keys: list[bytes]) -> None:
    body = page(*(content(quote_from_bytes(key).encode()) for key in keys), more=b"<EncodingType>url</EncodingType>")
    assert [listed.key for listed in parse_page(body, "b").objects] == [text(key) for key in keys]


def test_case_15_plus_stands_for_a_space_in_the_url_encoding() -> None:
    key = "a b+c%20d/é"
    body = page(content(quote_plus(key, safe="/").encode()), more=b"<EncodingType>url</EncodingType>")
    assert parse_page(body, "b").objects[0].key == key


@given(RAW_KEYS)
def test_case_15_no_odd_key_hides_its_siblings_where_the_server_ignores_the_encoding(keys: list[bytes]) -> None:
    keys = [key.replace(b"\r", b"-") for key in keys]  # XML itself turns CR into LF: such a server cannot say it
    shown = [escape(text(key), quote=False).encode("utf-8", "surrogateescape") for key in [*keys, b"sibling"]]
    objects = parse_page(page(*(content(key) for key in shown)), "b").objects
    assert [listed.key for listed in objects] == [*map(text, keys), "sibling"]


def test_case_15_forbidden_character_references_are_read() -> None:
    objects = parse_page(page(content(b"a&#x1;b&#31;c&#65;"), content(b"percent%2F+stays")), "b").objects
    assert [listed.key for listed in objects] == ["a\x01b\x1fcA", "percent%2F+stays"]


def test_fields() -> None:
    body = page(
        content(b"p/x"),
        more=b"<IsTruncated>true</IsTruncated><NextContinuationToken>a%2Bb c</NextContinuationToken>"
        b"<CommonPrefixes><Prefix>p/d/</Prefix></CommonPrefixes><CommonPrefixes><Prefix>p/e/</Prefix></CommonPrefixes>",
    )
    found = parse_page(body, "b")
    assert found.objects == (Listed("p/x", "abc:7", 7, 1714979289),)
    assert found.prefixes == ("p/d/", "p/e/")
    assert found.token == "a%2Bb c"


@pytest.mark.parametrize(
    ("more", "archived"),
    [
        (b"<StorageClass>GLACIER</StorageClass>", True),
        (b"<StorageClass>DEEP_ARCHIVE</StorageClass>", True),
        (b"<StorageClass>GLACIER_IR</StorageClass>", False),
        (b"<StorageClass>STANDARD</StorageClass>", False),
        (
            b"<StorageClass>GLACIER</StorageClass><RestoreStatus><IsRestoreInProgress>true</IsRestoreInProgress></RestoreStatus>",
            True,
        ),
        (
            b"<StorageClass>GLACIER</StorageClass><RestoreStatus><IsRestoreInProgress>false</IsRestoreInProgress>"
            b"<RestoreExpiryDate>2030-01-01T00:00:00Z</RestoreExpiryDate></RestoreStatus>",
            False,
        ),
    ],
)
def test_case_17_archive_classes(more: bytes, archived: bool) -> None:
    assert parse_page(page(content(b"k", more)), "b").objects[0].archived is archived


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html><body>proxy login</body></html>",
        b"not xml at all",
        page(b"<Key>k</Key><Size>1</Size>"),
        page(b'<Key>k</Key><LastModified>never</LastModified><ETag>"a"</ETag><Size>1</Size>'),
        page(more=b"<IsTruncated>true</IsTruncated>"),
    ],
)
def test_case_5_what_is_no_whole_listing_is_an_error(body: bytes) -> None:
    with pytest.raises(BadResponse):
        parse_page(body, "s3://b/")
