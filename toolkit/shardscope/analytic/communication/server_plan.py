"""The messages between workers and parameter servers in one step, one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardscope.analytic.communication.parameter_server import HEADER_BYTES
from shardscope.analytic.communication.plan import Exchange, Move, Round, When


def server_exchanges(
    pushed_bytes: Sequence[int],
    pulled_bytes: Sequence[int],
    workers: Iterable[int],
    *,
    sums: int,
    micro_batches: int = 1,
) -> tuple[Exchange, ...]:
    """Return one push of each worker to each server and one pull, with their headers, as in `parameter_server_traffic`.

    Args:
        pushed_bytes: Bytes of one worker's gradients for each server.
        pulled_bytes: Bytes of the parameters on each server.
        workers: Ranks of the workers; servers have the lowest ranks.
        sums: Number of norms that servers sum.
        micro_batches: Number of micro-batches in a step; pushes follow the last one.
    """
    servers = range(len(pulled_bytes))
    pairs = [(worker, server) for worker in workers for server in servers if worker != server]
    after, updated = When("backward", 1.0, micro_batches - 1), When("optimizer")
    push = [Move(worker, server, pushed_bytes[server]) for worker, server in pairs]
    pull = [Move(server, worker, pulled_bytes[server]) for worker, server in pairs]
    squares = [Move(a, b, 8, "norm") for a in servers for b in servers if a != b for _ in range(sums)]
    headers = [[m._replace(num_bytes=HEADER_BYTES) for m in moves] for moves in (push, pull)]
    return (
        _once("server_control", "headers of pushes", after, headers[0], is_attached=True),
        _once("server_push", "push", after, push),
        *([_once("server_control", "norms", after, squares)] if squares else []),
        _once("server_control", "headers of pulls", updated, headers[1], is_attached=True),
        _once("server_pull", "pull", updated, pull),
    )


def _once(
    collective: str, name: str, when: When, moves: Sequence[Move], *, is_attached: bool = False
) -> Exchange:
    return Exchange(collective, when, (Round(name, tuple(moves)),), is_attached=is_attached)
