"""Checks that several test files share explain their failures as tests do; and both ways of the S3 tier to the bytes."""

import pytest

from tiercache.tiers.cold import s3

pytest.register_assert_rewrite("tests.tiers.conformance")


@pytest.fixture(params=["native", "python"])
def fetching(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How S3 tiers that are made in the test fetch: in C, or in Python threads."""
    if request.param == "native" and s3.native is None:
        pytest.skip("the extension _fetch is not built")
    monkeypatch.setattr(s3, "FETCHING", request.param)
    return str(request.param)


@pytest.fixture
def python_fetching(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what only the Python way has."""
    monkeypatch.setattr(s3, "FETCHING", "python")
