"""`python -m tiercache` is the command `tiercache`."""

from __future__ import annotations

from tiercache.cli.main import run

if __name__ == "__main__":
    run()
