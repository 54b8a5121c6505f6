"""`evict`, `scrub`, `rebuild-index` and `targets` against a real socket: what is said, and the exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.admin.fake import FakeControl, failed, serving
from tiercache.admin.client import Client
from tiercache.admin.messages import EvictRequest, ScrubRequest
from tiercache.cli import following
from tiercache.cli.main import main
from tiercache.errors import HotSick, NoDaemon, NotFound


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeControl]:
    monkeypatch.setattr(following, "POLL_SECONDS", 0.001)
    monkeypatch.setenv("TIERCACHE_SOCKET", str(tmp_path / "fake.sock"))
    with serving(FakeControl(), tmp_path / "fake.sock") as fake:
        yield fake


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def ends(control: FakeControl, **outcome: Any) -> None:
    control.work.outcome = outcome


def test_evict_returns_when_it_is_done(control: FakeControl, capsys: pytest.CaptureFixture[str]) -> None:
    ends(control, counts={"demoted": 1, "already": 1, "dropped": 0, "in_use": 1, "pinned": 0})
    expected = "3 files, 300 B: 1 written to the warm tier, 1 in the warm tier already, 1 kept: in use\n"
    assert ran(capsys, "evict", "fake/a", "/mnt/fake/b") == (0, expected, "")
    assert control.work.asked == [EvictRequest(["fake/a", "/mnt/fake/b"], None)]
    assert control.work.polls_count < 0


def test_evict_of_what_is_not_hot_is_done(control: FakeControl, capsys: pytest.CaptureFixture[str]) -> None:
    ends(control, total_count=0, done_count=0, total_bytes=0, done_bytes=0)
    assert ran(capsys, "evict", "fake/a", "--to", "drop") == (0, "nothing of it is hot\n", "")
    assert control.work.asked == [EvictRequest(["fake/a"], "drop")]


def test_a_partial_failure_names_each_and_fails(control: FakeControl, capsys: pytest.CaptureFixture[str]) -> None:
    failures = [failed("fake/x", NotFound("'x' does not exist", hint="list it")), failed("fake/y", HotSick("the disk failed"))]
    failures.append(failed("/flash/0", HotSick("warm target /flash/0 is down")))
    ends(control, counts={"demoted": 2}, failed_count=6, failures=failures)
    code, out, err = ran(capsys, "evict", "fake/x", "fake/y")
    assert (code, out) == (1, "3 files, 300 B: 2 written to the warm tier, 1 failed\n")
    assert err.splitlines() == [
        "tiercache: fake/x: 'x' does not exist; list it",
        "tiercache: fake/y: the disk failed",
        "tiercache: warm target /flash/0 is down",
        "tiercache: and 3 more failures; the log has them",
    ]
    code, out, err = ran(capsys, "evict", "fake/x", "--json")
    document = json.loads(out)
    assert (code, document["error"], document["hint"]) == (1, "fake/x: 'x' does not exist", "list it")
    assert (document["state"], document["counts"], document["failed_count"]) == ("done", {"demoted": 2}, 6)


def test_a_job_that_was_given_up_fails(control: FakeControl, capsys: pytest.CaptureFixture[str]) -> None:
    ends(control, state="failed", error="all targets are down", hint="mount them")
    assert ran(capsys, "evict", "fake/a") == (1, "", "tiercache: all targets are down; mount them\n")


def test_evict_to_a_warm_tier_that_is_not_there_is_refused(control: FakeControl, capsys: pytest.CaptureFixture[str]) -> None:
    control.work.has_warm = False
    code, out, err = ran(capsys, "evict", "fake/a", "--to", "warm")
    assert (code, out, err) == (2, "", "tiercache: this mount has no warm tier; mount with --warm-target\n")
    assert ran(capsys, "evict", "fake/a", "--to", "cold")[0] == 2


def test_scrub_tells_what_it_found(control: FakeControl, capsys: pytest.CaptureFixture[str]) -> None:
    ends(control, counts={"bad_piece": 0})
    assert ran(capsys, "scrub") == (0, "3 objects, 300 B: no damage\n", "")
    lines = ["fake/a: shard 3 is truncated"]
    ends(control, counts={"truncated": 2, "bad_piece": 1}, lines=lines, damaged_count=3, repaired_count=3)
    code, out, err = ran(capsys, "scrub", "--tier", "warm", "--repair")
    expected = "fake/a: shard 3 is truncated\n3 objects, 300 B: 3 damaged, 3 repaired; 1 bad piece, 2 truncated\n"
    assert (code, out, err) == (0, expected, "")
    assert control.work.asked == [ScrubRequest(None, False), ScrubRequest("warm", True)]


def test_damage_that_is_left_fails(control: FakeControl, capsys: pytest.CaptureFixture[str]) -> None:
    ends(control, damaged_count=3)
    code, _, err = ran(capsys, "scrub")
    assert (code, err) == (1, "tiercache: 3 of 3 damaged things are not repaired; run it again with --repair\n")
    ends(control, damaged_count=3, repaired_count=2)
    code, out, err = ran(capsys, "scrub", "--repair", "--json")
    assert code == 1
    document = json.loads(out)
    assert document["error"] == "1 of 3 damaged things are not repaired"
    assert document["hint"] == "`tiercache targets` shows whether a target is missing"


def test_a_scrub_that_runs_already_is_joined(control: FakeControl, capsys: pytest.CaptureFixture[str]) -> None:
    control.work.joined = True
    code, _, err = ran(capsys, "scrub")
    assert (code, err) == (0, "tiercache: the scrub of the warm tier is running already: this shows how far it is\n")


def test_interrupted_it_says_that_the_job_goes_on(
    control: FakeControl, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(following.time, "sleep", interrupt)
    code, _, err = ran(capsys, "scrub")
    assert code == 130
    assert "goes on in the daemon" in err


def test_a_daemon_that_ends_before_the_job_is_named_as_the_reason(
    control: FakeControl, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends_meanwhile(_client: Client, _number: int) -> NoReturn:
        raise NoDaemon("no daemon answers")

    monkeypatch.setattr(Client, "job", ends_meanwhile)
    code, out, err = ran(capsys, "evict", "fake/a")
    assert (code, out) == (3, "")
    assert err.startswith("tiercache: the daemon ended before the ")
    assert "give the same command again" in err


def test_rebuild_index(control: FakeControl, capsys: pytest.CaptureFixture[str]) -> None:
    ends(control, total_bytes=0, counts={"copies": 7, "packs": 2, "members": 90})
    expected = "3 of 3 targets: 7 objects by themselves, 90 in 2 packs, 300 B\n"
    assert ran(capsys, "rebuild-index") == (0, expected, "")


def test_targets(control: FakeControl, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ran(capsys, "targets")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert out.splitlines()[0] == "2+1 shards: an object lies on 3 of 3 targets, 1 of them may fail"
    assert lines[1] == ["TARGET", "STATE", "USED", "FREE", "SIZE", "ERRORS"]
    assert lines[2] == ["/flash/0", "up", "1.00", "GB", "3.00", "GB", "10.0", "GB", "2"]
    assert lines[3] == ["/flash/1", "down", "-", "-", "-", "7", "not", "mounted"]
    assert lines[4][:2] == ["/flash/2", "full"]
    assert json.loads(ran(capsys, "targets", "--json")[1])["targets"][1]["used_bytes"] is None
    control.work.has_warm = False
    assert ran(capsys, "targets")[1] == "there is no warm tier: it has no targets\n"
