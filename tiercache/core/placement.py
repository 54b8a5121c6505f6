"""Which targets get what: weighted rendezvous hashing.

Every (object, target) pair has a number that depends on nothing else, and an object goes to the targets with the best numbers.
So all nodes agree without talking, a target that is added takes over only what it is now best for, and one that is removed gives
up only what it had. With the score -weight / ln(hash) a target is first for the share of objects that its weight is of the sum.

Each target costs one BLAKE2b, 1 us; there are tens of them, not thousands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import blake2b

_MANTISSA_BITS = 53


def rendezvous(object_id: bytes, weights: Mapping[bytes, float]) -> list[bytes]:
    """The targets (by uuid), best first. Those without weight come last, in an order that is the same everywhere."""
    return sorted(weights, key=lambda target: (-_score(object_id, target, weights[target]), target))


def _score(object_id: bytes, target: bytes, weight: float) -> float:
    if weight <= 0:
        return 0.0
    digest = blake2b(target, digest_size=8, key=object_id, person=b"tiercache-place").digest()
    number = int.from_bytes(digest, "big") >> (64 - _MANTISSA_BITS)
    return -weight / math.log((number + 0.5) / (1 << _MANTISSA_BITS))
