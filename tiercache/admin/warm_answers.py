"""What `status` says of the warm tier: replicas, read in place, and targets, which hold shards, together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tiercache.admin.messages import TierState, TierStatus
from tiercache.engine.dataset import Dataset
from tiercache.engine.warm_controls import WarmFacts
from tiercache.metrics.definitions import Metrics

_STATES = {"up": 2, "suspect": 1, "down": 0}


def warm_status(datasets: Sequence[Dataset], facts: WarmFacts | None) -> TierStatus:
    """`facts` None: there are no targets."""
    replicas = [dataset for dataset in datasets if dataset.replica is not None]
    if facts is None:
        return _of_replicas(replicas)
    state, detail = _of_targets(facts)
    if replicas:
        beside = _of_replicas(replicas)
        state = state if state == beside.state else "degraded"
        detail = f"{detail}; {beside.detail}"
    return TierStatus(facts.used_bytes, facts.capacity_bytes, state, detail)


def _of_replicas(replicas: Sequence[Dataset]) -> TierStatus:
    if not replicas:
        return TierStatus(0, None, "absent", "neither targets nor replicas")
    missing = [f"{dataset.name}: {why}" for dataset in replicas if (why := dataset.replica_trouble())]
    if missing:
        return TierStatus(0, None, "down" if len(missing) == len(replicas) else "degraded", "; ".join(missing))
    return TierStatus(0, None, "ok", f"{len(replicas)} replica(s), read in place")


def _of_targets(facts: WarmFacts) -> tuple[TierState, str]:
    """Copies can be read while as many targets are up as there are data shards, and written whole with the parity shards' too."""
    up_count = sum(target.state == "up" for target in facts.targets)
    usable_count = sum(target.state == "up" and target.is_writable and not target.is_full for target in facts.targets)
    geometry = f"{facts.data_shards}+{facts.parity_shards}"
    shards_count = facts.data_shards + facts.parity_shards
    summary = f"{geometry} shards, {up_count} of {len(facts.targets)} targets up"
    if up_count < facts.data_shards:
        return "down", f"{summary}, fewer than the {facts.data_shards} that a read needs"
    if usable_count < shards_count:
        why = "fewer" if up_count < shards_count else "some full or read-only, fewer"
        return "degraded", f"{summary}, {why} than the {shards_count} that a whole copy needs"
    return "ok", summary


def warm_notices(facts: WarmFacts | None) -> Iterable[str]:
    for target in facts.targets if facts is not None else ():
        if target.state != "up" or target.is_full or not target.is_writable:
            state = "full" if target.is_full else "read-only" if target.state == "up" else target.state
            detail = f": {target.detail}" if target.detail else ""
            yield f"warm target {target.path} is {state}{detail}; it is used as soon as it can be"


def gauge_targets(metrics: Metrics, facts: WarmFacts) -> None:
    for target in facts.targets:
        metrics.target_state.labels(target.path).set(_STATES[target.state])
        metrics.target_errors.labels(target.path).set(target.errors_count)
        if target.free_bytes is not None:
            metrics.target_free_bytes.labels(target.path).set(target.free_bytes)
    metrics.warm_packs.set(facts.packs_count)
    metrics.warm_packed_objects.set(facts.packed_objects_count)
