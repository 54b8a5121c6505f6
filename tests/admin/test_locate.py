"""Which daemon is meant: runtime directories, dead sockets, several daemons, paths through links."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.admin.fake import FakeControl, serving
from tiercache.admin import socket as sockets
from tiercache.admin.locate import daemon_of_mountpoint, daemon_of_paths, follow_links, only_daemon, resolve
from tiercache.errors import AccessDenied, NoDaemon, SetupError, UsageError


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runtime directory of these tests, for root and for others."""
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    monkeypatch.setattr(sockets, "ROOT_DIRECTORY", directory)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "session"))
    monkeypatch.delenv("TIERCACHE_SOCKET", raising=False)
    return directory


@pytest.fixture
def two(runtime: Path) -> Iterator[dict[str, Path]]:
    with ExitStack() as stack:
        found = {}
        for point, dataset in (("/mnt/a", "cats"), ("/mnt/a/deep", "dogs")):
            found[point] = runtime / f"{sockets.instance_name(point)}.sock"
            stack.enter_context(serving(FakeControl(point, dataset=dataset), found[point]))
        yield found


def test_names_are_readable_short_and_different() -> None:
    points = ["/", "/mnt/a", "/mnt-a", "/mnt/a b", os.fsdecode(b"/mnt/\xff"), "/" + "x" * 4000, "/.hidden", "/ä"]
    names = [sockets.instance_name(point) for point in points]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,31}-[0-9a-f]{8}", name) for name in names)
    assert names[1].startswith("mnt-a-")


def test_root_has_its_own_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert sockets.runtime_directory() == Path("/run/tiercache")


def test_others_use_their_session_or_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert sockets.runtime_directory() == tmp_path / "tiercache"
    assert sockets.socket_for("/mnt/a").parent == tmp_path / "tiercache"
    for useless in ("", "relative", str(tmp_path / "missing")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", useless)
        assert sockets.runtime_directory() == Path("/tmp/tiercache-4242")


def test_a_runtime_directory_is_created_closed_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "tiercache"
    monkeypatch.setattr(sockets, "runtime_directory", lambda: directory)
    assert sockets.prepare_runtime_directory() == directory
    assert directory.stat().st_mode & 0o777 == 0o700
    assert sockets.prepare_runtime_directory() == directory


def test_a_runtime_directory_that_others_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "tiercache"
    directory.mkdir()
    directory.chmod(0o777)
    monkeypatch.setattr(sockets, "runtime_directory", lambda: directory)
    with pytest.raises(SetupError, match="is open to other users"):
        sockets.prepare_runtime_directory()


def test_a_runtime_directory_of_another_user_is_refused_and_not_searched(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = tmp_path / "session" / "tiercache"
    foreign.mkdir(parents=True, mode=0o700)
    with serving(FakeControl(), foreign / "trap.sock"):
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
        assert sockets.runtime_directory() == foreign
        with pytest.raises(SetupError, match="belongs to another user"):
            sockets.prepare_runtime_directory()
        assert sockets.live_sockets() == []


def test_a_runtime_directory_that_is_a_link_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "tiercache"
    directory.symlink_to(tmp_path)
    monkeypatch.setattr(sockets, "runtime_directory", lambda: directory)
    with pytest.raises(SetupError, match="is not a directory"):
        sockets.prepare_runtime_directory()


def test_no_daemon(runtime: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(runtime / "dead.sock"))
    (runtime / "file.sock").touch()
    with pytest.raises(NoDaemon, match="no daemon is running"):
        only_daemon(None)


def test_the_only_daemon_is_found_beside_dead_sockets(runtime: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(runtime / "dead.sock"))
    with serving(FakeControl(), runtime / "live.sock"):
        assert only_daemon(None) == runtime / "live.sock"


def test_two_daemons_are_listed(two: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="2 daemons are running") as caught:
        only_daemon(None)
    assert all(str(path) in str(caught.value) for path in two.values())


def test_option_before_environment_before_search(two: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCACHE_SOCKET", str(two["/mnt/a"]))
    assert only_daemon(None) == two["/mnt/a"]
    assert only_daemon(str(two["/mnt/a/deep"])) == two["/mnt/a/deep"]
    assert only_daemon("relative.sock") == Path.cwd() / "relative.sock"


@pytest.mark.parametrize(
    ("path", "point"),
    [
        ("/mnt/a", "/mnt/a"),
        ("/mnt/a/x", "/mnt/a"),
        ("/mnt/a/deep/x", "/mnt/a/deep"),
        ("/mnt/a/deeper", "/mnt/a"),
        ("cats/x", "/mnt/a"),
        ("dogs", "/mnt/a/deep"),
    ],
)
def test_a_path_chooses_its_daemon(two: dict[str, Path], path: str, point: str) -> None:
    target = daemon_of_paths(None, [path], ())
    assert (target.socket, target.paths) == (two[point], [path])


@pytest.mark.parametrize(
    ("paths", "complaint"),
    [
        (["/mnt/a/x", "/mnt/a/deep/x"], "belong to different mounts"),
        (["/elsewhere/x"], "not in a mount of tiercache"),
        (["birds/x"], "no running daemon has a dataset 'birds'"),
    ],
)
def test_paths_that_fit_no_single_daemon(two: dict[str, Path], paths: list[str], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        daemon_of_paths(None, paths, ())


def test_a_mount_point_finds_its_daemon(two: dict[str, Path], runtime: Path) -> None:
    assert daemon_of_mountpoint(None, "/mnt/a") == two["/mnt/a"]
    assert daemon_of_mountpoint(None, "/mnt/b") is None
    with serving(FakeControl("/mnt/b"), runtime / "other-name.sock"):
        assert daemon_of_mountpoint(None, "/mnt/b") == runtime / "other-name.sock"


def test_the_daemon_of_another_user_is_not_taken_for_none(
    two: dict[str, Path], runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "answer_of", lambda path: sockets.Answer.DENIED)
    with pytest.raises(AccessDenied, match="the daemon of /mnt/a belongs to another user"):
        daemon_of_mountpoint(None, "/mnt/a")
    assert daemon_of_mountpoint(None, "/mnt/b") is None
    for number in range(20):
        (runtime / f"{number:02}.sock").touch()
    with pytest.raises(NoDaemon, match="and 14 more is not for you"):
        only_daemon(None)


def test_the_environment_does_not_hide_the_daemon_of_a_mount_point(
    two: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERCACHE_SOCKET", str(two["/mnt/a/deep"]))
    assert daemon_of_mountpoint(None, "/mnt/a") == two["/mnt/a"]
    with serving(FakeControl("/mnt/b"), tmp_path / "elsewhere.sock"):
        monkeypatch.setenv("TIERCACHE_SOCKET", str(tmp_path / "elsewhere.sock"))
        assert daemon_of_mountpoint(None, "/mnt/b") == tmp_path / "elsewhere.sock"
        assert daemon_of_mountpoint(str(two["/mnt/a"]), "/mnt/b") == two["/mnt/a"], "the option is an order"
    monkeypatch.setenv("TIERCACHE_SOCKET", "/none")
    assert daemon_of_mountpoint(None, "/mnt/c") is None


def test_links_are_followed_up_to_the_mount_point(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "inner").symlink_to("/nowhere")
    point = str(tmp_path / "real")
    assert follow_links(str(tmp_path / "link" / "x"), {point}) == f"{point}/x"
    assert follow_links(str(tmp_path / "link" / "inner" / "x"), {point}) == f"{point}/inner/x"
    assert follow_links(str(tmp_path / "link" / "inner" / "x"), ()) == "/nowhere/x"
    assert follow_links(str(tmp_path / "link"), {point}) == point
    assert follow_links("/", ()) == "/"
    assert follow_links("/", {"/"}) == "/"


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(UsageError, match="symbolic links"):
        follow_links(str(tmp_path / "a"), ())


def test_relative_paths_are_paths_in_a_mount_or_with_a_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path(os.path.realpath(tmp_path)) / "mount" / "sub"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    point = str(here.parent)
    assert resolve("a/b", ()) == "a/b"
    assert resolve("a/b", {point}) == f"{point}/sub/a/b"
    assert resolve("../b", {point}) == f"{point}/b"
    assert resolve("./b", ()) == f"{here}/b"
    assert resolve(".", ()) == str(here)


def test_a_working_directory_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert resolve("cats/x", {"/mnt/a"}) == "cats/x"
    with pytest.raises(UsageError, match="was removed"):
        resolve("./x", ())
