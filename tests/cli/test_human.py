"""What people read: numbers, times, names, and the comma list of `-o`."""

from __future__ import annotations

import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.cli.human import duration, moment, printable, ratio, size
from tiercache.cli.options import MountFlags, parse_mount_options
from tiercache.errors import UsageError


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (9_994, "9.99 kB"), (9_996, "10.0 kB"), (99_960, "100 kB"),
     (999_499, "999 kB"), (999_500, "1.00 MB"), (3_500_000_000_000, "3.50 TB"), (2**63 - 1, "9.22 EB")],
)  # fmt: skip
def test_sizes(number: int, text: str) -> None:
    assert size(number) == text


@given(st.integers(min_value=0, max_value=2**63 - 1))
def test_sizes_are_short_and_within_half_a_percent(number: int) -> None:
    text = size(number)
    value, unit = text.split()
    assert len(value) <= 4
    factor = 1000 ** ("B", "kB", "MB", "GB", "TB", "PB", "EB").index(unit)
    assert abs(float(value) * factor - number) <= number * 0.00501


@pytest.mark.parametrize(
    ("part", "text"), [(None, "-"), (0.0, "0.0 %"), (0.5, "50.0 %"), (0.99999, "99.9 %"), (1.0, "100.0 %"), (1.5, "150.0 %")]
)
def test_ratios(part: float | None, text: str) -> None:
    assert ratio(part) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (61, "1 min 1 s"),
        (3600, "1 h"),
        (7500, "2 h 5 min"),
        (86400 * 3 + 3600 * 4 + 59, "3 d 4 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_never() -> None:
    assert moment(None) == "never"
    assert re.fullmatch(r"2023-11-1[45] \d\d:\d\d", moment(1_700_000_000))


@given(st.binary(max_size=50).map(os.fsdecode) | st.text(max_size=50))
def test_anything_becomes_one_harmless_line(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    shown.encode("utf-8")


def test_what_is_escaped() -> None:
    assert printable(os.fsdecode(b"\xff\n\x1b[2J \xc3\xa4")) == "\\xff\\x0a\\x1b[2J ä"


@pytest.mark.parametrize(
    ("texts", "flags"),
    [
        ([], MountFlags()),
        (["ro,allow_other,uid=1000,gid=0"], MountFlags(allow_other=True, uid=1000, gid=0)),
        (["file_mode=0440", "dir_mode=550"], MountFlags(file_mode="0440", dir_mode="550")),
        (["_netdev,noauto,nofail,x-systemd.automount,x-systemd.requires=network-online.target,,defaults"], MountFlags()),
        (["uid=1,uid=2"], MountFlags(uid=2)),
    ],
)
def test_mount_options(texts: list[str], flags: MountFlags) -> None:
    assert parse_mount_options(texts) == flags


@given(st.text(max_size=20))
def test_any_other_mount_option_is_named(text: str) -> None:
    try:
        flags = parse_mount_options([text])
    except UsageError as error:
        named = str(error).removeprefix("-o ").partition(":")[0]
    else:
        assert isinstance(flags, MountFlags)
        return
    assert named.split("=")[0] in text
