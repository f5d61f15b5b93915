"""Bytes that parameter servers and their workers send, by formula.

Ranks 0 to k-1 are servers, each for one shard of the parameters. In every step, a worker pushes gradients to every
server and pulls parameters from every server, but nothing is sent between a server and a worker on the same rank. With
one server that shares its rank with one of W workers, 2(W-1) S bytes pass through the server's link in a step, for S
bytes of parameters (Li et al. 2014, section 2). In a ring all-reduce, a rank sends only 2(W-1)/W S (Patarasuk and Yuan
2009).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication.traffic import Sent, Traffic

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
HEADER_BYTES = 24
"""Bytes of the header before every message: three float64 values."""


def parameter_server_push_bytes(
    shard_bytes: Sequence[int], world_size: int, *, dedicated: bool = False
) -> Ints:
    """Return the bytes of gradients that each rank sends in a step; shape `(W,)`, by rank.

    Args:
        shard_bytes: Bytes of one worker's gradients for each server.
        world_size: W, the number of ranks, including servers.
        dedicated: Whether the ranks of servers compute no gradients.
    """
    remote = _remote_workers(len(shard_bytes), world_size, dedicated=dedicated)
    sent: Ints = (remote * np.asarray(shard_bytes, dtype=np.int64)[:, None]).sum(axis=0)
    return sent


def parameter_server_pull_bytes(
    shard_bytes: Sequence[int], world_size: int, *, dedicated: bool = False
) -> Ints:
    """Return the bytes of parameters that each rank sends in a step; shape `(W,)`, by rank.

    A server sends its shard to every worker on another rank. The arguments are the same as for
    `parameter_server_push_bytes`, except that `shard_bytes` is the size of each server's parameters.
    """
    sent = np.zeros(world_size, dtype=np.int64)
    remote = _remote_workers(len(shard_bytes), world_size, dedicated=dedicated)
    sent[: len(shard_bytes)] = remote.sum(axis=1) * np.asarray(shard_bytes, dtype=np.int64)
    return sent


def even_server_bytes(num_bytes: Floats, workers: Floats, servers: Floats, *, dedicated: bool) -> Floats:
    """Return the bytes that a server receives, and also sends, in a step if all shards have the same size.

    It is R/k S, for R workers on other ranks, k servers and S bytes of parameters. The exact functions above return
    the same in this case.

    Args:
        num_bytes: S, bytes of all parameters.
        workers: Number of workers.
        servers: k, the number of servers.
        dedicated: Whether servers have ranks of their own, in addition to `workers`. If not, a server shares its rank
            with a worker, and nothing is sent between the two.
    """
    remote = workers - (0.0 if dedicated else 1.0)
    return num_bytes * remote / servers


def parameter_server_control_bytes(
    servers: int, world_size: int, *, dedicated: bool = False, sums: int = 0
) -> Ints:
    """Return the bytes of control data that each rank sends in a step; shape `(W,)`, by rank.

    Control data are the headers of all messages, and sums of squares that servers exchange to compute norms.

    Args:
        servers: Number of servers.
        world_size: W, the number of ranks, including servers.
        dedicated: Whether the ranks of servers compute no gradients.
        sums: Number of norms over all gradients that an update needs: one for clipping, and one for the clipping that
            is part of LAMB.
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
    """Return the traffic of each rank in a step: gradients, parameters and control data.

    Only the sums of squares count as messages of control data, because a header is sent together with its message.

    Args:
        pushed_bytes: Bytes of one worker's gradients for each server, compressed or not.
        pulled_bytes: Bytes of the parameters on each server.
        world_size: W, the number of ranks, including servers.
        dedicated: Whether the ranks of servers compute no gradients.
        sums: Number of norms over all gradients that an update needs, as for `parameter_server_control_bytes`.
    """
    servers = len(pulled_bytes)
    one_each = [1] * servers
    control = parameter_server_control_bytes(servers, world_size, dedicated=dedicated, sums=sums)
    summed = np.where(np.arange(world_size) < servers, sums * (servers - 1), 0)
    return {
        "server_push": Sent(
            parameter_server_push_bytes(pushed_bytes, world_size, dedicated=dedicated),
            parameter_server_push_bytes(one_each, world_size, dedicated=dedicated),
            received=parameter_server_pull_bytes(pushed_bytes, world_size, dedicated=dedicated),
        ),
        "server_pull": Sent(
            parameter_server_pull_bytes(pulled_bytes, world_size, dedicated=dedicated),
            parameter_server_pull_bytes(one_each, world_size, dedicated=dedicated),
            received=parameter_server_push_bytes(pulled_bytes, world_size, dedicated=dedicated),
        ),
        "server_control": Sent(control, summed),
    }


def _remote_workers(servers: int, world_size: int, *, dedicated: bool) -> Ints:
    """Return a matrix of shape `(k, W)`: 1 if worker (column) and server (row) are on different ranks, else 0."""
    remote = 1 - np.eye(servers, world_size, dtype=np.int64)
    if dedicated:
        remote[:, :servers] = 0
    return remote
