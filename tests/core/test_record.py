from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiercache.core.record import (
    OBJECT_ID_BYTES,
    ROOT_INODE,
    Entry,
    Inode,
    Kind,
    ObjectRef,
    inode_number,
    object_id,
)

names = st.binary(max_size=40).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
triples = st.tuples(names, names, names)


@given(triples, triples)
def test_object_ids_are_equal_only_for_equal_source_key_and_version(
    left: tuple[str, str, str], right: tuple[str, str, str]
) -> None:
    assert (object_id(*left) == object_id(*right)) == (left == right)


@given(triples)
def test_object_ids_have_their_length(names: tuple[str, str, str]) -> None:
    assert len(object_id(*names)) == OBJECT_ID_BYTES


@given(st.text(max_size=20), st.integers(0, 20), st.integers(0, 20))
def test_text_that_moves_between_the_parts_changes_the_id(text: str, left: int, right: int) -> None:
    first, second = sorted((min(left, len(text)), min(right, len(text))))
    parts = (text[:first], text[first:second], text[second:])
    shifted = (text[:second], text[second:], "")
    assert (object_id(*parts) == object_id(*shifted)) == (parts == shifted)


def test_object_ids_never_change_between_releases_and_nodes() -> None:
    """Every node must compute the same id, and a new release must find what an old one cached."""
    assert object_id("s3.example.com/b", "train/0001.jpg", "abc:100").hex() == "a34452211ac0c020dad26ec7d5001eff5b657c58"


def test_inode_numbers_never_change_between_releases() -> None:
    assert inode_number("d", "train/0001.jpg", "abc:100") == 7534774636845152471


@given(triples, st.integers(0, 1000))
def test_inode_numbers_fit_63_bits_and_spare_those_of_the_kernel(names: tuple[str, str, str], attempt: int) -> None:
    assert ROOT_INODE < inode_number(*names, attempt=attempt) < 2**63


@given(triples, triples)
def test_inode_numbers_follow_from_the_name_and_the_version(left: tuple[str, str, str], right: tuple[str, str, str]) -> None:
    assert (inode_number(*left) == inode_number(*right)) == (left == right)


@given(triples)
def test_another_attempt_gives_another_number(names: tuple[str, str, str]) -> None:
    assert len({inode_number(*names, attempt=attempt) for attempt in range(8)}) == 8


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_case_15_keys_that_are_not_utf8_keep_their_identity(left: bytes, right: bytes) -> None:
    keys = [raw.decode("utf-8", "surrogateescape") for raw in (left, right)]
    assert [key.encode("utf-8", "surrogateescape") for key in keys] == [left, right]
    assert (object_id("s", keys[0], "v") == object_id("s", keys[1], "v")) == (left == right)


def test_an_entry_knows_the_object_it_stands_for() -> None:
    identity = object_id("s", "a/b", "v:7")
    entry = Entry(Inode(5), ROOT_INODE, b"b", Kind.FILE, "d", "a/b", "v:7", 7, 1000, identity)
    assert entry.ref == ObjectRef("d", "a/b", "v:7", 7, 1000, identity)
