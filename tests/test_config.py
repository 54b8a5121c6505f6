from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache import config as configuration
from tiercache.config import (
    Config,
    DatasetSettings,
    decode,
    default_hot_path,
    encode,
    from_mount,
    load,
    parse_duration,
    parse_size,
)
from tiercache.config.location import DirectoryLocation, S3Location, parse_source
from tiercache.config.quantity import parse_address, parse_mode
from tiercache.config.settings import AdminSettings, ColdSettings, HotSettings, MountSettings, PolicySettings
from tiercache.errors import UsageError

EXAMPLE = Path(__file__).parent.parent / "config" / "tiercache.toml"
MINIMAL = '[mount]\npoint = "/mnt/a"\n[[datasets]]\nname = "a"\ncold = "s3://bucket/prefix"\n'


def load_text(tmp_path: Path, text: str) -> Config:
    file = tmp_path / "tiercache.toml"
    file.write_text(text)
    return load(file)


def complaint(tmp_path: Path, text: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        load_text(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path}/tiercache.toml: ")
    assert "\n" not in caught.value.line
    assert caught.value.hint
    return caught.value


# quantities


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("3.5TB", 3_500_000_000_000),
        ("0.1TB", 100_000_000_000),
        ("1GB", 10**9),
        ("1GiB", 2**30),
        ("1 gib", 2**30),
        (" 8MiB ", 8 * 2**20),
        ("100G", 10**11),
        ("2K", 2000),
        ("2Ki", 2048),
        ("7.9PiB", 8894609264056730),
    ],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "GB", "-1GB", "1.GB", "1,5GB", "1e9", "10 GB free", "1GBi", "inf", "0x10", "16EiB", "9" * 30, "١GB\n1"]
)
def test_texts_that_are_no_sizes(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("90", 90),
        ("1.5", 1.5),
        ("500ms", 0.5),
        ("30s", 30),
        ("5m", 300),
        ("5min", 300),
        ("1h30m", 5400),
        ("3d", 259200),
        ("1w 1d", 691200),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1s", "1 year", "1y", "5 5", "1h30", "inf", "nan", "1e3", "40000d"])
def test_texts_that_are_no_durations(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_duration(text)
    assert repr(text) in str(caught.value)


@given(st.text(max_size=20))
def test_any_text_is_a_quantity_or_a_usage_error(text: str) -> None:
    for parse in (parse_size, parse_duration, parse_mode, parse_address, parse_source):
        with suppress(UsageError):
            parse(text)


@given(st.integers(0, 2**50), st.sampled_from([("", 1), ("kB", 10**3), ("MB", 10**6), ("KiB", 2**10), ("MiB", 2**20)]))
def test_sizes_are_exact(number: int, unit: tuple[str, int]) -> None:
    name, factor = unit
    if number * factor < 2**63:
        assert parse_size(f"{number}{name}") == number * factor


def test_modes_are_octal() -> None:
    assert parse_mode("0444") == parse_mode("444") == parse_mode("0o444") == 0o444
    for text in ("", "0888", "04444", "rw-r--r--", "44"):
        with pytest.raises(UsageError, match="not a file mode"):
            parse_mode(text)


def test_only_loopback_addresses_are_served() -> None:
    assert parse_address("127.0.0.1:9753") == ("127.0.0.1", 9753)
    assert parse_address("localhost:0") == ("127.0.0.1", 0)
    assert parse_address("[::1]:80") == ("::1", 80)
    for text, why in [
        ("0.0.0.0:80", "reachable"),
        ("10.0.0.1:80", "reachable"),
        ("node7:80", "not an IP"),
        ("127.0.0.1", "not an"),
        ("127.0.0.1:99999", "not an"),
    ]:
        with pytest.raises(UsageError, match=why):
            parse_address(text)


# sources


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("s3://bucket", S3Location("bucket", "")),
        ("s3://bucket/", S3Location("bucket", "")),
        ("s3://bucket/a/b", S3Location("bucket", "a/b/")),
        ("s3://bucket/a/b/", S3Location("bucket", "a/b/")),
        ("s3://bucket//a", S3Location("bucket", "/a/")),
        ("s3://bucket/a b%20+", S3Location("bucket", "a b%20+/")),
        ("file:///data/set", DirectoryLocation("/data/set")),
        ("file:///data/set/", DirectoryLocation("/data/set")),
        ("file:///a b%20", DirectoryLocation("/a b%20")),
        ("file:///", DirectoryLocation("/")),
    ],
)
def test_case_15_sources_are_taken_literally(url: str, location: object) -> None:
    assert parse_source(url) == location


@pytest.mark.parametrize(
    ("url", "culprit", "fix"),
    [
        ("bucket/prefix", "has no scheme", "s3://bucket/prefix"),
        ("/data/set", "has no scheme", "file:///data/set"),
        ("s3://", "names no bucket", "s3://bucket/prefix"),
        ("s3:///prefix", "names no bucket", "s3://bucket/prefix"),
        ("s3://my bucket/x", "'my bucket' cannot be the name of a bucket", "letters"),
        ("gs://bucket", "unknown scheme gs://", "s3://"),
        ("https://bucket.s3.amazonaws.com/x", "unknown scheme https://", "endpoint URL"),
        ("file://data/set", "absolute", "three slashes"),
    ],
)
def test_sources_that_are_none(url: str, culprit: str, fix: str) -> None:
    with pytest.raises(UsageError, match=re.escape(culprit)) as caught:
        parse_source(url)
    assert fix in caught.value.hint


# files


def test_a_minimal_file_has_the_documented_defaults(tmp_path: Path) -> None:
    config = load_text(tmp_path, MINIMAL)
    assert not config.single
    assert config.mount == MountSettings(point="/mnt/a", allow_other=os.geteuid() == 0)
    assert config.mount.metadata_ttl_seconds == 60
    assert config.mount.negative_ttl_seconds == 5
    assert config.hot == HotSettings(paths=(default_hot_path("/mnt/a"),))
    assert (config.hot.high_watermark_ratio, config.hot.low_watermark_ratio) == (0.95, 0.90)
    assert config.hot.chunk_bytes == 8 * 2**20
    assert config.cold == ColdSettings()
    assert (config.cold.concurrency, config.cold.deadline_seconds) == (32, 30)
    assert config.policy == PolicySettings(read_ahead_bytes=256 * 2**20, whole_file_bytes=64 * 2**20)
    assert config.admin == AdminSettings()
    assert config.datasets == (DatasetSettings(name="a", cold="s3://bucket/prefix", metadata_ttl_seconds=60),)
    assert config.datasets[0].location == S3Location("bucket", "prefix/")


def test_the_example_loads() -> None:
    config = load(EXAMPLE)
    assert [dataset.name for dataset in config.datasets] == ["imagenet", "open-images"]
    assert config.datasets[1].anonymous
    assert config.datasets[1].metadata_ttl_seconds == 86400


def test_the_example_shows_every_key_and_the_true_defaults(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    shown = load_text(tmp_path, re.sub(r"^#(?=\w+ = )", "", text, flags=re.MULTILINE))
    plain = load(EXAMPLE)
    for table in ("mount", "hot", "warm", "cold", "policy", "admin"):
        settings = getattr(shown, table)
        section = re.search(rf"^\[{table}\]$(.*?)(?=^\[)", text, re.MULTILINE | re.DOTALL)
        assert section is not None
        assert set(re.findall(r"^#?(\w+) = ", section[1], re.MULTILINE)) == set(type(settings).__struct_encode_fields__)
        for field in type(settings).__struct_fields__:
            default = getattr(getattr(plain, table), field)
            if default not in (None, ()) and field != "allow_other":
                assert getattr(settings, field) == default, f"{table}.{field}"
    datasets = text.partition("[[datasets]]")[2]
    assert set(re.findall(r"^#?(\w+) = ", datasets, re.MULTILINE)) == set(DatasetSettings.__struct_encode_fields__)
    assert (
        msgspec.structs.replace(shown.datasets[0], replica=None, endpoint_url=None, region=None, profile=None, id=None)
        == plain.datasets[0]
    )


def test_texts_become_numbers_and_datasets_inherit(tmp_path: Path) -> None:
    config = load_text(
        tmp_path,
        """
        [mount]
        point = "/mnt/a"
        file_mode = "0640"
        metadata_ttl = "10m"
        [hot]
        paths = ["/nvme0/cache", "/nvme1/cache"]
        capacity = "3.5TB"
        min_free = 1000
        chunk_size = "4MiB"
        low_watermark = 0.5
        [cold]
        endpoint_url = "http://127.0.0.1:9000"
        region = "eu-west-1"
        deadline = "10s"
        [admin]
        http = "localhost:9753"
        [[datasets]]
        name = "a"
        cold = "s3://bucket-a"
        [[datasets]]
        name = "b"
        cold = "s3://bucket-b"
        endpoint_url = "https://other.example.org:8443"
        metadata_ttl = 1
        [[datasets]]
        name = "c"
        cold = "file:///data/c"
        """,
    )
    assert config.mount.file_mode == 0o640
    assert config.hot.capacity_bytes == 3_500_000_000_000
    assert config.hot.capacity_each_bytes == 1_750_000_000_000
    assert config.hot.min_free_bytes == 1000
    assert config.hot.chunk_bytes == 4 * 2**20
    assert config.cold.deadline_seconds == 10
    assert config.cold.read_timeout_seconds == 10, "a default is never longer than the deadline"
    assert config.admin.http == ("127.0.0.1", 9753)
    first, second, third = config.datasets
    assert (first.endpoint_url, first.region, first.metadata_ttl_seconds) == ("http://127.0.0.1:9000", "eu-west-1", 600)
    assert (second.endpoint_url, second.region, second.metadata_ttl_seconds) == ("https://other.example.org:8443", "eu-west-1", 1)
    assert third.location == DirectoryLocation("/data/c")


DATASET = '[[datasets]]\nname = "a"\ncold = "s3://bucket"\n'
MOUNT = '[mount]\npoint = "/mnt/a"\n'
FILE_DATASET = '[[datasets]]\nname = "a"\ncold = "file:///data/a"\n'


@pytest.mark.parametrize(
    ("text", "culprit", "fix"),
    [
        # unknown keys
        (MINIMAL + "[hott]\n", "hott: unknown key", "did you mean hot?"),
        (MOUNT + DATASET + "[hot]\ncapcity = 1\n", "hot.capcity: unknown key", "did you mean capacity?"),
        (MINIMAL + 'ttl = "1s"\n', "datasets[0].ttl: unknown key", "metadata_ttl"),
        (MINIMAL + "zzz = 1\n", "datasets[0].zzz: unknown key", "possible here: name, cold"),
        ("single = true\n" + MINIMAL, "single: unknown key", "possible here"),
        (MINIMAL + "[lukewarm]\n", "lukewarm: unknown key", ""),
        # missing ones
        (DATASET, "mount.point: is missing", "write it"),
        (MOUNT, "datasets: there is none", "[[datasets]]"),
        (MOUNT + '[[datasets]]\nname = "a"\n', "datasets[0].cold: is missing", "write it"),
        (MOUNT + '[[datasets]]\ncold = "s3://bucket"\n', "datasets[0].name: is missing", "write it"),
        # wrong types and ranges
        ("mount = 3\n" + DATASET, "mount: must be a table, not int", "[mount]"),
        (MOUNT + '[datasets]\nname = "a"\n', "datasets: must be a list of tables", "two brackets"),
        (MINIMAL + '[cold]\nconcurrency = "many"\n', "cold.concurrency: expected int, got str", "config/tiercache.toml"),
        (MINIMAL + "[cold]\nconcurrency = 0\n", "cold.concurrency: expected int >= 1", "config/tiercache.toml"),
        (MINIMAL + "[cold]\ndeadline = 0\n", "cold.deadline: expected float > 0", "config/tiercache.toml"),
        (MINIMAL + "[cold]\ndeadline = inf\n", "cold.deadline: inf is not a number to work with", "finite"),
        (MINIMAL + "[hot]\nhigh_watermark = nan\n", "hot.high_watermark: nan", "finite"),
        (MINIMAL + "[hot]\nhigh_watermark = 95\n", "hot.high_watermark: expected float <= 1", ""),
        (MINIMAL + '[hot]\ncapacity = "much"\n', "hot.capacity: 'much' is not a size", "500GB"),
        (MINIMAL + "[hot]\ncapacity = true\n", "hot.capacity: expected int, got bool", ""),
        (MINIMAL + "[hot]\ncapacity = 1.5\n", "hot.capacity: expected int, got float", ""),
        (MINIMAL + "[hot]\ncapacity = -1\n", "hot.capacity: expected int >= 0", ""),
        (MINIMAL + '[hot]\npaths = "/cache"\n', "hot.paths: expected array, got str", ""),
        (MINIMAL + '[hot]\npaths = ["/cache", 1]\n', "hot.paths[1]: expected str, got int", ""),
        (MINIMAL + '[mount.x]\npoint = "/mnt/b"\n', "", ""),
        (MINIMAL.replace('"/mnt/a"', '"/mnt/a"\nfile_mode = 444'), "mount.file_mode: must be a text", '"0444"'),
        (MINIMAL.replace('"/mnt/a"', '"/mnt/a"\nuid = -1'), "mount.uid: expected int >= 0", ""),
        (MINIMAL.replace('"/mnt/a"', '"/mnt/a"\nmetadata_ttl = "soon"'), "mount.metadata_ttl: 'soon' is not a duration", "1h30m"),
        (MINIMAL + 'replica = "/r"\nreplica_trust = "blind"\n', "datasets[0].replica_trust: Invalid enum value 'blind'", ""),
        (MINIMAL + "name = 2020-01-01\n", "", ""),
        (MINIMAL + '[admin]\nhttp = "0.0.0.0:80"\n', "admin.http: '0.0.0.0:80' is reachable from other machines", "127.0.0.1"),
        # contradictions
        (
            MINIMAL + "[hot]\nhigh_watermark = 0.5\nlow_watermark = 0.6\n",
            "hot.low_watermark: 0.6 is above high_watermark 0.5",
            "lower",
        ),
        (MINIMAL + '[hot]\nchunk_size = "1MB"\n', "hot.chunk_size: 1000000 bytes is not possible", "8MiB"),
        (MINIMAL + '[hot]\nchunk_size = "1GiB"\n', "hot.chunk_size: 1073741824 bytes is not possible", "8MiB"),
        (MINIMAL + '[hot]\ncapacity = "1MB"\n', "hot.capacity: 1000000 bytes for each of 1 paths is less than 4 chunks", "raise"),
        (MINIMAL + "[hot]\npaths = []\n", "hot.paths: is empty", "leave the key out"),
        (MINIMAL + '[hot]\npaths = ["cache"]\n', "hot.paths[0]: 'cache' is not an absolute path", "begin it with /"),
        (MINIMAL + '[hot]\npaths = ["/c", "/c/"]\n', "hot.paths[1]: /c/ is hot.paths[0] too", "of its own"),
        (MINIMAL + '[hot]\npaths = ["/c", "/c/d"]\n', "hot.paths[1]: /c/d lies inside hot.paths[0] /c", "outside"),
        (MINIMAL + '[hot]\npaths = ["/mnt/a/c"]\n', "hot.paths[0]: /mnt/a/c lies inside mount.point /mnt/a", "outside"),
        (MINIMAL + '[hot]\npaths = ["/mnt"]\n', "mount.point: /mnt/a lies inside hot.paths[0] /mnt", "outside"),
        (MINIMAL + 'replica = "/r"\n[hot]\npaths = ["/r"]\n', "datasets[0].replica: /r is hot.paths[0] too", "of its own"),
        (
            MINIMAL + 'replica = "/r/s"\n[hot]\npaths = ["/r"]\n',
            "datasets[0].replica: /r/s lies inside hot.paths[0] /r",
            "outside",
        ),
        (MINIMAL + 'replica = "/mnt/a/../a/s"\n', "datasets[0].replica: /mnt/a/../a/s lies inside mount.point", "outside"),
        (
            MOUNT + '[[datasets]]\nname = "a"\ncold = "file:///mnt"\n',
            "mount.point: /mnt/a lies inside datasets[0].cold /mnt",
            "outside",
        ),
        (
            MOUNT + FILE_DATASET + 'replica = "/data/a"\n',
            "datasets[0].replica: /data/a is the source itself",
            "leave the replica out",
        ),
        (MOUNT + FILE_DATASET + 'region = "x"\n', "datasets[0].region: has no meaning for file:///data/a", "s3:// only"),
        (
            MINIMAL + '[[datasets]]\nname = "a"\ncold = "s3://other"\n',
            "datasets[1].name: 'a' is the name of datasets[0] too",
            "rename",
        ),
        (MINIMAL.replace('"a"', '"a/b"'), "datasets[0].name: 'a/b' cannot be the name", "begin with a letter"),
        (MINIMAL.replace('"a"', '".."'), "datasets[0].name: '..' cannot be the name", "begin with a letter"),
        (MINIMAL.replace('"a"', '""'), "datasets[0].name: is empty", "write a value"),
        (MINIMAL.replace('"a"', f'"{"a" * 129}"'), "datasets[0].name", "begin with a letter"),
        (
            MINIMAL.replace("s3://bucket/prefix", "gs://bucket"),
            "datasets[0].cold: source 'gs://bucket' has the unknown scheme",
            "s3://",
        ),
        (MINIMAL.replace("s3://bucket/prefix", "s3:///x"), "datasets[0].cold: source 's3:///x' names no bucket", "s3://bucket"),
        (
            MINIMAL + 'endpoint_url = "store:9000"\n',
            "datasets[0].endpoint_url: 'store:9000' is not the URL of an endpoint",
            "http://",
        ),
        (MINIMAL + '[cold]\nendpoint_url = "http://[::1"\n', "cold.endpoint_url: 'http://[::1' is not the URL", "http://"),
        (MINIMAL + '[cold]\nendpoint_url = "http://h:99999"\n', "cold.endpoint_url: 'http://h:99999' is not the URL", "http://"),
        (MINIMAL + 'anonymous = true\nprofile = "p"\n', "datasets[0].anonymous: contradicts the profile 'p'", "leave one"),
        (MINIMAL + "anonymous = true\nrequester_pays = true\n", "datasets[0].anonymous: contradicts requester_pays", "leave one"),
        (MINIMAL + 'immutable = true\nmetadata_ttl = "1s"\n', "datasets[0].metadata_ttl: contradicts immutable", "leave one"),
        (MINIMAL + 'replica_trust = "mtime"\n', "datasets[0].replica_trust: has no meaning without a replica", "add replica"),
        (MINIMAL + 'id = ""\n', "datasets[0].id: is empty", "leave it out"),
        (MINIMAL + '[cold]\nread_timeout = "1m"\n', "cold.read_timeout: 60 s is longer than deadline 30 s", "raise"),
        (MINIMAL + f'[admin]\nsocket = "/{"s" * 120}"\n', "admin.socket: longer than the 107 bytes", "shorter"),
        (MINIMAL + '[admin]\nsocket = "s"\n', "admin.socket: 's' is not an absolute path", "begin it with /"),
    ],
)
def test_each_mistake_is_named_with_key_file_and_fix(tmp_path: Path, text: str, culprit: str, fix: str) -> None:
    error = complaint(tmp_path, text)
    assert culprit in str(error)
    assert fix in error.hint


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (b'[mount]\npoint = "/mnt\n', 2),
        (b"[mount]\n\nuid = 1\nuid = 2\n", 4),
        (b'[mount]\npoint = "\xff"\n', 2),
        (b"[hot]\ncapacity = 3TB\n", 2),
    ],
)
def test_broken_toml_is_reported_with_its_line(tmp_path: Path, raw: bytes, line: int) -> None:
    file = tmp_path / "tiercache.toml"
    file.write_bytes(raw)
    with pytest.raises(UsageError, match=rf"tiercache\.toml: .*\(at line {line}\b"):
        load(file)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="missing: No such file"):
        load(tmp_path / "missing")
    with pytest.raises(UsageError, match="Is a directory"):
        load(tmp_path)
    (tmp_path / "big").write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(UsageError, match="larger than 1 MiB"):
        load(tmp_path / "big")


# mounts from the command line


def test_a_mount_shows_one_dataset_at_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = from_mount(
        "s3://bucket/a/images/",
        "mnt",
        hot=["cache"],
        hot_size="100GB",
        replica="replica",
        endpoint_url="http://127.0.0.1:9000",
        anonymous=True,
        allow_other=False,
        gid=7,
        file_mode="0640",
    )
    assert config.single
    assert config.mount.point == f"{tmp_path}/mnt"
    assert (config.mount.allow_other, config.mount.gid, config.mount.file_mode) == (False, 7, 0o640)
    assert config.hot.paths == (f"{tmp_path}/cache",)
    assert config.hot.capacity_bytes == 10**11
    dataset = config.datasets[0]
    assert (dataset.name, dataset.replica, dataset.anonymous) == ("images", f"{tmp_path}/replica", True)
    assert dataset.endpoint_url == "http://127.0.0.1:9000"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("s3://bucket", "bucket"),
        ("s3://bucket/a//", "a"),
        ("file:///data/my set", "my set"),
        ("file:///.-", "dataset"),
        ("file:///d/.x$y", "x-y"),
    ],
)
def test_a_mount_is_named_after_its_source(source: str, name: str) -> None:
    assert from_mount(source, "/mnt/a", hot=["/cache"]).datasets[0].name == name.replace(" ", "-")


@pytest.mark.parametrize(
    ("call", "culprit"),
    [
        ({"hot_size": "big"}, "--hot-size: 'big' is not a size"),
        ({"hot": ["/c", "/c"]}, "--hot: /c is --hot too"),
        ({"hot": ["/mnt/a"]}, "--hot: /mnt/a is MOUNTPOINT too"),
        ({"hot": [""]}, "--hot: is empty"),
        ({"hot": ["/c\udcff"]}, "--hot: '/c\\udcff' is not UTF-8"),
        ({"replica": ""}, "--replica: is empty"),
        ({"replica": "/mnt/a/r"}, "--replica: /mnt/a/r lies inside MOUNTPOINT /mnt/a"),
        ({"endpoint_url": "host"}, "--endpoint-url: 'host' is not the URL"),
        ({"endpoint_url": "http://key:secret@host"}, "--endpoint-url: holds a user name"),
        ({"anonymous": True, "profile": "p"}, "--no-sign-request: contradicts the profile 'p'"),
        ({"file_mode": "rw"}, "-o file_mode: 'rw' is not a file mode"),
        ({"name": "a/b"}, "--name: 'a/b' cannot be the name"),
    ],
)
def test_mistakes_on_the_command_line_name_the_option(call: dict[str, object], culprit: str) -> None:
    with pytest.raises(UsageError) as caught:
        from_mount("s3://bucket", "/mnt/a", **call)  # type: ignore[arg-type]
    assert str(caught.value).startswith(culprit)


def test_options_for_s3_are_refused_for_a_directory() -> None:
    with pytest.raises(UsageError, match="--profile: has no meaning for file:///data"):
        from_mount("file:///data", "/mnt/a", profile="p")


def test_cache_directories_differ_by_mount_point_and_follow_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = default_hot_path("/mnt/a"), default_hot_path("/srv/a")
    assert first != second
    assert first == default_hot_path("/mnt/../mnt/a/")
    assert re.fullmatch(r".*/tiercache/a-[0-9a-f]{8}", first)
    assert re.fullmatch(r".*/tiercache/root-[0-9a-f]{8}", default_hot_path("/"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/u/cache")
    assert default_hot_path("/mnt/a").startswith("/home/u/cache/tiercache/a-")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/u")
    assert default_hot_path("/mnt/a").startswith("/home/u/.cache/tiercache/a-")


# handing over


def test_a_configuration_survives_the_way_to_another_process() -> None:
    for config in (load(EXAMPLE), from_mount("file:///data/\udcff", "/mnt/\udcfe\u00e9", hot=["/c"], hot_size="1TB")):
        assert decode(encode(config)) == config


def test_damage_on_the_way_is_reported() -> None:
    for raw in (b"", b"\xff", b"[]", encode(load(EXAMPLE))[:-1], encode(load(EXAMPLE)).replace(b'"mount"', b'"mouse"')):
        with pytest.raises(UsageError, match="is damaged"):
            decode(raw)


def test_every_public_name_exists() -> None:
    assert all(hasattr(configuration, name) for name in configuration.__all__)
