"""CASES line 15: keys that POSIX cannot name, or only just. What is reachable has its own bytes as name, the rest is counted."""

from __future__ import annotations

import errno
import os
import unicodedata
from pathlib import Path

import pytest

from tests.fuse.bucket import Bucket, new_bucket
from tests.fuse.mount import Mounting
from tests.servers.process import wait_until
from tests.servers.rgw import is_installed
from tests.servers.s3 import S3Account

REACHABLE = [
    "plain",
    "dir/below",
    "100%",
    "a%2Fb",
    "a+b",
    " blank at both ends ",
    "tab\there",
    "bell\x07",
    "back\\slash",
    "star*?[x]",
    "quo'te\"d",
    "dash-1",
    "dash/below",
    ".hidden",
    "...",
    "dir/..hidden",
    "n" * 255,
    "ä" * 127,
    unicodedata.normalize("NFC", "é") + "-nfc",
    unicodedata.normalize("NFD", "é") + "-nfd",
    "\u202emirrored",
    "emoji-\U0001f600",
]
UNREACHABLE = ["a//b", "./dot", "x/../y", "up/..", "n" * 256, "deep/" + "m" * 300 + "/file", "/leading"]
"""Each is one thing that a listing shows in its directory, and has siblings that must not suffer."""


RGW = pytest.param("rgw", marks=[pytest.mark.rgw, pytest.mark.skipif(not is_installed(), reason="Ceph RGW is not installed")])


@pytest.fixture(params=["moto", RGW])
def exact(request: pytest.FixtureRequest) -> S3Account:
    """A server that keeps all key names apart."""
    server: S3Account = request.getfixturevalue(request.param)
    return server


def found_below(root: str) -> set[str]:
    return {os.path.relpath(os.path.join(place, name), root) for place, _, names in os.walk(root, onerror=fail) for name in names}


def fail(error: OSError) -> None:
    raise error


def unreachable_count(mount_status: dict[str, list[dict[str, int]]]) -> int:
    return mount_status["datasets"][0]["unreachable_count"]


def test_case_15_every_key_is_reachable_under_its_own_name_or_counted(exact: S3Account, mounting: Mounting) -> None:
    bucket = new_bucket(exact)
    for key in [*REACHABLE, *UNREACHABLE]:
        bucket.put(key, key.encode())
    mount = mounting(bucket)
    assert found_below(str(mount.root)) == set(REACHABLE)
    for key in REACHABLE:
        assert (mount.root / key).read_bytes() == key.encode()
        assert (mount.root / key).stat().st_size == len(key.encode())
    # 'a//', './' 'x/../' 'up/..' the long names and '/': one each, where it lies
    assert unreachable_count(mount.status()) == len(UNREACHABLE)
    assert mount.metrics()[f'tiercache_unreachable_keys{{dataset="{bucket.name}"}}'] == len(UNREACHABLE)


def test_case_15_names_are_found_by_a_lookup_alone(exact: S3Account, mounting: Mounting) -> None:
    bucket = new_bucket(exact)
    for key in [*REACHABLE, *UNREACHABLE]:
        bucket.put(key, key.encode())
    mount = mounting(bucket)
    for key in REACHABLE:
        assert (mount.root / key).read_bytes() == key.encode()
    for missing in ("plain2", "plai", "DIR", "dir/belo", "a%2fb", "a/b", "x/y", unicodedata.normalize("NFD", "é") + "-nfc"):
        assert not (mount.root / missing).exists()
    with pytest.raises(OSError) as caught:  # noqa: PT011
        os.stat(mount.root / ("n" * 256))
    assert caught.value.errno == errno.ENAMETOOLONG


def test_case_15_a_key_that_is_a_file_and_a_prefix_is_a_directory(exact: S3Account, mounting: Mounting) -> None:
    bucket = new_bucket(exact)
    for key in ("both", "both-1", "both/below", "other"):
        bucket.put(key, key.encode())
    mount = mounting(bucket)
    assert (mount.root / "both").is_dir()
    assert sorted(os.listdir(mount.root)) == ["both", "both-1", "other"]
    assert os.listdir(mount.root / "both") == ["below"]
    assert (mount.root / "both/below").read_bytes() == b"both/below"
    assert unreachable_count(mount.status()) == 1


def test_case_15_marker_objects_are_directories(exact: S3Account, mounting: Mounting) -> None:
    bucket = new_bucket(exact)
    bucket.put("empty/", b"")
    bucket.put("marked/", b"")
    bucket.put("marked/file", b"x")
    bucket.put("content/", b"bytes without a name")
    mount = mounting(bucket)
    assert sorted(os.listdir(mount.root)) == ["content", "empty", "marked"]
    assert os.listdir(mount.root / "empty") == []
    assert os.listdir(mount.root / "marked") == ["file"]
    assert os.listdir(mount.root / "content") == []
    wait_until(lambda: unreachable_count(mount.status()) == 1, "the marker's content to be counted")


def test_a_prefix_is_the_root_of_the_mount(bucket: Bucket, mounting: Mounting) -> None:
    for key in ("data/train/a", "data/train/b/c", "data/trainer", "other"):
        bucket.put(key, key.encode())
    for prefix in ("data/train", "data/train/"):
        mount = mounting(bucket.source + "/" + prefix, extra=bucket.account.environment, options=endpoint(bucket))
        assert found_below(str(mount.root)) == {"a", "b/c"}
        assert (mount.root / "b/c").read_bytes() == b"data/train/b/c"


def test_a_name_that_is_no_text_is_read_cold_hot_and_after_an_upgrade(mounting: Mounting, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    name = os.fsdecode(b"bytes\xff\xfe")
    (source / name).write_bytes(b"content" * 1000)
    mount = mounting(f"file://{source}")
    with (mount.root / name).open("rb", buffering=0) as file:
        assert (mount.root / name).read_bytes() == b"content" * 1000
        assert mount.tiercache("upgrade", mount.point).code == 0
        assert file.read() == b"content" * 1000
    assert (mount.root / name).read_bytes() == b"content" * 1000


def endpoint(bucket: Bucket) -> list[str]:
    return ["--endpoint-url", bucket.account.endpoint_url]
