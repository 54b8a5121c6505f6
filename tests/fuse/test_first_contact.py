"""What can be wrong before the first mount: one line that names cause and fix, exit 1, within five seconds, nothing left mounted.

What only an unprivileged user meets (fusermount3, allow_other) is in test_unprivileged.py.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fuse.bucket import Bucket
from tests.fuse.mount import Mount, Mounting, Ran, detach, is_mounted
from tests.fuse.room import room, without_device
from tests.servers.certificate import make_certificate
from tests.servers.process import free_ports
from tests.servers.scripted import Answer, Asked, error_reply, reply, running_scripted
from tests.servers.synthetic import SyntheticBucket
from tests.tiers.disks import ext4, fill_up, tmpfs

LIMIT_SECONDS = 10.0  # twice what is promised: the machine that tests may be busy
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


def refused(mount: Mount, ran: Ran, *words: str) -> None:
    """One line with all of `words`, exit 1, in time, and no trace."""
    assert ran.code == 1, ran
    assert ran.err.count("\n") == 1, ran.err
    assert ran.err.startswith("tiercache: ")
    for word in words:
        assert word in ran.err
    assert ";" in ran.err, "the line says what to do"
    assert ran.json["error"]
    assert ran.json["hint"]
    assert ran.seconds < LIMIT_SECONDS
    assert not is_mounted(mount.point)
    assert not mount.socket.exists()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_bytes(b"content")
    return source


@pytest.fixture
def local(mounting: Mounting, directory: Path) -> Mount:
    """A mount of a directory, not made yet: everything is right until a test spoils it."""
    return mounting(f"file://{directory}", started=False)


# -- the machine


def test_no_dev_fuse(local: Mount, tmp_path: Path) -> None:
    stage = tmp_path / "stage"
    stage.mkdir()
    with room(stage, *without_device()) as private:
        ran = private.tiercache("mount", local.source, local.point, "--hot", local.hot, "--json", env=local.env)
        assert not private.is_mounted(local.point)
    refused(local, ran, "/dev/fuse", "does not exist", "modprobe fuse", "--device /dev/fuse")


def test_root_without_the_capability(local: Mount, tmp_path: Path) -> None:
    stage = tmp_path / "stage"
    stage.mkdir()
    with room(stage) as private:
        less = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
        ran = private.run([*less, *cli(local)], local.env)
    refused(local, ran, "CAP_SYS_ADMIN", "--cap-add SYS_ADMIN")


def cli(mount: Mount) -> list[str]:
    return [sys.executable, "-m", "tiercache", "mount", mount.source, str(mount.point), "--hot", str(mount.hot), "--json"]


# -- the mount point


def test_mount_point_missing(local: Mount) -> None:
    local.point.rmdir()
    refused(local, local.mount(), str(local.point), "does not exist", "mkdir")


def test_mount_point_is_a_file(local: Mount) -> None:
    local.point.rmdir()
    local.point.write_bytes(b"")
    refused(local, local.mount(), str(local.point), "not a directory")


def test_mount_point_not_empty(local: Mount) -> None:
    (local.point / "something").write_bytes(b"precious")
    refused(local, local.mount(), str(local.point), "not empty")
    assert (local.point / "something").read_bytes() == b"precious"


def test_mount_point_in_use_by_another_file_system(local: Mount) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(local.point)], check=True, timeout=30)
    try:
        ran = local.mount()
        assert is_mounted(local.point)
    finally:
        detach(local.point)
    refused(local, ran, "already a mount point", "tmpfs")


def test_mount_point_in_use_by_another_source(mounting: Mounting, directory: Path, tmp_path: Path) -> None:
    mount = mounting(f"file://{directory}")
    other = tmp_path / "other"
    other.mkdir()
    ran = mount.tiercache("mount", f"file://{other}", mount.point, "--hot", tmp_path / "hot2")
    assert (ran.code, ran.err.count("\n")) == (1, 1)
    assert "umount" in ran.err
    assert (mount.root / "file").read_bytes() == b"content"


def test_a_stale_mount_point_is_healed(mounting: Mounting, directory: Path) -> None:
    mount = mounting(f"file://{directory}")
    mount.kill()
    ran = mount.mount()
    assert (ran.code, ran.err) == (0, "")
    assert ran.seconds < LIMIT_SECONDS
    mount.pid = ran.json["status"]["pid"]
    assert (mount.root / "file").read_bytes() == b"content"


# -- the cache directory


def test_cache_directory_is_not_ours(local: Mount) -> None:
    local.hot.mkdir()
    (local.hot / "thesis.tex").write_bytes(b"precious")
    refused(local, local.mount(), str(local.hot), "--hot")
    assert [path.name for path in local.hot.iterdir()] == ["thesis.tex"]


def test_cache_disk_is_full(mounting: Mounting, directory: Path, tmp_path: Path) -> None:
    with ext4(tmp_path / "image", tmp_path / "disk", 16 << 20) as disk:
        fill_up(disk)
        mount = mounting(f"file://{directory}", hot=disk / "hot", hot_size=None, started=False)
        refused(mount, mount.mount(), str(disk / "hot"), "space")
        mount.close()


def test_cache_directory_on_tmpfs(mounting: Mounting, directory: Path, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "memory", 64 << 20) as memory:
        mount = mounting(f"file://{directory}", hot=memory / "hot", started=False)
        refused(mount, mount.mount(), "tmpfs", "--hot")
        mount.close()


def test_cache_directory_in_use(mounting: Mounting, directory: Path) -> None:
    first = mounting(f"file://{directory}")
    second = mounting(f"file://{directory}", hot=first.hot, started=False)
    ran = second.mount()
    refused(second, ran, str(first.hot), str(first.pid))
    assert ran.seconds < LIMIT_SECONDS, "a holder that runs is reported within a second"
    assert (first.root / "file").read_bytes() == b"content"


# -- the source


def test_source_directory_missing(mounting: Mounting, tmp_path: Path) -> None:
    mount = mounting(f"file://{tmp_path}/nowhere", started=False)
    refused(mount, mount.mount(), f"{tmp_path}/nowhere")


def test_bucket_missing(bucket: Bucket, mounting: Mounting) -> None:
    mount = mounting(Bucket(bucket.account, "no-such-bucket"), started=False)
    refused(mount, mount.mount(), "no-such-bucket", "does not exist", "endpoint")


@pytest.mark.parametrize("wrong", [{"AWS_SECRET_ACCESS_KEY": "wrong"}, {"AWS_ACCESS_KEY_ID": "nobody"}], ids=["secret", "key-id"])
def test_wrong_key(bucket: Bucket, mounting: Mounting, wrong: dict[str, str]) -> None:
    bucket.put("file", b"content")
    mount = mounting(bucket.source, extra={**bucket.account.environment, **wrong}, options=endpoint(bucket), started=False)
    refused(mount, mount.mount(), "credentials")


def test_no_key_at_all(bucket: Bucket, mounting: Mounting) -> None:
    mount = mounting(bucket.source, options=endpoint(bucket), started=False)
    refused(mount, mount.mount(), "credentials", "AWS_ACCESS_KEY_ID", "--no-sign-request")


def endpoint(bucket: Bucket) -> list[str]:
    return ["--endpoint-url", bucket.account.endpoint_url]


def test_unreachable_endpoint(mounting: Mounting) -> None:
    (port,) = free_ports(1)
    mount = mounting("s3://bucket", extra=KEYS, options=["--endpoint-url", f"http://127.0.0.1:{port}"], started=False)
    refused(mount, mount.mount(), f"127.0.0.1:{port}", "endpoint")


def test_endpoint_that_has_no_name(mounting: Mounting) -> None:
    mount = mounting("s3://bucket", extra=KEYS, options=["--endpoint-url", "http://store.invalid:9000"], started=False)
    refused(mount, mount.mount(), "store.invalid")


def test_endpoint_that_accepts_and_says_nothing(mounting: Mounting) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        mount = mounting("s3://bucket", extra=KEYS, options=["--endpoint-url", url], started=False)
        mount.point.rmdir()
        at_once = mount.mount()  # what a command takes on this machine that need not wait for anything
        mount.point.mkdir()
        ran = mount.mount()
    waited_seconds = ran.seconds - at_once.seconds
    refused(mount, replace(ran, seconds=waited_seconds), "127.0.0.1", "no answer")
    assert waited_seconds < LIMIT_SECONDS - 1.0, "the start of the command has to fit in as well"


def test_wrong_scheme_http_to_a_tls_port(mounting: Mounting, tmp_path: Path) -> None:
    _, tls = make_certificate(tmp_path)
    with running_scripted(lambda _: reply(), tls=tls) as server:
        mount = mounting("s3://bucket", extra=KEYS, options=["--endpoint-url", f"http://127.0.0.1:{server.port}"], started=False)
        refused(mount, mount.mount(), f"127.0.0.1:{server.port}", "https")


def test_wrong_scheme_https_to_a_plain_port(bucket: Bucket, mounting: Mounting) -> None:
    url = bucket.account.endpoint_url.replace("http:", "https:")
    mount = mounting(bucket.source, extra=bucket.account.environment, options=["--endpoint-url", url], started=False)
    refused(mount, mount.mount(), "http://")


# -- answers that no server here gives


Script = Callable[[Asked], Answer]


@contextmanager
def answered_by(script: Script, mounting: Mounting, *options: str) -> Iterator[Mount]:
    with running_scripted(script) as server:
        where = ["--endpoint-url", server.endpoint_url, *options]
        yield mounting("s3://bucket/prefix", extra=KEYS, options=where, started=False)


def is_list(asked: Asked) -> bool:
    return "list-type" in asked.target


def test_wrong_region(mounting: Mounting) -> None:
    def script(_: Asked) -> Answer:
        return error_reply(400, "AuthorizationHeaderMalformed", Region="eu-central-1")

    with answered_by(script, mounting) as mount:
        refused(mount, mount.mount(), "eu-central-1", "us-east-1", "region")


def test_moved_permanently_names_the_region(mounting: Mounting) -> None:
    with answered_by(lambda _: error_reply(301, "PermanentRedirect", {"x-amz-bucket-region": "eu-west-3"}), mounting) as mount:
        refused(mount, mount.mount(), "eu-west-3", "region")


@pytest.mark.parametrize(
    ("denies", "permission"), [(is_list, "s3:ListBucket"), (lambda asked: not is_list(asked), "s3:GetObject")]
)
def test_a_403_names_the_permission_that_lacked(mounting: Mounting, denies: Callable[[Asked], bool], permission: str) -> None:
    store = SyntheticBucket(["prefix/file"])

    def script(asked: Asked) -> Answer:
        return error_reply(403, "AccessDenied") if denies(asked) else store(asked)

    with answered_by(script, mounting) as mount:
        refused(mount, mount.mount(), permission, "grant")


def test_clock_skew_has_its_own_line(mounting: Mounting) -> None:
    skewed = error_reply(403, "RequestTimeTooSkewed", {"date": "Mon, 06 May 2024 07:08:09 GMT"})
    with answered_by(lambda _: skewed, mounting) as mount:
        refused(mount, mount.mount(), "clock")


def test_a_bucket_that_is_not_public(mounting: Mounting) -> None:
    with answered_by(lambda _: error_reply(403, "AccessDenied"), mounting, "--no-sign-request") as mount:
        refused(mount, mount.mount(), "not public", "--no-sign-request")


def test_a_public_bucket_needs_no_key_and_two_permissions(mounting: Mounting) -> None:
    """Neither HeadBucket nor anything else but ListObjectsV2 on the prefix and GetObject; and nothing is signed."""
    store = SyntheticBucket(["prefix/dir/file", "prefix-2/file"])

    def script(asked: Asked) -> Answer:
        allowed = "prefix=prefix%2F" in asked.target if is_list(asked) else asked.target.startswith("/bucket/prefix/")
        return store(asked) if allowed and asked.method == "GET" else error_reply(403, "AccessDenied")

    with running_scripted(script) as server:
        mount = mounting("s3://bucket/prefix", options=["--endpoint-url", server.endpoint_url, "--no-sign-request"])
        assert os.listdir(mount.root / "dir") == ["file"]
        assert (mount.root / "dir/file").read_bytes() == store.body("prefix/dir/file")
        assert all("authorization" not in asked.headers for asked in server.asked)


def test_in_the_foreground_and_by_serve_it_is_one_line_too(local: Mount, directory: Path) -> None:
    local.point.rmdir()
    ran = local.tiercache("mount", "-f", local.source, local.point, "--hot", local.hot)
    assert ran.code == 1
    assert "does not exist" in ran.err
    config = local.home / "tiercache.toml"
    config.write_text(
        f'[mount]\npoint = "{local.point}"\n[hot]\npaths = ["{local.hot}"]\n'
        f'[[datasets]]\nname = "data"\ncold = "file://{directory}"\n'
    )
    ran = local.tiercache("serve", "--config", config)
    assert ran.code == 1
    assert "does not exist" in ran.err
