"""Steps and bytes of every algorithm, against ranks that really pass pieces on (see `wire`)."""

from __future__ import annotations

import numpy as np
import pytest

from analytic.communication import wire
from analytic.communication.tree_in_segments import run_tree_in_segments
from shardscope.analytic import communication as comm
from shardscope.analytic.communication.algorithms.server import byteps_split

WORLDS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 31]


def steps_of(op: str, algorithm: str, workers: int, **options: object) -> float:
    """The steps that the formula counts: the time with a latency of one second and endless bandwidth."""
    return comm.collective_time(
        op=op, algorithm=algorithm, num_bytes=1, workers=workers, bandwidth=np.inf, latency=1, **options
    )


def bytes_of(op: str, algorithm: str, workers: int, **options: object) -> float:
    """The bytes that the formula lets wait for one another: the time at one byte a second."""
    return comm.collective_time(
        op=op, algorithm=algorithm, num_bytes=1, workers=workers, bandwidth=1, **options
    )


def added_of(op: str, algorithm: str, workers: int, **options: object) -> float:
    rates = {"bandwidth": np.inf, "reduce_bandwidth": 1}
    return comm.collective_time(op=op, algorithm=algorithm, num_bytes=1, workers=workers, **rates, **options)


def sent_of(op: str, algorithm: str, workers: int, of: str = "worker", **options: object) -> float:
    return comm.collective_volume(op=op, algorithm=algorithm, num_bytes=1, workers=workers, of=of, **options)


@pytest.mark.parametrize("workers", WORLDS)
def test_the_ring(workers: int) -> None:
    ran = wire.run_ring(wire.Wire(workers, workers))
    assert ran.is_reduced_everywhere
    assert steps_of("all_reduce", "ring", workers) == ran.rounds
    assert bytes_of("all_reduce", "ring", workers) == pytest.approx(float(ran.critical))
    assert added_of("all_reduce", "ring", workers) == pytest.approx(float(ran.added))
    assert sent_of("all_reduce", "ring", workers) == pytest.approx(float(ran.busiest_sent))


@pytest.mark.parametrize("workers", WORLDS[2:])
def test_the_ring_both_ways_has_a_link_for_each(workers: int) -> None:
    ran = wire.run_both_ways(workers)
    assert ran.is_reduced_everywhere
    assert steps_of("all_reduce", "bidirectional-ring", workers) == ran.rounds
    assert bytes_of("all_reduce", "bidirectional-ring", workers) == pytest.approx(float(ran.critical_by_link))
    assert sent_of("all_reduce", "bidirectional-ring", workers) == pytest.approx(float(ran.busiest_sent))


@pytest.mark.parametrize("workers", WORLDS)
@pytest.mark.parametrize("segments", [1, 3, 8])
def test_the_chain(workers: int, segments: int) -> None:
    ran = wire.run_chain(workers, segments)
    rounds = ran.rounds if workers > 1 else 0
    assert steps_of("broadcast", "chain", workers, segments=segments) == rounds
    assert bytes_of("broadcast", "chain", workers, segments=segments) == pytest.approx(float(ran.critical))
    assert sent_of("broadcast", "chain", workers, segments=segments) == pytest.approx(float(ran.busiest_sent))


@pytest.mark.parametrize("workers", WORLDS)
def test_the_binomial_tree(workers: int) -> None:
    ran = wire.run_binomial(workers)
    assert ran.is_reduced_everywhere
    assert steps_of("all_reduce", "tree", workers) == ran.rounds
    assert bytes_of("all_reduce", "tree", workers) == float(ran.critical)
    assert added_of("all_reduce", "tree", workers) == float(ran.added)
    assert sent_of("all_reduce", "tree", workers) == float(ran.busiest_sent)


@pytest.mark.sampled
@pytest.mark.parametrize("workers", WORLDS)
@pytest.mark.parametrize("segments", [1, 2, 5, 24])
def test_the_pipelined_tree_takes_its_formulas_steps_to_within_its_filling(
    workers: int, segments: int
) -> None:
    ran = run_tree_in_segments(workers, segments)
    assert ran.is_reduced_everywhere
    steps = steps_of("all_reduce", "pipelined-tree", workers, segments=segments)
    assert abs(steps - ran.rounds) <= (5 if workers > 3 else 0)
    assert sent_of("all_reduce", "pipelined-tree", workers) == float(ran.busiest_sent)


@pytest.mark.parametrize("workers", WORLDS)
def test_recursive_doubling(workers: int) -> None:
    ran = wire.run_recursive_doubling(workers)
    assert ran.is_reduced_everywhere
    assert steps_of("all_reduce", "recursive-doubling", workers) == ran.rounds
    assert bytes_of("all_reduce", "recursive-doubling", workers) == float(ran.critical)
    assert added_of("all_reduce", "recursive-doubling", workers) == float(ran.added)
    assert sent_of("all_reduce", "recursive-doubling", workers) == float(ran.busiest_sent)


@pytest.mark.parametrize("workers", WORLDS)
def test_halving_and_doubling_takes_the_rounds_counted_and_no_more_bytes(workers: int) -> None:
    ran = wire.run_halving_doubling(workers)
    assert ran.is_reduced_everywhere
    assert steps_of("all_reduce", "halving-doubling", workers) == ran.rounds
    moved, added = (count("all_reduce", "halving-doubling", workers) for count in (bytes_of, added_of))
    if workers & (workers - 1) == 0:
        assert moved == pytest.approx(float(ran.critical))
        assert added == pytest.approx(float(ran.added))
    else:  # the paper counts (p-1)/p where 2^floor(lg p) ranks exchange
        assert float(ran.critical) <= moved <= float(ran.critical) + 2 / workers * 2
        assert float(ran.added) <= added <= float(ran.added) + 2 / workers


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (1, 4), (2, 1), (2, 4), (3, 2), (4, 4), (5, 3)])
def test_rings_of_rings_and_the_torus(nodes: int, per_node: int) -> None:
    ran, across = wire.run_two_levels(nodes, per_node)
    assert ran.is_reduced_everywhere
    workers = nodes * per_node
    for name, option in (("hierarchical", "per_node"), ("torus-2d", "columns")):
        options = {option: per_node}
        assert steps_of("all_reduce", name, workers, **options) == ran.rounds
        assert bytes_of("all_reduce", name, workers, **options) == pytest.approx(float(ran.critical))
        assert added_of("all_reduce", name, workers, **options) == pytest.approx(float(ran.added))
        assert sent_of("all_reduce", name, workers, **options) == pytest.approx(float(ran.busiest_sent))
    carried = sent_of("all_reduce", "hierarchical", workers, of="link", per_node=per_node)
    assert carried == pytest.approx(float(across))


@pytest.mark.parametrize("dedicated", [False, True])
@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (6, 4), (8, 3)])
def test_the_parameter_server(workers: int, servers: int, dedicated: bool) -> None:
    ran = wire.run_server(workers, servers, dedicated=dedicated)
    options = {"servers": servers, "dedicated": dedicated}
    assert steps_of("all_reduce", "parameter-server", workers, **options) == ran.rounds
    assert bytes_of("all_reduce", "parameter-server", workers, **options) == pytest.approx(
        float(ran.critical)
    )
    busiest = max(*ran.sent.values(), *ran.received.values())
    assert sent_of("all_reduce", "parameter-server", workers, **options) == pytest.approx(float(busiest))
    at_once = bytes_of("all_reduce", "parameter-server", workers, overlap=True, **options)
    assert at_once == pytest.approx(float(busiest))


@pytest.mark.parametrize("dedicated", [False, True])
@pytest.mark.parametrize(("workers", "servers"), [(3, 1), (4, 2), (5, 4), (8, 8)])
def test_the_servers_even_form_is_what_the_exact_bytes_come_to(
    workers: int, servers: int, dedicated: bool
) -> None:
    ranks = workers + servers if dedicated else workers
    shards = [840 // servers] * servers
    push = comm.parameter_server_push_bytes(shards, ranks, dedicated=dedicated)
    pull = comm.parameter_server_pull_bytes(shards, ranks, dedicated=dedicated)
    options = {"servers": servers, "dedicated": dedicated}
    assert sent_of("all_reduce", "parameter-server", workers, **options) * 840 == (push + pull).max()


@pytest.mark.parametrize("servers", [0, 1, 2, 5, 8])
@pytest.mark.parametrize("workers", [2, 3, 8])
def test_byteps_keeps_every_link_equally_busy(workers: int, servers: int) -> None:
    servers = min(servers, workers)
    split = byteps_split(np.float64(workers), np.float64(servers))
    assert servers * split.of_cpu + workers * split.of_gpu == pytest.approx(1)
    cpu = workers * split.of_cpu  # comes in from each GPU machine, and goes back
    gpu = (1 - split.of_gpu) + (workers - 1) * split.of_gpu  # its own gradients, and the sums it hands out
    taken = bytes_of("all_reduce", "byteps", workers, servers=servers)
    assert gpu == pytest.approx(taken)
    assert servers == 0 or cpu == pytest.approx(taken)


@pytest.mark.parametrize("workers", WORLDS)
def test_bruck_and_pairwise(workers: int) -> None:
    ran = wire.run_bruck(workers)
    assert steps_of("all_to_all", "bruck", workers) == ran.rounds
    assert bytes_of("all_to_all", "bruck", workers) == pytest.approx(float(ran.sent))
    assert bytes_of("all_to_all", "pairwise", workers) == pytest.approx((workers - 1) / workers)
    assert steps_of("all_to_all", "pairwise", workers) == workers - 1


@pytest.mark.parametrize("wavelengths", [1, 2, 3, 4, 8, 16, 64])
@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8, 9, 16, 25, 27, 64, 100, 130])
def test_light_takes_the_steps_counted_and_no_more_wavelengths_than_there_are(
    workers: int, wavelengths: int
) -> None:
    ran = wire.run_light(workers, wavelengths)
    assert ran.everyone_has_all
    assert ran.wavelengths <= wavelengths
    options = {"wavelengths": wavelengths, "reconfiguration": 0}
    steps = steps_of("all_reduce", "optical-ring", workers, **options)
    if ran.last_group % 2 == 0 or ran.last_group == 1:
        assert steps == ran.steps
    else:  # the paper's ⌈m²/8⌉ wavelengths for all to all are one more than an odd m needs
        assert ran.steps <= steps <= ran.steps + 1


@pytest.mark.parametrize("workers", [2, 4, 6, 8])
def test_volumes_are_what_the_exact_bytes_of_the_strategies_that_run_come_to(workers: int) -> None:
    elements = 8 * 9 * 7 * workers
    exact = {
        "ring": comm.ring_all_reduce_bytes(elements, 4, workers),
        "bidirectional-ring": comm.ring_all_reduce_bytes(elements, 4, workers, directions=2),
        "pipelined-tree": comm.tree_all_reduce_bytes(elements, 4, workers),
        "hierarchical": comm.hierarchical_all_reduce_bytes(elements, 4, workers, 2).total,
    }
    for name, sent in exact.items():
        options = {"per_node": 2} if name == "hierarchical" else {}
        assert sent_of("all_reduce", name, workers, **options) * elements * 4 == pytest.approx(sent.max())
