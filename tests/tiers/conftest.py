"""Checks that several test files share explain their failures as tests do."""

import pytest

pytest.register_assert_rewrite("tests.tiers.conformance")
