"""The calculator's inputs as traits, set from the controls or from code."""

from __future__ import annotations

from typing import Any

import traitlets as t

from shardscope.analytic.communication import ALGORITHMS, OPS
from shardscope.errors import unknown_name
from shardscope_widgets.figures._communication import CommunicationQuestion
from shardscope_widgets.kit.form import named, own_trait

UNITS = {"Gbit/s": 1e9 / 8, "GB/s": 1e9, "GiB/s": float(2**30)}
"""Bytes per second in one unit of bandwidth, by name of the unit."""
FIRST = ("parameter-server", "ring", "tree", "halving-doubling", "hierarchical", "optical-ring")
_OPS = tuple((op.replace("_", "-"), op) for op in OPS)


class CommunicationInputs(t.HasTraits):
    """The calculator's inputs, in the units shown on the screen."""

    op = own_trait("all_reduce", "Operation", "The collective operation.", kind="choice", values=_OPS)
    workers = own_trait(64, "Workers", "Total number of workers.", least=1)
    bandwidth = own_trait(100.0, "Bandwidth", "Bandwidth of one worker in one direction.", least=1e-6, step=1)
    bandwidth_unit = own_trait(
        "Gbit/s",
        "Unit",
        "Unit of both bandwidths: Gbit/s, GB/s or GiB/s.",
        kind="choice",
        values=named(UNITS),
    )
    latency_us = own_trait(5.0, "Latency, µs", "Latency per message, in microseconds.", least=0, step=1)
    num_bytes = own_trait(1e8, "Message", "Size of the tensor, in bytes.", least=1)
    algorithms = t.List(t.Unicode(), default_value=list(FIRST), help="Names of the algorithms to compare.")
    per_node = own_trait(8, "Workers per node", "Workers per node, for the hierarchical algorithm.", least=1)
    inner_bandwidth = own_trait(
        2400.0, "Within a node", "Bandwidth within a node, in the chosen unit.", least=1e-6, step=1
    )
    servers = own_trait(1, "Servers", "Number of parameter servers, or of BytePS CPU machines.", least=1)
    dedicated = own_trait(False, "Dedicated servers", "Whether the servers run on separate machines.")
    wavelengths = own_trait(64, "Wavelengths", "Wavelengths per fibre of the optical ring.", least=1)
    compute_ms = own_trait(
        100.0, "Compute, ms", "Compute time of one worker per step, in milliseconds.", least=1e-6, step=10
    )
    overlap = own_trait(
        0.0,
        "Overlap",
        "Fraction of the computation that communication can overlap with, 0 to 1.",
        least=0,
        most=1,
        step=0.05,
        slider=".0%",
    )

    memory_bandwidth = own_trait(
        2000.0,
        "Memory, GB/s",
        "Rate at which compression and decompression read and write memory, in GB/s.",
        least=1e-3,
        step=100,
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
        """The inputs converted to bytes and seconds."""
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
            codec_bandwidth=self.memory_bandwidth * 1e9,
        )
