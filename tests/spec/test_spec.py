"""The names of the floor of descriptions, which are imported when first used."""

from __future__ import annotations

import pytest

from shardscope import spec


def test_every_name_of_the_specs_is_found_where_it_is_said_to_be() -> None:
    assert set(spec._HOME_OF) == set(spec.__all__)
    assert {name for name in spec.__all__ if not hasattr(spec, name)} == set()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = spec.nothing
