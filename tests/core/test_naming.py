"""Which keys have a name: CASES 15, against a model that has the whole set of keys before its eyes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.core.naming import (
    Absent,
    Branch,
    DirectoryName,
    FileName,
    Leaf,
    Level,
    Tree,
    Undecided,
    components,
    decide,
    decode,
    encode,
    fault,
    last_of,
)
from tiercache.core.record import Listed, Page
from tiercache.errors import BadResponse

PARTS = ["a", "x", "x-", "x-1", "x-1!", "x.", "x0", "", ".", "..", "L" * 256, "z\0"]
PARTS += ["\u00e9", "e\u0301", "\udcff", "n\nl", "%2F", "a+b", " s "]
keys = st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).map("/".join).filter(bool)
key_sets = st.dictionaries(keys, st.integers(0, 1), max_size=25)


def listed(key: str, size_bytes: int = 1) -> Listed:
    return Listed(key, f"v:{size_bytes}", size_bytes, 0)


def pages(found: Iterable[tuple[str, int | None]], size: int) -> Iterator[Page]:
    """Pages of keys (with sizes) and prefixes (None), in byte order."""
    rows = sorted(found, key=lambda row: encode(row[0]))
    for start in range(0, max(1, len(rows)), size):
        part = rows[start : start + size]
        objects = tuple(listed(key, bytes_) for key, bytes_ in part if bytes_ is not None)
        prefixes = tuple(key for key, bytes_ in part if bytes_ is None)
        yield Page(objects, prefixes, "more" if start + size < len(rows) else "")


def level_rows(store: dict[str, int], prefix: str) -> dict[str, int | None]:
    rows: dict[str, int | None] = {}
    for key, size in store.items():
        if key.startswith(prefix):
            head, slash, _ = key[len(prefix) :].partition("/")
            rows[f"{prefix}{head}{slash}"] = None if slash else size
    return rows


def model_level(store: dict[str, int], prefix: str) -> tuple[dict[bytes, str | None], int]:
    """Names (to the key of a file or None for a directory) and how many keys or prefixes have none."""
    rows = level_rows(store, prefix)
    names: dict[bytes, str | None] = {}
    unreachable = 0
    for row, size in rows.items():
        text = row[len(prefix) :]
        if row == prefix:
            unreachable += bool(size)
        elif fault(encode(text.removesuffix("/"))) is not None:
            unreachable += 1
        elif text.endswith("/"):
            names[encode(text[:-1])] = None
        elif f"{row}/" in rows:
            unreachable += 1
        else:
            names[encode(text)] = row
    return names, unreachable


@given(key_sets, st.sampled_from(["", "a/", "x/", "x-1/"]), st.integers(1, 5))
def test_case_15_a_level_is_what_the_whole_set_of_keys_says_however_it_is_cut_into_pages(
    store: dict[str, int], prefix: str, size: int
) -> None:
    expected, unreachable = model_level(store, prefix)
    level = Level(prefix)
    seen: dict[bytes, str | None] = {}
    for page in pages(level_rows(store, prefix).items(), size):
        for named in level.take(page):
            assert named.name not in seen, "a name was decided twice"
            assert named.name in level
            seen[named.name] = named.listed.key if isinstance(named, FileName) else None
    assert seen == expected
    assert level.unreachable_count == unreachable
    assert bool(level.example) == (unreachable > 0)
    assert level.exists == any(key.startswith(prefix) for key in store)
    assert len(level) == len(expected)


@given(key_sets, st.sampled_from(PARTS), st.sampled_from(["", "a/", "x/"]), st.integers(1, 4))
def test_case_15_a_lookup_agrees_with_the_listing(store: dict[str, int], name: str, prefix: str, limit: int) -> None:
    if fault(encode(name)) is not None:
        return
    expected, _ = model_level(store, prefix)
    rows = level_rows({key: size for key, size in store.items() if key.startswith(prefix + name)}, prefix)
    page = next(pages(rows.items(), limit))
    verdict = decide(prefix, encode(name), page)
    if isinstance(verdict, Undecided):
        assert page.token
        below = any(key.startswith(f"{prefix}{name}/") for key in store)
        verdict = DirectoryName(encode(name)) if below else verdict.otherwise
    match verdict:
        case Absent():
            assert encode(name) not in expected
        case FileName(found, file):
            assert expected[found] == file.key
        case DirectoryName(found):
            assert expected[found] is None


@given(key_sets, st.sampled_from(["", "a/", "x/"]), st.integers(1, 5))
def test_case_15_a_recursive_listing_gives_every_file_that_levels_lead_to(store: dict[str, int], prefix: str, size: int) -> None:
    expected: set[str] = set()
    waiting = [prefix]
    while waiting:
        here = waiting.pop()
        names, _ = model_level(store, here)
        for name, key in names.items():
            if key is None:
                waiting.append(f"{here}{decode(name)}/")
            else:
                expected.add(key)
    tree = Tree(prefix)
    found: list[Leaf | Branch] = []
    for page in pages(((key, bytes_) for key, bytes_ in store.items() if key.startswith(prefix)), size):
        found += tree.take(page)
    files = [leaf for leaf in found if isinstance(leaf, Leaf)]
    assert sorted(leaf.file.listed.key for leaf in files) == sorted(expected)
    for leaf in files:
        path = "/".join(decode(part) for part in (*leaf.parents, leaf.file.name))
        assert prefix + path == leaf.file.listed.key
    files_count = len(files)
    empty_markers = sum(key.startswith(prefix) and key.endswith("/") and not size for key, size in store.items())
    below_count = sum(key.startswith(prefix) for key in store)
    assert below_count - files_count - empty_markers <= tree.unreachable_count <= below_count - files_count


@pytest.mark.parametrize(
    ("name", "nameable"),
    [
        (b"a", True),
        (b"...", True),
        (b"L" * 255, True),
        ("\u00e9".encode() * 127, True),
        (b"\xff\xfe", True),
        (b"\x01\n\x7f", True),
        (b" a ", True),
        (b"%2F+", True),
        (b"", False),
        (b".", False),
        (b"..", False),
        (b"L" * 256, False),
        (b"a\0b", False),
        (b"a/b", False),
    ],
)
def test_case_15_what_posix_can_name(name: bytes, nameable: bool) -> None:
    assert (fault(name) is None) is nameable


def test_case_15_names_keep_their_exact_bytes() -> None:
    for raw in (b"\xff", "\u00e9".encode(), "e\u0301".encode(), b" ", b"%41"):
        assert encode(decode(raw)) == raw


def test_paths_split_into_components() -> None:
    assert components("") == []
    assert components("a/b") == components("a/b/") == [b"a", b"b"]
    assert components("a//b") == [b"a", b"", b"b"]


def test_a_file_before_its_directory_on_an_earlier_page_is_held_back() -> None:
    level = Level("")
    assert level.take(Page((listed("x"), listed("x-1")), (), "more")) == []
    assert b"x" not in level
    later = level.take(Page((), ("x/",), ""))
    assert later == [DirectoryName(b"x"), FileName(b"x-1", listed("x-1"))]
    assert (level.unreachable_count, level.example) == (1, "x")


def test_a_store_that_lists_out_of_order_or_twice_changes_nothing_but_the_moment() -> None:
    level = Level("")
    first = level.take(Page((listed("z"), listed("x")), (), "more"))
    first += level.take(Page((listed("a"),), ("x/",), "more"))
    first += level.take(Page((), ("x/",), ""))
    last = {named.name: named for named in first}
    assert last[b"x"] == DirectoryName(b"x")
    assert len(level) == 3
    assert level.unreachable_count == 1


def test_a_marker_that_is_listed_as_an_object_is_a_directory() -> None:
    assert Level("").take(Page((listed("d/", 0),), (), "")) == [DirectoryName(b"d")]
    assert decide("", b"d", Page((listed("d/", 0),), (), "")) == DirectoryName(b"d")


@pytest.mark.parametrize("page", [Page((listed("b/x"),), (), ""), Page((), ("b/",), ""), Page((), ("a/x",), "")])
def test_an_answer_to_another_question_is_refused(page: Page) -> None:
    with pytest.raises(BadResponse, match="the store answered"):
        Level("a/").take(page)


def test_a_lookup_refuses_an_answer_to_another_question() -> None:
    with pytest.raises(BadResponse, match="'b'"):
        decide("", b"a", Page((listed("b"),), (), ""))


def test_the_last_name_of_a_page_is_the_greatest_of_both_kinds() -> None:
    assert last_of(Page((listed("b"),), ("a/", "c/"), "")) == "c/"
    assert last_of(Page((), (), "")) == ""
