"""A bucket that exists only as a list of keys: for `scripted`, where filling a real server with 100,000 objects takes minutes."""

from __future__ import annotations

import bisect
import hashlib
import urllib.parse
from collections.abc import Sequence
from xml.sax.saxutils import escape

from tests.servers.scripted import Answer, Asked, error_reply, reply

_MODIFIED = ("2024-05-06T07:08:09.000Z", "Mon, 06 May 2024 07:08:09 GMT")


class SyntheticBucket:
    """Answers ListObjectsV2, GET and HEAD. The body of an object is its key, as often as makes `size_bytes`."""

    def __init__(self, keys: Sequence[str], size_bytes: int = 100) -> None:
        self._keys = sorted(keys, key=str.encode)
        self._size_bytes = size_bytes

    def body(self, key: str) -> bytes:
        raw = key.encode()
        return (raw * (self._size_bytes // len(raw) + 1))[: self._size_bytes]

    def __call__(self, asked: Asked) -> Answer:
        path, _, query = asked.target.partition("?")
        fields = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        if "list-type" in fields:
            return self._list(fields)
        key = urllib.parse.unquote(path).split("/", 2)[2]
        position = bisect.bisect_left(self._keys, key)
        if position == len(self._keys) or self._keys[position] != key:
            return error_reply(404, "NoSuchKey")
        return self._object(asked, self.body(key))

    def _object(self, asked: Asked, body: bytes) -> Answer:
        headers = {"etag": f'"{hashlib.md5(body).hexdigest()}"', "last-modified": _MODIFIED[1], "accept-ranges": "bytes"}
        if asked.method == "HEAD":
            return reply(200, {**headers, "content-length": str(len(body))})
        span = asked.headers.get("range")
        if span is None:
            return reply(200, headers, body)
        first, _, last = span.removeprefix("bytes=").partition("-")
        piece = body[int(first) : int(last) + 1]
        return reply(206, {**headers, "content-range": f"bytes {first}-{int(first) + len(piece) - 1}/{len(body)}"}, piece)

    def _list(self, fields: dict[str, str]) -> Answer:
        prefix, delimiter, limit = fields.get("prefix", ""), fields.get("delimiter", ""), int(fields.get("max-keys", "1000"))
        position = int(fields.get("continuation-token", "0")) or bisect.bisect_left(self._keys, prefix)
        shown: list[str] = []
        prefixes: list[str] = []
        while position < len(self._keys) and self._keys[position].startswith(prefix) and len(shown) + len(prefixes) < limit:
            key = self._keys[position]
            end = key.find(delimiter, len(prefix)) if delimiter else -1
            if end < 0:
                shown.append(key)
                position += 1
            else:
                prefixes.append(key[: end + 1])
                position = bisect.bisect_left(self._keys, key[:end] + chr(ord("/") + 1))
        more = position < len(self._keys) and self._keys[position].startswith(prefix)
        return reply(
            200, {"content-type": "application/xml"}, self._page(shown, prefixes, str(position) if more else "").encode()
        )

    def _page(self, keys: Sequence[str], prefixes: Sequence[str], token: str) -> str:
        def text(value: str) -> str:
            return escape(urllib.parse.quote(value))

        contents = "".join(
            f"<Contents><Key>{text(key)}</Key><LastModified>{_MODIFIED[0]}</LastModified>"
            f"<ETag>&quot;{hashlib.md5(self.body(key)).hexdigest()}&quot;</ETag><Size>{self._size_bytes}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
            for key in keys
        )
        commons = "".join(f"<CommonPrefixes><Prefix>{text(prefix)}</Prefix></CommonPrefixes>" for prefix in prefixes)
        next_token = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<EncodingType>url</EncodingType><KeyCount>{len(keys) + len(prefixes)}</KeyCount>"
            f"<IsTruncated>{'true' if token else 'false'}</IsTruncated>{next_token}{contents}{commons}</ListBucketResult>"
        )
