"""Numbers and names as people read them. Decimal units, as in the options: 1 GB = 10^9 bytes."""

from __future__ import annotations

import time

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def size(size_bytes: int) -> str:
    """Three significant digits: `0 B`, `999 B`, `1.23 GB`, `12.3 GB`, `123 GB`."""
    if size_bytes < 1000:
        return f"{size_bytes} B"
    value = float(size_bytes)
    unit = 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value /= 1000
        unit += 1
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f} {_UNITS[unit]}"


def size_or_dash(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else size(size_bytes)


def ratio(part: float | None) -> str:
    """`97.3 %`, and never `100.0 %` for something that is not whole."""
    if part is None:
        return "-"
    return f"{min(part, 0.999) if part < 1 else part:.1%}".replace("%", " %")


def duration(seconds: float) -> str:
    """The two largest units: `12 s`, `3 min 5 s`, `2 h 5 min`, `3 d 4 h`."""
    whole = int(seconds)
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    while len(parts) > 1 and parts[0][0] == 0:
        parts.pop(0)
    return " ".join(f"{number} {unit}" for number, unit in parts[:2] if number or unit == parts[0][1])


def moment(unix_seconds: int | None) -> str:
    """Local time to the minute; `never` for None."""
    return "never" if unix_seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_seconds))


def printable(text: str) -> str:
    """One line that a terminal shows as it is: control characters and bytes that are not UTF-8 become `\\x1b`.

    A file name may hold escape sequences; printing them would let a bucket's owner drive the reader's terminal.
    """
    return "".join(character if character.isprintable() else _escaped(character) for character in text)


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
