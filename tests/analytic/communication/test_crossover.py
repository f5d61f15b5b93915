"""Where one algorithm overtakes another, against the equation solved by hand and a scan in small steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardscope.analytic import communication as comm
from shardscope.errors import SpecError

LINK = {"bandwidth": 12.5e9, "latency": 5e-6}


@given(st.integers(3, 10).map(lambda k: 2**k), st.floats(1e8, 1e12), st.floats(1e-7, 1e-4))
@settings(max_examples=30)
def test_the_tree_is_overtaken_by_the_ring_where_the_equation_says(
    workers: int, rate: float, latency: float
) -> None:
    """2 lg W (α + S/B) = 2(W-1) α + 2(W-1)/W S/B, solved for S."""
    lg = np.log2(workers)
    size = (workers - 1 - lg) * latency * rate / (lg - (workers - 1) / workers)
    (found,) = comm.crossover(
        "tree", "ring", over="num_bytes", workers=workers, bandwidth=rate, latency=latency
    )
    assert found.value == pytest.approx(size, rel=1e-9)
    assert (found.below, found.above) == ("tree", "ring")


def test_the_bandwidth_of_a_crossover_is_where_both_take_equally_long() -> None:
    fixed = {"num_bytes": 1e7, "workers": 64, "latency": 5e-6}
    (found,) = comm.crossover("ring", "tree", over="bandwidth", **fixed)
    both = [
        comm.collective_time(op="all_reduce", algorithm=name, bandwidth=found.value, **fixed)
        for name in ("ring", "tree")
    ]
    assert both[0] == pytest.approx(both[1], rel=1e-9)
    assert found.seconds == pytest.approx(both[1])
    assert (found.below, found.above) == ("ring", "tree")


def test_every_crossover_over_workers_is_that_of_a_scan() -> None:
    found = comm.crossover("tree", "ring", over="workers", num_bytes=1e6, high=1000, **LINK)
    ahead = [
        comm.collective_time(op="all_reduce", algorithm="tree", num_bytes=1e6, workers=w, **LINK)
        < comm.collective_time(op="all_reduce", algorithm="ring", num_bytes=1e6, workers=w, **LINK)
        for w in range(2, 1001)
    ]
    scanned = [w for w in range(3, 1001) if ahead[w - 2] != ahead[w - 3]]
    assert [crossing.value for crossing in found] == scanned
    assert len(scanned) >= 1


def test_the_order_of_the_two_does_not_matter() -> None:
    call = {"over": "num_bytes", "workers": 64, **LINK}
    assert comm.crossover("tree", "ring", **call) == comm.crossover("ring", "tree", **call)


def test_an_algorithm_never_overtakes_itself_or_what_is_always_ahead() -> None:
    assert comm.crossover("ring", "ring", over="num_bytes", workers=8, **LINK) == ()
    assert comm.crossover("ring", "halving-doubling", over="num_bytes", workers=64, **LINK) == ()


def test_algorithms_carry_their_own_options() -> None:
    optical = ("optical-ring", {"wavelengths": 4, "reconfiguration": 1e-4})
    (found,) = comm.crossover("ring", optical, over="num_bytes", workers=256, **LINK)
    # 510 (α + S/(256 B)) = θ (α + δ + S/B). Groups of 9 leave 29, then 4, whom 2 wavelengths join: θ = 5
    steps = 5
    size = (510 * 5e-6 - steps * 105e-6) * 12.5e9 / (steps - 510 / 256)
    assert found.value == pytest.approx(size, rel=1e-9)
    assert found.above == "ring"


def test_what_cannot_be_varied_is_refused() -> None:
    with pytest.raises(SpecError, match="over='latency' is not known"):
        comm.crossover("ring", "tree", over="latency", num_bytes=1, workers=2, **LINK)
    with pytest.raises(SpecError, match="low=10 is not between 0 and high=5"):
        comm.crossover("ring", "tree", over="num_bytes", low=10, high=5, workers=2, **LINK)


@given(st.integers(1, 512), st.sampled_from(["weak", "strong"]), st.floats(0, 1))
def test_efficiency_is_the_share_of_the_step_that_computes(
    workers: int, scaling: str, overlap: float
) -> None:
    call = {"num_bytes": 1e8, "workers": workers, "algorithm": "ring", **LINK}
    computing = 0.1 / (workers if scaling == "strong" else 1)
    waiting = comm.collective_time(op="all_reduce", **call) - overlap * computing
    efficiency = comm.scaling_efficiency(compute_s=0.1, scaling=scaling, overlap=overlap, **call)
    assert efficiency == pytest.approx(computing / (computing + max(waiting, 0)))
    assert 0 < efficiency <= 1


def test_strong_scaling_wears_off_sooner_than_weak() -> None:
    call = {"compute_s": 0.1, "num_bytes": 1e8, "workers": [2, 4, 8, 64], "algorithm": "ring", **LINK}
    assert (comm.scaling_efficiency(scaling="strong", **call) < comm.scaling_efficiency(**call)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compute_s": 0}, "compute_s=0 is out of range"),
        ({"overlap": 1.5}, "overlap=1.5 is out of range"),
        ({"scaling": "wide"}, "scaling='wide' is not known"),
    ],
)
def test_impossible_scaling_is_refused(change: dict[str, object], message: str) -> None:
    call = {"compute_s": 0.1, "num_bytes": 1e8, "workers": 8, "algorithm": "ring", **LINK}
    with pytest.raises(SpecError, match=message):
        comm.scaling_efficiency(**call | change)


def test_the_frontier_names_who_is_fastest_everywhere() -> None:
    names = ["parameter-server", "ring", "tree", "recursive-doubling"]
    call = {"workers": 64, **LINK}
    found = comm.frontier(names, over="num_bytes", **call)
    ends = [1.0, *(crossing.value for crossing in found), 1e12]
    leaders = [found[0].below, *(crossing.above for crossing in found)]
    for leader, low, high in zip(leaders, ends, ends[1:], strict=False):
        for size in np.geomspace(low * 1.001, high * 0.999, 5):
            times = {
                name: comm.collective_time(op="all_reduce", algorithm=name, num_bytes=size, **call)
                for name in names
            }
            assert times[leader] == pytest.approx(min(times.values()))
    assert len(found) >= 2
