"""A model and machines so small that every layout can be tried by a plain loop."""

from __future__ import annotations

import pytest

from planner.brute import machine, small_model


@pytest.fixture
def model():
    return small_model()


@pytest.fixture
def cluster():
    return machine(nodes=2, per_node=4)
