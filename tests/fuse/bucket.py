"""A bucket of a test server, filled by boto3 as its owner would."""

from __future__ import annotations

import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.servers.s3 import S3Account

UPLOADS = 8


@dataclass(frozen=True)
class Bucket:
    """Its own for each test."""

    account: S3Account
    name: str

    @property
    def source(self) -> str:
        return f"s3://{self.name}"

    def put(self, key: str, body: bytes) -> str:
        return self.account.put(self.name, key, body)

    def delete(self, key: str) -> None:
        self.account.delete(self.name, key)

    def upload(self, directory: Path) -> None:
        """All files below `directory`."""
        files = [Path(place) / name for place, _, names in os.walk(directory) for name in names]
        with ThreadPoolExecutor(UPLOADS) as pool:
            list(pool.map(lambda file: self.put(str(file.relative_to(directory)), file.read_bytes()), files))


def remove_bucket(bucket: Bucket) -> None:
    """With all its objects. SeaweedFS gives each bucket volumes of its own, and has as many as fit on the disk."""
    client = bucket.account.client
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket.name):
        keys = [{"Key": item["Key"]} for item in page.get("Contents", [])]
        if keys:
            client.delete_objects(Bucket=bucket.name, Delete={"Objects": keys, "Quiet": True})
    client.delete_bucket(Bucket=bucket.name)


def new_bucket(account: S3Account) -> Bucket:
    name = f"b{uuid.uuid4().hex[:12]}"
    account.make_bucket(name)
    return Bucket(account, name)
