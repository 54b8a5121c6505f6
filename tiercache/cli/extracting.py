"""`extract`: get objects out of the warm tier without a daemon, an index or a configuration."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiercache.cli import output
from tiercache.cli.human import moment, size
from tiercache.cli.options import Json
from tiercache.cli.output import Column
from tiercache.errors import NotFound, SetupError, UsageError

if TYPE_CHECKING:
    from tiercache.core.record import ObjectId
    from tiercache.tiers.warm.extraction import Archive, Copy

FAILED = 1
_OBJECT_ID_DIGITS = 40
_SHOWN_PROBLEMS = 20
_SHOWN_VERSIONS = 5


def extract(
    wanted: Annotated[str | None, typer.Argument(metavar="KEY|OBJECT-ID", help="What to extract, or to list.")] = None,
    warm_target: Annotated[
        list[str] | None,
        typer.Option("--warm-target", metavar="DIR", help="A directory of the warm tier; name all that are left."),
    ] = None,
    list_only: Annotated[
        bool, typer.Option("--list", help="Only list the copies that are there, by names and sizes of files.")
    ] = False,
    output_path: Annotated[
        str | None,
        typer.Option("--output", metavar="PATH", help="Write to this file, or to stdout with - [default: the key's last part]."),
    ] = None,
    newest: Annotated[bool, typer.Option("--newest", help="Of several versions take the one that was modified last.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    as_json: Json = False,
) -> int:
    """Get a file out of the warm tier's directories alone; nothing but them is needed."""
    from tiercache.tiers.warm.extraction import Archive

    if not warm_target:
        raise UsageError("no warm target is named", hint="give each of its directories as --warm-target DIR")
    if list_only and (output_path is not None or newest or force):
        raise UsageError("--list writes no file", hint="leave out --output, --newest and --force, or --list")
    if not list_only and wanted is None:
        raise UsageError("nothing to extract is named", hint="give a key or an object id, or see what there is with --list")
    if as_json and output_path == "-":
        raise UsageError("--json and --output - both write to stdout", hint="leave out one of them")
    archive = Archive([Path(target) for target in warm_target])
    found = _found(archive, wanted)
    _complain(archive)
    if list_only:
        return _list(archive, found, as_json)
    assert wanted is not None
    _extract(_chosen(found, wanted, newest), output_path, force, as_json)
    return 0


def _found(archive: Archive, wanted: str | None) -> dict[ObjectId, list[Copy]]:
    """By object id: the objects that have this id or, if none has, this key; all when nothing is wanted."""
    from tiercache.core.record import ObjectId
    from tiercache.tiers.warm.extraction import by_object

    if wanted is not None and len(wanted) == _OBJECT_ID_DIGITS and set(wanted.lower()) <= set("0123456789abcdef"):
        found = by_object(archive.copies(ObjectId(bytes.fromhex(wanted))))
        if found:
            return found
    return by_object(copy for copy in archive.copies() if wanted is None or copy.content.key == wanted)


def _chosen(found: Mapping[ObjectId, list[Copy]], wanted: str, newest: bool) -> list[Copy]:
    if not found:
        raise NotFound(
            f"{wanted}: no copy of it can be found", hint="see what there is with --list; name all targets that are left"
        )
    ordered = sorted(found.values(), key=lambda copies: (copies[0].content.mtime_seconds, copies[-1].manifest.generation))
    if len(ordered) > 1 and not newest:
        shown = [
            f"{copies[0].content.object_id.hex()} (modified {moment(copies[0].content.mtime_seconds)})"
            for copies in reversed(ordered[-_SHOWN_VERSIONS:])
        ]
        raise UsageError(
            f"{wanted}: there are {len(ordered)} versions of it",
            hint=f"take --newest, or name one by its object id: {', '.join(shown)}",
        )
    return ordered[-1]


def _extract(copies: Sequence[Copy], output_path: str | None, force: bool, as_json: bool) -> None:
    from tiercache.tiers.warm.extraction import chunks, write_file

    content = copies[0].content
    if output_path == "-":
        try:
            for part in chunks(copies):
                sys.stdout.buffer.write(part)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise SetupError(f"stdout: {error.strerror}") from error
        return
    name = output_path if output_path is not None else content.key.rpartition("/")[2]
    if not name or "\0" in name:
        raise UsageError(f"{content.key}: no file can have this name", hint="choose one with --output")
    with output.progress_bar(f"extracting {content.key}") as update:
        write_file(copies, Path(name), force=force, update=update)
    if as_json:
        output.json_document({"output": name, **_facts(copies[0])})
    else:
        output.line(f"{name}: {size(content.size_bytes)}, {content.key} in version {content.version}")


def _list(archive: Archive, found: Mapping[ObjectId, list[Copy]], as_json: bool) -> int:
    copies = sorted(
        (copy for each in found.values() for copy in each),
        key=lambda copy: (copy.content.source_id, copy.content.key, copy.content.mtime_seconds, copy.manifest.generation),
    )
    unreadable_count = archive.lost_count + sum(copy.state == "unreadable" for copy in copies)
    error = f"{unreadable_count} of the copies cannot be read" if unreadable_count else ""
    hint = "name all targets that are left" if unreadable_count else ""
    if as_json:
        document = {"copies": [_facts(copy) for copy in copies], "problems": archive.problems}
        output.json_document(document, error=error, hint=hint)
    elif copies:
        columns = [
            Column("KEY"),
            Column("VERSION"),
            Column("SIZE", right=True),
            Column("MODIFIED"),
            Column("EC"),
            Column("STATE"),
            Column("OBJECT ID"),
        ]
        output.table(columns, [_row(copy) for copy in copies])
    else:
        output.line("no copy is there")
    if error:
        output.complaint(f"{error}; {hint}")
    return FAILED if error else 0


def _facts(copy: Copy) -> dict[str, Any]:
    content, manifest = copy.content, copy.manifest
    return {
        "key": content.key,
        "version": content.version,
        "source_id": content.source_id,
        "size_bytes": content.size_bytes,
        "mtime_seconds": content.mtime_seconds,
        "object_id": content.object_id.hex(),
        "generation": f"{manifest.generation:016x}",
        "pack_id": manifest.object_id.hex() if manifest.is_pack else None,
        "ec": manifest.geometry.text,
        "state": copy.state,
        "shards_count": copy.whole_count,
        "manifests_count": copy.manifests_count,
    }


def _row(copy: Copy) -> list[str]:
    content, geometry = copy.content, copy.manifest.geometry
    state: str = copy.state
    if state != "complete":
        state = f"{state} ({copy.whole_count} of {geometry.shards_count} shards, {copy.manifests_count} manifests)"
    cells = [content.key, content.version, size(content.size_bytes), moment(content.mtime_seconds)]
    return [*cells, geometry.text, state, content.object_id.hex()]


def _complain(archive: Archive) -> None:
    for problem in archive.problems[:_SHOWN_PROBLEMS]:
        output.complaint(problem)
    if len(archive.problems) > _SHOWN_PROBLEMS:
        output.complaint(f"and {len(archive.problems) - _SHOWN_PROBLEMS} more that cannot be read")
