from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiercache.core.health import (
    DOWN_AFTER_COUNT,
    PROBING,
    QUIET_SECONDS,
    UP_SECONDS,
    WRITE_SECONDS,
    Health,
    Usage,
    Writing,
)

ROOM = Usage(50 << 30, 100 << 30)
NO_ROOM = Usage(0, 100 << 30)


def _recover(health: Health, now: float, *, writing: Writing = "done", usage: Usage = ROOM) -> None:
    health.probe_succeeded(now, 0.5, usage, writing)


def test_an_error_makes_suspect_and_a_probe_due_and_a_good_probe_up_again() -> None:
    health = Health(0.0)
    _recover(health, 0.0)
    assert not health.probe_due(1.0)
    health.failed(1.0, "Input/output error")
    assert (health.state, health.detail, health.errors_count) == ("suspect", "Input/output error", 1)
    assert health.probe_due(1.0)
    _recover(health, 1.1)
    assert (health.state, health.detail, health.errors_count) == ("up", "", 1)


def test_operations_alone_never_make_a_target_down() -> None:
    health = Health(0.0)
    for _ in range(100):
        health.failed(1.0, "Input/output error")
    assert (health.state, health.errors_count) == ("suspect", 100)


def test_probes_that_fail_make_it_down_and_back_off() -> None:
    health = Health(0.0)
    health.failed(100.0, "does not answer")
    now, waits = 100.0, []
    for count in range(1, 12):
        assert health.probe_due(now)
        health.probe_failed(now, 0.999, "does not answer", is_gone=False)
        assert health.state == ("suspect" if count < DOWN_AFTER_COUNT else "down")
        waits.append(round(health.probe_at - now, 6))
        now = health.probe_at
    assert waits == sorted(waits)
    assert waits[0] <= 4.0
    assert waits[-1] <= PROBING.ceiling_seconds
    _recover(health, now)
    assert health.state == "up"


def test_a_target_that_is_gone_is_down_at_once() -> None:
    health = Health(0.0)
    health.probe_failed(0.0, 0.5, "is not mounted", is_gone=True)
    assert (health.state, health.detail, health.errors_count) == ("down", "is not mounted", 0)
    other = Health(0.0)
    other.vanished(5.0, "has no marker")
    assert other.state == "down"
    assert other.probe_due(5.0)


def test_wrong_bytes_are_counted_and_nothing_else() -> None:
    health = Health(0.0)
    for _ in range(50):
        health.damaged()
    assert (health.state, health.errors_count) == ("up", 50)


def test_a_full_target_stays_up_until_a_probe_could_write_and_found_space() -> None:
    health = Health(0.0)
    _recover(health, 0.0)
    health.filled(1.0)
    assert (health.state, health.is_full) == ("up", True)
    assert health.wants_write(1.0)
    assert health.probe_at <= 1.0 + PROBING.first_seconds
    _recover(health, 3.0, writing="full", usage=NO_ROOM)
    assert (health.state, health.is_full, health.detail) == ("up", True, "full")
    _recover(health, 5.0, writing="done", usage=NO_ROOM)
    assert health.is_full
    _recover(health, 7.0, writing="untried")
    assert health.is_full
    _recover(health, 9.0)
    assert (health.is_full, health.detail) == (False, "")


def test_a_read_only_target_is_suspect_until_a_probe_could_write() -> None:
    health = Health(0.0)
    health.write_refused(1.0, "not writable: Read-only file system")
    assert (health.state, health.is_writable) == ("suspect", False)
    assert health.wants_write(1.0)
    for now in (2.0, 10.0, 50.0):
        health.probe_succeeded(now, 0.999, ROOM, "refused", "not writable: Read-only file system")
        assert (health.state, health.is_writable, health.detail) == ("suspect", False, "not writable: Read-only file system")
    _recover(health, 60.0)
    assert (health.state, health.is_writable, health.detail) == ("up", True, "")


def test_probes_of_a_target_that_is_up_write_now_and_then() -> None:
    health = Health(0.0)
    _recover(health, 0.0)
    assert not health.wants_write(WRITE_SECONDS - 1)
    _recover(health, 10.0, writing="untried")
    assert health.wants_write(WRITE_SECONDS)


def test_a_target_whose_operations_hang_while_its_probes_succeed_backs_off_and_is_forgiven_after_a_quiet_time() -> None:
    health, now, waits = Health(0.0), 1000.0, []
    for _ in range(6):
        health.failed(now, "does not answer")
        waits.append(max(0.0, health.probe_at - now))
        now = max(now, health.probe_at)
        _recover(health, now)
        now += 0.5
    assert waits[0] == 0.0
    assert waits[-1] > 5.0
    now += QUIET_SECONDS
    health.failed(now, "does not answer")
    assert health.probe_due(now)


def test_a_call_that_comes_back_is_worth_a_probe() -> None:
    health = Health(0.0)
    health.probe_failed(0.0, 0.999, "does not answer", is_gone=True)
    assert not health.probe_due(0.1)
    health.wish_probe(0.1)
    assert health.probe_due(0.1)


EVENTS = st.sampled_from(
    ["failed", "damaged", "refused", "filled", "vanished", "good", "full", "untried", "ro", "bad", "gone", "back"]
)


@given(st.lists(st.tuples(EVENTS, st.floats(0.0, 100.0), st.floats(0.0, 1.0)), max_size=60))
def test_whatever_happens_one_good_probe_makes_it_up_and_probes_never_stop(events: list[tuple[str, float, float]]) -> None:
    health, now = Health(0.0), 0.0
    for event, pause_seconds, draw in events:
        now += pause_seconds
        before = health.errors_count
        match event:
            case "failed":
                health.failed(now, "x")
            case "damaged":
                health.damaged()
            case "refused":
                health.write_refused(now, "x")
            case "filled":
                health.filled(now)
            case "vanished":
                health.vanished(now, "x")
            case "good":
                health.probe_succeeded(now, draw, ROOM, "done")
            case "full":
                health.probe_succeeded(now, draw, NO_ROOM, "full")
            case "untried":
                health.probe_succeeded(now, draw, ROOM, "untried")
            case "ro":
                health.probe_succeeded(now, draw, ROOM, "refused", "x")
            case "bad":
                health.probe_failed(now, draw, "x", is_gone=False)
            case "gone":
                health.probe_failed(now, draw, "x", is_gone=True)
            case "back":
                health.wish_probe(now)
        assert health.errors_count >= before
        assert health.probe_at <= now + max(PROBING.ceiling_seconds, 1.5 * UP_SECONDS)
        assert health.is_writable or health.state != "up"
        assert health.detail or health.state == "up"
    health.probe_succeeded(now, 0.5, ROOM, "done")
    assert (health.state, health.is_full, health.is_writable, health.detail) == ("up", False, True, "")
