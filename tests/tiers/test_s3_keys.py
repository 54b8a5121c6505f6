"""CASES 15 at the S3 tier: odd keys keep their names exactly, and none hides its siblings.

moto for every machine; Ceph RGW (`-m rgw`), a real server with exact names, where it is installed. Both refuse keys that are
not UTF-8: those are covered by the properties in `test_s3_listing.py` and `test_sigv4.py`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

import pytest

from tests.servers import rgw
from tests.servers.moto import running_moto
from tests.servers.s3 import S3Account
from tests.tiers.s3_tier import BUCKET, open_s3, read, ref_of
from tiercache.errors import NotFound, VersionChanged

ODD_KEYS = (
    "a/b",
    "a//b",
    "/a/b",
    "a/./b",
    "a/../b",
    "../up",
    "./here",
    ".",
    "..",
    "both",
    "both/below",
    "marker/",
    "trailing//",
    "x" * 300 + "/y",
    "y" * 1000,
    " leading",
    "trailing ",
    "in the middle",
    "plus+plus",
    "percent%2Fencoded",
    "percent%",
    "100%25",
    "question?mark",
    "hash#mark",
    'amp&lt;<tag>"quoted"\'s',
    "semi;colon:at@eq=comma,dollar$star*",
    "back\\slash",
    "tilde~caret^pipe|brace{}[]",
    unicodedata.normalize("NFC", "é/Å"),
    unicodedata.normalize("NFD", "é/Å"),
    "日本語/ファイル",
    "emoji-\U0001f9ca",
    "tab\there",
    "return\rhere",
    "control\x01\x02\x1f\x7f",
    "right-to-left-\u202e-mark",
)
NEWLINE = "new\nline"  # moto takes it for something else


@pytest.fixture(scope="module", params=["moto", pytest.param("rgw", marks=pytest.mark.rgw)])
def server(request: pytest.FixtureRequest) -> Iterator[S3Account]:
    if request.param == "rgw" and not rgw.is_installed():
        pytest.skip("Ceph RGW is not installed (Debian: radosgw ceph-mon ceph-osd ceph-common)")
    with running_moto() if request.param == "moto" else rgw.running_rgw() as running:
        running.make_bucket(BUCKET)
        with running.in_environment():
            yield running


@pytest.fixture
def keys(server: S3Account) -> tuple[str, ...]:
    found = (*ODD_KEYS, NEWLINE) if isinstance(server, rgw.Rgw) else ODD_KEYS
    for key in found:
        server.put(BUCKET, key, content(key))
    return found


def content(key: str) -> bytes:
    return b"" if key.endswith("/") else b"content of " + key.encode()


async def test_case_15_every_odd_key_is_listed_and_read_under_its_own_name(server: S3Account, keys: tuple[str, ...]) -> None:
    async with open_s3(server.endpoint_url) as tier:
        listed = {found.key: found for found in (await tier.list("", delimiter=False)).objects}
        assert sorted(listed) == sorted(keys)
        for key, found in listed.items():
            assert await tier.head(key) == found
            if found.size_bytes:
                ref = ref_of(tier, found)
                assert await read(tier, ref) == content(key)
                assert await read(tier, ref, 3, 5) == content(key)[3:8]


async def test_case_15_levels(server: S3Account, keys: tuple[str, ...]) -> None:
    async with open_s3(server.endpoint_url) as tier:
        top = await tier.list("")
        assert {found.key for found in top.objects} == {key for key in keys if "/" not in key}
        assert set(top.prefixes) == {key[: key.index("/") + 1] for key in keys if "/" in key}
        inner = await tier.list("a/")
        assert {found.key for found in inner.objects} == {"a/b"}
        assert set(inner.prefixes) == {"a//", "a/./", "a/../"}
        assert {found.key for found in (await tier.list("a//")).objects} == {"a//b"}
        marker = await tier.list("marker/")
        assert [(found.key, found.size_bytes) for found in marker.objects] == [("marker/", 0)]


async def test_case_15_pages_of_odd_keys_continue_where_they_stopped(server: S3Account, keys: tuple[str, ...]) -> None:
    async with open_s3(server.endpoint_url) as tier:
        found: list[str] = []
        token = ""
        while True:
            page = await tier.list("", delimiter=False, token=token, limit=3)
            found += [listed.key for listed in page.objects]
            token = page.token
            if not token:
                break
    assert sorted(found) == sorted(keys)


async def test_case_15_neighbours_of_odd_keys_do_not_exist(server: S3Account, keys: tuple[str, ...]) -> None:
    async with open_s3(server.endpoint_url) as tier:
        for absent in (
            "a",
            "a/",
            "leading",
            "percent/encoded",
            "percent%2fencoded",
            "plus plus",
            "100%",
            "back/slash",
            "marker",
            "X",
        ):
            with pytest.raises(NotFound):
                await tier.head(absent)


async def test_case_3_version_change_of_an_odd_key(server: S3Account) -> None:
    key = "odd/ +%é//x"
    server.put(BUCKET, key, b"first")
    async with open_s3(server.endpoint_url) as tier:
        ref = ref_of(tier, await tier.head(key))
        server.put(BUCKET, key, b"2nd..")
        for offset, length in ((0, 5), (1, 2)):
            with pytest.raises(VersionChanged):
                await read(tier, ref, offset, length)
    server.delete(BUCKET, key)
