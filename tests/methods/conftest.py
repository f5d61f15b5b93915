"""What holds for tests that define methods of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardscope.spec import registry


@pytest.fixture(autouse=True)
def no_methods_left() -> Iterator[None]:
    """Methods of one test are unknown to the next."""
    yield
    registry._of_users.clear()
