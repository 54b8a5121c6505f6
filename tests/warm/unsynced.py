"""The module `os` without syncing, for tests in which no machine goes down."""

from __future__ import annotations

import os


class Unsynced:
    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def fsync(self, file: int) -> None:
        pass
