"""Devices of a cluster. All sizes are in bytes, all rates in bytes or FLOP per second."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, model_validator

from shardscope.errors import SpecError, quoted
from shardscope.spec import catalogue
from shardscope.spec._base import Spec
from shardscope.spec.numbers import require_plausible, sizes_in
from shardscope.spec.units import Bandwidth, Bytes, BytesOrNone, Flops, Watts, bytes_text


class Device(Spec):
    """An accelerator, or a CPU used as one. Quantities may be strings with units: ``"80 GiB"``."""

    name: str
    memory_bytes: Bytes
    """Bytes that one process can allocate: as reported by the driver where known, otherwise the marketed size."""
    context_bytes: BytesOrNone = 0.0
    """Bytes of `memory_bytes` that the driver's context takes in each process; 0 if there is none or it is unknown."""
    peak_flops: dict[str, Flops]
    """Peak FLOP/s of dense matrix products, by dtype: ``fp32``, ``tf32``, ``fp16``, ``bf16``, ``fp8``."""
    memory_bandwidth: Bandwidth
    """Bytes per second between the device and its own memory."""
    architecture: str = ""
    """Architecture as compilers name it, such as ``sm_90`` or ``gfx942``: from NVIDIA's table of compute capabilities
    (developer.nvidia.com/cuda-gpus) or AMD's table of specifications (rocm.docs.amd.com). Empty if unknown, or if the
    device is not a GPU by NVIDIA or AMD; memory is then predicted as for ``sm_90``."""
    power_w: Watts | None = None
    """Power limit, in watts."""
    host_bandwidth: Bandwidth = 25e9
    """Bytes per second to and from the host's memory, in each direction (PCIe or NVLink-C2C)."""
    source: str = Field(min_length=1)
    """Publication or page that states the values."""
    recalled: tuple[str, ...] = ()
    """Fields whose values were written from memory and not confirmed in the source."""

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        require_plausible(sizes_in(self))
        return self

    @model_validator(mode="after")
    def _check_context(self) -> Self:
        if self.context_bytes >= self.memory_bytes:
            raise SpecError(
                f"context_bytes={bytes_text(self.context_bytes)} leaves none of "
                f"memory_bytes={bytes_text(self.memory_bytes)} for tensors; give a smaller value, or 0"
            )
        return self

    @model_validator(mode="after")
    def _check_architecture(self) -> Self:
        if not re.fullmatch(r"(sm_\d{2,3}|gfx[0-9a-f]+)?", self.architecture):
            raise SpecError(
                f"architecture={quoted(self.architecture)} is not the name of an architecture; use the "
                "compiler's name, such as sm_90 or gfx942, or leave it empty"
            )
        return self

    @classmethod
    def of(cls, name: str) -> Device:
        """Return a device from the catalogue; `Device.names` lists them.

        Example:
            >>> Device.of("a100-80gb").peak_flops["bf16"]
            312000000000000.0
        """
        proper, fields = catalogue.lookup("devices", name, field="device")
        return cls(name=proper, **{key: value for key, value in fields.items() if key != "node"})

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names in the catalogue."""
        return tuple(catalogue.table("devices"))
