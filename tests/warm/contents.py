"""What the nodes that die have to do with: the same objects in every process."""

from __future__ import annotations

from tests.engine.engines import KIB, content
from tests.warm.nodes import CHUNK_BYTES
from tiercache.tiers.memory import MemoryCold

LARGE = {"large": content(1, 2 * CHUNK_BYTES + 5), "text": b"all work and no play " * 5000, "one chunk": content(2, 50 * KIB)}
SMALL = {f"small{number}": content(100 + number, 1 + 1500 * number) for number in range(9)}
ALL = {**LARGE, **SMALL}
SOME = dict(list(SMALL.items())[:6])
CONTENTS = {"demotion": LARGE, "packing": SMALL, "packing some": SOME, "again": ALL, "repair": ALL, "room": ALL}


class Store(MemoryCold):
    """`keys` are those of all objects."""

    keys: tuple[str, ...] = ()


def store_of(work: str) -> Store:
    store = Store()
    for key, data in CONTENTS[work].items():
        store.put(key, data)
    store.keys = tuple(CONTENTS[work])
    return store
