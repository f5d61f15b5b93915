"""What was measured of one kind of machine: the few constants that turn counts into seconds."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from math import log
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat

from shardscope.errors import unknown_name
from shardscope.spec._base import Spec
from shardscope.spec.cluster import Device

Share = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Calibration(Spec):
    """Constants of a machine and its software. Each has a meaning; none belongs to one measured row."""

    name: str
    device: str = ""
    """The catalogue's device it was measured on."""

    matmul_efficiency: Share = 0.75
    """Of the peak, that matrix products reach when they are huge."""
    fp8_efficiency: Share = 0.6
    """The same for products in 8 bits, of their own peak."""
    half_size: NonNegativeFloat = 200.0
    """w in elements: a product's time grows by w (1/m + 1/n + 1/k)."""
    attention_efficiency: Share = 0.4
    """Of the peak, that a fused attention kernel reaches on the half of the scores that causal attention needs."""
    attention_half_seq: NonNegativeFloat = 0.0
    """Tokens: fused attention's time grows by this over the length of the sequence."""
    unfused_efficiency: Share = 0.4
    """Of the peak, that the products of attention in separate kernels reach, on all scores."""
    memory_efficiency: Share = 0.8
    """Of the memory's bandwidth, that element-wise operators reach."""
    head_efficiency: Share = 1.0
    """Of `matmul_efficiency`, that the output projection reaches where the vocabulary is not cut (no padding)."""
    launch_s: NonNegativeFloat = 5e-6
    """Of the host, for each kernel: a block takes no less than its kernels take to be launched."""
    launch_jitter: NonNegativeFloat = 0.0
    """Growth of the launch time for each further tensor rank, as every collective waits for the slowest host."""
    intra_efficiency: Share = 0.8
    """Of the bandwidth inside a node, that collectives reach."""
    inter_efficiency: Share = 0.8
    """Of the bandwidth between nodes."""
    collective_s: NonNegativeFloat = 10e-6
    """Of starting one collective."""
    pipeline_efficiency: Share = 0.8
    """Of the bandwidth that messages between stages reach, waits included."""
    gradient_overlap: Fraction = 0.0
    """Of the reduction of gradients, hidden behind the last backward pass (ZeRO 0 to 2)."""
    shard_overlap: Fraction = 0.8
    """Of ZeRO-3's gathering and reduction, hidden behind computation."""
    optimizer_efficiency: Share = 0.7
    """Of the memory's bandwidth, that the optimizer's update reaches."""
    step_s: NonNegativeFloat = 1e-3
    """Once a step, whatever its size: data, loss scale, clipping, logging."""

    quantiles: dict[str, PositiveFloat] = Field(default_factory=lambda: {"5": 0.7, "50": 1.0, "95": 1.45})
    """Of measured / predicted on rows that were not fitted, by per cent: the interval of a prediction."""
    ridge: PositiveFloat | None = None
    """FLOP a byte of the device measured, peak over bandwidth: what `half_size` scales with on another."""
    constant_mfu: dict[str, PositiveFloat] = Field(default_factory=dict)
    """The median MFU of the rows fitted, by data set and precision: the baseline to beat."""
    constant_rate: dict[str, PositiveFloat] = Field(default_factory=dict)
    """The same for FLOPs with recomputation, and the bubble counted as (p - 1) / m: the plain formula's constant."""
    scores: dict[str, dict[str, float]] = Field(default_factory=dict)
    """By data set, on rows that were not fitted: ``mape`` and ``max`` in per cent, ``rank`` correlation, ``rows``;
    ``cross-validated`` over all rows known, in five parts, each predicted by constants fitted to the other four."""
    measured_on: str = ""
    """The machine and software behind the constants."""
    source: str = ""
    note: str = ""
    """What does not hold: constants that the rows could not tell, or a device that was never measured."""
    fitted: tuple[str, ...] = ()
    """Hashes of the inputs of the rows fitted, so that none of them is scored unawares."""

    @classmethod
    def of(cls, device: Device | str) -> Calibration:
        """The calibration of that name, or of a device; of the nearest device measured where there is none.

        A transfer keeps the shares of peak and bandwidth, scales `half_size` by the FLOPs a byte of the two devices,
        doubles the interval (in logarithms) and says in `note` where it comes from.

        Raises:
            SpecError: No calibration and no measured device has this name.

        Example:
            >>> Calibration.of("b200-megatron").device
            'b200'
        """
        known = {one.name: one for one in catalogue()}
        name = device if isinstance(device, str) else device.name
        found = known.get(name) or next((one for one in known.values() if one.device == name), None)
        if found is not None:
            return found
        if isinstance(device, str):
            raise unknown_name("calibration", device, known)
        return _nearest(device, tuple(known.values()))


@cache
def catalogue() -> tuple[Calibration, ...]:
    """Every calibration that ships with Shardscope; of two for one device, the one to take first comes first."""
    folder = files("shardscope.spec") / "catalogue" / "calibrations"
    texts = {
        entry.name: entry.read_text("utf-8") for entry in folder.iterdir() if entry.name.endswith(".json")
    }
    every = [Calibration.from_json(texts[name]) for name in sorted(texts)]
    return tuple(sorted(every, key=lambda one: (one.device, not one.name.endswith("megatron"))))


def _nearest(device: Device, known: tuple[Calibration, ...]) -> Calibration:
    ridge = max(device.peak_flops.values()) / device.memory_bandwidth
    wide = next(
        (device.peak_flops[f] for f in ("bf16", "fp16", "tf32", "fp32") if f in device.peak_flops), None
    )
    ridge = wide / device.memory_bandwidth if wide else ridge
    measured = [one for one in known if one.ridge is not None]
    assert measured, "the catalogue holds calibrations"
    nearest = min(measured, key=lambda one: abs(log(ridge / (one.ridge or ridge))))
    scale = ridge / (nearest.ridge or ridge)
    return nearest.replace(
        name=f"{device.name} by {nearest.name}",
        device=device.name,
        half_size=nearest.half_size * scale,
        ridge=ridge,
        quantiles={level: ratio**2 for level, ratio in nearest.quantiles.items()},
        constant_mfu={},
        constant_rate={},
        scores={},
        fitted=(),
        note=f"{device.name} was never measured: the constants are those of {nearest.device} ({nearest.name}), "
        f"half_size times {scale:.2f} for its FLOPs a byte, and the interval is twice as wide",
    )
