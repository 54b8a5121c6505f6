"""What all S3 test servers have in common: an address, a key pair, and a boto3 client to fill buckets with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import boto3
import botocore.config
import pytest


class S3Account:
    def __init__(self, endpoint_url: str, access_key: str, secret_key: str) -> None:
        self.endpoint_url = endpoint_url
        self.access_key = access_key
        self.secret_key = secret_key

    @property
    def environment(self) -> dict[str, str]:
        """For a subprocess or monkeypatch: the credentials as boto3's usual chain finds them, and nothing else of it."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @contextmanager
    def in_environment(self) -> Iterator[None]:
        """The credential chain of this process finds this account, and nothing else, meanwhile."""
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("AWS_")]:
                patch.delenv(name)
            for name, value in self.environment.items():
                patch.setenv(name, value)
            yield

    @cached_property
    def client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
            config=botocore.config.Config(
                s3={"addressing_style": "path"},
                max_pool_connections=32,
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    def close_client(self) -> None:
        if "client" in self.__dict__:  # the cached property was used
            self.client.close()

    def make_bucket(self, bucket: str) -> None:
        self.client.create_bucket(Bucket=bucket)

    def put(self, bucket: str, key: str, body: bytes = b"", **extra: Any) -> str:
        """Returns the ETag without quotes."""
        return str(self.client.put_object(Bucket=bucket, Key=key, Body=body, **extra)["ETag"]).strip('"')

    def delete(self, bucket: str, key: str) -> None:
        self.client.delete_object(Bucket=bucket, Key=key)
