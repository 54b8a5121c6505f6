from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiercache.core.eviction import (
    FRESH_SECONDS,
    POOL_CAPACITY,
    TAKE_SHARE,
    Candidate,
    Evict,
    SampledLru,
    WarmCopy,
    oldest_copies,
)
from tiercache.core.record import ObjectId

NOW = 1_000_000


def candidate(number: int, accessed_seconds: int, held_bytes: int = 100, access_count: int = 1) -> Candidate:
    return Candidate(ObjectId(number.to_bytes(20, "big")), held_bytes, accessed_seconds, access_count, held_bytes)


def unprotected(object_id: ObjectId) -> bool:
    return False


def numbers(victims: list[Evict]) -> list[int]:
    return [int.from_bytes(victim.object_id, "big") for victim in victims]


def test_the_oldest_go_first_until_the_need_is_met() -> None:
    sample = [candidate(number, 1000 - number) for number in range(32)]
    victims = SampledLru().choose(sample, 250, NOW, unprotected)
    assert numbers(victims) == [31, 30, 29]
    assert victims[0] == Evict(sample[31].object_id, 100, 969)


def test_no_more_than_a_share_of_a_sample_goes_at_once() -> None:
    sample = [candidate(number, number) for number in range(64)]
    assert numbers(SampledLru().choose(sample, 10**9, NOW, unprotected)) == list(range(64 // TAKE_SHARE))


def test_of_a_tiny_tier_one_object_goes_at_a_time() -> None:
    assert numbers(SampledLru().choose([candidate(1, 20), candidate(2, 10)], 10**9, NOW, unprotected)) == [2]


def test_candidates_that_were_left_compete_with_the_next_sample() -> None:
    policy = SampledLru()
    assert numbers(policy.choose([candidate(1, 10), candidate(2, 20), candidate(3, 90)], 100, NOW, unprotected)) == [1]
    assert numbers(policy.choose([candidate(4, 50), candidate(5, 60)], 100, NOW, unprotected)) == [2]
    assert numbers(policy.choose([candidate(6, 70)], 100, NOW, unprotected)) == [4]


def test_a_newer_record_of_a_pooled_object_replaces_the_old_one() -> None:
    policy = SampledLru()
    policy.choose([candidate(1, 10), candidate(2, 20)], 100, NOW, unprotected)
    assert numbers(policy.choose([candidate(2, 900), candidate(3, 500)], 100, NOW, unprotected)) == [3]


def test_an_outdated_victim_is_named_with_its_old_time_and_only_once() -> None:
    policy = SampledLru()
    policy.choose([candidate(1, 10), candidate(2, 20)], 100, NOW, unprotected)
    assert policy.choose([candidate(3, 30)], 100, NOW, unprotected) == [Evict(candidate(2, 20).object_id, 100, 20)]
    assert numbers(policy.choose([candidate(4, 40)], 100, NOW, unprotected)) == [3]


def test_protected_objects_stay_even_from_the_pool() -> None:
    policy = SampledLru()
    policy.choose([candidate(1, 10), candidate(2, 20)], 100, NOW, unprotected)
    pinned = candidate(2, 20).object_id
    assert numbers(policy.choose([candidate(3, 30)], 100, NOW, lambda object_id: object_id == pinned)) == [3]


def test_case_7_fresh_objects_are_not_evicted_by_one_another() -> None:
    policy = SampledLru()
    sample = [candidate(number, NOW - number % FRESH_SECONDS) for number in range(32)]
    assert policy.choose(sample, 10**9, NOW, unprotected) == []
    assert len(policy.choose(sample, 100, NOW + FRESH_SECONDS, unprotected)) == 1


def test_times_in_the_future_neither_stick_nor_go_first() -> None:
    future = candidate(1, NOW + 10**6)
    assert numbers(SampledLru().choose([future, candidate(2, NOW - 50)], 100, NOW, unprotected)) == [2]
    assert numbers(SampledLru().choose([future], 100, NOW, unprotected)) == [1]


def test_what_holds_nothing_is_no_victim() -> None:
    assert SampledLru().choose([candidate(1, 10, held_bytes=0)], 100, NOW, unprotected) == []


def test_no_need_takes_nothing_and_no_sample_is_no_error() -> None:
    assert SampledLru().choose([candidate(1, 10)], 0, NOW, unprotected) == []
    assert SampledLru().choose([], 100, NOW, unprotected) == []


def test_of_equally_old_objects_the_less_often_read_goes() -> None:
    sample = [candidate(1, 10, access_count=9), candidate(2, 10, access_count=2)]
    assert numbers(SampledLru().choose(sample, 100, NOW, unprotected)) == [2]


candidates = st.builds(candidate, st.integers(0, 300), st.integers(NOW - 1000, NOW + 10), st.integers(0, 5000), st.integers(0, 3))


@given(st.lists(st.tuples(st.lists(candidates, max_size=100), st.integers(0, 20_000)), max_size=8), st.sets(st.integers(0, 300)))
def test_every_choice_keeps_the_rules(rounds: list[tuple[list[Candidate], int]], pinned: set[int]) -> None:
    policy = SampledLru()
    shown: set[tuple[ObjectId, int, int]] = set()
    for sample, need in rounds:
        shown.update((each.object_id, each.held_bytes, each.accessed_seconds) for each in sample)
        victims = policy.choose(sample, need, NOW, lambda object_id: int.from_bytes(object_id, "big") in pinned)
        assert len(victims) <= max(1, len(sample) // TAKE_SHARE)
        assert len(set(numbers(victims))) == len(victims)
        assert not pinned & set(numbers(victims))
        assert sum(victim.held_bytes for victim in victims[:-1]) < max(1, need)
        for victim in victims:
            assert (victim.object_id, victim.held_bytes, victim.accessed_seconds) in shown
            assert victim.held_bytes > 0
            assert not 0 <= NOW - victim.accessed_seconds < FRESH_SECONDS


def test_the_pool_is_bounded() -> None:
    policy = SampledLru()
    policy.choose([candidate(number, number) for number in range(10 * POOL_CAPACITY)], 0, NOW, unprotected)
    drained = 0
    while policy.choose([], 1, NOW, unprotected):
        drained += 1
    assert drained == POOL_CAPACITY


def test_for_demotion_what_was_just_read_may_go_but_goes_last() -> None:
    sample = [candidate(1, NOW), candidate(2, NOW - 100)]
    assert numbers(SampledLru().choose(sample, 10**9, NOW, unprotected, fresh_seconds=0)) == [2]
    assert numbers(SampledLru().choose([candidate(1, NOW)], 10**9, NOW, unprotected, fresh_seconds=0)) == [1]
    assert SampledLru().choose([candidate(1, NOW)], 10**9, NOW, unprotected) == []


def warm_copy(number: int, generation: int, *, is_sole: bool = False) -> WarmCopy:
    return WarmCopy(ObjectId(number.to_bytes(20, "big")), generation, False, 100, is_sole)


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=30), st.integers(0, 3000))
def test_a_warm_copy_that_is_nowhere_else_never_goes(drawn: list[tuple[int, bool]], need_bytes: int) -> None:
    copies = [warm_copy(number, generation, is_sole=is_sole) for number, (generation, is_sole) in enumerate(drawn)]
    going = oldest_copies(copies, need_bytes)
    assert not any(copy.is_sole for copy in going)
    loose = sorted(copy.generation for copy in copies if not copy.is_sole)
    assert [copy.generation for copy in going] == loose[: len(going)]
    assert len(going) == min(len(loose), -(-need_bytes // 100))
