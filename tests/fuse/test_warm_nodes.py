"""Two daemons on one set of targets: what both demote at once, what one has that the other wants, and what is left of it."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from tests.fuse.bucket import Bucket
from tests.fuse.mount import COMMAND_SECONDS, Mount, Mounting, drop_caches
from tests.fuse.warm import KIB, MIB, Targets, a_mixed_dataset, evict_all
from tests.servers.proxy import Proxy
from tests.warm.surveying import Survey, differing, survey
from tiercache.engine.warm_scrubbing import GRACE_SECONDS

OBJECTS_COUNT = 500
TOGETHER_COUNT = 4
SIZES_BYTES = (1, 4 * KIB, 30 * KIB, 100 * KIB) * 3 + (MIB + 1,)
STORED = "tiercache_demoted_stored_bytes_total"


def work(mount: Mount, source: Path, paths: list[Path], seed: int, both: Barrier) -> None:
    """Read and evict one directory after the other: the first ones together, the others in an order of its own."""
    rng = random.Random(seed)
    directories = sorted({path.parent for path in paths})
    together, apart = directories[:TOGETHER_COUNT], directories[TOGETHER_COUNT:]
    rng.shuffle(apart)
    for directory in (*together, *apart):
        chosen = [path for path in paths if path.parent == directory]
        rng.shuffle(chosen)
        try:
            for path in chosen:
                assert (mount.root / path.relative_to(source)).read_bytes() == path.read_bytes(), path
            if directory in together:
                both.wait(COMMAND_SECONDS)
        except BaseException:
            both.abort()
            raise
        ran = mount.tiercache("evict", mount.root / directory.relative_to(source), "--to", "warm", "--json")
        assert ran.code == 0, (ran.out, ran.err)
        assert not ran.json["failures"]


def age_all(targets: Targets) -> None:
    """Everything on them was written long ago, as far as their clocks tell."""
    for kind in ("shards", "manifests", "packs", "drafts"):
        for path in targets.files(kind):
            status = path.stat()
            os.utime(path, (status.st_atime, status.st_mtime - 2 * GRACE_SECONDS))


def copies_of_objects(found: Survey) -> dict[bytes, int]:
    """How many copies have each object, alone or in a pack."""
    counts: dict[bytes, int] = {}
    for seen in found.copies.values():
        manifest = seen.manifest
        members = [member.object_id for member in manifest.members] if manifest.is_pack else [manifest.object_id]
        for object_id in members:
            counts[object_id] = counts.get(object_id, 0) + 1
    return counts


def test_two_daemons_demote_and_read_the_same_objects_at_once(
    bucket: Bucket, proxy: Proxy, mounting: Mounting, tmp_path: Path
) -> None:
    targets = Targets(tmp_path / "warm", 4, 2)
    source = tmp_path / "source"
    total_bytes = sum(SIZES_BYTES[number % len(SIZES_BYTES)] for number in range(OBJECTS_COUNT))
    paths = a_mixed_dataset(source, total_bytes, sizes_bytes=SIZES_BYTES)
    assert len(paths) == OBJECTS_COUNT
    bucket.upload(source)
    one, other = mounts = [mounting(bucket, via=proxy, options=targets.options) for _ in range(2)]

    both = Barrier(len(mounts))
    with ThreadPoolExecutor(len(mounts)) as pool:
        for ended in [pool.submit(work, mount, source, paths, seed, both) for seed, mount in enumerate(mounts)]:
            ended.result()
    contents = {str(path.relative_to(source)): path.read_bytes() for path in paths}
    found = survey(targets.paths)
    assert (found.torn_manifests, found.unreferenced, found.foreign) == ([], [], [])
    assert not [manifest for manifest in found.copies.values() if len(manifest.whole) != 6], "generations are mixed"
    assert {key for seen in found.copies.values() for key, _ in seen.contents()} == set(contents)

    age_all(targets)
    ran = one.tiercache("scrub", "--tier", "warm", "--repair", "--json")
    assert ran.code == 0, (ran.out, ran.err)
    found = survey(targets.paths)
    assert found.incomplete(len(targets.paths)) == []
    counts = copies_of_objects(found)
    assert len(counts) == OBJECTS_COUNT
    assert set(counts.values()) == {1}, "one copy of each object is left"
    versions = {(key, version): contents[key] for (key, version) in found.contents()}
    assert differing(found, versions) == []

    drop_caches()
    stored_before, lying_before = other.metrics().get(STORED, 0.0), targets.used_bytes()
    with proxy.recording() as record:
        for path in paths:
            assert (other.root / path.relative_to(source)).read_bytes() == path.read_bytes(), path
    assert record.gets == []
    assert evict_all(other)["already"] == OBJECTS_COUNT
    assert (other.metrics().get(STORED, 0.0), targets.used_bytes()) == (stored_before, lying_before)
