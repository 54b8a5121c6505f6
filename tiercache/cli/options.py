"""Options that several commands share, and the comma list of `-o` (which is what /etc/fstab passes)."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
import typer

from tiercache.errors import UsageError

Json = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout instead of text.")]
Socket = Annotated[
    str | None,
    typer.Option(
        "--socket", metavar="PATH", help="Admin socket of the daemon [env: TIERCACHE_SOCKET; default: the only one that runs]."
    ),
]
PathArguments = Annotated[list[str], typer.Argument(metavar="PATH...", help="Paths under the mount, or dataset/key.")]

MAX_ID = 2**32 - 2  # (uid_t) -1 means "no change" to chown
_IGNORED = frozenset({"_netdev", "auto", "noauto", "nofail", "user", "nouser", "defaults", "ro", "noatime", "nodev", "nosuid"})


class MountFlags(msgspec.Struct, frozen=True):
    """What `-o` decides; None where it says nothing. Modes are the octal text that the user wrote."""

    allow_other: bool | None = None
    uid: int | None = None
    gid: int | None = None
    file_mode: str | None = None
    dir_mode: str | None = None
    read_path: str | None = None


def parse_mount_options(texts: list[str]) -> MountFlags:
    """`["allow_other,uid=1000", "ro"]`; the last of equal keys wins, as for mount(8). Raises UsageError that names the option."""
    flags = MountFlags()
    for option in (option for text in texts for option in text.split(",")):
        name, equals, value = option.partition("=")
        if option in _IGNORED or option == "" or option.startswith("x-"):
            continue
        if option == "allow_other":
            flags = msgspec.structs.replace(flags, allow_other=True)
        elif name in ("uid", "gid") and equals:
            flags = msgspec.structs.replace(flags, **{name: _identity(option, value)})
        elif name in ("file_mode", "dir_mode") and equals:
            flags = msgspec.structs.replace(flags, **{name: _mode(option, value)})
        elif name == "read_path" and equals:
            flags = msgspec.structs.replace(flags, read_path=value)
        elif option == "rw":
            raise UsageError("-o rw: the mount is always read-only", hint="leave it out, or write -o ro")
        else:
            raise UsageError(
                f"-o {option}: unknown mount option",
                hint="known: allow_other, ro, uid=ID, gid=ID, file_mode=OCTAL, dir_mode=OCTAL, read_path=auto|plain|python",
            )
    return flags


def _identity(option: str, value: str) -> int:
    if re.fullmatch(r"[0-9]{1,10}", value) is None or int(value) > MAX_ID:
        raise UsageError(f"-o {option}: not a numeric id", hint=f"write a number from 0 to {MAX_ID}, as `id` shows it")
    return int(value)


def _mode(option: str, value: str) -> str:
    if re.fullmatch(r"0?[0-7]{3}", value) is None:
        raise UsageError(f"-o {option}: not a file mode", hint="write the permission bits in octal, as in file_mode=0444")
    return value
