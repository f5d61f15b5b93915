"""The inputs of the calculator as traits, set from the controls or from code."""

from __future__ import annotations

from typing import Any

import traitlets as t

from shardscope.analytic.communication import ALGORITHMS, OPS
from shardscope.errors import SpecError, unknown_name
from shardscope_widgets.figures._communication import CommunicationQuestion

UNITS = {"Gbit/s": 1e9 / 8, "GB/s": 1e9, "GiB/s": float(2**30)}
"""Bytes per second in one of each bandwidth unit."""
FIRST = ("parameter-server", "ring", "tree", "halving-doubling", "hierarchical", "optical-ring")
POSITIVE = ("num_bytes", "bandwidth", "inner_bandwidth", "compute_ms")
COUNTS = ("workers", "per_node", "servers", "wavelengths")


class Asked(t.HasTraits):
    """Inputs of the calculator, in the units shown on the screen."""

    op = t.Unicode("all_reduce", help="The operation.")
    algorithms = t.List(t.Unicode(), default_value=list(FIRST), help="Those that are compared.")
    num_bytes = t.Float(1e8, help="Bytes of the tensor.")
    workers = t.Int(64, help="Workers in all.")
    bandwidth = t.Float(100.0, help="Of one worker, one way, in the unit beside it.")
    bandwidth_unit = t.Unicode("Gbit/s", help="Gbit/s, GB/s or GiB/s, of both bandwidths.")
    latency_us = t.Float(5.0, help="Microseconds a message.")
    per_node = t.Int(8, help="Workers a node, for the hierarchy.")
    inner_bandwidth = t.Float(2400.0, help="Inside a node, in the same unit.")
    servers = t.Int(1, help="Servers, or BytePS's CPU machines.")
    dedicated = t.Bool(False, help="Whether the servers are machines of their own.")
    wavelengths = t.Int(64, help="On each fibre.")
    compute_ms = t.Float(100.0, help="Milliseconds that one worker computes in a step.")
    overlap = t.Float(0.0, help="Share of the computation that hides communication, 0 to 1.")

    @t.validate(*POSITIVE)
    def _above_nothing(self, proposal: Any) -> float:
        if not proposal["value"] > 0:
            raise _out_of_range(proposal, "a number above 0")
        return float(proposal["value"])

    @t.validate(*COUNTS)
    def _at_least_one(self, proposal: Any) -> int:
        if proposal["value"] < 1:
            raise _out_of_range(proposal, "a whole number of 1 or more")
        return int(proposal["value"])

    @t.validate("latency_us")
    def _not_negative(self, proposal: Any) -> float:
        if not proposal["value"] >= 0:
            raise _out_of_range(proposal, "0 µs or more")
        return float(proposal["value"])

    @t.validate("overlap")
    def _share(self, proposal: Any) -> float:
        if not 0 <= proposal["value"] <= 1:
            raise _out_of_range(proposal, "a share from 0 to 1")
        return float(proposal["value"])

    @t.validate("op", "bandwidth_unit")
    def _known(self, proposal: Any) -> str:
        name, value = proposal["trait"].name, str(proposal["value"])
        valid = OPS if name == "op" else tuple(UNITS)
        if value not in valid:
            raise unknown_name(name, value, valid)
        return value

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


def _out_of_range(proposal: Any, wanted: str) -> SpecError:
    return SpecError(f"{proposal['trait'].name}={proposal['value']:g} is out of range; give {wanted}")
