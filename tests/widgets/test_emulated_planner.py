"""The Planner of an emulated cluster, whose plans are jobs."""

from __future__ import annotations

import pytest

from shardscope.errors import SpecError
from shardscope.spec.cluster import Cluster
from shardscope_widgets import Planner


def test_plans_of_an_emulated_cluster_are_jobs_with_a_jobs_defaults():
    cluster = Cluster.emulated(2, "20 Mbit/s", flops="400 MFLOP/s", memory_bandwidth="2 GB/s")
    fix = {"data": 2, "zero": [0, 1, 3], "recompute": "none", "micro_batch": 4}
    planner = Planner("gpt-nano", cluster=cluster, fix=fix)
    try:
        assert (planner.problem, planner.precision, planner.global_batch) == ("", "fp32", 64)
        assert len(planner.plans) == 3
        planner.weights = {"headroom": 1.0}
        least = min(plan.memory_bytes for plan in planner.plans)
        assert planner.plans[0].memory_bytes == least
        with pytest.raises(SpecError, match=r"calibrate the machine with ss.calibrate\(\) instead"):
            planner.measure(1.0)
    finally:
        planner.close()
