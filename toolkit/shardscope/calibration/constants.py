"""The constants of CPU ranks that `ss.calibrate` measures: their units and meanings."""

from __future__ import annotations

from typing import Literal, NamedTuple

Unit = Literal["FLOP/s", "B/s", "s", "x"]
Needs = Literal["ranks", "transport", "nodes"]


class Kind(NamedTuple):
    """Unit and meaning of a constant, and the properties that it depends on."""

    unit: Unit
    meaning: str
    needs: tuple[Needs, ...] = ()


CONSTANTS: dict[str, Kind] = {
    "flops": Kind("FLOP/s", "matrix products of one rank with a core of its own"),
    "bandwidth": Kind("B/s", "other operations, read and written"),
    "operation_s": Kind("s", "fixed time per operation; operations on small tensors take little longer"),
    "optimizer_bandwidth": Kind("B/s", "optimizer update, read and written"),
    "tensor_s": Kind("s", "fixed time per parameter tensor that the optimizer updates"),
    "codec_bandwidth": Kind("B/s", "compression and decompression of gradients, read and written"),
    "slowdown": Kind(
        "x", "computation of ranks that compute at the same time, relative to one rank", ("ranks",)
    ),
    "step_s": Kind("s", "fixed time per step: batch, loss, events, waits for the slowest rank", ("ranks",)),
    "unit_s": Kind("s", "fixed time per unit for which ZeRO-2 or ZeRO-3 gathers parameters", ("ranks",)),
    "stage_s": Kind("s", "fixed time per micro-batch of a pipeline stage, in both passes", ("ranks",)),
    "message_s": Kind("s", "time per message", ("transport", "ranks")),
    "woken_message_s": Kind("s", "time per message of ranks that slept before it", ("transport", "ranks")),
    "message_bandwidth": Kind("B/s", "bytes that one rank sends in a collective", ("transport", "ranks")),
    "link_efficiency": Kind(
        "x", "fraction of a link's bandwidth that messages between nodes reach", ("transport",)
    ),
    "pair_latency_s": Kind(
        "s", "half a round trip between two nodes, without delays that ranks add", ("nodes",)
    ),
    "pair_bandwidth": Kind("B/s", "payload that one node sends to another", ("nodes",)),
}
"""All constants, by name."""
MEASURED_OF_PAIRS = tuple(name for name, kind in CONSTANTS.items() if "nodes" in kind.needs)
"""Constants that only a calibration of an emulated cluster has; they reveal slow links; predictions do not use them."""
NOT_FITTED = (*MEASURED_OF_PAIRS, "woken_message_s")
"""Constants that are measured separately instead of being fitted to runs; a calibration may lack them."""
OUTDATED = ("idle_message_s",)
"""Names of constants of earlier versions, which measured something else: messages of ranks that had not slept."""

_SIZES = {
    "FLOP/s": ((1e9, "GFLOP/s"), (1e6, "MFLOP/s")),
    "B/s": ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")),
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "x": ((1.0, "×"),),
}


def amounts_text(name: str, *values: float) -> list[str]:
    """Format values of a constant with one unit: ``["1.2", "1.1", "1.3 ms"]``; the first value selects the unit."""
    size, unit = next(
        (each for each in _SIZES[CONSTANTS[name].unit] if values[0] >= each[0]),
        _SIZES[CONSTANTS[name].unit][-1],
    )
    texts = [f"{value / size:.3g}" if value / size < 1000 else f"{value / size:.0f}" for value in values]
    return [*texts[:-1], f"{texts[-1]} {unit}"]
