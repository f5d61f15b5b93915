"""Asynchronous training with parameter servers: bounds on the rate of updates, and the mean staleness."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication.parameter_server import even_server_bytes
from shardscope.analytic.communication.ring import Floats


def mean_staleness(workers: npt.ArrayLike) -> Floats:
    """Return the mean staleness of a gradient: W - 1 updates, for W workers that each start again without waiting.

    Between two updates of the same worker, every update of another worker makes its gradient staler by one. Over all
    gradients the mean is W - 1, however much the speeds of the workers differ (Zhang et al. 2016, arXiv 1511.05950,
    section 3, measure the same).

    Args:
        workers: W, the number of workers; a number or an array.
    """
    count: Floats = np.asarray(workers, dtype=np.float64) - 1.0
    return count


def most_updates_per_s(
    computing_s: npt.ArrayLike,
    *,
    workers: npt.ArrayLike,
    num_bytes: npt.ArrayLike,
    bandwidth: npt.ArrayLike,
    latency: npt.ArrayLike = 0.0,
    update_s: npt.ArrayLike = 0.0,
    servers: npt.ArrayLike = 1,
    dedicated: bool = False,
) -> Floats:
    """Return the largest possible number of updates per second of W asynchronous workers. All numbers may be arrays.

    It is the smaller of W / (computing + 2 (α + S/B) + update), the rate at which W workers go round if none waits for
    another, and the inverse of the time for which one update occupies the busiest part: a server's link in one
    direction, or a server itself (asymptotic bounds of operational analysis, Denning and Buzen 1978, section 6). The
    rate is close to it if one of the two is much smaller.

    Args:
        computing_s: Seconds in which a worker computes one gradient.
        workers: W, the number of workers.
        num_bytes: S, bytes of the gradients, and of the parameters.
        bandwidth: B, bytes per second of each link in one direction.
        latency: α, seconds per message.
        update_s: Seconds of one update of all parameters.
        servers: k, the number of servers, each with 1/k of the parameters.
        dedicated: Whether servers have ranks of their own. If not, a server shares its rank with a worker, and nothing
            is sent between the two.
    """
    count, size, rate, several = (
        np.asarray(each, dtype=np.float64) for each in (workers, num_bytes, bandwidth, servers)
    )
    update = np.asarray(update_s, dtype=np.float64) / several
    own = size * (1.0 if dedicated else 1.0 - 1.0 / count)  # on average over the workers
    alone = np.asarray(computing_s, dtype=np.float64) + 2 * (np.asarray(latency, float) + own / rate) + update
    link = even_server_bytes(size, count, several, dedicated=dedicated) / count / rate
    busiest = np.maximum(link, update)
    with np.errstate(divide="ignore"):
        most: Floats = np.minimum(count / alone, np.where(busiest > 0, 1.0 / busiest, np.inf))
    return most
