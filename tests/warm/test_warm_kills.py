"""kill -9 at any file operation of demotion, packing, repair and making room: no torn copy is seen, nothing is left over."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import tiercache
from tests.warm.contents import CONTENTS, Store, store_of
from tests.warm.damage import damage
from tests.warm.nodes import ALL_IS_OLD_SECONDS, CURSOR, Node, Unreadable, node_on
from tests.warm.surveying import survey
from tests.warm.unsynced import Unsynced
from tiercache.engine.demotion import Outcome
from tiercache.tiers.warm import files

TARGETS_COUNT = 7
SIGKILL = -9
WORKS = ("demotion", "packing", "repair", "room")


class Outcomes(msgspec.Struct):
    status: int
    count: int


class Dying:
    """The program that starts nodes which kill themselves."""

    def __init__(self) -> None:
        path = str(Path(tiercache.__file__).parent.parent)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm.dying_node"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=path,
            env=os.environ | {"PYTHONPATH": path},
            text=True,
        )

    def run(self, work: str, home: Path, targets: list[Path], *, at: int = 0, when: str = "before") -> Outcomes:
        order = {"work": work, "home": str(home), "targets": [str(target) for target in targets], "at": at, "when": when}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(order).decode() + "\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._process.stdout.readline(), type=Outcomes)

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def dying() -> Iterator[Dying]:
    made = Dying()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "os", Unsynced())


def targets_in(home: Path) -> list[Path]:
    return [home / f"target{number}" for number in range(TARGETS_COUNT)]


def prepared(dying: Dying, work: str, home: Path) -> None:
    """The targets as the node finds them that will die.

    For a repair: two copies of almost everything, of which packs have not all members in common, with damage of every kind.
    """
    home.mkdir()
    for target in targets_in(home):
        target.mkdir()
    if work in ("repair", "room"):
        for first in ("demotion", "packing" if work == "room" else "packing some"):
            assert dying.run(first, home / first, targets_in(home)).status == 0
    if work == "repair":
        assert dying.run("again", home / "again", targets_in(home)).status == 0
        damage(survey(targets_in(home)), random.Random(7))


def points(count: int, wanted_count: int, rng: random.Random) -> list[tuple[int, str]]:
    """Spread over the whole work, each at a random place of its part."""
    bounds = [1 + count * number // wanted_count for number in range(wanted_count + 1)]
    return [
        (rng.randrange(begin, max(end, begin + 1)), rng.choice(("before", "half", "after")))
        for begin, end in itertools.pairwise(bounds)
    ]


async def assert_nothing_torn(home: Path, work: str, node: Node, store: Store) -> None:
    """What the next node sees, from the targets alone."""
    seen = survey(targets_in(home))
    assert not [copy.manifest for copy in seen.copies.values() if not copy.is_readable]
    if work != "repair":
        assert seen.torn_manifests == []
        shards = [copy.whole[index] for copy in seen.copies.values() for index in range(copy.manifest.geometry.shards_count)]
        assert all(shards)
    there = {key for key, _ in seen.contents()}
    assert work != "repair" or there == set(store.keys)
    node.faults.is_down = True
    for key in there:
        assert await node.mount.cat(key) == CONTENTS[work][key]
    await node.forget_hot()
    node.faults.is_down = False


async def assert_mended(home: Path, work: str, node: Node, store: Store) -> None:
    """Who comes next finishes what was begun, and a scrub removes what is left of it."""
    for key in store.keys:
        assert await node.mount.cat(key) == CONTENTS[work][key]
    outcomes = await node.demote()
    assert set(outcomes.values()) <= {Outcome.WRITTEN, Outcome.ALREADY}
    if node.cursor.exists():
        await node.scrub(repair=True)  # the rest of the pass that was interrupted
    progress = await node.scrub(repair=True, grace_seconds=ALL_IS_OLD_SECONDS)
    assert progress.failures.count == 0
    seen = survey(targets_in(home))
    assert seen.incomplete(TARGETS_COUNT) == []
    found = {key: data for (key, _), data in seen.contents().items()}
    assert found == CONTENTS[work]
    await node.forget_hot()
    node.faults.is_down = True
    for key in store.keys:
        assert await node.mount.cat(key) == CONTENTS[work][key]
    again = await node.scrub(repair=False)
    assert (dict(again.found), again.damaged_count) == ({}, 0)


@pytest.mark.parametrize("points_count", [4, pytest.param(100, marks=pytest.mark.soak)])
@pytest.mark.parametrize("work", WORKS)
async def test_whoever_is_killed_leaves_no_torn_copy_and_nothing_else(
    dying: Dying, tmp_path: Path, work: str, points_count: int
) -> None:
    prepared(dying, work, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "template")
    whole = dying.run(work, tmp_path / "whole" / "node", targets_in(tmp_path / "whole"))
    assert whole.status == 0
    for number, (at, when) in enumerate(points(whole.count, points_count, random.Random(points_count))):
        home = tmp_path / f"point{number}"
        shutil.copytree(tmp_path / "template", home)
        died = dying.run(work, home / "node", targets_in(home), at=at, when=when)
        assert died.status in (SIGKILL, 0), f"{when} operation {at} of {whole.count}"
        store = store_of(work)
        if number % 2 and (home / "node" / CURSOR).exists():
            (home / "next").mkdir()
            shutil.copy(home / "node" / CURSOR, home / "next")
        try:
            async with node_on(home / "next", targets_in(home), store, faults=Unreadable()) as node:
                await assert_nothing_torn(home, work, node, store)
                await assert_mended(home, work, node, store)
        except BaseException:
            print(f"{work}: killed {when} operation {at} of {whole.count}", file=sys.stderr)  # noqa: T201 - the seed of a failure
            raise
        shutil.rmtree(home)
