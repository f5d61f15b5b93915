"""The interval of a layout's step time, whose steps are evaluated as one table, equals that of separate evaluations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import shardscope as ss
from shardscope.analytic.layouts import Layouts
from shardscope.calibration.calibration import Calibration
from shardscope.calibration.spread import Floats, widened
from shardscope.prediction.step.step import step_time

A100, H100 = (ss.Cluster.of(name, nodes=4, per_node=8) for name in ("a100-80gb", "h100-80gb"))
CASES = {
    "tensor and pipeline": ("gpt3-175b", A100, {"tensor": 8, "pipeline": 4}),
    "sharded": ("llama-3-8b", H100, {"data": 32, "zero": 3, "recompute": "full"}),
    "experts": ("mixtral-8x7b", H100, {"data": 8, "pipeline": 4, "expert": 8, "recompute": "selective"}),
    "offloaded": ("llama-3-8b", A100, {"data": 32, "zero": 2, "offload": "optimizer"}),
    "mixed": ("gpt3-175b", ss.Cluster.mixed(A100, H100), {"tensor": 8, "pipeline": 8}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_interval_of_one_table_is_that_of_separate_evaluations(case: str) -> None:
    name, cluster, degrees = CASES[case]
    layout = ss.Layout(**{"micro_batch": 1, "global_batch": 64, **degrees})  # type: ignore[arg-type]
    found = ss.predict(name, cluster, layout)

    def one_by_one(calibrations: Sequence[Calibration]) -> Floats:
        table = Layouts.of([layout])
        return np.concatenate([step_time(found.model, table, cluster, each).total for each in calibrations])

    said = widened(one_by_one, found.calibration)
    assert found.interval == pytest.approx(said.interval, rel=1e-12)
    assert dict(found.uncertainty.shares) == pytest.approx(dict(said.shares), abs=1e-9)
