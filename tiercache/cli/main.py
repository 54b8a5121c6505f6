"""The command `tiercache`: its sub-commands, and what becomes of an error.

Exit codes, on which scripts depend: 0 done, 1 failed, 2 usage, 3 no daemon, 130 interrupted. An error
is one line on stderr, `tiercache: <what>; <what to do>`; with `--json` stdout also gets an object with
`error` and `hint`. Whatever is not a TiercacheError is a bug and ends in a traceback.

Start-up time is felt at every call: modules that cost more than a few milliseconds (trio, pyfuse3,
boto3, rich, httpx) are imported by the commands that need them, in their functions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from tiercache import __version__
from tiercache.cli import evicting, extracting, inspect, mounting, output, pinning, scrubbing, unmounting, upgrading
from tiercache.errors import NoDaemon, TiercacheError, UsageError

FAILED, USAGE, NO_DAEMON, INTERRUPTED = 1, 2, 3, 130

app = typer.Typer(
    name="tiercache",
    help="Mount datasets as a filesystem and read them at local-disk speed.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=lambda asked: _show_version(asked), help="Show the version.")
    ] = False,
) -> None:
    """Mount datasets as a filesystem and read them at local-disk speed."""


def _show_version(asked: bool) -> None:
    if asked:
        output.line(f"tiercache {__version__}")
        raise typer.Exit


for command in (
    mounting.mount,
    mounting.serve,
    unmounting.umount,
    upgrading.upgrade,
    inspect.status,
    inspect.where,
    inspect.refresh,
    pinning.pin,
    pinning.unpin,
    pinning.pins,
    evicting.evict,
    scrubbing.scrub,
    inspect.targets,
    scrubbing.rebuild_index,
    extracting.extract,
):
    app.command()(command)


def main(arguments: Sequence[str]) -> int:
    """Run one command; the exit code. Only bugs are raised."""
    as_json = "--json" in arguments
    try:
        code = app(args=list(arguments), prog_name="tiercache", standalone_mode=False)
    except TiercacheError as error:
        _complain(error, as_json)
        return _exit_code(error)
    except typer.TyperException as error:
        _complain(UsageError(_one_line(error.format_message()), hint="see `tiercache --help`"), as_json)
        return USAGE
    except typer.Abort:
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def run() -> NoReturn:
    """The console script."""
    output.make_safe()
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        output.silence()
        code = FAILED
    sys.exit(code)


def _complain(error: TiercacheError, as_json: bool) -> None:
    output.failure(error)
    if as_json:
        output.json_document({}, error=str(error), hint=error.hint)


def _exit_code(error: TiercacheError) -> int:
    if isinstance(error, UsageError):
        return USAGE
    return NO_DAEMON if isinstance(error, NoDaemon) else FAILED


def _one_line(message: str) -> str:
    return " ".join(message.split()).rstrip(".")
