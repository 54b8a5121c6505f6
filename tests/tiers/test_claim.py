import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tiers.disks import ext4, fill_up, tmpfs
from tiercache.errors import SetupError
from tiercache.mountinfo import mounts, parse
from tiercache.tiers.claim import LOCK, MARKER, Claim, claim
from tiercache.tiers.place import refuse_filesystem, refuse_overlap, resolve

MIB = 1 << 20
NOBODY = 65534
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory on a disk (pytest's own may be on a tmpfs, which is no place for a cache), open to all users."""
    path = Path(tempfile.mkdtemp(prefix="claim-", dir="/var/tmp"))
    path.chmod(0o755)
    try:
        refuse_filesystem(path, mounts())
    except SetupError as error:
        pytest.skip(f"no local disk here: {error}")
    try:
        yield path
    finally:
        shutil.rmtree(path)


def take(path: Path, **more: object) -> Claim:
    return claim(path, mountpoint=Path("/nowhere/mnt"), **more)  # type: ignore[arg-type]


def refusal(path: Path, **more: object) -> SetupError:
    with pytest.raises(SetupError) as caught:
        take(path, **more)
    assert "\n" not in caught.value.line
    assert str(path) in str(caught.value)
    assert caught.value.hint
    return caught.value


HOLDER = """
import os, sys
from pathlib import Path
from tiercache.tiers.claim import claim
held = claim(Path(sys.argv[1]), mountpoint=Path("/mnt/first"))
print("held", flush=True)
for line in sys.stdin:
    if line == "stopping\\n":
        held.stopping()
        print("stopping", flush=True)
    elif line == "release\\n":
        held.release()
        print("released", flush=True)
"""


class Other:
    """Another process that holds the claim and does what it is told."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        self.hear()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextmanager
def holder(path: Path) -> Iterator[Other]:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            other = Other(process)
            assert other.hear() == "held"
            yield other
        finally:
            process.kill()


def as_user(uid: int, work: Callable[[], object]) -> str:
    """What `work` returned, or the line of the SetupError that it raised, when another user did it."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of other tests; the child only makes system calls
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os.umask(0o022)
            try:
                answer = str(work())
            except SetupError as error:
                answer = error.line
            os.write(writer, answer.encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with open(reader) as answers:
        answer = answers.read()
    assert os.waitpid(pid, 0)[1] == 0, answer
    return answer


# -- taking


def test_a_missing_directory_is_created_for_us_alone(home: Path) -> None:
    with take(home / "a" / "b") as held:
        assert held.path == home / "a" / "b"
        assert held.fresh
        assert sorted(os.listdir(held.path)) == [LOCK, MARKER]
        modes = [stat.S_IMODE((home / name).stat().st_mode) for name in ("a", "a/b", f"a/b/{LOCK}", f"a/b/{MARKER}")]
        assert modes == [0o700, 0o700, 0o600, 0o600]


def test_an_empty_directory_is_taken_and_closed_to_others(home: Path) -> None:
    (home / "lost+found").mkdir()
    with take(home) as held:
        assert held.fresh
        assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_case_8_a_cache_is_found_again_under_the_same_uuid(home: Path) -> None:
    with take(home) as first:
        (home / "objects").mkdir()
        (home / "index").mkdir()
    with take(home) as second:
        assert second.uuid == first.uuid
        assert not second.fresh
        assert (home / "objects").is_dir()


def test_release_is_idempotent_and_frees_the_directory(home: Path) -> None:
    held = take(home)
    held.release()
    held.release()
    held.stopping()
    take(home).release()


def test_a_path_through_links_is_the_directory_itself(home: Path) -> None:
    (home / "real").mkdir()
    (home / "link").symlink_to("real")
    (home / "absolute").symlink_to(home / "link")
    with take(home / "absolute" / ".." / "absolute" / "cache") as held:
        assert held.path == home / "real" / "cache"


def test_a_relative_path_and_a_link_to_nowhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    (home / "link").symlink_to("target")
    with take(Path("link")) as held:
        assert held.path == home / "target"


def test_a_first_claim_that_was_killed_halfway_is_taken_up(home: Path) -> None:
    (home / LOCK).touch()
    (home / f"{MARKER}.new").write_bytes(b'{"for')
    with take(home) as held:
        assert held.fresh
        assert sorted(os.listdir(home)) == [LOCK, MARKER]


# -- whose it is


def test_nobodys_data_is_taken_for_a_cache(home: Path) -> None:
    (home / "thesis.tex").write_text("precious")
    assert "not empty and not a cache of ours (it holds 'thesis.tex' but no tiercache.json)" in str(refusal(home))
    assert os.listdir(home) == ["thesis.tex"]
    assert stat.S_IMODE(home.stat().st_mode) == 0o755


def test_a_foreign_file_named_lock_is_left_alone(home: Path) -> None:
    (home / LOCK).write_text("somebody else's")
    assert "it holds 'lock'" in str(refusal(home))
    assert (home / LOCK).read_text() == "somebody else's"


@pytest.mark.parametrize(
    ("marker", "complaint"),
    [
        (b"", "is damaged"),
        (b"\xff\xfe", "is damaged"),
        (b'{"format": "1", "uuid": ""}', "is damaged"),
        (b'{"format": 2, "uuid": "x", "more": 1}', "has format 2, this program knows 1"),
    ],
)
def test_a_marker_that_we_cannot_honour(home: Path, marker: bytes, complaint: str) -> None:
    (home / MARKER).write_bytes(marker)
    assert complaint in str(refusal(home))
    assert (home / MARKER).read_bytes() == marker
    assert os.listdir(home) == [MARKER]


def test_a_marker_that_is_a_link_is_no_marker(home: Path) -> None:
    (home / "elsewhere").write_bytes(b'{"format": 1, "uuid": "x"}')
    (home / MARKER).symlink_to("elsewhere")
    refusal(home)


@pytest.mark.parametrize("below", ["", "cache", "cache/deeper"])
def test_a_file_is_not_a_directory(home: Path, below: str) -> None:
    (home / "file").touch()
    assert "is not a directory" in str(refusal(home / "file" / below))


def test_a_loop_of_links(home: Path) -> None:
    (home / "a").symlink_to("b")
    (home / "b").symlink_to("a")
    assert "loop" in str(refusal(home / "a"))


@root_only
def test_a_directory_of_another_user_is_refused_to_root(home: Path) -> None:
    os.chown(home, NOBODY, NOBODY)
    assert f"belongs to {pwd.getpwuid(NOBODY).pw_name}, not to root" in str(refusal(home))


@root_only
def test_another_user_makes_his_own_and_gets_nobody_elses(home: Path) -> None:
    open_to_all = home / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o1777)
    assert as_user(NOBODY, lambda: take(open_to_all / "mine").path) == str(open_to_all / "mine")
    assert stat.S_IMODE((open_to_all / "mine").stat().st_mode) == 0o700
    take(home / "roots").release()
    name = pwd.getpwuid(NOBODY).pw_name
    assert f"{home}/roots belongs to root, not to {name}" in as_user(NOBODY, lambda: take(home / "roots"))
    assert f"{home}/new is not writable (Permission denied)" in as_user(NOBODY, lambda: take(home / "new"))
    assert f"{home}/roots/below is not writable (Permission denied)" in as_user(NOBODY, lambda: take(home / "roots" / "below"))
    assert not (home / "new").exists()


@root_only
def test_a_directory_without_write_permission_is_refused(home: Path) -> None:
    locked = home / "locked"
    locked.mkdir()
    os.chown(locked, NOBODY, NOBODY)
    locked.chmod(0o500)
    assert "is not writable (Permission denied)" in as_user(NOBODY, lambda: take(locked))


def test_a_disk_that_is_full_is_named_as_such(tmp_path: Path) -> None:
    with ext4(tmp_path / "image", tmp_path / "disk", 8 * MIB) as disk:
        (disk / "cache").mkdir()
        fill_up(disk)
        error = refusal(disk / "cache")
        assert f"the disk of cache directory {disk}/cache is full" in str(error)
        assert "free space there" in error.hint
        (disk / "ballast").unlink()
        take(disk / "cache").release()


def test_case_7_a_cache_on_a_full_disk_is_still_usable(tmp_path: Path) -> None:
    with ext4(tmp_path / "image", tmp_path / "disk", 8 * MIB) as disk:
        with take(disk / "cache") as held:
            first = held.uuid
        fill_up(disk)
        with take(disk / "cache") as held:
            assert held.uuid == first


def test_a_read_only_disk(tmp_path: Path) -> None:
    with ext4(tmp_path / "image", tmp_path / "disk", 8 * MIB) as disk:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True, timeout=30)
        assert "is not writable (Read-only file system)" in str(refusal(disk / "cache"))


def test_the_root_of_a_fresh_disk_is_taken(tmp_path: Path) -> None:
    with ext4(tmp_path / "image", tmp_path / "disk", 8 * MIB) as disk:
        assert os.listdir(disk) == ["lost+found"]
        take(disk).release()


# -- where it lies


def test_memory_is_no_disk(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "memory", 4 * MIB) as memory:
        assert "is in memory (tmpfs)" in str(refusal(memory / "cache"))
        assert os.listdir(memory) == []


MOUNTINFO = rb"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:30 / /home rw shared:2 - nfs4 server:/home rw
24 22 0:31 / /scratch rw - lustre mgs@tcp:/scratch rw
25 22 0:32 / /mnt/with\040space rw master:3 propagate_from:2 - fuse.sshfs host: rw
26 22 8:1 /srv/data /bind rw - ext4 /dev/sda1 rw
27 22 0:33 / /shm rw - tmpfs tmpfs rw
28 22 259:0 / /nvme rw - xfs /dev/nvme0n1 rw
29 28 0:34 / /nvme/over rw - tmpfs tmpfs rw
30 29 259:1 / /nvme/over rw - btrfs /dev/nvme1n1 rw
31 22 0:35 / /lay rw - overlay overlay rw
32 22 0:36 / /tank rw - zfs tank rw
33 22 0:37 / /share rw - cifs //nas/share rw
34 22 0:38 / /nine rw - 9p host rw
35 22 0:39 / /ceph rw - ceph mon:/ rw
36 22 0:40 / /proc rw - proc proc rw
"""


@pytest.mark.parametrize("path", ["/x", "/nvme/cache", "/nvme/over/cache", "/lay/cache", "/tank/cache", "/homes/cache"])
def test_local_disks_are_fit_for_a_cache(path: str) -> None:
    refuse_filesystem(Path(path), parse(MOUNTINFO))


@pytest.mark.parametrize(
    ("path", "fstype"),
    [
        ("/home/me/cache", "nfs4"),
        ("/scratch", "lustre"),
        ("/mnt/with space/cache", "fuse.sshfs"),
        ("/shm/cache", "tmpfs"),
        ("/share/c", "cifs"),
        ("/nine/c", "9p"),
        ("/ceph/c", "ceph"),
        ("/proc/c", "proc"),
    ],
)
def test_network_memory_and_pseudo_file_systems_are_not(path: str, fstype: str) -> None:
    with pytest.raises(SetupError, match=fstype.replace(".", r"\.")) as caught:
        refuse_filesystem(Path(path), parse(MOUNTINFO))
    assert path in caught.value.line


@pytest.mark.parametrize(
    ("home", "other", "relation"),
    [
        ("/nvme/data", "/nvme/data", "is also"),
        ("/nvme/data/cache", "/nvme/data", "lies inside"),
        ("/nvme", "/nvme/over/replica", "contains"),
        ("/srv/data/cache", "/bind", "lies inside"),
        ("/bind/cache", "/srv/data", "lies inside"),
        ("/srv", "/bind/replica", "contains"),
        ("/bind", "/srv/data", "is also"),
    ],
)
def test_overlaps_are_seen_by_name_and_by_place(home: str, other: str, relation: str) -> None:
    with pytest.raises(SetupError, match=f"cache directory {home} {relation} the replica {other}"):
        refuse_overlap(Path(home), "replica", Path(other), parse(MOUNTINFO))


@pytest.mark.parametrize(
    ("home", "other"),
    [("/nvme/data", "/nvme/data2"), ("/nvme/over/a", "/nvme/a"), ("/bind/a", "/srv/other"), ("/lay/a", "/tank/a")],
)
def test_neighbours_do_not_overlap(home: str, other: str) -> None:
    refuse_overlap(Path(home), "replica", Path(other), parse(MOUNTINFO))


def test_a_chroot_without_mounts_is_one_place() -> None:
    with pytest.raises(SetupError, match="contains"):
        refuse_overlap(Path("/a"), "source", Path("/a/b"), [])


def test_case_13_nothing_below_a_mount_that_may_hang_is_touched(tmp_path: Path) -> None:
    """The link below the pretended FUSE mount would be followed if it were touched."""
    (tmp_path / "mnt").mkdir()
    (tmp_path / "mnt" / "link").symlink_to("/")
    (tmp_path / "into").symlink_to("mnt/link")
    line = f"99 1 0:99 / {tmp_path}/mnt rw - fuse.tiercache tiercache rw\n".encode()
    assert resolve(tmp_path / "into", parse(MOUNTINFO + line)) == tmp_path / "mnt" / "link"
    assert resolve(tmp_path / "into", parse(MOUNTINFO)) == Path("/")


def test_replicas_sources_and_other_caches_are_kept_apart(home: Path) -> None:
    (home / "data").mkdir()
    (home / "link").symlink_to("data")
    others = [("replica", home / "data"), ("source", home / "a" / "b")]
    assert f"lies inside the replica {home}/data" in str(refusal(home / "data" / "cache", others=others))
    assert f"contains the source {home}/a/b" in str(refusal(home / "a", others=others))
    with pytest.raises(SetupError, match=f"is also the replica {home}/data"):
        take(home / "link", others=others)
    assert list((home / "data").iterdir()) == []
    with pytest.raises(SetupError, match="is also the mount point"):
        claim(home / "m", mountpoint=home / "m")
    take(home / "data2", others=others).release()


def test_bind_mounts_do_not_hide_an_overlap(home: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    (home / "data").mkdir()
    (home / "bound").mkdir()
    subprocess.run(["mount", "--bind", home / "data", home / "bound"], check=True, timeout=30)
    try:
        others = [("replica", home / "data")]
        assert f"lies inside the replica {home}/data" in str(refusal(home / "bound" / "cache", others=others))
    finally:
        subprocess.run(["umount", home / "bound"], check=True, timeout=30)


def test_a_cache_inside_a_cache_is_refused_without_being_told(home: Path) -> None:
    take(home / "outer").release()
    assert f"lies inside the cache directory {home}/outer" in str(refusal(home / "outer" / "objects" / "inner"))
    assert not (home / "outer" / "objects").exists()


# -- one at a time


def test_a_second_claim_says_within_a_second_who_holds_it(home: Path) -> None:
    with holder(home / "cache") as other:
        began = time.monotonic()
        error = refusal(home / "cache")
        assert time.monotonic() - began < 1.0
        assert f"in use by tiercache process {other.pid} (/mnt/first), which is running" in str(error)
        assert "tiercache umount /mnt/first" in error.hint
        other.tell("release")
        take(home / "cache").release()


def test_a_second_claim_in_the_same_process_is_refused(home: Path) -> None:
    with take(home):
        assert str(os.getpid()) in str(refusal(home))


def test_case_13_a_killed_holder_is_succeeded_at_once(home: Path) -> None:
    with holder(home) as other:
        os.kill(other.pid, signal.SIGKILL)
        with take(home) as held:
            assert not held.fresh


def test_a_stopping_holder_is_waited_for(home: Path) -> None:
    with holder(home) as other:
        other.tell("stopping")
        began = time.monotonic()
        error = refusal(home, patience_seconds=1.5)
        assert time.monotonic() - began >= 1.5
        assert f"process {other.pid} (/mnt/first), which is stopping but has not let go of it" in str(error)
        found: list[Claim] = []
        successor = threading.Thread(target=lambda: found.append(take(home)))
        successor.start()
        other.process.kill()
        successor.join(10)
        assert not found[0].fresh
        found[0].release()


def test_a_holder_whose_process_is_gone_is_waited_for(home: Path) -> None:
    """A child that inherited the lock outlives its parent: the lock file names a process that is gone."""
    with holder(home) as other:
        text = (home / LOCK).read_text()
        with subprocess.Popen(["true"]) as gone:
            pass
        (home / LOCK).write_text(text.replace(str(other.pid), str(gone.pid)))
        began = time.monotonic()
        refusal(home, patience_seconds=1.2)
        assert time.monotonic() - began >= 1.2


def test_a_holder_that_has_not_written_its_name_yet(home: Path) -> None:
    with holder(home):
        (home / LOCK).write_bytes(b"")
        began = time.monotonic()
        assert "in use by another tiercache" in str(refusal(home))
        assert time.monotonic() - began < 1.0


def test_of_many_first_claims_one_wins(home: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom tiercache.errors import SetupError\n"
        "from tiercache.tiers.claim import claim\nsys.stdin.readline()\n"
        "try:\n    held = claim(Path(sys.argv[1]), mountpoint=Path('/mnt'))\n"
        "except SetupError:\n    print('lost', flush=True)\n"
        "else:\n    print(held.uuid, flush=True)\nsys.stdin.readline()\n"
    )
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(home / "new")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    try:
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        answers = []
        for racer in racers:
            assert racer.stdout is not None
            answers.append(racer.stdout.readline().strip())
        assert sorted(answers)[1:] == ["lost"] * 3
        assert f'"{min(answers)}"' in (home / "new" / MARKER).read_text()
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()


def test_a_claim_leaves_no_descriptor_when_it_is_refused(home: Path) -> None:
    with take(home / "held"):
        before = sorted(os.listdir("/proc/self/fd"))
        refusal(home / "held", patience_seconds=0.0)
        (home / "held" / "x").mkdir()
        assert sorted(os.listdir("/proc/self/fd")) == before
