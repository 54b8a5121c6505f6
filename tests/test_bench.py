"""The benchmark, with small sizes: it runs, measures every row, finds wrong bytes, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import crowd
from bench.benchmark import ROWS
from bench.benchmark import main as benchmark
from bench.crowd import Broken
from bench.lab import Lab, Sizes
from bench.measure import Result, Row, Take, Target, alternated, summary
from bench.reader import Job
from bench.reads import Digest, Random, Sequential, places
from bench.report import line
from bench.usage import Usage, usage_of
from tests.servers.weed import Weed

ROOT = Path(__file__).parents[1]
RUN_SECONDS = 240.0
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
    assert result.ratios == summary([1 / 4, 4 / 6, 5 / 12, 8 / 14])


def test_the_ratio_is_the_median_of_the_pairs_and_not_the_ratio_of_the_medians() -> None:
    result = took([10.0, 30.0, 100.0], [20.0, 10.0, 100.0])
    assert result.ratios.median == 1.0
    assert result.figures.median / result.reference_figures.median == 1.5
    assert (result.ratios.least, result.ratios.most) == (0.5, 3.0)


def test_a_missed_target_is_told_with_its_numbers() -> None:
    target = Target(lambda result: result.ratios.median, 0.5, True, "of the download")
    row = Row("cold", "", "MB/s", "", lambda _lab, _pairs: Result(), target=target)
    assert line(row, took([40.0], [100.0])).endswith("BELOW: 0.40 of the download, target >= 0.5")
    assert line(row, took([50.0], [100.0])).endswith("ok: 0.50 of the download, target >= 0.5")
    assert Target(lambda _: 10.5, 10.0, False, "ms").verdict(Result()) == "BELOW: 10.50 ms, target <= 10"


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
    jobs: list[Job] = [Sequential(str(path), 3 << 20), Random(str(path), 3 << 20, 1, 50)]
    done = crowd.run(jobs, before=lambda: ready.append(True))
    assert ready == [True]
    assert [outcome.count for outcome in done.outcomes] == [3 << 20, 50]
    assert 0 < done.seconds < 20
    assert done.cpu_seconds > 0


def test_a_short_file_is_broken_and_not_fast(tmp_path: Path) -> None:
    path = tmp_path / "big"
    path.write_bytes(b"x" * 4096)
    with pytest.raises(Broken, match="read 4096 bytes instead of 8192"):
        crowd.run([Sequential(str(path), 8192)])
    with pytest.raises(Broken, match="No such file"):
        crowd.run([Sequential(str(tmp_path / "absent"), 1)])


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


# -- the whole


def test_unknown_rows_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        benchmark(["--only", "lukewarm"])
    assert ended.value.code == 2
    assert "no such row; there are cold-sequential," in capsys.readouterr().err


@needs_mounts
def test_every_row_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    command = [sys.executable, "bench/benchmark.py", "--quick", "--repeat", "1", "--directory", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
    assert ran.returncode == 0, ran.stderr
    table = ran.stdout.partition("target\n")[2]
    figures = {text.split()[0]: text for text in table.partition("\n\n")[0].splitlines()}
    assert set(figures) == {row.name for row in ROWS}
    for row in ROWS:
        assert row.unit in figures[row.name]
        assert row.target is None or "target" in figures[row.name]
    usage = table.partition("CPU, user and system")[2]
    for row in ROWS:
        assert (f"\n{row.name} " in usage) == bool(row.cpu_unit)
    assert "Peak resident memory of a daemon: " in usage
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
