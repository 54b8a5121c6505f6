"""Configurations in which every value has the right type, and which make no sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiercache.config import Config, from_mount, load
from tiercache.errors import UsageError

DATASET = {"name": '"a"', "cold": '"s3://bucket/prefix"'}


def loaded(tmp_path: Path, key: str, value: str) -> Config:
    """A file that is right but for one key: `cold.deadline`, or `datasets.profile`."""
    table, _, name = key.partition(".")
    tables: dict[str, dict[str, str]] = {"mount": {"point": '"/mnt/a"'}, "datasets": dict(DATASET)}
    tables.setdefault(table, {})[name] = value
    text = ""
    for head, keys in tables.items():
        text += f"[[{head}]]\n" if head == "datasets" else f"[{head}]\n"
        text += "".join(f"{each} = {written}\n" for each, written in keys.items())
    file = tmp_path / "tiercache.toml"
    file.write_text(text)
    return load(file)


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("cold.deadline", '"1ms"', "0.001 s is too short"),
        ("cold.deadline", "0.5", "0.5 s is too short"),
        ("cold.connect_timeout", '"1ms"', "0.001 s is too short"),
        ("cold.read_timeout", "1e-9", "1e-09 s is too short"),
        ("cold.deadline", '"2h"', "expected float <= 3600"),
        ("mount.negative_ttl", '"2d"', "would hide new files for longer than a day"),
        ("hot.high_watermark", "0.01", "0.01 would leave the cache all but empty"),
        ("hot.low_watermark", "1e-9", "1e-09 would leave the cache all but empty"),
        ("policy.read_ahead", '"1PB"', "is more than can be under way"),
        ("hot.capacity", "0", "is less than 4 chunks"),
        ("mount.file_mode", '"0000"', "0000 lets nobody read"),
        ("mount.file_mode", '"0111"', "0111 lets nobody read"),
        ("mount.dir_mode", '"0444"', "0444 lets nobody read"),
        ("cold.region", '"us east"', "'us east' cannot be the name of a region"),
        ("cold.endpoint_url", '"http://store/?x=1"', "is not the URL of an endpoint"),
    ],
)
def test_a_number_or_a_text_with_which_nothing_works_is_refused(tmp_path: Path, key: str, value: str, complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        loaded(tmp_path, key, value)
    assert str(caught.value).startswith(f"{tmp_path}/tiercache.toml: {key}: ")
    assert complaint in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    "key",
    [
        "mount.point",
        "cold.endpoint_url",
        "cold.region",
        "admin.socket",
        "admin.group",
        *(f"datasets.{key}" for key in ("name", "cold", "replica", "endpoint_url", "region", "profile", "id")),
    ],
)
@pytest.mark.parametrize("text", ['""', '" "', r'"\t\n"'])
def test_an_empty_text_is_refused_whatever_its_key(tmp_path: Path, key: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        loaded(tmp_path, key, text)
    named = key.replace("datasets.", "datasets[0].")
    assert str(caught.value) == f"{tmp_path}/tiercache.toml: {named}: is empty"


def test_an_empty_text_in_a_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"hot\.paths\[1\]: is empty"):
        loaded(tmp_path, "hot.paths", '["/cache", ""]')


@pytest.mark.parametrize(
    ("option", "called"),
    [
        ("profile", "--profile"),
        ("region", "--region"),
        ("endpoint_url", "--endpoint-url"),
        ("name", "--name"),
        ("replica", "--replica"),
        ("socket", "--socket"),
    ],
)
def test_an_empty_option_is_called_by_its_name(option: str, called: str) -> None:
    with pytest.raises(UsageError, match=f"^{called}: is empty"):
        from_mount("s3://bucket", "/mnt/a", **{option: ""})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cold.deadline", '"1s"'),
        ("cold.connect_timeout", '"100ms"'),
        ("mount.metadata_ttl", "0"),
        ("mount.negative_ttl", "0"),
        ("mount.file_mode", '"0040"'),
        ("mount.dir_mode", '"0550"'),
        ("policy.read_ahead", "0"),
        ("policy.whole_file", "0"),
        ("hot.min_free", "0"),
        ("cold.region", '"eu-west-1"'),
    ],
)
def test_what_is_odd_but_works_is_taken(tmp_path: Path, key: str, value: str) -> None:
    loaded(tmp_path, key, value)
