"""What a replica says of itself while its directory is not there, or not yet."""

from __future__ import annotations

from pathlib import Path

import trio

from tiercache.tiers.warm.replica import Replica


async def test_a_look_tells_what_is_wrong_with_the_directory_until_it_is_right(tmp_path: Path, nursery: trio.Nursery) -> None:
    place = tmp_path / "late"
    replica = Replica(place, "", nursery=nursery)
    assert replica.trouble == ""
    await replica.look()
    assert replica.trouble == "does not exist"
    place.write_bytes(b"")
    await replica.look()
    assert replica.trouble == "is not a directory"
    place.unlink()
    place.mkdir()
    await replica.look()
    assert replica.trouble == "is empty"
    (place / "file").write_bytes(b"content")
    await replica.look()
    assert replica.trouble == ""
