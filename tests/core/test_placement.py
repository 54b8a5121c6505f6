from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.core.placement import rendezvous

OBJECTS = [number.to_bytes(20, "big") for number in range(4000)]
TARGETS = [bytes([number]) * 16 for number in range(1, 9)]

targets = st.dictionaries(st.binary(min_size=16, max_size=16), st.floats(1, 1e15), max_size=12)


@settings(deadline=None)
@given(st.binary(min_size=20, max_size=20), targets)
def test_every_target_has_its_place(object_id: bytes, weights: dict[bytes, float]) -> None:
    order = rendezvous(object_id, weights)
    assert sorted(order) == sorted(weights)
    assert order == rendezvous(object_id, dict(reversed(weights.items())))


@settings(deadline=None)
@given(st.binary(min_size=20, max_size=20), targets)
def test_without_one_target_the_others_keep_their_order(object_id: bytes, weights: dict[bytes, float]) -> None:
    order = rendezvous(object_id, weights)
    for target in weights:
        rest = {other: weight for other, weight in weights.items() if other != target}
        assert rendezvous(object_id, rest) == [other for other in order if other != target]


@settings(deadline=None)
@given(st.binary(min_size=20, max_size=20), targets, st.floats(1.01, 10))
def test_more_weight_moves_a_target_to_the_front_only(object_id: bytes, weights: dict[bytes, float], factor: float) -> None:
    order = rendezvous(object_id, weights)
    for target in weights:
        heavier = rendezvous(object_id, weights | {target: weights[target] * factor})
        assert heavier.index(target) <= order.index(target)
        assert [other for other in heavier if other != target] == [other for other in order if other != target]


@pytest.mark.parametrize("weights", [[1.0] * 8, [1.0, 1.0, 2.0, 4.0], [1e12, 3e12]])
def test_the_share_is_that_of_the_weight(weights: list[float]) -> None:
    given_weights = dict(zip(TARGETS, weights, strict=False))
    first = Counter(rendezvous(object_id, given_weights)[0] for object_id in OBJECTS)
    for target, weight in given_weights.items():
        expected = len(OBJECTS) * weight / sum(weights)
        assert abs(first[target] - expected) < 5 * expected**0.5


def test_six_of_eight_are_spread_evenly() -> None:
    weights = dict.fromkeys(TARGETS, 1.0)
    chosen = Counter(target for object_id in OBJECTS for target in rendezvous(object_id, weights)[:6])
    assert all(abs(count - 3000) < 150 for count in chosen.values())


def test_a_target_without_weight_comes_last() -> None:
    weights = {TARGETS[0]: 0.0, TARGETS[1]: 1.0, TARGETS[2]: 0.0}
    assert rendezvous(OBJECTS[0], weights) == [TARGETS[1], TARGETS[0], TARGETS[2]]


def test_the_order_never_changes_between_releases() -> None:
    """Nodes of different releases must look for manifests in the same places."""
    order = rendezvous(OBJECTS[7], dict.fromkeys(TARGETS, 1.0))
    assert [target[0] for target in order] == [2, 8, 6, 3, 4, 1, 5, 7]
