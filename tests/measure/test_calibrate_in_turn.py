"""`ss.calibrate(rows=..., prior=...)`: rows given one by one say the same as all at once."""

from __future__ import annotations

import pytest

import shardscope as ss

CLUSTER = ss.Cluster.of("a100-80gb", nodes=4)
MODEL = ss.Model.of("llama-2-13b")
LAYOUT = ss.Layout(data=4, tensor=8, global_batch=256, recompute="full")


def test_rows_given_one_by_one_say_the_same_as_all_at_once() -> None:
    usual = ss.predict(MODEL, CLUSTER, LAYOUT).step_time_s
    rows = [
        {"label": f"run {place}", "step_time_s": ratio * usual}
        for place, ratio in enumerate([1.2, 1.2, 1.2, 1.2, 1.2, 1.1])
    ]
    together = ss.calibrate(CLUSTER, rows=rows, model=MODEL, layout=LAYOUT)
    in_turn = None
    for row in rows:
        in_turn = ss.calibrate(CLUSTER, rows=row, model=MODEL, layout=LAYOUT, prior=in_turn)
    one, other = (ss.predict(MODEL, CLUSTER, LAYOUT, calibration=each) for each in (together, in_turn))
    assert one.step_time_s == pytest.approx(other.step_time_s, rel=0.005)
    assert one.uncertainty.between == pytest.approx(other.uncertainty.between, abs=0.005)
