"""Sizes, durations, file modes, numbers of shards and addresses as people write them.

Decimal prefixes are powers of 1000 and binary ones powers of 1024, as the labels on disks and the
output of `df -H` and `df -h` have it: `GB` = 10^9, `GiB` = 2^30. A bare number is in the base unit
(bytes, seconds). Numbers are taken as decimals, never as binary floating point: `0.1TB` is exactly 10^11.
"""

from __future__ import annotations

import ipaddress
import re
from decimal import Decimal

from tiercache.errors import UsageError

MAX_SIZE_BYTES = 2**63 - 1  # off_t
MAX_DURATION_SECONDS = 100 * 365 * 86400  # a century: more is a slip of the pen, and stays far from time_t's end

_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*(?:([kmgtpe])(i?))?b?\s*", re.IGNORECASE)
_DURATION = re.compile(r"\s*(?:\d{1,12}(?:\.\d{1,12})?\s*(?:ms|min|[smhdw])\s*)+")
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|min|[smhdw])")
_SHARDS = re.compile(r"\s*([0-9]{1,3})\s*\+\s*([0-9]{1,3})\s*")
_PLAIN_NUMBER = re.compile(r"\s*\d{1,12}(?:\.\d{1,12})?\s*")
_MODE = re.compile(r"(?:0o?)?[0-7]{3}")
_SECONDS = {
    "ms": Decimal("0.001"),
    **{unit: Decimal(n) for unit, n in (("s", 1), ("m", 60), ("min", 60), ("h", 3600), ("d", 86400), ("w", 604800))},
}


def parse_size(text: str) -> int:
    """`"3.5TB"`, `"8 MiB"`, `"100G"` (= GB) or `"4096"` in bytes. Raises UsageError."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a size", hint="write a number and a unit, as in 500GB, 3.5TB or 8MiB")
    number, prefix, binary = match.groups()
    power = " kmgtpe".index((prefix or " ").lower())
    size_bytes = int((Decimal(number) * (1024 if binary else 1000) ** power).to_integral_value())
    if size_bytes > MAX_SIZE_BYTES:
        raise UsageError(f"{text!r} is larger than any file system", hint="the largest size is 8 EiB - 1")
    return size_bytes


def parse_duration(text: str) -> float:
    """`"3d"`, `"1h30m"`, `"1.5h"`, `"500ms"` or `"90"` in seconds. Raises UsageError."""
    if _PLAIN_NUMBER.fullmatch(text):
        total = Decimal(text.strip())
    elif _DURATION.fullmatch(text):
        total = sum((Decimal(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(text)), Decimal(0))
    else:
        raise UsageError(f"{text!r} is not a duration", hint="write a number and a unit (ms, s, m, h, d, w), as in 30s or 1h30m")
    if total > MAX_DURATION_SECONDS:
        raise UsageError(f"{text!r} is longer than a century", hint="the longest duration is 36500d")
    return float(total)


def parse_shards(text: str) -> tuple[int, int]:
    """`"4+2"`: counts of data and parity shards. Raises UsageError."""
    match = _SHARDS.fullmatch(text)
    if match is None:
        raise UsageError(
            f"{text!r} is not a number of data and of parity shards", hint="write data+parity, as in 4+2; 1+0 keeps single copies"
        )
    return int(match[1]), int(match[2])


def parse_mode(text: str) -> int:
    """`"0444"` or `"444"`: permission bits in octal. Raises UsageError."""
    if _MODE.fullmatch(text) is None:
        raise UsageError(f"{text!r} is not a file mode", hint='write the permission bits in octal, as in "0444"')
    return int(text[-3:], 8)


def parse_address(text: str) -> tuple[str, int]:
    """`"127.0.0.1:9753"`, `"[::1]:9753"` or `"localhost:9753"`; port 0 takes a free one. Raises UsageError.

    Loopback only: what is served there has no authentication.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise UsageError(f"{text!r} is not an address", hint='write host and port, as in "127.0.0.1:9753"')
    if host == "localhost":
        host = "127.0.0.1"
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError as error:
        raise UsageError(f"{text!r}: {host!r} is not an IP address", hint="write 127.0.0.1 or [::1]") from error
    if not loopback:
        raise UsageError(f"{text!r} is reachable from other machines", hint="write 127.0.0.1 or [::1], and a proxy before it")
    return host, int(port)
