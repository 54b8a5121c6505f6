"""The model of the warm tier: a dictionary of bytes, against nodes that share targets to which everything happens that can.

What it demands:

* A read gives exactly the bytes of the present version. It may fail only while the store gives nothing, and only when the object
  has no warm copy or more targets were in trouble than parity covers. It ends in bounded time in any case.
* What was demoted lies on the targets, and while no more than m of them are in trouble, and m+1 are not, nothing fails to be
  demoted.
* When all targets are back, one scrub with repair leaves every copy complete, nothing that nobody needs, and no wrong byte.

A target is *in trouble* from the moment when something happens to it until a scrub has mended everything.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import trio

from tests.engine.engines import KIB, content, until
from tests.reference.warm_steps import (
    KEYS,
    NODES_COUNT,
    SIZES,
    Cold,
    Crash,
    Damage,
    Demote,
    MakeRoom,
    Mend,
    Overwrite,
    Probe,
    Read,
    Recover,
    Scrub,
    Step,
    Storm,
    Survive,
    Trouble,
)
from tests.warm.damage import KINDS, noise
from tests.warm.nodes import ALL_IS_OLD_SECONDS, CHUNK_BYTES, Node, Unreadable, node_on
from tests.warm.surveying import Survey, differing, survey
from tests.warm.trouble import HASTY, Life, Weather, living
from tiercache.engine.demotion import Outcome
from tiercache.engine.warm_scrubbing import GRACE_SECONDS
from tiercache.errors import BadResponse, Unavailable
from tiercache.index.memory import MemoryIndex
from tiercache.tiers.memory import MemoryCold
from tiercache.tiers.warm.target import Deadlines, Target

READ_SECONDS = 30.0
HOT_BYTES = (1 << 20) + 6 * CHUNK_BYTES  # the first is what the index is taken to occupy
"""Of a pressed node: less than the objects may have together, so that it demotes by itself what it has to let go of."""


class Process:
    """One node in a task of its own, which can be killed."""

    def __init__(self, model: Model, number: int) -> None:
        self.node: Node
        self.life = Life()
        self._model = model
        self._home = model.home / f"node{number}"
        self._index = MemoryIndex()
        self._end = trio.Event()
        self._ended = trio.Event()
        self._is_pressed = False

    async def start(self, *, is_pressed: bool = False) -> None:
        self._is_pressed = is_pressed
        self.life, self._end, self._ended = Life(), trio.Event(), trio.Event()
        with living(self.life):
            await self._model.nursery.start(self._run)

    async def _run(self, task_status: trio.TaskStatus[None]) -> None:
        model = self._model
        try:
            async with node_on(
                self._home,
                model.targets,
                model.store,
                model.geometry,
                faults=model.faults,
                index=self._index,
                capacity_bytes=HOT_BYTES if self._is_pressed else 1 << 30,
            ) as self.node:
                if self._is_pressed:
                    self.node.mount.engine.start()
                else:
                    self.node.mount.engine.nursery.start_soon(self.node.warm.repairs.run)
                model.set_deadlines(self.node)
                task_status.started()
                await self._end.wait()
        finally:
            self._ended.set()

    async def kill(self) -> None:
        self.life.dies_after(0)
        self._end.set()
        await self._ended.wait()
        self._model.departed += self.node.warm.targets.all
        self._index = self._index.reopened(other_boot=False)


class Model:
    """`is_pressed`: the nodes' hot tiers are small, and all that daemons do by themselves is done."""

    def __init__(
        self, home: Path, nursery: trio.Nursery, weather: Weather, geometry: str, targets_count: int, *, is_pressed: bool
    ) -> None:
        self.home = home
        self.nursery = nursery
        self.weather = weather
        self.is_pressed = is_pressed
        self.geometry = geometry
        self.parity_count = int(geometry.split("+")[1])
        self.targets = [home / f"target{number}" for number in range(targets_count)]
        self.store = MemoryCold(piece_bytes=16 * KIB)
        self.faults = Unreadable()
        self.processes: list[Process] = []
        self.departed: list[Target] = []  # of dead nodes
        self.contents: dict[tuple[str, str], bytes] = {}
        self.present: dict[str, str] = {}
        self.in_trouble: set[Path] = set()
        self.demoted: set[tuple[str, str]] = set()
        self.was_anything_lost = False
        self.was_room_made = False  # so that what a node knows of copies may be out of date
        self.rooms_count = 0  # that are being made now

    # -- nodes

    async def start(self) -> None:
        for target in self.targets:
            target.mkdir()
        for number, key in enumerate(KEYS):
            self.put(key, SIZES[(number * 3) % len(SIZES)], number)
        for number in range(NODES_COUNT):
            self.processes.append(Process(self, number))
            await self.processes[-1].start(is_pressed=self.is_pressed)

    async def stop(self) -> None:
        self.weather.end_all()
        for process in self.processes:
            await process.kill()

    def put(self, key: str, size_bytes: int, seed: int) -> None:
        data = content(seed, size_bytes) if seed % 3 else (b"%d of much that shrinks " % seed * 20_000)[:size_bytes]
        version = self.store.put(key, data).version
        self.contents[key, version] = data
        self.present[key] = version

    def set_deadlines(self, node: Node) -> None:
        for target in node.warm.targets.all:
            hangs = self.weather.kinds.get(target.path) in ("hanging", "mute")
            target.deadlines = HASTY if hangs else Deadlines()

    @property
    def is_covered(self) -> bool:
        return len(self.in_trouble) <= self.parity_count

    @property
    def has_spare_targets(self) -> bool:
        """Without as many as parity covers, are there still m+1 for the manifests of a copy?"""
        return len(self.targets) > 2 * self.parity_count

    # -- steps

    async def step(self, step: Step) -> None:
        match step:
            case Overwrite():
                self.put(step.key, step.size_bytes, step.seed)
            case Read():
                await self.read(step.node, step.key, fresh=step.fresh)
            case Survive():
                await self.survive(step.node)
            case Demote():
                await self.demote(step.node, fill=step.fill, evict=step.evict)
            case Trouble():
                self.trouble(self.targets[step.target % len(self.targets)], step.kind)
            case Damage():
                self.damage(step.place, step.kind)
            case Recover():
                self.recover(self.targets[step.target % len(self.targets)])
            case Probe():
                await self.as_node(step.node, lambda node: node.probe())
            case Scrub():
                await self.scrub(step.node, repair=step.repair, grace_seconds=GRACE_SECONDS if self.is_pressed else 0.0)
            case MakeRoom():
                await self.make_room(step.node, step.need_bytes)
            case Crash():
                await self.crash(step)
            case Cold():
                self.faults.is_down = step.is_down
            case Storm():
                await self.storm(random.Random(step.seed))
            case Mend():
                await self.mend(step.node)

    async def scrub(self, number: int, *, repair: bool, grace_seconds: float) -> None:
        await self.as_node(number, lambda node: node.scrub(repair=repair, grace_seconds=grace_seconds))

    async def make_room(self, number: int, need_bytes: int) -> None:
        self.was_room_made = True
        self.rooms_count += 1
        await self.as_node(number, lambda node: node.warm.room.make_room(need_bytes))
        self.rooms_count -= 1
        self.demoted &= self.names_on_targets()

    async def as_node(self, number: int, act: Callable[[Node], Awaitable[object]]) -> None:
        process = self.processes[number]
        with living(process.life):
            await act(process.node)

    async def read(self, number: int, key: str, *, fresh: bool) -> None:
        with living(self.processes[number].life):
            node = self.processes[number].node
            if fresh:
                await node.forget_hot()
            await node.warm.catalogues.refresh()
            version = self.present[key]
            data = self.contents[key, version]
            must_succeed = not self.faults.is_down or ((key, version) in self.demoted and self.is_covered)
            with trio.fail_after(READ_SECONDS):
                try:
                    got = await node.mount.cat(key)
                except (Unavailable, BadResponse):
                    if must_succeed:
                        raise
                    return
            assert got == data, f"wrong bytes of {key}"

    async def survive(self, number: int) -> None:
        was_down, self.faults.is_down = self.faults.is_down, True
        for key in KEYS:
            await self.read(number, key, fresh=True)
        self.faults.is_down = was_down

    async def demote(self, number: int, *, fill: bool, evict: bool) -> None:
        if fill:
            for key in KEYS:
                await self.read(number, key, fresh=False)
        with living(self.processes[number].life):
            node = self.processes[number].node
            was_covered = self.is_covered
            for key in KEYS:
                await node.mount.entry(key)  # what was overwritten is known to be
            outcomes = await node.demote()
            self._demoted(outcomes, was_covered=was_covered)
            if evict:
                await node.forget_hot()

    def _demoted(self, outcomes: dict[tuple[str, str], Outcome], *, was_covered: bool) -> None:
        there = self.names_on_targets()
        for (key, version), outcome in outcomes.items():
            assert outcome is not Outcome.FAILED or not (was_covered and self.has_spare_targets), f"{key} was not demoted"
            if outcome is Outcome.WRITTEN and was_covered and not self.rooms_count:
                assert (key, version) in there, f"{key} was written, and is not there"
            if outcome is Outcome.ALREADY and not self.was_anything_lost and not self.was_room_made:
                assert (key, version) in there, f"{key} is said to be there already"
            if outcome in (Outcome.WRITTEN, Outcome.ALREADY) and (key, version) in there:
                self.demoted.add((key, version))

    def names_on_targets(self) -> set[tuple[str, str]]:
        """Of objects that can be read without those that are in trouble."""
        sound = [target for target in self.targets if target not in self.in_trouble]
        return {
            (member.key, member.version)
            for seen in survey(sound).copies.values()
            for member in (seen.manifest.members if seen.manifest.is_pack else [seen.manifest.content])
            if seen.is_readable
        }

    # -- what happens to targets

    def trouble(self, target: Path, kind: str) -> None:
        self.in_trouble.add(target)
        self._note_losses()
        if kind == "away":
            if target.exists() and not self._away(target).exists():
                target.rename(self._away(target))
        elif kind == "deleted":
            shutil.rmtree(target, ignore_errors=True)
        elif kind == "emptied":
            for path in target.iterdir() if target.exists() else ():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        elif kind == "noise":
            for path in sorted(target.rglob("*")):
                if path.is_file():
                    noise(path, random.Random(len(path.name)))
        else:
            self.weather.begin(str(target), kind)
            for process in self.processes:
                self.set_deadlines(process.node)

    def damage(self, place: float, kind: int) -> None:
        paths = [
            path
            for target in self.targets
            for part in ("shards", "manifests", "packs")
            for path in sorted((target / part).rglob("*"))
        ]
        paths = [path for path in paths if path.is_file() and path.stat().st_size]
        if paths:
            path = paths[int(place * len(paths))]
            self.in_trouble.add(next(target for target in self.targets if path.is_relative_to(target)))
            self._note_losses()
            KINDS[kind](path, random.Random(int(place * 1e6)))

    def _note_losses(self) -> None:
        self.was_anything_lost = self.was_anything_lost or not self.is_covered

    def _away(self, target: Path) -> Path:
        return target.with_name(f"{target.name} away")

    def recover(self, target: Path) -> None:
        self.weather.end(str(target))
        if self._away(target).exists():
            while self._away(target).exists():  # a probe may make the target anew in between
                shutil.rmtree(target, ignore_errors=True)
                with suppress(OSError):
                    self._away(target).rename(target)
        for process in self.processes:
            self.set_deadlines(process.node)

    # -- all at once

    async def crash(self, step: Crash) -> None:
        process = self.processes[step.node]
        if step.work == "demote":
            for key in KEYS:
                await self.read(step.node, key, fresh=False)
        process.life.dies_after(step.calls_count)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._work_until_dead, process, step)
            if step.amid:
                for key in KEYS:
                    nursery.start_soon(partial(self.read, 1 - step.node, key, fresh=False))
                nursery.start_soon(partial(self.demote, 1 - step.node, fill=False, evict=True))
        await process.kill()
        await process.start(is_pressed=self.is_pressed)

    async def _work_until_dead(self, process: Process, step: Crash) -> None:
        with living(process.life):
            if step.work == "demote":
                outcomes = await process.node.demote()
                if process.life.spend():
                    self._demoted(outcomes, was_covered=False)
            elif step.work == "repair":
                await process.node.scrub(repair=True, grace_seconds=GRACE_SECONDS if step.amid else 0.0)

    async def storm(self, rng: random.Random) -> None:
        """Both nodes read, demote and scrub at once."""
        numbers = range(NODES_COUNT)
        works: list[Callable[[], Awaitable[object]]] = []
        for number in numbers:
            works += [partial(self.read, number, rng.choice(KEYS), fresh=False) for _ in range(3)]
            works.append(partial(self.demote, number, fill=rng.random() < 0.5, evict=rng.random() < 0.5))
            if rng.random() < 0.2:
                self.demoted.clear()  # nothing is sure to be there
                works.append(partial(self.make_room, number, 100 * KIB))
            if rng.random() < 0.5:
                repair = rng.random() < 0.7
                works.append(partial(self.scrub, number, repair=repair, grace_seconds=GRACE_SECONDS))
        rng.shuffle(works)
        async with trio.open_nursery() as nursery:
            for work in works:
                nursery.start_soon(work)

    # -- the end

    async def mend(self, number: int) -> None:
        """Everything is back, and one node scrubs, while nobody writes."""
        for target in self.targets:
            self.recover(target)
        if self.is_pressed:
            await self._restart(is_pressed=False)
        for process in self.processes:
            self.set_deadlines(process.node)
            await self._recovered(process)
        process = self.processes[number]
        process.node.cursor.unlink(missing_ok=True)
        with living(process.life):
            progress = await process.node.scrub(repair=True, grace_seconds=ALL_IS_OLD_SECONDS)
        assert progress.failures.count == 0, progress.failures.kept
        self._assert_whole(survey(self.targets))
        self.in_trouble.clear()
        self.demoted &= self.names_on_targets()
        if self.is_pressed:
            await self._restart(is_pressed=True)

    async def _restart(self, *, is_pressed: bool) -> None:
        for process in self.processes:
            await process.kill()
            await process.start(is_pressed=is_pressed)

    async def _recovered(self, process: Process) -> None:
        """All targets are up, and what still hung has come back."""
        targets = process.node.warm.targets.all
        hung = [*targets, *self.departed]
        await until(lambda: all(target._patience.outstanding_count == 0 for target in hung))
        with living(process.life):
            with trio.fail_after(READ_SECONDS):
                await process.node.probe()
                while not all(target.state == "up" and target.is_writable and not target.is_full for target in targets):
                    await process.node.probe()
            await until(lambda: process.node.warm.repairs.waiting_count == 0)

    def _assert_whole(self, seen: Survey) -> None:
        if self.was_anything_lost:
            seen.pass_over_unidentifiable()
        wrong = seen.incomplete(len(self.targets))
        assert wrong == [], "\n".join(map(os.fspath, wrong))
        assert differing(seen, self.contents) == []

    async def finish(self) -> None:
        await self.mend(0)
        self.faults.is_down = False
        for number in range(NODES_COUNT):
            await self.survive(number)
        for number in range(NODES_COUNT):
            for key in KEYS:
                await self.read(number, key, fresh=True)
