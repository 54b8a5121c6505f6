"""`tiercache extract` on targets that this test writes by the documented format, whole and damaged."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tiercache.cli.main import main
from tiercache.core.manifest import ManifestDraft, Member
from tiercache.core.record import ObjectId, ObjectRef, object_id
from tiercache.core.stripe import (
    Generation,
    Geometry,
    encode_shard_footer,
    encode_shard_header,
    manifest_path,
    shard_path,
)
from tiercache.tiers.warm.codec import encode_stripe
from tiercache.tiers.warm.isal import ErasureCode

SOURCE = "s3.example.com/bucket"
CHUNK_BYTES = 10_000
FOUR_TWO = Geometry(4, 2)
TEXT = b"".join(b"line %d of a text that shrinks\n" % number for number in range(1000))
NOISE = random.Random(1).randbytes(25_000)


def uuid_of(number: int) -> bytes:
    return bytes([number + 1]) * 16


class Shelf:
    """Six targets, and copies written to them as docs/formats.md says."""

    def __init__(self, root: Path, count: int = 6) -> None:
        self.targets = [root / f"target{number}" for number in range(count)]
        for target in self.targets:
            target.mkdir()

    def arguments(self, *more: str) -> list[str]:
        return ["extract", *(f"--warm-target={target}" for target in self.targets), *more]

    def put(
        self, key: str, content: bytes, version: str = "v1", generation: int = 1, geometry: Geometry = FOUR_TWO, mtime: int = 1000
    ) -> ObjectId:
        ref = ObjectRef("", key, version, len(content), mtime, object_id(SOURCE, key, version))
        draft = ManifestDraft.of_object(ref, SOURCE, Generation(generation), geometry, chunk_bytes=CHUNK_BYTES)
        chunks = [content[start : start + CHUNK_BYTES] for start in range(0, len(content), CHUNK_BYTES)]
        self._write(draft, chunks, [None] * len(chunks))
        return ref.object_id

    def put_pack(self, contents: dict[str, bytes], generation: int = 1) -> ObjectId:
        identity = ObjectId(b"\xab" * 20)
        draft = ManifestDraft(identity, Generation(generation), FOUR_TWO)
        members = [
            Member(object_id(SOURCE, key, "v1"), SOURCE, key, "v1", len(content), 1000) for key, content in contents.items()
        ]
        self._write(draft, list(contents.values()), members)
        return identity

    def _write(self, draft: ManifestDraft, chunks: Sequence[bytes], members: Sequence[Member | None]) -> None:
        geometry, is_pack = draft.geometry, draft.is_pack
        code = ErasureCode(geometry.data_count, geometry.parity_count)
        files = [
            bytearray(encode_shard_header(draft.object_id, draft.generation, geometry, index, is_pack=is_pack))
            for index in range(geometry.shards_count)
        ]
        for chunk, member in zip(chunks, members, strict=True):
            encoded = encode_stripe(chunk, 3, code)
            for file, piece in zip(files, encoded.pieces, strict=True):
                file += piece
            row = {"is_plain": encoded.is_plain, "digest": encoded.digest, "checksums": encoded.checksums}
            draft.add(encoded.logical_bytes, encoded.frame_bytes, **row, member=member)  # type: ignore[arg-type]
        for index, file in enumerate(files):
            path = self.targets[index] / shard_path(draft.object_id, draft.generation, index)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(file) + encode_shard_footer(draft.stripes(), index))
        manifest = draft.finish([uuid_of(index) for index in range(geometry.shards_count)])
        for target in self.targets[: geometry.parity_count + 1]:
            path = target / manifest_path(draft.object_id, draft.generation, is_pack=is_pack)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(manifest.encode())

    def shards(self, pattern: str = "*") -> list[Path]:
        return sorted(
            (path for target in self.targets for path in target.glob(f"shards/*/{pattern}")), key=lambda path: path.suffix
        )


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return Shelf(tmp_path)


class Ran:
    def __init__(self, capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> None:
        self.code = main(arguments)
        self.out, self.err = capsys.readouterr()

    @property
    def document(self) -> Any:
        return json.loads(self.out)


@pytest.mark.parametrize(
    "content", [b"", b"x", TEXT, NOISE, TEXT + NOISE + TEXT], ids=["empty", "byte", "text", "noise", "mixed"]
)
@pytest.mark.parametrize("geometry", [Geometry(1, 0), Geometry(1, 1), FOUR_TWO], ids=lambda each: each.text)
def test_an_object_comes_back(shelf: Shelf, capsys: pytest.CaptureFixture[str], content: bytes, geometry: Geometry) -> None:
    shelf.put("train/a.bin", content, geometry=geometry)
    ran = Ran(capsys, shelf.arguments("train/a.bin"))
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("a.bin: ")
    assert Path("a.bin").read_bytes() == content
    assert Path("a.bin").stat().st_mtime == 1000
    assert os.listdir() == ["a.bin"]


def test_by_object_id_and_to_another_name(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    identity = shelf.put("train/a.bin", TEXT)
    ran = Ran(capsys, shelf.arguments("--output", "other", "--json", identity.hex().upper()))
    assert ran.code == 0
    assert ran.document["output"] == "other"
    assert (ran.document["key"], ran.document["object_id"]) == ("train/a.bin", identity.hex())
    assert Path("other").read_bytes() == TEXT


def test_a_key_that_looks_like_an_object_id(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    key = "ab" * 20
    shelf.put(key, TEXT)
    assert Ran(capsys, shelf.arguments(key)).code == 0
    assert Path(key).read_bytes() == TEXT


def test_a_member_of_a_pack(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    pack_id = shelf.put_pack({"small/a": b"aaa", "small/b": NOISE[:777], "small/empty": b""})
    assert Ran(capsys, shelf.arguments("small/b")).code == 0
    assert Path("b").read_bytes() == NOISE[:777]
    assert Ran(capsys, shelf.arguments(object_id(SOURCE, "small/empty", "v1").hex())).code == 0
    assert Path("empty").read_bytes() == b""
    ran = Ran(capsys, shelf.arguments(pack_id.hex()))
    assert ran.code == 1
    assert "no copy of it can be found" in ran.err


@pytest.mark.parametrize("missing", [(0, 1), (0, 5), (2, 4)])
def test_any_two_targets_may_be_gone(shelf: Shelf, capsys: pytest.CaptureFixture[str], missing: tuple[int, int]) -> None:
    shelf.put("a", TEXT + NOISE)
    for number in missing:
        shutil.rmtree(shelf.targets[number])
    ran = Ran(capsys, shelf.arguments("a"))
    assert ran.code == 0
    assert "No such file" in ran.err
    assert Path("a").read_bytes() == TEXT + NOISE


def test_with_three_targets_gone_there_is_an_error_and_no_file(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    shelf.put("a", TEXT)
    for number in (1, 2, 3):
        shutil.rmtree(shelf.targets[number])
    ran = Ran(capsys, shelf.arguments("a"))
    assert ran.code == 1
    assert "byte 0 cannot be read: 3 of 4 pieces" in ran.err
    assert os.listdir() == []


def test_damage_is_found_and_gone_around(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    """Two pieces of every stripe are wrong, each in another way, and two manifests of three."""
    content = TEXT + NOISE
    shelf.put("a", content)
    source = random.Random(3)
    damaged, truncated = shelf.shards()[1], shelf.shards()[3]
    raw = bytearray(damaged.read_bytes())
    for position in range(64, len(raw), 7):
        raw[position] ^= 1 << source.randrange(8)
    damaged.write_bytes(raw)
    os.truncate(truncated, 70)
    manifests = [path for target in shelf.targets for path in target.glob("manifests/*/*")]
    manifests[0].write_bytes(source.randbytes(500))
    os.truncate(manifests[1], 100)
    ran = Ran(capsys, shelf.arguments("a"))
    assert ran.code == 0
    assert "not one" in ran.err
    assert Path("a").read_bytes() == content


def test_never_a_wrong_byte_whatever_is_flipped(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    content = NOISE + TEXT
    shelf.put("a", content)
    source = random.Random(4)
    files = [path for target in shelf.targets for path in target.rglob("*") if path.is_file()]
    originals = {path: path.read_bytes() for path in files}
    codes = set()
    for _ in range(40):
        for path in source.sample(files, source.choice([2, 3, 6])):
            raw = bytearray(originals[path])
            for _ in range(source.choice([1, 20, 400])):
                raw[source.randrange(len(raw))] ^= 1 << source.randrange(8)
            path.write_bytes(raw[: source.choice([len(raw), source.randrange(len(raw))])])
        codes.add(Ran(capsys, shelf.arguments("--force", "a")).code)
        assert not Path("a").exists() or Path("a").read_bytes() == content
        for path, raw_before in originals.items():
            path.write_bytes(raw_before)
        Path("a").unlink(missing_ok=True)
    assert codes == {0, 1}


def test_a_chunk_that_one_copy_lacks_comes_from_another(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    content = NOISE + TEXT
    for generation in (1, 2):
        shelf.put("a", content, generation=generation)
    for path in shelf.shards("*.0000000000000001.*")[:3]:
        os.truncate(path, 64 + 2500)  # one stripe is left
    for path in shelf.shards("*.0000000000000002.*")[:3]:
        raw = path.read_bytes()
        path.write_bytes(raw[:64] + bytes(100) + raw[164:])  # the first one is gone
    assert Ran(capsys, shelf.arguments("a")).code == 0
    assert Path("a").read_bytes() == content


def test_several_versions_are_not_guessed_at(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    old = shelf.put("a", b"old", "v1", mtime=1000)
    new = shelf.put("a", b"new", "v2", mtime=2000)
    ran = Ran(capsys, shelf.arguments("a"))
    assert ran.code == 2
    assert "2 versions" in ran.err
    assert ran.err.index(new.hex()) < ran.err.index(old.hex())
    assert Ran(capsys, shelf.arguments("--newest", "a")).code == 0
    assert Path("a").read_bytes() == b"new"
    assert Ran(capsys, shelf.arguments("--force", old.hex())).code == 0
    assert Path("a").read_bytes() == b"old"


def test_a_file_that_exists_is_left_alone(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    shelf.put("a", TEXT)
    Path("a").write_bytes(b"mine")
    Path("directory").mkdir()
    assert Ran(capsys, shelf.arguments("a")).code == 2
    assert Ran(capsys, shelf.arguments("--output", "directory", "--force", "a")).code == 2
    assert Path("a").read_bytes() == b"mine"
    assert Ran(capsys, shelf.arguments("--output", "nowhere/a", "a")).code == 1
    assert Ran(capsys, shelf.arguments("--force", "a")).code == 0
    assert Path("a").read_bytes() == TEXT
    assert sorted(os.listdir()) == ["a", "directory"]


def test_targets_are_not_written_to(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    def seen() -> list[tuple[Path, int, int]]:
        found = sorted(path for target in shelf.targets for path in (target, *target.rglob("*")))
        return [(path, path.stat().st_mtime_ns, path.stat().st_size) for path in found]

    shelf.put("a", TEXT)
    before = seen()
    assert Ran(capsys, shelf.arguments("a")).code == 0
    assert Ran(capsys, shelf.arguments("--list")).code == 0
    assert seen() == before


def test_the_list_for_people(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    assert Ran(capsys, shelf.arguments("--list")).out == "no copy is there\n"
    shelf.put("train/b", TEXT)
    shelf.put("train/a\x1b", TEXT)
    shelf.put_pack({"small": b"123"})
    shelf.shards(f"{object_id(SOURCE, 'train/b', 'v1').hex()}*")[0].unlink()
    ran = Ran(capsys, shelf.arguments("--list"))
    assert ran.code == 0
    lines = [line.split("  ") for line in ran.out.splitlines()]
    assert [line[0] for line in lines] == ["KEY", "small", "train/a\\x1b", "train/b"]
    assert "degraded (5 of 6 shards, 3 manifests)" in lines[3]
    assert "complete" in lines[1]
    os.truncate(next(shelf.targets[1].glob("packs/*")), 90)
    ran = Ran(capsys, shelf.arguments(f"--warm-target={shelf.targets[0]}/.", "--list", "small"))
    assert "degraded (6 of 6 shards, 2 manifests)" in ran.out


def test_the_list_for_machines(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    shelf.put("b", TEXT)
    shelf.put("a", NOISE, generation=255)
    pack_id = shelf.put_pack({"c": b"123"})
    for path in shelf.shards(f"{object_id(SOURCE, 'b', 'v1').hex()}*")[:3]:
        path.unlink()
    ran = Ran(capsys, shelf.arguments("--list", "--json"))
    assert ran.code == 1
    assert ran.document["error"] == "1 of the copies cannot be read"
    [a, b, c] = ran.document["copies"]
    assert a == {
        "key": "a",
        "version": "v1",
        "source_id": SOURCE,
        "size_bytes": len(NOISE),
        "mtime_seconds": 1000,
        "object_id": object_id(SOURCE, "a", "v1").hex(),
        "generation": "00000000000000ff",
        "pack_id": None,
        "ec": "4+2",
        "state": "complete",
        "shards_count": 6,
        "manifests_count": 3,
    }
    assert (b["state"], b["shards_count"]) == ("unreadable", 3)
    assert (c["pack_id"], c["state"]) == (pack_id.hex(), "complete")
    only = Ran(capsys, shelf.arguments("--list", "--json", "c"))
    assert [copy["key"] for copy in only.document["copies"]] == ["c"]


def test_a_copy_without_a_valid_manifest_is_reported(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    shelf.put("a", TEXT)
    shelf.put("b", TEXT)
    for target in shelf.targets:
        for path in target.glob(f"manifests/*/{object_id(SOURCE, 'a', 'v1').hex()}*"):
            path.write_bytes(b"noise")
    ran = Ran(capsys, shelf.arguments("--list", "--json"))
    assert (ran.code, len(ran.document["copies"])) == (1, 1)
    assert "none of its manifests can be read" in ran.document["problems"][-1]


def test_a_pipe_among_the_shards_does_not_stop_it(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    shelf.put("a", TEXT)
    path = shelf.shards()[0]
    path.unlink()
    os.mkfifo(path)
    assert Ran(capsys, shelf.arguments("a")).code == 0
    assert Path("a").read_bytes() == TEXT


@pytest.mark.parametrize(
    "arguments",
    [
        ["extract", "a"],
        ["extract", "--warm-target=."],
        ["extract", "--warm-target=.", "--list", "--force"],
        ["extract", "--warm-target=.", "--json", "--output=-", "a"],
    ],
)
def test_what_makes_no_sense_is_a_usage_error(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert Ran(capsys, arguments).code == 2


def test_without_any_target_there_is_nothing_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, ["extract", f"--warm-target={tmp_path}/nowhere", "--list"])
    assert ran.code == 1
    assert "no target can be read" in ran.err


def test_to_a_pipe(shelf: Shelf) -> None:
    shelf.put("a", TEXT + NOISE)
    command = [sys.executable, "-m", "tiercache", *shelf.arguments("--output", "-", "a")]
    done = subprocess.run(command, check=True, capture_output=True)
    assert done.stdout == TEXT + NOISE
    for path in shelf.shards()[:3]:
        raw = path.read_bytes()
        path.write_bytes(raw[:-400] + bytes(400))
    done = subprocess.run(command, check=False, capture_output=True)
    assert done.returncode == 1
    assert (TEXT + NOISE).startswith(done.stdout)


def test_by_hand_with_dd_and_zstd(shelf: Shelf, tmp_path: Path) -> None:
    """The recipe of docs/formats.md, typed as it stands there: a shell, `od`, `dd`, `cat` and `zstd`."""
    if shutil.which("zstd") is None:
        pytest.skip("no zstd program")
    page = (Path(__file__).parents[2] / "docs/formats.md").read_text()
    script = page.partition("<!-- by hand -->\n```sh\n")[2].partition("\n```")[0]
    for key, content in (("text", TEXT), ("mixed", TEXT[:20_000] + NOISE), ("empty", b"")):
        identity = shelf.put(key, content)
        for number, path in enumerate(shelf.shards(f"{identity.hex()}*")[:4]):
            shutil.copy(path, tmp_path / f"shard{number}")
        subprocess.run(["sh", "-euc", script], check=True, cwd=tmp_path, env={**os.environ, "k": "4"})
        assert (tmp_path / "object").read_bytes() == content
