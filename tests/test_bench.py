"""The benchmark, with small sizes: it runs, measures every row, finds wrong bytes, and leaves nothing behind."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from bench import crowd
from bench.benchmark import TABLES
from bench.benchmark import main as benchmark
from bench.crowd import Broken
from bench.lab import Lab, Sizes
from bench.measure import Result, Row, Take, Target, Verdict, alternated, interval
from bench.mounts import empty
from bench.reader import Job
from bench.reads import Churn, Digest, Latencies, Random, Sequential, places
from bench.report import line, missed
from bench.shards import Encode, Series, Spread
from bench.usage import Usage, usage_of
from tests.servers.process import wait_until
from tests.servers.weed import Weed

ROOT = Path(__file__).parents[1]
RUN_SECONDS = 420.0
needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/fuse"), reason="makes real mounts: needs root and /dev/fuse"
)


def took(figures: list[float], references: list[float]) -> Result:
    return Result([Take(figure) for figure in figures], [Take(figure) for figure in references])


# -- arithmetic


def test_turns_are_abba_and_pairs_stay_together() -> None:
    order: list[str] = []

    def side(name: str, figure: float) -> Take:
        order.append(name)
        return Take(figure * len(order))

    measure = alternated(lambda _: side("A", 1.0), lambda _: side("B", 2.0))
    result = measure(object(), 4)  # type: ignore[arg-type]
    assert "".join(order) == "ABBAABBA"
    assert [take.figure for take in result.mount] == [1, 4, 5, 8]
    assert [take.figure for take in result.reference] == [4, 6, 12, 14]
    assert result.ratios == [1 / 4, 4 / 6, 5 / 12, 8 / 14]


def test_the_ratio_is_taken_within_a_pair() -> None:
    result = took([10.0, 30.0, 100.0], [20.0, 10.0, 100.0])
    assert result.ratios == [0.5, 3.0, 1.0]
    assert result.differences == [-10.0, 20.0, 0.0]
    assert result.figures.median / result.reference_figures.median == 1.5


@pytest.mark.parametrize("count", [5, 6, 15, 30])
def test_the_interval_has_the_median_nine_times_in_ten(count: int) -> None:
    chance = random.Random(count)
    found = [interval([chance.random() for _ in range(count)]) for _ in range(4000)]
    hits = sum(1 for ends in found if ends is not None and ends[0] <= 0.5 <= ends[1])
    assert 0.885 <= hits / len(found) <= 0.92


def test_four_values_have_no_interval() -> None:
    assert interval([1.0, 2.0, 3.0, 4.0]) is None


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([0.5, 0.6, 0.7, 0.8, 0.9], Verdict.OK),
        ([0.5, 0.5, 0.6, 0.8, 0.9], Verdict.NOT_MISSED),
        ([0.5, 0.5, 0.6, 0.6, 0.6], Verdict.MISSED),
        ([0.1, 0.1, 0.1, 0.1], Verdict.UNDECIDED),
    ],
)
def test_a_target_is_missed_only_by_the_whole_interval(ratios: list[float], verdict: Verdict) -> None:
    result = took(ratios, [1.0] * len(ratios))
    assert Target(lambda result: result.ratios, 0.7, True, "").verdict(result) is verdict
    less = took([1 / ratio for ratio in ratios], [1.0] * len(ratios))
    assert Target(lambda result: result.ratios, 1 / 0.7, False, "").verdict(less) is verdict


def test_a_missed_target_is_told_with_its_numbers() -> None:
    targets = (
        Target(lambda result: result.ratios, 0.5, True, "of the download"),
        Target(lambda result: result.differences, -10.0, False, "ms"),
    )
    row = Row("cold", "", "MB/s", "", lambda _lab, _pairs: Result(), targets=targets)
    missing = took([40.0] * 5, [100.0] * 5)
    first, second = line("cold", row, missing).splitlines()
    assert first.endswith("0.4 [0.4-0.4]  MISSED: >= 0.5 of the download")
    assert second.endswith("  ok: -60 [-60--60] <= -10 ms")
    assert line("cold", row, took([50.0] * 5, [100.0] * 5)).splitlines()[0].endswith("  ok: >= 0.5 of the download")
    assert missed([("x/cold", row, missing)]) == "1 of 1 rows with a target MISSED it: x/cold."


def test_files_that_are_emptied_stay(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"content")
    empty(tmp_path)
    assert (tmp_path / "a" / "b").read_bytes() == b""


def test_the_gil_estimate_lies_between_the_event_loop_and_all() -> None:
    usage = Usage(total_seconds=10.0, loop_seconds=4.0, others_user_ticks=1, others_ticks=3) - Usage(0.0, 0.0, 0, 0)
    assert usage.held_seconds == pytest.approx(6.0)
    assert Usage(1.0, 0.25, 0, 0).held_seconds == 0.25


def test_cpu_of_another_process_is_what_it_used() -> None:
    program = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        usage = usage_of(process.pid)
        process.communicate(b"\n", timeout=20)
    assert 0.3 <= usage.total_seconds < 0.6
    assert usage.loop_seconds == pytest.approx(usage.total_seconds, abs=0.05)  # it has one thread


# -- readers


def test_places_are_different_pages_and_the_same_ones_again() -> None:
    found = places(1 << 20, 5, 100)
    assert found == places(1 << 20, 5, 100)
    assert len(set(found)) == 100
    assert all(place % 4096 == 0 and 0 <= place < 1 << 20 for place in found)


def test_readers_begin_together_and_read_all(tmp_path: Path) -> None:
    path = tmp_path / "big"
    path.write_bytes(os.urandom(3 << 20))
    ready: list[bool] = []
    jobs: list[Job] = [
        Sequential(str(path), 3 << 20, 2),
        Random(str(path), 3 << 20, 1, 50, rounds=3),
        Latencies(str(path), 3 << 20, 1, 50),
    ]
    done = crowd.run(jobs, before=lambda: ready.append(True))
    assert ready == [True]
    assert [outcome.count for outcome in done.outcomes] == [6 << 20, 150, 50]
    assert len(done.outcomes[2].seconds["read"]) == 50
    assert 0 < done.seconds < 20
    assert done.cpu_seconds > 0


def test_a_short_file_is_broken_and_not_fast(tmp_path: Path) -> None:
    path = tmp_path / "big"
    path.write_bytes(b"x" * 4096)
    with pytest.raises(Broken, match="read 4096 bytes instead of 8192"):
        crowd.run([Sequential(str(path), 8192)])
    with pytest.raises(Broken, match="No such file"):
        crowd.run([Sequential(str(tmp_path / "absent"), 1)])


def test_a_load_goes_on_until_it_is_ended_and_its_failure_is_told(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    with crowd.running([Churn([str(path)])]):
        assert crowd.run([Sequential(str(path), 7)]).count == 7
    with pytest.raises(Broken, match="there is nothing to read"), crowd.running([Churn([])]) as go_on:
        wait_until(lambda: not go_on(), "the end of the reader")


def test_wrong_bytes_are_found(tmp_path: Path) -> None:
    lab = Lab(tmp_path, Sizes(8192, 10, 1, 1, 1, 1), Weed(tmp_path / "weed", [1, 2, 3, 4, 5]))
    other = tmp_path / "other"
    for root in (lab.native, other):
        root.mkdir()
        (root / "big").write_bytes(b"a" * 8192)
    lab.verify(other, ["big"])
    lab.verify(other, ["big"], 8192, seed=1, count=1)
    (other / "big").write_bytes(b"a" * 8191 + b"b")
    with pytest.raises(Broken, match="wrong bytes in big"):
        lab.verify(other, ["big"])


def test_places_are_hashed_as_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "big"
    path.write_bytes(os.urandom(1 << 20))
    whole, some, others = (
        crowd.run([Digest([str(path)], 1 << 20, seed, count)]).outcomes[0] for seed, count in ((0, 0), (1, 20), (2, 20))
    )
    assert (whole.count, some.count) == (1 << 20, 20 * 4096)
    assert len({whole.digest, some.digest, others.digest}) == 3


def test_plain_writing_spreads_all_bytes_and_their_share_of_parity(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom((8 << 20) + 1000))
    directories = [tmp_path / f"t{position}" for position in range(6)]
    for directory in directories:
        directory.mkdir()
    assert crowd.run([Spread([str(source)], list(map(str, directories)), 4)]).count == (8 << 20) + 1000
    assert [(directory / "source").stat().st_size for directory in directories] == [(2 << 20) + 250] * 6


def test_encoding_is_done_over_and_over_until_it_is_enough(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(9 << 20))
    assert crowd.run([Encode(str(source), 40 << 20, 4, 2, 3, 2)]).count == 3 * (8 << 20) + 2 * (1 << 20)


def test_files_of_a_series_must_be_whole(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_bytes(b"x" * 4096)
    assert crowd.run([Series(list(map(str, paths)), 4096)]).count == 8192
    with pytest.raises(Broken, match="read 4096 bytes instead of 4097"):
        crowd.run([Series(list(map(str, paths)), 4097)])


# -- the whole


def test_unknown_rows_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        benchmark(["--only", "lukewarm"])
    assert ended.value.code == 2
    assert "no such row; there are cold-sequential," in capsys.readouterr().err


@needs_mounts
def test_every_row_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    command = [sys.executable, "bench/benchmark.py", "--quick", "--pairs", "1", "--directory", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
    assert ran.returncode == 0, ran.stderr
    table, _, usage = ran.stdout.partition("target\n")[2].partition("CPU, user and system")
    figures = {text.split()[0]: text for text in table.splitlines() if text and not text.startswith(" ")}
    rows = TABLES[0].rows
    assert set(figures) == {row.name for row in rows}
    for row in rows:
        assert row.unit in figures[row.name]
        if row.obstacle():
            assert "not measured" in figures[row.name]
            continue
        assert not row.targets or row.targets[0].wording in figures[row.name]
        assert (f"\n{row.name} " in usage) == bool(row.cpu_unit)
    assert "Peak resident memory of a daemon: " in usage
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
