"""All that the command line prints goes through here: JSON for machines, aligned tables for people, one line for an error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import msgspec

from tiercache.cli.human import printable, size
from tiercache.errors import TiercacheError

PIPE_WIDTH = 100_000  # columns: a table in a pipe or a file is never wrapped


class Column(msgspec.Struct, frozen=True):
    """Numbers stand right."""

    title: str
    right: bool = False


class Update(Protocol):
    def __call__(self, done: int, total: int, shown: Callable[[int], str] = size) -> None: ...


def json_document(value: object, *, error: str = "", hint: str = "") -> None:
    """The one document that a command with `--json` writes to stdout; `error` and `hint` are added when something failed."""
    document = msgspec.to_builtins(value)
    if error:
        document = {**document, "error": error, "hint": hint}
    print(json.dumps(document, indent=2))


def line(text: str = "") -> None:
    print(printable(text))


def facts(rows: Mapping[str, str]) -> None:
    """A name and a value a line, the values aligned; empty values are left out."""
    width = max((len(name) for name in rows), default=0)
    for name, value in rows.items():
        if value:
            print(f"{name:<{width}}  {printable(value)}")


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        grid.add_column(column.title, justify="right" if column.right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(printable(cell)) for cell in row))
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    with console.capture() as capture:
        console.print(grid)
    for printed in capture.get().splitlines():
        print(printed.rstrip())


def failure(error: TiercacheError) -> None:
    """One line on stderr."""
    complaint(error.line)


def complaint(text: str) -> None:
    print(f"tiercache: {printable(text)}", file=sys.stderr)


@contextmanager
def progress_bar(label: str) -> Iterator[Update]:
    """Gives `update(done, total)`, of bytes unless `shown` writes numbers otherwise. Drawn on stderr, only on a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total, shown=size: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[text]}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(printable(label), text="", total=None)

        def update(done: int, total: int, shown: Callable[[int], str] = size) -> None:
            progress.update(task, completed=done, total=max(total, 1), text=f"{shown(done)} of {shown(total)}")

        yield update


def flush() -> None:
    """A command that goes on running shows what it has said."""
    sys.stdout.flush()


def silence() -> None:
    """For a reader that has gone (`head`): Python would complain again when it flushes stdout at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_safe() -> None:
    """Whatever the locale, nothing that is printed can fail to be encoded."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
