"""Where a dataset comes from: `s3://bucket/prefix` or `file:///directory`, taken literally.

Nothing is percent-decoded and nothing is normalised: an S3 key may hold `%`, `//` and blanks, and
tools for S3 (`aws s3 ls`) take such URLs literally too. A prefix is a directory of the dataset, so
it ends in `/`, whether it was written or not.
"""

from __future__ import annotations

import re

import msgspec

from tiercache.errors import UsageError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")  # today's rule is 3 to 63; older buckets and other stores allow more
_CREDENTIALS = re.compile(r"[^/@]*@|[^/@:]*:.*@", re.DOTALL)  # before the host; a secret key may hold slashes
MAX_KEY_BYTES = 1024


class S3Location(msgspec.Struct, frozen=True):
    """`prefix` is '' or ends in '/'; every key of the dataset begins with it."""

    bucket: str
    prefix: str


class DirectoryLocation(msgspec.Struct, frozen=True):
    """`path` is absolute."""

    path: str


Location = S3Location | DirectoryLocation


def parse_source(url: str) -> Location:
    """Raises UsageError that quotes the URL and says what to write instead; it quotes none that holds credentials."""
    match = _SCHEME.fullmatch(url)
    if _CREDENTIALS.match(url if match is None else match[2]):
        raise UsageError(
            "the source holds credentials (what stands before the @), which others could read",
            hint="write s3://bucket/prefix; give credentials by --profile, AWS_PROFILE, AWS_ACCESS_KEY_ID or ~/.aws/credentials",
        )
    if match is None:
        instead = f"file://{url}" if url.startswith("/") else "s3://bucket/prefix or file:///directory"
        raise UsageError(f"source {url!r} has no scheme", hint=f"write {instead}")
    scheme, rest = match[1], match[2]
    if scheme == "s3":
        return _parse_s3(url, rest)
    if scheme == "file":
        return _parse_directory(url, rest)
    hint = "write s3://bucket/prefix or file:///directory"
    if scheme in ("http", "https"):
        hint = "write s3://bucket/prefix, and give the address of the store as the endpoint URL"
    shown = url.partition("?")[0]  # what follows may be a signature
    raise UsageError(f"source {shown!r} has the unknown scheme {scheme}://", hint=hint)


def _parse_s3(url: str, rest: str) -> S3Location:
    bucket, _, prefix = rest.partition("/")
    if not bucket:
        raise UsageError(f"source {url!r} names no bucket", hint="write s3://bucket/prefix")
    if _BUCKET.fullmatch(bucket) is None:
        raise UsageError(
            f"source {url!r}: {bucket!r} cannot be the name of a bucket",
            hint="bucket names have letters, digits, dots, dashes and underscores",
        )
    if prefix and not prefix.endswith("/"):
        prefix += "/"
    if "\0" in prefix or len(prefix.encode("utf-8", "surrogateescape")) > MAX_KEY_BYTES:
        raise UsageError(f"source {url!r}: its prefix cannot be one of S3", hint="at most 1,024 bytes, none of them NUL")
    return S3Location(bucket, prefix)


def _parse_directory(url: str, path: str) -> DirectoryLocation:
    if not path.startswith("/"):
        raise UsageError(
            f"source {url!r} does not name an absolute directory",
            hint="write three slashes, as in file:///data/imagenet (no host name)",
        )
    if "\0" in path:
        raise UsageError(f"source {url!r} holds a NUL character", hint="write the directory's path")
    return DirectoryLocation(path if path == "/" else path.rstrip("/") or "/")
