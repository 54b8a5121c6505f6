from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.core.pin import Admitted, PinSet, Refused, admits, covered_bytes, covers, is_live, live, outermost
from tiercache.core.record import Pin


def pin(prefix: str, *, dataset: str = "d", exact: bool = False, expires_seconds: int = 0) -> Pin:
    return Pin(dataset, prefix, exact, "root", "test", 0, expires_seconds, 0)


@pytest.mark.parametrize(
    ("prefix", "key", "expected"),
    [
        ("", "a", True),
        ("", "/a", True),
        ("train/a", "train/a", True),
        ("train/a", "train/a/0001.jpg", True),
        ("train/a", "train/ab", False),
        ("train/a", "train", False),
        ("train/a/", "train/a/0001.jpg", True),
        ("train/a/", "train/a/", True),
        ("train/a/", "train/a", False),
        ("train/a", "train/a/", True),
        ("train/a", "train/a//b", True),
        ("train/a//", "train/a/b", False),
        ("train/a//", "train/a//b", True),
        ("/", "/a", True),
        ("/", "a", False),
    ],
)
def test_prefixes_match_at_slashes_only(prefix: str, key: str, expected: bool) -> None:
    assert covers(pin(prefix), "d", key) is expected
    assert PinSet([pin(prefix)]).covers("d", key, 0) is expected


def sized(prefix: str, size_bytes: int, *, dataset: str = "d", exact: bool = False) -> Pin:
    return Pin(dataset, prefix, exact, "root", "test", 0, 0, size_bytes)


def test_what_several_pins_cover_counts_once() -> None:
    inner = [sized("a/b", 5, exact=True), sized("a/c/", 7), sized("a/c/d", 3, exact=True)]
    beside = [sized("ab", 11), sized("a/", 13, dataset="other"), sized("a", 1, exact=True)]
    assert covered_bytes([*inner, *beside]) == 5 + 7 + 11 + 13 + 1
    assert covered_bytes([*inner, sized("a/", 20), *beside]) == 20 + 11 + 13 + 1
    assert covered_bytes([*inner, sized("", 0), *beside]) == 5 + 7 + 11 + 1 + 13  # one that nobody has measured
    assert covered_bytes([]) == 0


def test_the_same_name_as_a_key_and_as_a_prefix_is_not_covered_by_itself() -> None:
    file, tree = sized("a", 2, exact=True), sized("a", 9)
    assert outermost([file, tree]) == [tree]
    assert covered_bytes([file, tree]) == 9
    assert outermost([sized("a/", 1), tree, sized("a/b", 1)]) == [tree]


@given(st.lists(st.tuples(st.sampled_from(["", "a", "a/", "a/b", "a/b/", "a/b/c", "b"]), st.booleans()), unique=True))
def test_outermost_pins_are_those_that_no_other_covers(chosen: list[tuple[str, bool]]) -> None:
    pins = [sized(prefix, 1, exact=exact) for prefix, exact in chosen]

    def lies_in(inner: Pin, outer: Pin) -> bool:
        return inner is not outer and not outer.exact and covers(outer, "d", inner.prefix)

    assert outermost(pins) == [inner for inner in pins if not any(lies_in(inner, outer) for outer in pins)]


def test_an_exact_pin_covers_one_key() -> None:
    pins = PinSet([pin("a/b", exact=True)])
    assert pins.covers("d", "a/b", 0)
    assert not pins.covers("d", "a/b/c", 0)
    assert not covers(pin("a/b", exact=True), "d", "a/b/c")


def test_an_exact_pin_of_the_empty_key_is_not_the_whole_dataset() -> None:
    assert not covers(pin("", exact=True), "d", "a")
    assert not PinSet([pin("", exact=True)]).covers("d", "a", 0)


def test_pins_of_another_dataset_do_not_count() -> None:
    assert not covers(pin(""), "other", "a")
    assert not PinSet([pin("")]).covers("other", "a", 0)


def test_pins_count_until_they_expire() -> None:
    limited = pin("a", expires_seconds=100)
    assert is_live(limited, 99.9)
    assert not is_live(limited, 100)
    assert live([limited, pin("b")], 100) == [pin("b")]
    pins = PinSet([limited])
    assert pins.covers("d", "a/x", 99)
    assert not pins.covers("d", "a/x", 100)


def test_an_expired_pin_does_not_hide_a_wider_live_one() -> None:
    pins = PinSet([pin("a/b", exact=True, expires_seconds=10), pin("a/b", expires_seconds=10), pin("a")])
    assert pins.find("d", "a/b", 50) == pin("a")


def test_the_narrowest_pin_is_named() -> None:
    pins = PinSet([pin(""), pin("a"), pin("a/b"), pin("a/b", exact=True)])
    assert len(pins) == 4
    assert pins.find("d", "a/b", 0) == pin("a/b", exact=True)
    assert pins.find("d", "a/b/c", 0) == pin("a/b")
    assert pins.find("d", "a/x", 0) == pin("a")
    assert pins.find("d", "x", 0) == pin("")


keys = st.text(st.sampled_from("ab/"), max_size=8)
pins_drawn = st.lists(st.builds(pin, keys, dataset=st.sampled_from("de"), exact=st.booleans(), expires_seconds=st.integers(0, 3)))


@given(pins_drawn, st.sampled_from("de"), keys, st.integers(0, 4))
def test_a_set_of_pins_covers_what_any_live_pin_covers(pins: list[Pin], dataset: str, key: str, now_seconds: int) -> None:
    unique = {(each.dataset, each.prefix, each.exact): each for each in pins}
    pin_set = PinSet(pins)
    expected = any(covers(each, dataset, key) for each in live(unique.values(), now_seconds))
    assert pin_set.covers(dataset, key, now_seconds) is expected
    found = pin_set.find(dataset, key, now_seconds)
    assert (found is not None) is expected
    assert found is None or (covers(found, dataset, key) and is_live(found, now_seconds))


def test_admission_keeps_a_reserve_and_answers_with_numbers() -> None:
    assert admits(500, 200, 400, 1000) == Admitted(fetch_bytes=300, pinned_bytes=900, limit_bytes=900)
    assert admits(501, 200, 400, 1000) == Refused(wanted_bytes=501, pinned_bytes=400, limit_bytes=900, short_bytes=1)
    assert admits(600, 600, 400, 1000, reserve_ratio=0) == Admitted(fetch_bytes=0, pinned_bytes=1000, limit_bytes=1000)


@given(st.integers(0, 10**13), st.integers(0, 10**13), st.integers(0, 10**13), st.integers(0, 10**13))
def test_admitted_pins_never_exceed_the_limit(wanted: int, hot: int, pinned: int, capacity: int) -> None:
    answer = admits(wanted, min(hot, wanted), pinned, capacity)
    assert answer.limit_bytes <= capacity
    if isinstance(answer, Admitted):
        assert answer.pinned_bytes == pinned + wanted <= answer.limit_bytes
        assert answer.fetch_bytes == wanted - min(hot, wanted)
    else:
        assert pinned + wanted == answer.limit_bytes + answer.short_bytes
        assert answer.short_bytes > 0
