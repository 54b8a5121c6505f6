"""Which dataset and which name in it the paths of an operator mean."""

from __future__ import annotations

from tiercache.core.record import Entry
from tiercache.engine.dataset import Dataset
from tiercache.engine.engine import Engine
from tiercache.errors import NotFound, UsageError


class Places:
    """`single`: the one dataset is shown at the root of the mount."""

    def __init__(self, engine: Engine, mountpoint: str, *, single: bool) -> None:
        self._engine = engine
        self._mountpoint = mountpoint
        self._single = single
        self._datasets = {dataset.name: dataset for dataset in engine.datasets}

    def located(self, path: str) -> tuple[Dataset, str]:
        """The dataset and the path below it. Raises UsageError, NotFound."""
        point = self._mountpoint
        if path.startswith("/"):
            if path != point and not path.startswith(point.rstrip("/") + "/"):
                raise UsageError(f"{path} is not below {point}", hint="name a path under the mount, or dataset/key")
            below = path[len(point) :].strip("/")
            if self._single:
                return self._engine.datasets[0], below
        else:
            below = path.strip("/")
        name, _, rest = below.partition("/")
        if name not in self._datasets:
            known = ", ".join(self._datasets)
            raise NotFound(f"no dataset {name!r} here", hint=f"datasets of this daemon: {known}")
        return self._datasets[name], rest

    async def entry(self, path: str) -> Entry:
        """Raises UsageError, NotFound, or what the cold store said."""
        dataset, below = self.located(path)
        return await self._engine.namespace.resolve(dataset.name, below)

    def path_of(self, dataset: str, key: str) -> str:
        """'dataset/key' of an object."""
        found = self._datasets.get(dataset)
        return f"{dataset}/{key.removeprefix(found.prefix) if found else key}"
