"""The inputs of the calculator as traits, set from the controls or from code."""

from __future__ import annotations

from typing import Any

import traitlets as t

from shardscope.analytic.communication import ALGORITHMS, OPS
from shardscope.errors import unknown_name
from shardscope_widgets.figures._communication import CommunicationQuestion
from shardscope_widgets.kit.form import named, own_trait

UNITS = {"Gbit/s": 1e9 / 8, "GB/s": 1e9, "GiB/s": float(2**30)}
"""Bytes per second in one of each bandwidth unit."""
FIRST = ("parameter-server", "ring", "tree", "halving-doubling", "hierarchical", "optical-ring")
_OPS = tuple((op.replace("_", "-"), op) for op in OPS)


class Asked(t.HasTraits):
    """Inputs of the calculator, in the units shown on the screen."""

    op = own_trait("all_reduce", "Operation", "The operation.", kind="choice", values=_OPS)
    workers = own_trait(64, "Workers", "Workers in all.", least=1)
    bandwidth = own_trait(
        100.0, "Bandwidth, one way", "Of one worker, one way, in the unit beside it.", least=1e-6, step=1
    )
    bandwidth_unit = own_trait(
        "Gbit/s", "Unit", "Gbit/s, GB/s or GiB/s, of both bandwidths.", kind="choice", values=named(UNITS)
    )
    latency_us = own_trait(5.0, "Latency, µs", "Microseconds a message.", least=0, step=1)
    num_bytes = own_trait(1e8, "Message", "Bytes of the tensor.", least=1)
    algorithms = t.List(t.Unicode(), default_value=list(FIRST), help="Those that are compared.")
    per_node = own_trait(8, "Workers a node", "Workers a node, for the hierarchy.", least=1)
    inner_bandwidth = own_trait(
        2400.0, "Bandwidth inside", "Inside a node, in the same unit.", least=1e-6, step=1
    )
    servers = own_trait(1, "Servers", "Servers, or BytePS's CPU machines.", least=1)
    dedicated = own_trait(False, "Servers apart", "Whether the servers are machines of their own.")
    wavelengths = own_trait(64, "Wavelengths", "On each fibre.", least=1)
    compute_ms = own_trait(
        100.0, "Computing, ms", "Milliseconds that one worker computes in a step.", least=1e-6, step=10
    )
    overlap = own_trait(
        0.0,
        "Overlap",
        "Share of the computation that hides communication, 0 to 1.",
        least=0,
        most=1,
        step=0.05,
        slider=".0%",
    )

    @t.validate("algorithms")
    def _known_algorithms(self, proposal: Any) -> list[str]:
        for name in proposal["value"]:
            if name not in ALGORITHMS:
                raise unknown_name("algorithms", name, ALGORITHMS)
        return [name for name in ALGORITHMS if name in proposal["value"]]

    @property
    def able(self) -> tuple[str, ...]:
        """Names of the algorithms that implement the chosen operation."""
        return tuple(name for name, algorithm in ALGORITHMS.items() if self.op in algorithm.costs)

    @property
    def question(self) -> CommunicationQuestion:
        """The inputs in bytes and seconds."""
        unit = UNITS[self.bandwidth_unit]
        servers = {"servers": self.servers}
        return CommunicationQuestion(
            op=self.op,
            algorithms=tuple(name for name in self.able if name in self.algorithms),
            num_bytes=self.num_bytes,
            workers=self.workers,
            bandwidth=self.bandwidth * unit,
            latency=self.latency_us * 1e-6,
            options={
                "hierarchical": {"per_node": self.per_node, "inner_bandwidth": self.inner_bandwidth * unit},
                "parameter-server": servers | {"dedicated": self.dedicated},
                "byteps": servers,
                "optical-ring": {"wavelengths": self.wavelengths},
            },
            compute_s=self.compute_ms * 1e-3,
            overlap=self.overlap,
        )
