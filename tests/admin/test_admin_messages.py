"""The wire form: whatever the names hold, what one side says is what the other hears."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.admin.messages import ErrorAnswer, Paths, PinRequest, decode, encode

NAMES = st.binary(max_size=40).map(os.fsdecode) | st.text(max_size=20)


@given(st.lists(NAMES, max_size=5))
def test_any_path_survives(paths: list[str]) -> None:
    raw = encode(Paths(paths))
    assert raw.isascii()
    assert decode(raw, Paths).paths == paths


@given(NAMES, NAMES, st.none() | st.floats(min_value=1e-9, max_value=1e9), st.booleans())
def test_any_pin_request_survives(owner: str, reason: str, ttl: float | None, dry: bool) -> None:
    request = PinRequest(["a"], owner, reason, ttl, dry)
    assert decode(encode(request), PinRequest) == request


@given(st.binary(max_size=60))
def test_any_other_bytes_are_a_value_error_or_a_message(raw: bytes) -> None:
    try:
        message = decode(raw, ErrorAnswer)
    except ValueError:
        return
    assert isinstance(message, ErrorAnswer)


def test_a_newer_daemons_additional_fields_are_ignored_in_answers() -> None:
    assert decode(b'{"error": "e", "since": 3}', ErrorAnswer) == ErrorAnswer("e")


def test_a_misspelt_field_of_a_request_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown field `dryrun`"):
        decode(b'{"paths": [], "owner": "me", "dryrun": true}', PinRequest)
