from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.core.manifest import Manifest, ManifestDraft, Member
from tiercache.core.pack import Catalogue
from tiercache.core.record import ObjectId, object_id
from tiercache.core.stripe import Generation, Geometry

ONE = Geometry(1, 0)


def id_of(number: int) -> ObjectId:
    return object_id("source", f"key {number}", "v")


def pack_id_of(number: int) -> ObjectId:
    return ObjectId(number.to_bytes(20, "big"))


def pack_of(number: int, members: Sequence[int], generation: int = 1) -> Manifest:
    draft = ManifestDraft(pack_id_of(number), Generation(generation), ONE)
    for each in members:
        member = Member(id_of(each), "source", f"key {each}", "v", 5, 0)
        draft.add(5, 5, is_plain=True, digest=0, checksums=[0], member=member)
    return draft.finish([None])


def test_members_are_found_and_others_are_not() -> None:
    catalogue = Catalogue()
    catalogue.add(pack_of(1, [1, 2, 3]))
    catalogue.add(pack_of(2, [4]))
    assert catalogue.find(id_of(3)) == [(pack_id_of(1), 1, 2)]
    assert catalogue.find(id_of(4)) == [(pack_id_of(2), 1, 0)]
    assert catalogue.find(id_of(5)) == []
    assert (catalogue.packs_count, catalogue.members_count, catalogue.entries_bytes) == (2, 4, 64)
    assert (pack_id_of(1), Generation(1)) in catalogue


def test_the_oldest_copy_comes_first() -> None:
    catalogue = Catalogue()
    for number, generation in ((1, 30), (2, 10), (3, 20)):
        catalogue.add(pack_of(number, [7], generation))
    assert [generation for _, generation, _ in catalogue.find(id_of(7))] == [10, 20, 30]


def test_a_pack_is_added_once() -> None:
    catalogue = Catalogue()
    for _ in range(2):
        catalogue.add(pack_of(1, [1]))
    assert len(catalogue.find(id_of(1))) == catalogue.members_count == 1
    catalogue.drop(pack_id_of(9), Generation(1))
    assert catalogue.packs == [(pack_id_of(1), 1)]


def test_what_looks_like_an_id_across_two_entries_is_none() -> None:
    """Eight bytes that lie across the border of two entries must not be taken for an id."""
    catalogue = Catalogue()
    members = list(range(4000))
    catalogue.add(pack_of(0, members))
    for position in range(1, 16):
        for number in members[:50]:
            identity = id_of(number)
            entry = identity[2:10] + bytes(4) + number.to_bytes(4, "little") + identity[2:10]
            shifted = ObjectId(identity[:2] + entry[position : position + 8] + identity[10:])
            assert catalogue.find(shifted) == []


def test_a_dropped_pack_is_gone_at_once_and_its_entries_in_time() -> None:
    catalogue = Catalogue()
    catalogue.add(pack_of(0, range(500)))
    for number in range(1, 257):
        catalogue.add(pack_of(number, [1000 + number]))
    catalogue.drop(pack_id_of(0), Generation(1))
    assert catalogue.find(id_of(3)) == []
    assert catalogue.members_count == 256
    for number in range(1, 257):
        assert catalogue.find(id_of(1000 + number)) != []
        catalogue.drop(pack_id_of(number), Generation(1))
        assert catalogue.find(id_of(1000 + number)) == []
    assert catalogue.members_count == 0
    assert catalogue.entries_bytes <= 256 * 16  # nothing of the 500
    catalogue.add(pack_of(0, [3]))
    assert len(catalogue.find(id_of(3))) == 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.lists(st.integers(0, 8), max_size=4, unique=True)), max_size=40))
def test_it_is_what_a_dictionary_would_be(steps: list[tuple[int, bool, list[int]]]) -> None:
    catalogue = Catalogue()
    model: dict[int, list[int]] = {}
    for number, is_added, members in steps:
        if is_added:
            catalogue.add(pack_of(number, members))
            model.setdefault(number, members)
        else:
            catalogue.drop(pack_id_of(number), Generation(1))
            model.pop(number, None)
    for each in range(9):
        expected = [(pack_id_of(number), 1, held.index(each)) for number, held in sorted(model.items()) if each in held]
        assert catalogue.find(id_of(each)) == expected
    assert catalogue.members_count == sum(map(len, model.values()))
