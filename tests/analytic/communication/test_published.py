"""Times against the forms in which they were published, each typed in from its source."""

from __future__ import annotations

from math import ceil, floor, log2

import numpy as np
import pytest

from shardscope.analytic.communication import collective_time
from shardscope.analytic.communication.algorithms import ALGORITHMS

S, B, A, G = 3e8, 12.5e9, 7e-6, 2e11
POWERS = [2, 4, 8, 64, 1024]
ANY = [2, 3, 5, 6, 12, 100]


def took(op: str, algorithm: str, workers: int, gamma: float = np.inf, **options: object) -> float:
    return collective_time(
        op=op,
        algorithm=algorithm,
        num_bytes=S,
        workers=workers,
        bandwidth=B,
        latency=A,
        reduce_bandwidth=gamma,
        **options,
    )


# Thakur, Rabenseifner and Gropp 2005 (MPICH), section 4. lg p, n bytes; here n/β is S/B and n/γ is S/G.


@pytest.mark.parametrize("p", POWERS)
def test_thakur_powers_of_two(p: int) -> None:
    lg, part = log2(p), (p - 1) / p
    assert took("all_reduce", "recursive-doubling", p, G) == pytest.approx(lg * (A + S / B + S / G))
    rabenseifner = 2 * lg * A + 2 * part * S / B + part * S / G
    assert took("all_reduce", "halving-doubling", p, G) == pytest.approx(rabenseifner)
    assert took("broadcast", "tree", p) == pytest.approx(lg * A + lg * S / B)
    assert took("all_gather", "recursive-doubling", p) == pytest.approx(lg * A + part * S / B)


@pytest.mark.parametrize("p", [3, 5, 6, 12, 100])
def test_thakur_other_numbers(p: int) -> None:
    lg, part = floor(log2(p)), (p - 1) / p
    expected = (2 * lg + 2) * A + (2 * part + 2) * S / B + (1 + part) * S / G
    assert took("all_reduce", "halving-doubling", p, G) == pytest.approx(expected)


@pytest.mark.parametrize("p", ANY)
def test_thakur_any_number(p: int) -> None:
    part = (p - 1) / p
    assert took("all_gather", "ring", p) == pytest.approx((p - 1) * A + part * S / B)
    assert took("reduce_scatter", "ring", p, G) == pytest.approx((p - 1) * A + part * (S / B + S / G))
    assert took("all_gather", "bruck", p) == pytest.approx(ceil(log2(p)) * A + part * S / B)
    van_de_geijn = (ceil(log2(p)) + p - 1) * A + 2 * part * S / B
    assert took("broadcast", "scatter-all-gather", p) == pytest.approx(van_de_geijn)


# mlsysim 0.3.0, physics/communication.py, after Patarasuk and Yuan 2009 and Thakur et al. 2005.


@pytest.mark.parametrize("n", ANY)
def test_mlsysim_ring_tree_and_all_to_all(n: int) -> None:
    ring = 2 * (n - 1) * A + 2 * (n - 1) / n * S / B
    assert took("all_reduce", "ring", n) == pytest.approx(ring)
    assert took("all_reduce", "tree", n) == pytest.approx(2 * ceil(log2(n)) * (A + S / B))
    assert took("all_to_all", "pairwise", n) == pytest.approx((n - 1) / n * S / B + (n - 1) * A)


@pytest.mark.parametrize("n", POWERS)
def test_mlsysim_double_binary_tree_with_its_constants(n: int) -> None:
    expected = 1.2 * 2 * log2(n) * A + 1.05 * 2 * (n - 1) / n * S / B
    constants = {"latency_factor": 1.2, "bandwidth_factor": 1.05}
    assert took("all_reduce", "double-binary-tree", n, **constants) == pytest.approx(expected)


@pytest.mark.parametrize(("nodes", "g"), [(2, 8), (16, 8), (3, 4), (1, 8)])
def test_mlsysim_hierarchical(nodes: int, g: int) -> None:
    fast, near = 3e11, 2e-6
    ring = 2 * (nodes - 1) * A + 2 * (nodes - 1) / nodes * S / g / B
    expected = 2 * ((g - 1) / g * S / fast + (g - 1) * near) + ring
    inner = {"per_node": g, "inner_bandwidth": fast, "inner_latency": near}
    assert took("all_reduce", "hierarchical", nodes * g, **inner) == pytest.approx(expected)


# nccl-tests, doc/PERFORMANCE.md: what a bus of B can do, without latency.


@pytest.mark.parametrize("n", ANY)
@pytest.mark.parametrize(
    ("op", "algorithm", "factor"),
    [
        ("all_reduce", "ring", lambda n: 2 * (n - 1) / n),
        ("reduce_scatter", "ring", lambda n: (n - 1) / n),
        ("all_gather", "ring", lambda n: (n - 1) / n),
        ("all_to_all", "pairwise", lambda n: (n - 1) / n),
        ("broadcast", "chain", lambda n: 1),
        ("reduce", "chain", lambda n: 1),
    ],
)
def test_nccl_bus_bandwidth(op: str, algorithm: str, factor: object, n: int) -> None:
    seconds = collective_time(op=op, algorithm=algorithm, num_bytes=S, workers=n, bandwidth=B)
    assert seconds == pytest.approx(S / B * factor(n), rel=1e-6)


@pytest.mark.parametrize("n", ANY)
def test_nvlink_sharp_passes_n_plus_1_shares(n: int) -> None:
    """S. Jeaugey in nccl-tests pull request 239: algbw = busbw n / (n + 1).

    The page's own (n-1)/(n+1) is this over the ring's bound of 2(n-1)/n, less the factor of two.
    """
    seconds = collective_time(op="all_reduce", algorithm="nvls", num_bytes=S, workers=n, bandwidth=B)
    assert S / seconds == pytest.approx(B * n / (n + 1))
    assert 2 * (n - 1) / n * S / seconds / 2 == pytest.approx(B * (n - 1) / (n + 1))


# Parameter servers: Dive into Deep Learning 12.7; Jiang et al. 2020 (BytePS, OSDI).


@pytest.mark.parametrize("n", ANY)
def test_one_server_carries_n_tensors_each_way(n: int) -> None:
    star = took("all_reduce", "parameter-server", n, dedicated=True) - 2 * A
    assert star == pytest.approx(2 * n * S / B)
    one_way = took("all_reduce", "parameter-server", n, dedicated=True, overlap=True) - 2 * A
    assert one_way == pytest.approx(n * S / B)
    ring = took("all_reduce", "ring", n) - 2 * (n - 1) * A
    assert one_way / ring == pytest.approx(n / 2 * n / (n - 1))  # about N/2 a direction


@pytest.mark.parametrize("k", [1, 2, 4])
def test_k_servers_carry_a_kth_each(k: int) -> None:
    at_once = took("all_reduce", "parameter-server", 8, servers=k, dedicated=True, overlap=True) - 2 * A
    assert at_once == pytest.approx(8 * S / (k * B))


@pytest.mark.parametrize("k", [0, 1, 3, 8])
@pytest.mark.parametrize("n", [2, 3, 8, 64])
def test_byteps_optimum(n: int, k: int) -> None:
    k = min(k, n)
    expected = 2 * n * (n - 1) * S / ((n * n + k * n - 2 * k) * B)
    assert took("all_reduce", "byteps", n, servers=k) - 2 * A == pytest.approx(expected)


@pytest.mark.parametrize("n", [2, 3, 8, 64])
def test_byteps_lies_between_the_ring_and_servers_of_their_own(n: int) -> None:
    ring = took("all_reduce", "ring", n) - 2 * (n - 1) * A
    servers = took("all_reduce", "parameter-server", n, servers=n, dedicated=True, overlap=True) - 2 * A
    assert took("all_reduce", "byteps", n, servers=0) - 2 * A == pytest.approx(ring)
    assert took("all_reduce", "byteps", n, servers=n) - 2 * A == pytest.approx(servers)


# Dai et al. 2022 (WRHT): 1,024 workers and 64 wavelengths take three steps of the whole message each.


def test_wrht_takes_three_steps_for_1024_workers_and_64_wavelengths() -> None:
    seconds = took("all_reduce", "optical-ring", 1024, wavelengths=64, reconfiguration=25e-6)
    assert seconds == pytest.approx(3 * (A + 25e-6 + S / B))


# Measured over links held to 1 Gbit/s, 4 nodes, 16.8 MB, by tests/benchmarks/links.py; headers take 4 to 5 % of them.


@pytest.mark.parametrize(
    ("algorithm", "options", "measured"),
    [("ring", {}, 0.225), ("pipelined-tree", {"segments": 9}, 0.393), ("parameter-server", {}, 0.862)],
)
def test_measured_times_are_a_little_above_the_formulas(
    algorithm: str, options: dict[str, int], measured: float
) -> None:
    link = {"op": "all_reduce", "num_bytes": 16.8e6, "workers": 4, "bandwidth": 1e9 / 8}
    assert 1.04 < measured / collective_time(algorithm=algorithm, **link, **options) < 1.15


def test_every_algorithm_names_its_source_and_a_formula_for_each_operation() -> None:
    for name, algorithm in ALGORITHMS.items():
        assert algorithm.source, name
        assert algorithm.formulas.keys() == algorithm.costs.keys(), name
