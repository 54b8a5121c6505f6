"""A program that commits to an index until it is killed, and says on stdout what was acknowledged."""

from __future__ import annotations

import sys
from pathlib import Path

import trio

from tests.index import samples
from tiercache.index.index import PutEntry, PutPin
from tiercache.index.lmdb import open_index


async def main(directory: Path, start: int) -> None:
    index = await open_index(directory, boot_id="boot", exists=lambda record: True, map_bytes=1 << 20)
    if index.health.rebuilt:
        sys.exit(f"rebuilt: {index.health.rebuilt}")

    async def work(lane: int) -> None:
        number = start + lane
        while True:
            name = PutEntry(samples.entry(b"%d" % number), float(number))
            await index.commit([*samples.filled(number, chunks=1 + number % 4), name], sync=number % 3 == 0)
            if number % 10 == 0:
                await index.commit([PutPin(samples.pin(str(number)))], sync=True)
            sys.stdout.write(f"{number}\n")
            sys.stdout.flush()
            number += 4

    async with trio.open_nursery() as nursery:
        for lane in range(4):
            nursery.start_soon(work, lane)


trio.run(main, Path(sys.argv[1]), int(sys.argv[2]))
