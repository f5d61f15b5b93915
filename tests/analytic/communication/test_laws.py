"""What holds of every algorithm, whatever the numbers, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardscope.analytic import communication as comm
from shardscope.analytic.communication.algorithms import ALGORITHMS
from shardscope.errors import SpecError

EACH = [(op, name) for name, algorithm in ALGORITHMS.items() for op in algorithm.costs]
SIZES = st.integers(1, 10**12).map(float)  # whole bytes: what is cut into pieces is cut between bytes
RATES = st.floats(1e6, 1e13)
LATENCIES = st.floats(0, 1e-2)
WORKERS = st.integers(0, 7).map(lambda k: 8 * 2**k)
LINK = {"num_bytes": 1e8, "workers": 16, "bandwidth": 1e10, "latency": 5e-6}


@pytest.mark.parametrize(("op", "name"), EACH)
def test_one_worker_waits_for_nobody(op: str, name: str) -> None:
    assert comm.collective_time(op=op, algorithm=name, **LINK | {"workers": 1}) == 0
    assert comm.collective_volume(op=op, algorithm=name, num_bytes=1e8, workers=1) == 0


@given(st.sampled_from(EACH), SIZES, WORKERS, RATES, st.floats(1, 100), LATENCIES)
def test_more_bandwidth_never_slows(
    each: tuple[str, str], size: float, workers: int, rate: float, more: float, latency: float
) -> None:
    op, name = each
    slow, fast = (
        comm.collective_time(
            op=op, algorithm=name, num_bytes=size, workers=workers, bandwidth=b, latency=latency
        )
        for b in (rate, rate * more)
    )
    assert fast <= slow * (1 + 1e-12)


@given(st.sampled_from(EACH), SIZES, WORKERS, RATES, LATENCIES, st.integers(1, 100))
def test_more_latency_and_more_bytes_never_hasten(
    each: tuple[str, str], size: float, workers: int, rate: float, latency: float, more: int
) -> None:
    op, name = each
    base = {"op": op, "algorithm": name, "workers": workers, "bandwidth": rate}
    now = comm.collective_time(num_bytes=size, latency=latency, **base)
    assert now <= comm.collective_time(num_bytes=size, latency=latency * more + 1e-9, **base) * (1 + 1e-9)
    assert now <= comm.collective_time(num_bytes=size * more, latency=latency, **base) * (1 + 1e-9)


@given(SIZES, st.integers(2, 10_000))
def test_the_rings_volume_depends_on_the_workers_only_by_their_last_part(size: float, workers: int) -> None:
    sent = comm.collective_volume(op="all_reduce", algorithm="ring", num_bytes=size, workers=workers)
    assert sent * workers / (2 * (workers - 1)) == pytest.approx(size)
    assert sent < 2 * size


POINT_TO_POINT = [
    name for name, found in ALGORITHMS.items() if "all_reduce" in found.costs and found.title[:3] != "in-"
]


@given(st.sampled_from(POINT_TO_POINT), SIZES, WORKERS)
def test_no_algorithm_between_workers_alone_undercuts_the_lower_bound(
    name: str, size: float, workers: int
) -> None:
    """2(W-1)/W S a worker (Patarasuk and Yuan 2009), over all its links."""
    sent = comm.collective_volume(op="all_reduce", algorithm=name, num_bytes=size, workers=workers)
    assert sent >= 2 * (workers - 1) / workers * size * (1 - 1e-12)


@given(SIZES, st.integers(2, 512), RATES, LATENCIES)
def test_one_server_is_the_star_and_as_many_as_workers_the_ring(
    size: float, workers: int, rate: float, latency: float
) -> None:
    link = {"op": "all_reduce", "num_bytes": size, "workers": workers, "bandwidth": rate}
    server = lambda k, **more: comm.collective_time(algorithm="parameter-server", servers=k, **link, **more)
    assert server(1) == pytest.approx(2 * (workers - 1) * size / rate)
    assert server(workers) == pytest.approx(comm.collective_time(algorithm="ring", **link))
    assert server(2) <= server(1)


@given(SIZES, st.sampled_from([8, 16, 64, 1024]), RATES, st.floats(1, 100), LATENCIES)
def test_a_hierarchy_beats_the_flat_ring_where_the_inside_is_faster(
    size: float, workers: int, rate: float, faster: float, latency: float
) -> None:
    link = {
        "op": "all_reduce",
        "num_bytes": size,
        "workers": workers,
        "bandwidth": rate,
        "latency": latency,
    }
    ring = comm.collective_time(algorithm="ring", **link)
    inner = {"per_node": 8, "inner_bandwidth": rate * faster, "inner_latency": latency}
    assert comm.collective_time(algorithm="hierarchical", **link, **inner) <= ring * (1 + 1e-9)


@pytest.mark.parametrize(("op", "name"), EACH)
def test_an_array_is_as_good_as_one_call_each(op: str, name: str) -> None:
    size = np.array([1e3, 1e6, 1e9])[:, None, None]
    workers = np.array([8, 16])[:, None]
    rate = np.array([1e9, 1e11])
    table = comm.collective_time(
        op=op, algorithm=name, num_bytes=size, workers=workers, bandwidth=rate, latency=1e-6
    )
    assert np.broadcast_shapes(table.shape, (3, 2, 2)) == (3, 2, 2)
    table = np.broadcast_to(table, (3, 2, 2))
    for i, s in enumerate(size.flat):
        for j, w in enumerate(workers.flat):
            for k, b in enumerate(rate):
                one = comm.collective_time(
                    op=op, algorithm=name, num_bytes=s, workers=w, bandwidth=b, latency=1e-6
                )
                assert table[i, j, k] == pytest.approx(one, rel=1e-12)


@pytest.mark.parametrize(("op", "name"), EACH)
def test_a_term_is_the_time_opened(op: str, name: str) -> None:
    rates = LINK | {"reduce_bandwidth": 1e11}
    term = comm.collective_term(op=op, algorithm=name, **rates)
    assert term.value == pytest.approx(comm.collective_time(op=op, algorithm=name, **rates))
    assert sum(leaf.value for leaf in term.walk() if not leaf.parts) == pytest.approx(term.value)
    assert term.formula
    assert term.source


@given(SIZES, WORKERS, RATES, st.floats(1e-7, 1e-3), st.sampled_from(["chain", "pipelined-tree"]))
def test_the_segments_chosen_are_the_best(
    size: float, workers: int, rate: float, latency: float, name: str
) -> None:
    call = {"op": "broadcast", "algorithm": name, "num_bytes": size, "workers": workers}
    call |= {"bandwidth": rate, "latency": latency}
    best = comm.collective_time(**call)
    for segments in np.unique(np.geomspace(1, max(size, 1), 40).astype(int)):
        assert best <= comm.collective_time(**call, segments=segments) * (1 + 1e-9)


def test_rings_in_groups_are_the_same_formula() -> None:
    for op in ("all_reduce", "reduce_scatter", "all_gather"):
        assert comm.ring_time(op, 1e8, 16, 1e10, 5e-6) == comm.collective_time(
            op=op, algorithm="ring", **LINK
        )
    pairs = comm.collective_time(op="all_to_all", algorithm="pairwise", **LINK)
    assert comm.ring_time("all_to_all", 1e8, 16, 1e10, 5e-6) == pairs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bandwidth": -1e9}, r"bandwidth=-1e\+09 is out of range; give a number above 0, bytes/s"),
        ({"bandwidth": 0}, "bandwidth=0 is out of range"),
        ({"bandwidth": [1e9, float("nan")]}, "bandwidth=nan is out of range"),
        ({"workers": 0}, "workers=0 is out of range; give a whole number of 1 or more"),
        ({"workers": 2.5}, "workers=2.5 is out of range; give a whole number"),
        ({"num_bytes": -1}, "num_bytes=-1 is out of range; give a number of 0 or more, bytes"),
        ({"num_bytes": "1 GB"}, "num_bytes='1 GB' is not a number; give a number of 0 or more, bytes"),
        ({"latency": -1e-6}, "latency=-1e-06 is out of range"),
        ({"reduce_bandwidth": 0}, "reduce_bandwidth=0 is out of range"),
        ({"algorithm": "rign"}, "algorithm='rign' is not known; did you mean 'ring'"),
        ({"op": "allreduce"}, "op='allreduce' is not known; did you mean 'all_reduce'"),
        (
            {"op": "broadcast"},
            "algorithm='ring' does not support broadcast; use one of chain, tree",
        ),
        ({"servers": 2}, "servers=2 is not an option of algorithm='ring'; its options are none"),
        (
            {"algorithm": "parameter-server", "servers": 0},
            "servers=0 is out of range; give a whole number of 1",
        ),
        ({"algorithm": "parameter-server", "servers": 17}, "servers=17 is more than the 16 workers"),
        (
            {"algorithm": "parameter-server", "dedicated": 1},
            "dedicated=1 is not a bool; give True or False",
        ),
        ({"algorithm": "hierarchical", "per_node": 6}, "per_node=6 does not divide workers=16"),
        ({"algorithm": "hierarchical", "inner_bandwidth": 0}, "inner_bandwidth=0 is out of range"),
        ({"algorithm": "torus-2d", "columns": 3}, "columns=3 does not divide workers=16"),
        (
            {"algorithm": "recursive-doubling", "op": "all_gather", "workers": [4, 6]},
            "workers=6 is not a power",
        ),
        ({"algorithm": "optical-ring", "wavelengths": 0}, "wavelengths=0 is out of range"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(change: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        comm.collective_time(**{"op": "all_reduce", "algorithm": "ring"} | LINK | change)
    assert "\n" not in str(caught.value)
