"""Parameter-server algorithms: one or more servers, and BytePS, which divides the summation over all machines."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardscope.analytic.communication.algorithms._algorithm import Algorithm, Option
from shardscope.analytic.communication.cost import CollectiveInput, Cost, Phase
from shardscope.analytic.communication.parameter_server import even_server_bytes
from shardscope.analytic.communication.ring import Floats
from shardscope.errors import SpecError


def _serve(message: CollectiveInput, *, servers: Floats, dedicated: bool, overlap: bool) -> Cost:
    """Return the cost of averaging gradients with parameter servers.

    Raises:
        SpecError: There are more servers than workers, but servers are not dedicated.
    """
    size, count = message.num_bytes, message.workers
    if not dedicated and np.any(servers > count):
        raise SpecError(
            f"servers={np.max(servers):.0f} is more than the {np.min(count):.0f} workers on which they run; "
            f"use at most one server per worker, or dedicated=True"
        )
    several = np.where(count > 1, 1.0, 0.0)
    share = several * even_server_bytes(size, count, servers, dedicated=dedicated)
    # a worker sends its whole tensor; if it is also a server, it sends only the other servers' shards
    own = several * size * (1.0 if dedicated else (servers - 1) / servers)
    busiest = np.maximum(share, own) if dedicated else share + own
    moved = busiest if overlap else 2 * np.maximum(share, own)
    added = (count - 1) / servers * size
    return Cost((Phase("push and pull", 2 * several, moved, added),), busiest, busiest)


class BytePsSplit(NamedTuple):
    """Fraction of the tensor that each machine sums: with k CPU and n GPU machines, k `of_cpu` + n `of_gpu` = 1."""

    of_cpu: Floats
    of_gpu: Floats


def byteps_split(workers: Floats, servers: Floats) -> BytePsSplit:
    """Return the distribution of summation over machines that keeps all links equally busy (Jiang et al. 2020, OSDI).

    Each of the n GPU machines sums the fraction (n-k)/(n²+kn-2k) of the tensor, and each of the k CPU-only machines the
    fraction 2(n-1)/(n²+kn-2k). More than n CPU machines do not help.

    Args:
        workers: n, the number of GPU machines.
        servers: k, the number of CPU-only machines.
    """
    n, k = workers, np.minimum(servers, workers)
    whole = np.maximum(n * n + k * n - 2 * k, 1.0)  # 0 for one machine and one server, which exchange nothing
    return BytePsSplit(2 * (n - 1) / whole, (n - k) / whole)


def _byteps(message: CollectiveInput, *, servers: Floats) -> Cost:
    """Return the cost of averaging gradients with BytePS's optimal distribution."""
    n, size = message.workers, message.num_bytes
    split = byteps_split(n, servers)
    several = np.where(n > 1, 1.0, 0.0)
    moved = several * (1 + (n - 2) * split.of_gpu) * size
    added = (n - 1) * np.maximum(split.of_cpu, split.of_gpu) * size
    return Cost((Phase("push and pull at once", 2 * several, moved, added),), moved, moved)


PARAMETER_SERVER = Algorithm(
    title="parameter server",
    since=2010,
    source="Smola and Narayanamurthy 2010; Li et al. 2014 (OSDI); each server has a single link",
    about="Workers push gradients to k servers, each with 1/k of the parameters, and pull the updated parameters.",
    costs={"all_reduce": _serve},
    formulas={
        "all_reduce": "2α + 2R/k · S/B + (W−1)/k · S/γ,  R = W−1 if servers run on workers, W if dedicated (then "
        "R/k ≥ 1); with overlap, (R+k−1)/k or R/k, respectively, instead of 2R/k",
    },
    options={
        "servers": Option(1, "k: number of servers, each with 1/k of the tensor", 1),
        "dedicated": Option(False, "whether servers are separate machines, in addition to the workers"),
        "overlap": Option(False, "whether workers pull some parameters while they push other gradients"),
    },
)
BYTEPS = Algorithm(
    title="BytePS optimum",
    since=2020,
    source="Jiang et al. 2020 (OSDI); k = 0 moves as many bytes as a ring, k = n as dedicated servers",
    about="CPU machines and the CPUs of GPU machines share the summation, so that every link is busy both ways.",
    costs={"all_reduce": _byteps},
    formulas={"all_reduce": "2α + 2W(W−1)/(W²+kW−2k) · S/B + (W−1) max(2(W−1), W−k)/(W²+kW−2k) · S/γ"},
    options={"servers": Option(0, "k: additional CPU machines; more than W do not help", 0)},
)
