from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tiercache.core.prefetch import AHEAD_BYTES, ESTABLISHED_BYTES, MAX_STREAMS, Budget, Run, Streams, plan

KIB, MIB, GIB = 1024, 1024**2, 1024**3
CHUNK = 8 * MIB
PIECE = 128 * KIB
MAX_WINDOW = 64 * MIB


def absent(chunk: int) -> bool:
    return False


def test_a_first_read_reads_nothing_ahead() -> None:
    assert Streams(MAX_WINDOW).observe(5 * GIB, PIECE) == Run(PIECE, 0, 5 * GIB + PIECE)


@given(st.integers(0, 10**12), st.lists(st.integers(1, MIB), min_size=1, max_size=100))
def test_reads_in_order_are_one_run(start: int, lengths: list[int]) -> None:
    streams = Streams(MAX_WINDOW)
    position = start
    for length in lengths:
        run = streams.observe(position, length)
        position += length
        assert run.run_bytes == position - start
        assert run.next_offset == position
    assert run.window_bytes <= MAX_WINDOW


def test_the_window_follows_a_young_run_and_leaps_when_it_is_established() -> None:
    streams = Streams(MAX_WINDOW)
    windows = {}
    for position in range(0, 16 * MIB, PIECE):
        run = streams.observe(position, PIECE)
        windows[run.run_bytes] = run.window_bytes
    assert windows[PIECE] == 0
    assert windows[2 * PIECE] == 2 * PIECE
    assert windows[ESTABLISHED_BYTES - PIECE] == ESTABLISHED_BYTES - PIECE
    assert windows[ESTABLISHED_BYTES] == 32 * MIB
    assert windows[8 * MIB] == windows[16 * MIB] == MAX_WINDOW


@given(st.randoms(use_true_random=False))
def test_pieces_slightly_out_of_order_stay_one_run(rng: random.Random) -> None:
    """The kernel has up to a few pieces of a stream under way, and they arrive in any order."""
    streams = Streams(MAX_WINDOW)
    pieces = list(range(256))
    for first in range(0, len(pieces), 4):
        group = pieces[first : first + 4]
        rng.shuffle(group)
        pieces[first : first + 4] = group
    for piece in pieces:
        run = streams.observe(piece * PIECE, PIECE)
    assert run.next_offset == 256 * PIECE
    assert run.run_bytes >= 256 * PIECE * 3 // 4
    assert run.window_bytes == MAX_WINDOW


def test_a_stream_of_which_the_page_cache_hides_parts_stays_one_run() -> None:
    streams = Streams(MAX_WINDOW)
    position = 0
    for step in range(200):
        run = streams.observe(position, PIECE)
        position += PIECE + (512 * KIB if step % 10 == 9 else 0)
    assert run.next_offset == position - 512 * KIB
    assert run.run_bytes > 100 * PIECE


@given(st.integers(2, MAX_STREAMS - 4), st.randoms(use_true_random=False))
def test_case_18_interleaved_streams_of_one_handle_do_not_look_random(count: int, rng: random.Random) -> None:
    streams = Streams(MAX_WINDOW)
    positions = [number * GIB for number in range(count)]
    turns = [number for number in range(count) for _ in range(20)]
    rng.shuffle(turns)
    for number in turns:
        run = streams.observe(positions[number], PIECE)
        positions[number] += PIECE
        assert run.run_bytes == positions[number] - number * GIB


def test_case_18_random_reads_between_them_reset_no_stream() -> None:
    streams = Streams(MAX_WINDOW)
    rng = random.Random(1)
    positions = [number * GIB for number in range(4)]
    for _ in range(100):
        for number in range(4):
            run = streams.observe(positions[number], PIECE)
            positions[number] += PIECE
            assert run.run_bytes == positions[number] - number * GIB
        for _ in range(3):
            streams.observe(rng.randrange(100 * GIB, 1000 * GIB), 4 * KIB)
    for _ in range(1000):
        streams.observe(rng.randrange(100 * GIB, 1000 * GIB), 4 * KIB)
    assert streams.observe(positions[0], PIECE).run_bytes == positions[0] + PIECE


def test_a_new_stream_gets_a_place_when_all_are_taken() -> None:
    streams = Streams(MAX_WINDOW)
    for number in range(2 * MAX_STREAMS):
        for position in range(0, 4 * PIECE, PIECE):
            run = streams.observe(number * GIB + position, PIECE)
        assert run.run_bytes == 4 * PIECE


def test_random_reads_look_random() -> None:
    streams = Streams(MAX_WINDOW)
    rng = random.Random(3)
    runs = [streams.observe(rng.randrange(GIB // 4096) * 4096, 4096) for _ in range(20_000)]
    assert sum(run.run_bytes > 4096 for run in runs) <= 20_000 // 500
    assert max(run.window_bytes for run in runs) <= 64 * KIB


def test_reading_the_same_bytes_again_is_no_progress() -> None:
    streams = Streams(MAX_WINDOW)
    for _ in range(100):
        run = streams.observe(GIB, PIECE)
        assert run.run_bytes == PIECE
        assert run.next_offset == GIB + PIECE


@given(st.lists(st.tuples(st.integers(0, 64 * MIB), st.integers(1, MIB)), min_size=1, max_size=200))
def test_whatever_is_read_runs_and_windows_stay_within_bounds(reads: list[tuple[int, int]]) -> None:
    streams = Streams(MAX_WINDOW)
    total = 0
    for offset, length in reads:
        run = streams.observe(offset, length)
        total += length
        assert length <= run.run_bytes <= min(total, run.next_offset)
        assert offset + length <= run.next_offset <= offset + length + 65 * MIB
        assert 0 <= run.window_bytes <= MAX_WINDOW


def test_a_jump_beyond_the_room_of_a_stream_begins_another() -> None:
    streams = Streams(max_window_bytes=0)
    for position in range(0, 8 * MIB, PIECE):
        streams.observe(position, PIECE)
    assert streams.observe(8 * MIB + AHEAD_BYTES + 1, PIECE).run_bytes == PIECE
    assert streams.observe(8 * MIB, PIECE).run_bytes > 8 * MIB


def test_plan_names_the_chunks_of_the_window_nearest_first() -> None:
    run = Run(4 * MIB, 32 * MIB, 4 * MIB)
    assert plan(run, 100 * GIB, CHUNK, absent) == [1, 2, 3, 4]
    assert plan(run, 100 * GIB, CHUNK, {1, 3}.__contains__) == [2, 4]
    assert plan(Run(8 * MIB, 64 * MIB, 8 * MIB), 100 * GIB, CHUNK, absent) == list(range(1, 9))
    assert plan(run, 20 * MIB, CHUNK, absent) == [1, 2]
    assert plan(run, 4 * MIB, CHUNK, absent) == []
    assert plan(Run(PIECE, 0, 8 * MIB), 100 * GIB, CHUNK, absent) == []


@given(st.integers(0, GIB), st.integers(0, 64 * MIB), st.integers(1, GIB), st.sets(st.integers(0, 128)))
def test_plans_hold_only_missing_chunks_of_the_object_within_the_window(
    head: int, window_bytes: int, size: int, present: set[int]
) -> None:
    chunks = plan(Run(1, window_bytes, min(head, size)), size, CHUNK, present.__contains__)
    assert chunks == sorted(set(chunks) - present)
    assert len(chunks) <= window_bytes // CHUNK + 1
    for chunk in chunks:
        assert min(head, size) <= chunk * CHUNK < min(size, head + window_bytes)


def test_a_young_run_plans_no_more_than_it_read() -> None:
    """Averaged over the places where a record may lie, since a chunk is fetched whole."""
    planned = 0
    record = 512 * KIB
    places = range(0, 4 * CHUNK, PIECE)
    for place in places:
        streams = Streams(MAX_WINDOW)
        chunks: set[int] = set()
        for position in range(place, place + record, PIECE):
            chunks.update(plan(streams.observe(position, PIECE), GIB, CHUNK, absent))
        planned += len(chunks) * CHUNK
    assert planned / len(places) <= 2 * record


@given(st.integers(0, 100), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60), st.booleans()), max_size=100))
def test_case_14_no_number_of_handles_exceeds_the_budget(capacity: int, steps: list[tuple[int, int, bool]]) -> None:
    budget = Budget(capacity)
    held = [0] * 10
    for handle, wanted, back in steps:
        if back:
            budget.give_back(held[handle])
            held[handle] = 0
            continue
        granted = budget.grant(wanted, held[handle])
        assert 0 <= granted <= wanted
        held[handle] += granted
        assert budget.used_bytes == sum(held) <= capacity


def test_case_14_hundreds_of_handles_share_the_budget_evenly() -> None:
    budget = Budget(256 * MIB)
    held = [0] * 7
    for _ in range(100):
        for handle in range(7):
            held[handle] += budget.grant(MIB, held[handle])
    assert min(held) >= 256 * MIB // 8 - MIB
    assert max(held) <= 256 * MIB // 8 + MIB
    crowd = [budget.grant(CHUNK) for _ in range(300)]
    assert sum(held) + sum(crowd) == budget.used_bytes == 256 * MIB
    for granted in (*held, *crowd):
        budget.give_back(granted)
    assert budget.used_bytes == 0


def test_a_lone_stream_gets_half_of_the_budget_and_one_chunk_at_least() -> None:
    budget = Budget(256 * MIB)
    held = 0
    while granted := budget.grant(CHUNK, held):
        held += granted
    assert 128 * MIB <= held <= 128 * MIB + CHUNK
    assert Budget(CHUNK).grant(CHUNK) == CHUNK
