"""What `status` says of targets and replicas together."""

from __future__ import annotations

import dataclasses

import pytest

from tiercache.admin.warm_answers import gauge_targets, warm_notices, warm_status
from tiercache.engine.dataset import Dataset
from tiercache.engine.warm_controls import TargetFacts, TargetState, WarmFacts
from tiercache.metrics.definitions import Metrics
from tiercache.metrics.tally import Tally
from tiercache.tiers.memory import MemoryCold

UP = TargetFacts("/flash/0", "ab", "up", "", 10, 20, 100, 0, False, True)


def targets(*states: TargetState) -> WarmFacts:
    rows = [dataclasses.replace(UP, path=f"/flash/{number}", state=state) for number, state in enumerate(states)]
    return WarmFacts(2, 1, rows, used_bytes=30, capacity_bytes=300, packs_count=4, packed_objects_count=90)


def dataset(trouble: str | None) -> Dataset:
    cold = MemoryCold()
    replica = None if trouble is None else cold
    return Dataset("a", cold, cold, "", 60.0, replica=replica, replica_trouble=lambda: trouble or "")


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        (targets("up", "up", "up"), "ok"),
        (targets("up", "up", "up", "down"), "ok"),
        (targets("up", "up", "down"), "degraded"),
        (targets("up", "up", "suspect"), "degraded"),
        (targets("up", "down", "suspect"), "down"),
    ],
)
def test_the_state_goes_by_how_many_targets_are_up(facts: WarmFacts, state: str) -> None:
    status = warm_status([dataset(None)], facts)
    assert (status.state, status.used_bytes, status.capacity_bytes) == (state, 30, 300)
    assert status.detail.startswith("2+1 shards, ")


def test_a_target_that_takes_nothing_degrades() -> None:
    facts = targets("up", "up", "up")
    for change in ({"is_full": True}, {"is_writable": False}):
        rows = [*facts.targets[:2], dataclasses.replace(facts.targets[2], **change)]
        status = warm_status([], dataclasses.replace(facts, targets=rows))
        assert status.state == "degraded"
        assert "some full or read-only" in status.detail


@pytest.mark.parametrize(
    ("facts", "trouble", "state"),
    [
        (None, None, "absent"),
        (None, "", "ok"),
        (None, "is missing", "down"),
        (targets("up", "up", "up"), "", "ok"),
        (targets("up", "up", "up"), "is missing", "degraded"),
        (targets("down", "down", "up"), "", "degraded"),
        (targets("down", "down", "up"), "is missing", "down"),
    ],
)
def test_replicas_and_targets_are_one_tier(facts: WarmFacts | None, trouble: str | None, state: str) -> None:
    assert warm_status([dataset(trouble)], facts).state == state


def test_what_is_wrong_with_a_target_is_a_notice() -> None:
    facts = targets("up", "down")
    odd = dataclasses.replace(UP, path="/flash/9", is_full=True)
    bad = dataclasses.replace(facts.targets[1], detail="not mounted")
    assert list(warm_notices(dataclasses.replace(facts, targets=[facts.targets[0], bad, odd]))) == [
        "warm target /flash/1 is down: not mounted; it is used as soon as it can be",
        "warm target /flash/9 is full; it is used as soon as it can be",
    ]
    assert list(warm_notices(None)) == []


def test_gauges_of_targets() -> None:
    metrics = Metrics()
    down = dataclasses.replace(UP, path="/flash/1", state="down", errors_count=3, free_bytes=None)
    gauge_targets(metrics, dataclasses.replace(targets("up"), targets=[UP, down]))
    samples = Tally(metrics).samples()
    assert samples["tiercache_target_state", ("/flash/0",)] == 2
    assert samples["tiercache_target_state", ("/flash/1",)] == 0
    assert samples["tiercache_target_errors", ("/flash/1",)] == 3
    assert ("tiercache_target_free_bytes", ("/flash/1",)) not in samples
    assert (samples["tiercache_warm_packs", ()], samples["tiercache_warm_packed_objects", ()]) == (4, 90)
