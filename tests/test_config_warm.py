"""The table `[warm]`, and the options `--warm-target` and `--ec`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiercache.config import Config, WarmSettings, from_mount, load
from tiercache.config.quantity import parse_shards
from tiercache.errors import UsageError

MIB = 2**20
DATASET = '[[datasets]]\nname = "a"\ncold = "s3://bucket"\nreplica = "/replica"\n[[datasets]]\nname = "b"\ncold = "file:///b"\n'
SIX = [f"/flash/{number}" for number in range(6)]


def loaded(tmp_path: Path, warm: str, hot: str = "") -> Config:
    file = tmp_path / "tiercache.toml"
    file.write_text(f'[mount]\npoint = "/mnt/a"\n[hot]\npaths = ["/cache"]\n{hot}\n[warm]\n{warm}\n{DATASET}')
    return load(file)


def mounted(count: int, ec: str | None = None) -> WarmSettings:
    return from_mount("s3://bucket", "/mnt/a", hot=["/cache"], warm_targets=SIX[:count], ec=ec).warm


def test_without_targets_there_is_no_warm_tier(tmp_path: Path) -> None:
    assert loaded(tmp_path, "").warm == WarmSettings()
    assert loaded(tmp_path, "targets = []").warm.targets == ()
    assert from_mount("s3://bucket", "/mnt/a").warm == WarmSettings()


def test_the_table_has_the_documented_defaults(tmp_path: Path) -> None:
    warm = loaded(tmp_path, f"targets = {SIX}").warm
    assert warm == WarmSettings(targets=tuple(SIX))
    assert (warm.data_shards, warm.parity_shards, warm.shards_count, warm.zstd_level) == (4, 2, 6, 3)
    assert (warm.capacity_bytes, warm.pack_threshold_bytes, warm.scrub_rate_bytes) == (None, MIB, 64_000_000)


def test_texts_become_numbers(tmp_path: Path) -> None:
    keys = 'capacity = "5TB"\npack_threshold = "64KiB"\nscrub_rate = "0B"\nzstd_level = 19\ndata_shards = 3\nparity_shards = 0\n'
    warm = loaded(tmp_path, f"targets = {SIX}\n{keys}").warm
    assert (warm.capacity_bytes, warm.pack_threshold_bytes, warm.scrub_rate_bytes) == (5 * 10**12, 65536, 0)
    assert (warm.zstd_level, warm.data_shards, warm.parity_shards) == (19, 3, 0)


def test_one_target_alone_keeps_single_copies_unless_it_is_said_otherwise(tmp_path: Path) -> None:
    assert (mounted(1).data_shards, mounted(1).parity_shards) == (1, 0)
    warm = loaded(tmp_path, 'targets = ["/flash"]').warm
    assert (warm.data_shards, warm.parity_shards) == (1, 0)
    with pytest.raises(UsageError, match="1\\+2 shards need 3"):
        loaded(tmp_path, 'targets = ["/flash"]\ndata_shards = 1')


def test_packs_follow_smaller_chunks(tmp_path: Path) -> None:
    assert loaded(tmp_path, f"targets = {SIX}", hot='chunk_size = "64KiB"').warm.pack_threshold_bytes == 65536
    assert loaded(tmp_path, f"targets = {SIX}", hot='chunk_size = "32MiB"').warm.pack_threshold_bytes == MIB


@pytest.mark.parametrize(("ec", "shards"), [("4+2", (4, 2)), (" 3 + 1 ", (3, 1)), ("1+0", (1, 0)), ("1+5", (1, 5))])
def test_shards_of_the_command_line(ec: str, shards: tuple[int, int]) -> None:
    warm = mounted(6, ec)
    assert warm.targets == tuple(SIX)
    assert (warm.data_shards, warm.parity_shards) == shards == parse_shards(ec)


def test_relative_targets_of_the_command_line_are_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert from_mount("s3://bucket", "/mnt/a", hot=["/cache"], warm_targets=["flash"]).warm.targets == (f"{tmp_path}/flash",)


@pytest.mark.parametrize(
    ("warm", "culprit", "fix"),
    [
        (
            f"targets = {SIX[:3]}",
            "warm.targets: 3 directories are named, and 4+2 shards need 6",
            "name 3 more, or choose fewer shards, as in data_shards = 2 and parity_shards = 1",
        ),
        (
            'targets = ["/flash"]\nparity_shards = 0',
            "warm.targets: one directory is named, and 4+0 shards need 4",
            "data_shards = 1",
        ),
        ('targets = ["/f", "/f/"]', "warm.targets: 2 directories are named", "name 4 more"),
        ('targets = ["/f", "/f/"]\ndata_shards = 2\nparity_shards = 0', "warm.targets[1]: /f/ is warm.targets[0] too", "its own"),
        ('targets = ["flash"]', "warm.targets[0]: 'flash' is not an absolute path", "begin it with /"),
        ('targets = [" "]', "warm.targets[0]: is empty", "write a value"),
        ('targets = "/flash"', "warm.targets: expected array, got str", ""),
        ('targets = ["/cache/warm"]', "warm.targets[0]: /cache/warm lies inside hot.paths[0] /cache", "outside"),
        ('targets = ["/"]', "lies inside warm.targets[0] /", "outside"),
        ('targets = ["/mnt/a"]', "warm.targets[0]: /mnt/a is mount.point too", "its own"),
        ('targets = ["/replica/x"]', "warm.targets[0]: /replica/x lies inside datasets[0].replica /replica", "outside"),
        ('targets = ["/b"]', "datasets[1].cold: /b is warm.targets[0] too", "its own"),
        ('targets = ["/f"]\nzstd_level = 20', "warm.zstd_level: expected int <= 19", ""),
        ('targets = ["/f"]\nzstd_level = 0', "warm.zstd_level: expected int >= 1", ""),
        ('targets = ["/f"]\ndata_shards = 0', "warm.data_shards: expected int >= 1", ""),
        ('targets = ["/f"]\nparity_shards = 9', "warm.parity_shards: expected int <= 8", ""),
        ('targets = ["/f"]\ndata_shards = 30\nparity_shards = 3', "warm.data_shards: 30+3 is more than 32 shards", "fewer"),
        (
            'targets = ["/f"]\npack_threshold = "9MiB"',
            "warm.pack_threshold: 9437184 bytes is more than hot.chunk_size",
            "lower it",
        ),
        ('targets = ["/f"]\ncapacity = "1MB"', "warm.capacity: 1000000 bytes is less than 4 chunks", "raise it"),
        ('targets = ["/f"]\ncapacity = "much"', "warm.capacity: 'much' is not a size", "500GB"),
        ("zstd_level = 3", "warm.zstd_level: has no meaning without warm.targets", "leave it out"),
        ('targets = ["/f"]\nlevel = 3', "warm.level: unknown key", "did you mean zstd_level?"),
    ],
)
def test_each_mistake_is_named_with_its_key_and_what_to_do(tmp_path: Path, warm: str, culprit: str, fix: str) -> None:
    with pytest.raises(UsageError) as caught:
        loaded(tmp_path, warm)
    assert culprit in str(caught.value)
    assert fix in caught.value.hint


@pytest.mark.parametrize(
    ("call", "culprit", "fix"),
    [
        ({"warm_targets": SIX[:4]}, "--warm-target: 4 directories are named, and 4+2 shards need 6", "name 2 more, or "),
        ({"warm_targets": SIX[:4]}, "--warm-target: ", "as in --ec 3+1"),
        ({"warm_targets": ["/f", "/f"], "ec": "1+1"}, "--warm-target: /f is --warm-target too", "of its own"),
        ({"warm_targets": [""]}, "--warm-target: is empty", "write a value"),
        ({"warm_targets": ["/f\udcff"]}, "--warm-target: '/f\\udcff' is not UTF-8", "another name"),
        ({"warm_targets": ["/cache/w"]}, "--warm-target: /cache/w lies inside --hot /cache", "outside"),
        ({"warm_targets": SIX, "ec": "4"}, "--ec: '4' is not a number of data and of parity shards", "4+2"),
        ({"warm_targets": SIX, "ec": "-4+2"}, "--ec: '-4+2' is not", "4+2"),
        ({"warm_targets": SIX, "ec": "0+2"}, "--ec: expected int >= 1", ""),
        ({"warm_targets": SIX, "ec": "8+3"}, "--warm-target: 6 directories are named, and 8+3 shards need 11", "--ec 4+2"),
        ({"ec": "4+2"}, "--ec: has no meaning without --warm-target", "leave it out"),
    ],
)
def test_mistakes_on_the_command_line_name_the_option(call: dict[str, object], culprit: str, fix: str) -> None:
    with pytest.raises(UsageError) as caught:
        from_mount("s3://bucket", "/mnt/a", hot=["/cache"], **call)  # type: ignore[arg-type]
    assert str(caught.value).startswith(culprit)
    assert fix in caught.value.hint
