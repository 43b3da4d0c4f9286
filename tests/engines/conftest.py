"""Workers of these tests are processes of new interpreters, as users have them."""

import pytest


@pytest.fixture(autouse=True)
def _as_users_have_them(new_interpreters: None) -> None:
    """Start new interpreters in each test of this folder."""
