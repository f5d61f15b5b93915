"""Time and volume of a collective operation with any algorithm, and the time as a tree of terms."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication._checks import check_options, find_algorithm, numbers
from shardscope.analytic.communication.cost import CollectiveInput, Cost, LinkRates, Price
from shardscope.analytic.communication.ring import Floats
from shardscope.analytic.terms import Term

_LINK_ARGUMENTS = ("num_bytes", "workers", "bandwidth", "latency", "reduce_bandwidth")
_INNER = ("inner_bandwidth", "inner_latency")


def collective_time(
    *,
    op: str,
    algorithm: str,
    num_bytes: npt.ArrayLike,
    workers: npt.ArrayLike,
    bandwidth: npt.ArrayLike,
    latency: npt.ArrayLike = 0.0,
    reduce_bandwidth: npt.ArrayLike = np.inf,
    **options: Any,
) -> Any:
    """Return the time of a collective operation in the alpha-beta-gamma model, in seconds.

    All numbers may be arrays, which are broadcast against each other.

    Args:
        op: ``"all_reduce"``, ``"reduce_scatter"``, ``"all_gather"``, ``"broadcast"``, ``"reduce"``, ``"all_to_all"`` or
            ``"send_recv"``.
        algorithm: A name in `ALGORITHMS`, which also describes the formula, source and options of each algorithm.
        num_bytes: S, bytes of the whole tensor: the output of an all-gather, the input of a reduce-scatter, or the
            data of one rank in an all-to-all, including the block that it keeps.
        workers: W, the number of workers.
        bandwidth: B, bytes per second that a worker sends while it receives at the same rate.
        latency: α, seconds per message.
        reduce_bandwidth: γ, bytes per second that a worker adds; infinite if the time for additions is neglected.
        options: Options of the algorithm, for example ``servers=4`` or ``per_node=8, inner_bandwidth=300e9``.

    Raises:
        SpecError: A number is out of range, the algorithm is unknown, or it does not support this operation.

    Example:
        >>> link = {"bandwidth": 12.5e9, "latency": 5e-6}
        >>> float(collective_time(op="all_reduce", algorithm="ring", num_bytes=1e9, workers=64, **link))
        0.15813
    """
    arguments = _link_arguments(num_bytes, workers, bandwidth, latency, reduce_bandwidth)
    cost, rates = _cost_and_rates(op, algorithm, arguments, options)
    return _price(cost, rates).total[()]


class CollectiveCost(NamedTuple):
    """Time of a collective in seconds, split into latency, bandwidth and reduction, and its volumes in bytes.

    All values are arrays that can be broadcast against each other.
    """

    latency_s: Floats
    bandwidth_s: Floats
    reduction_s: Floats
    sent_bytes: Floats
    """Bytes that the busiest worker sends over all its links."""
    carried_bytes: Floats
    """Bytes that the busiest link carries in one direction."""

    @property
    def seconds(self) -> Floats:
        """Total time in seconds; the same as `collective_time`."""
        total: Floats = self.latency_s + self.bandwidth_s + self.reduction_s
        return total


def collective_outcome(
    *,
    op: str,
    algorithm: str,
    num_bytes: npt.ArrayLike,
    workers: npt.ArrayLike,
    bandwidth: npt.ArrayLike,
    latency: npt.ArrayLike = 0.0,
    reduce_bandwidth: npt.ArrayLike = np.inf,
    **options: Any,
) -> CollectiveCost:
    """Return the time of a collective, split into latency, bandwidth and reduction, and its volumes in bytes.

    The arguments are the same as for `collective_time`.
    """
    arguments = _link_arguments(num_bytes, workers, bandwidth, latency, reduce_bandwidth)
    cost, rates = _cost_and_rates(op, algorithm, arguments, options)
    return CollectiveCost(*_price(cost, rates), cost.sent, cost.carried)


def collective_volume(
    *,
    op: str,
    algorithm: str,
    num_bytes: npt.ArrayLike,
    workers: npt.ArrayLike,
    of: Literal["worker", "link"] = "worker",
    **options: Any,
) -> Any:
    """Return the bytes that the busiest worker sends, or that the busiest link carries in one direction.

    All numbers may be arrays, which are broadcast against each other. The number of segments into which some algorithms
    divide the tensor does not affect the volume.

    Args:
        op: Operation, as for `collective_time`.
        algorithm: A name in `ALGORITHMS`.
        num_bytes: S, bytes of the whole tensor.
        workers: W, the number of workers.
        of: ``"worker"`` for the bytes that the busiest worker sends, ``"link"`` for those that the busiest link
            carries.
        options: Options of the algorithm.
    """
    cost, _ = _cost_and_rates(op, algorithm, _link_arguments(num_bytes, workers, 1e10, 5e-6, np.inf), options)
    volume = cost.sent if of == "worker" else cost.carried
    whole = np.broadcast_shapes(np.shape(volume), np.shape(num_bytes), np.shape(workers))
    return np.broadcast_to(volume, whole)[()]


def collective_term(
    *,
    op: str,
    algorithm: str,
    num_bytes: float,
    workers: int,
    bandwidth: float,
    latency: float = 0.0,
    reduce_bandwidth: float = np.inf,
    **options: Any,
) -> Term:
    """Return the time of one collective, in seconds, as a tree of terms.

    The root has one part for each phase of the algorithm, and each phase has parts for latency, bandwidth and
    additions. The arguments are the same as for `collective_time`, but must be single numbers.
    """
    arguments = _link_arguments(num_bytes, workers, bandwidth, latency, reduce_bandwidth)
    cost, rates = _cost_and_rates(op, algorithm, arguments, options)
    found = find_algorithm(algorithm, op)
    parts = tuple(_phase_term(phase, rates) for phase in cost.phases)
    whole = Term.total(f"{op.replace('_', '-')}, {found.title}", parts)
    inputs = {"S": float(num_bytes), "W": float(workers), "B": float(bandwidth), "α": float(latency)}
    return Term(
        whole.name, whole.value, "s", found.formulas[op], inputs | _given(options), found.source, whole.parts
    )


def _given(options: dict[str, Any]) -> dict[str, float | str]:
    return {name: value if isinstance(value, float | int) else str(value) for name, value in options.items()}


def _phase_term(phase: Any, rates: LinkRates) -> Term:
    """Return the time of one phase as a term, with latency, bandwidth and additions as its parts."""
    price: Price = rates.price(phase)
    where = {True: "Bᵢ", False: "B"}[phase.inside]
    parts = [
        Term("latency", float(price.latency), "s", "steps · α", {"steps": float(phase.steps)}),
        Term("bandwidth", float(price.bandwidth), "s", f"bytes / {where}", {"bytes": float(phase.num_bytes)}),
    ]
    if price.reduction > 0:
        reduced = {"bytes": float(phase.reduced)}
        parts.append(Term("adding", float(price.reduction), "s", "bytes / γ", reduced))
    return Term.total(phase.name, tuple(parts))


def _link_arguments(*values: npt.ArrayLike) -> dict[str, npt.ArrayLike]:
    return dict(zip(_LINK_ARGUMENTS, values, strict=True))


def _cost_and_rates(
    op: str, algorithm: str, link: dict[str, npt.ArrayLike], options: dict[str, Any]
) -> tuple[Cost, LinkRates]:
    """Return the cost of the collective and the rates of the links, after checking all arguments.

    Raises:
        SpecError: An argument is invalid.
    """
    found = find_algorithm(algorithm, op)
    message = CollectiveInput(
        numbers("num_bytes", link["num_bytes"], least=0, unit="bytes"),
        numbers("workers", link["workers"], least=1, unit="", is_whole=True),
        numbers("bandwidth", link["bandwidth"], least=0, unit="bytes/s", is_open=True),
        numbers("latency", link["latency"], least=0, unit="seconds"),
    )
    gamma = numbers("reduce_bandwidth", link["reduce_bandwidth"], least=0, unit="bytes/s", is_open=True)
    settings = check_options(algorithm, found, options)
    inner = [settings.pop(name, None) for name in _INNER]
    inside = [given if given is not None else own for given, own in zip(inner, message[2:], strict=True)]
    cost = found.cost(op, message, **settings)
    return cost, LinkRates(message.bandwidth, message.latency, gamma, inside[0], inside[1])


def _price(cost: Cost, rates: LinkRates) -> Price:
    """Return the time of all phases together, split into latency, bandwidth and reduction."""
    prices = [rates.price(phase) for phase in cost.phases]
    return Price(*(sum(parts, start=np.zeros(())) for parts in zip(*prices, strict=True)))
