"""One page of ListObjectsV2, from XML to records.

The page is asked for with `encoding-type=url`, because XML cannot carry every key: control characters are not
allowed in it at all, and bytes that are not UTF-8 neither. Where the answer confirms the encoding, keys are decoded
to bytes and from there with `surrogateescape`, so that any name survives. Where a server ignores it, characters that
XML forbids are exchanged for private-use ones before parsing and back after it, so that one odd key never hides its
siblings.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from datetime import UTC, datetime
from urllib.parse import unquote_to_bytes

from tiercache.core.record import Listed, Page
from tiercache.errors import BadResponse

ARCHIVE_CLASSES = frozenset({"GLACIER", "DEEP_ARCHIVE"})  # GLACIER_IR is read like any other

# Stand-ins for what XML forbids: U+10F700 + byte for control characters and for bytes that are not UTF-8, and above
# them two for the non-characters.
_STAND_IN = 0x10F700
_NON_CHARACTERS = {0xFFFE: _STAND_IN + 0x100, 0xFFFF: _STAND_IN + 0x101}
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\udc80-\udcff]")
_REFERENCE = re.compile(r"&#(?:x([0-9a-fA-F]{1,6})|([0-9]{1,7}));")
_STANDING_IN = re.compile("[\U0010f700-\U0010f801]")


def parse_page(body: bytes, shown: str) -> Page:
    """Raises BadResponse when the answer is no listing, or says that it goes on without saying where."""
    try:
        root, decode = _tree(body)
    except ET.ParseError as error:
        raise BadResponse(f"the listing of {shown} is not XML: {error}", hint="check the endpoint URL") from error
    if _tag(root) != "ListBucketResult":
        raise BadResponse(f"the listing of {shown} is a <{_tag(root)}>", hint="check the endpoint URL")
    objects: list[Listed] = []
    prefixes: list[str] = []
    token, is_truncated = "", False
    for child in root:
        match _tag(child):
            case "Contents":
                objects.append(_listed(child, decode, shown))
            case "CommonPrefixes":
                prefixes.extend(decode(part.text or "") for part in child)
            case "IsTruncated":
                is_truncated = (child.text or "").strip() == "true"
            case "NextContinuationToken":
                token = child.text or ""
    if is_truncated and not token:
        raise BadResponse(
            f"the listing of {shown} is cut short without a continuation token", hint="the store must have ListObjectsV2"
        )
    return Page(tuple(objects), tuple(prefixes), token if is_truncated else "")


def bare_etag(text: str) -> str:
    """Without quotes, and without the mark of a weak one, which a proxy may add to the headers but not to a listing."""
    return text.removeprefix("W/").strip('"')


def _tag(element: ET.Element) -> str:
    return element.tag.rpartition("}")[2]


def _tree(body: bytes) -> tuple[ET.Element, Callable[[str], str]]:
    try:
        root = ET.fromstring(body)
    except ET.ParseError:
        root = ET.fromstring(_legible(body))
    encoded = any(_tag(child) == "EncodingType" and child.text == "url" for child in root)
    return root, _from_url if encoded else _from_legible


def _from_url(text: str) -> str:
    return unquote_to_bytes(text.replace("+", " ")).decode("utf-8", "surrogateescape")


def _legible(body: bytes) -> bytes:
    def stand_in_for_reference(match: re.Match[str]) -> str:
        code = int(match[1], 16) if match[1] else int(match[2])
        return chr(_STAND_IN + code) if code < 0x20 and code not in (0x09, 0x0A, 0x0D) else match[0]

    def stand_in(match: re.Match[str]) -> str:
        code = ord(match[0])
        return chr(_NON_CHARACTERS.get(code, _STAND_IN + (code & 0xFF)))  # a surrogate's low byte is the byte itself

    text = _REFERENCE.sub(stand_in_for_reference, body.decode("utf-8", "surrogateescape"))
    return _FORBIDDEN.sub(stand_in, text).encode("utf-8")


def _from_legible(text: str) -> str:
    if not _STANDING_IN.search(text):
        return text
    characters = {stand_in: chr(code) for code, stand_in in _NON_CHARACTERS.items()}
    raw = bytearray()
    for character in text:
        code = ord(character) - _STAND_IN
        raw += bytes([code]) if 0 <= code <= 0xFF else characters.get(ord(character), character).encode("utf-8")
    return raw.decode("utf-8", "surrogateescape")


def _listed(contents: ET.Element, decode: Callable[[str], str], shown: str) -> Listed:
    fields: dict[str, str] = {}
    restored = False
    for child in contents:
        name = _tag(child)
        if name == "RestoreStatus":
            restored = any(_tag(part) == "RestoreExpiryDate" and part.text for part in child)
        else:
            fields[name] = child.text or ""
    try:
        size = int(fields["Size"])
        etag = bare_etag(fields["ETag"])
        mtime = _whole_seconds(fields["LastModified"])
        key = decode(fields["Key"])
    except (KeyError, ValueError) as error:
        raise BadResponse(f"the listing of {shown} has an unreadable entry {fields.get('Key', '')!r}: {error}") from error
    archived = fields.get("StorageClass", "") in ARCHIVE_CLASSES and not restored
    return Listed(key, f"{etag}:{size}", size, mtime, archived)


def _whole_seconds(text: str) -> int:
    moment = datetime.fromisoformat(text)
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() // 1)
