"""kill -9 at any moment: what was acknowledged is there, and the index is sound."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import tiercache
from tests.index import samples
from tiercache.core.record import ROOT_INODE
from tiercache.index.lmdb import LmdbIndex, open_index

ROUNDS = 6
HERE = Path(__file__).parent


def write_until_killed(directory: Path, start: int, after_lines: int) -> list[int]:
    """Run the writer, kill it once it has acknowledged `after_lines` numbers; all that it acknowledged."""
    path = os.pathsep.join([str(HERE), str(Path(tiercache.__file__).parent.parent)])
    process = subprocess.Popen(
        [sys.executable, str(HERE / "crashing_writer.py"), str(directory), str(start)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
        text=True,
    )
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(after_lines)]
    finally:
        process.kill()
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == -9
    return [int(line) for line in [*lines, *rest.splitlines()] if line.strip()]


def assert_all_there(index: LmdbIndex, acknowledged: list[int]) -> None:
    pins = index.pins()
    for number in acknowledged:
        record = index.hot(samples.object_id(number))
        assert record is not None, number
        assert record.complete
        digests = {chunk: each.digest for chunk, each in index.chunks(record.object_id).items()}
        assert digests == {chunk: samples.digest(number, chunk) for chunk in range(1 + number % 4)}
        link = index.link(ROOT_INODE, b"%d" % number)
        assert link is not None
        assert link.checked_seconds == float(number)
        assert number % 10 or samples.pin(str(number)) in pins


async def test_everything_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    rng = random.Random(11)
    acknowledged: list[int] = []
    for attempt in range(ROUNDS):
        acknowledged += write_until_killed(tmp_path / "index", attempt * 100_000, rng.randrange(1, 200))
        index = await open_index(tmp_path / "index", boot_id="boot", exists=lambda record: True)
        assert (index.health.rebuilt, index.health.unclean, index.health.trusted_epoch) == ("", True, 1)
        assert_all_there(index, acknowledged)
        await index.aclose(clean=False)
    (tmp_path / "index" / "data.mdb").unlink()
    index = await open_index(tmp_path / "index", boot_id="boot", exists=lambda record: True)
    assert index.health.recovered_count >= len(acknowledged) - 8 * ROUNDS
    assert {pin.prefix for pin in index.pins()} >= {str(number) for number in acknowledged if number % 10 == 0}
    await index.aclose(clean=False)
