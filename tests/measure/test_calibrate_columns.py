"""Columns of measured steps may have the names that other tables give them."""

from __future__ import annotations

import pytest

import shardscope as ss
from shardscope.errors import SpecError

ROW = {"data": 8, "zero": 1, "global_batch": 64, "device": "a100-80gb", "step_time_s": 6.0}


def test_a_cluster_and_a_short_name_of_the_time_are_read() -> None:
    names = {"device": "cluster", "step_time_s": "step_s"}
    other = {names.get(name, name): value for name, value in ROW.items()}
    assert ss.calibrate(rows=other, model="llama-7b") == ss.calibrate(rows=ROW, model="llama-7b")


def test_two_names_of_one_column_are_refused() -> None:
    with pytest.raises(
        SpecError, match=r"rows.0. has step_time_s and step_s, which are one column; leave one out"
    ):
        ss.calibrate(rows={**ROW, "step_s": 6.0}, model="llama-7b")
