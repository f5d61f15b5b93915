"""Bytes that parameter servers and their workers send, by formula. All traffic of a server uses its single link.

Ranks 0 to k-1 each serve one shard. A worker pushes gradients to every server and pulls parameters from every server; a
worker reaches a server on its own rank through memory. With one server that shares its rank with a worker, 2(W-1) S
passes through the server's link in a step (Li et al. 2014, section 2). A ring sends 2(W-1)/W S per rank (Patarasuk and
Yuan 2009).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication.traffic import Sent, Traffic

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
HEADER_BYTES = 24
"""Bytes of the header in front of every message: three float64 values."""


def parameter_server_push_bytes(
    shard_bytes: Sequence[int], world_size: int, *, dedicated: bool = False
) -> Ints:
    """Bytes of gradients that each rank sends in a step; shape `(W,)`, by rank.

    Args:
        shard_bytes: Bytes of the parameters on each server, one value per server.
        world_size: W, the number of ranks, servers included.
        dedicated: Whether the servers' ranks compute no gradients.
    """
    remote = _remote_workers(len(shard_bytes), world_size, dedicated=dedicated)
    sent: Ints = (remote * np.asarray(shard_bytes, dtype=np.int64)[:, None]).sum(axis=0)
    return sent


def parameter_server_pull_bytes(
    shard_bytes: Sequence[int], world_size: int, *, dedicated: bool = False
) -> Ints:
    """Bytes of parameters that each rank sends in a step: its shard, to every worker on another rank; shape `(W,)`."""
    sent = np.zeros(world_size, dtype=np.int64)
    remote = _remote_workers(len(shard_bytes), world_size, dedicated=dedicated)
    sent[: len(shard_bytes)] = remote.sum(axis=1) * np.asarray(shard_bytes, dtype=np.int64)
    return sent


def even_server_bytes(num_bytes: Floats, workers: Floats, servers: Floats, *, dedicated: bool) -> Floats:
    """Bytes that a server receives, and also sends, if k shards have equal sizes: R/k S for R workers on other ranks.

    Arguments follow NumPy broadcasting. The exact functions above give the same result if k divides the tensor.
    Dedicated servers are additional to `workers`; other servers share a rank with a worker, which reaches its own
    server through memory.
    """
    remote = workers - (0.0 if dedicated else 1.0)
    return num_bytes * remote / servers


def parameter_server_control_bytes(
    servers: int, world_size: int, *, dedicated: bool = False, sums: int = 0
) -> Ints:
    """Control bytes that each rank sends in a step, shape `(W,)`: headers, and sums of squares between servers.

    Args:
        servers: Number of servers.
        world_size: W, the number of ranks, servers included.
        dedicated: Whether the servers' ranks compute no gradients.
        sums: Number of norms of the whole gradient that an update needs: one for clipping, one for LAMB's own clipping.
    """
    remote = _remote_workers(servers, world_size, dedicated=dedicated)
    messages = remote.sum(axis=0)
    messages[:servers] += remote.sum(axis=1)
    sent: Ints = messages * HEADER_BYTES
    sent[:servers] += 8 * sums * (servers - 1)
    return sent


def parameter_server_traffic(
    pushed_bytes: Sequence[int],
    pulled_bytes: Sequence[int],
    world_size: int,
    *,
    dedicated: bool = False,
    sums: int = 0,
) -> Traffic:
    """Traffic of each rank in a step: gradients, parameters and control messages.

    A header is sent with its message, so only the sums of squares are separate messages.

    Args:
        pushed_bytes: Bytes of one worker's gradients for each server, packed or not.
        pulled_bytes: Bytes of the parameters that each server holds.
        world_size: W, the number of ranks, servers included.
        dedicated: Whether the servers' ranks compute no gradients.
        sums: As for `parameter_server_control_bytes`.
    """
    servers = len(pulled_bytes)
    one_each = [1] * servers
    control = parameter_server_control_bytes(servers, world_size, dedicated=dedicated, sums=sums)
    summed = np.where(np.arange(world_size) < servers, sums * (servers - 1), 0)
    return {
        "server_push": Sent(
            parameter_server_push_bytes(pushed_bytes, world_size, dedicated=dedicated),
            parameter_server_push_bytes(one_each, world_size, dedicated=dedicated),
        ),
        "server_pull": Sent(
            parameter_server_pull_bytes(pulled_bytes, world_size, dedicated=dedicated),
            parameter_server_pull_bytes(one_each, world_size, dedicated=dedicated),
        ),
        "server_control": Sent(control, summed),
    }


def _remote_workers(servers: int, world_size: int, *, dedicated: bool) -> Ints:
    """Return 1 where a worker (column) is on a different rank than a server (row), else 0; shape `(k, W)`."""
    remote = 1 - np.eye(servers, world_size, dtype=np.int64)
    if dedicated:
        remote[:, :servers] = 0
    return remote
