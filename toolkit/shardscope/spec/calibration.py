"""Calibrations: constants measured on one type of GPU that convert counts of FLOP, bytes and calls to seconds."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from math import log
from typing import Annotated, NamedTuple, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from shardscope.errors import SpecError, unknown_name
from shardscope.spec._base import Spec
from shardscope.spec.cluster import Device

Share = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Interval(NamedTuple):
    """Interval around a predicted step time, in seconds, that contained 90 % of the held-out measurements."""

    low: float
    high: float


class Fitted(Spec):
    """What all calibrations have: a name, quantiles of the prediction's error, and caveats."""

    name: str
    quantiles: dict[str, PositiveFloat] = Field(default_factory=lambda: {"5": 0.7, "50": 1.0, "95": 1.45})
    """Quantiles of measured / predicted time on held-out measurements, by level in per cent. They give the
    prediction interval."""
    note: str = ""
    """Caveats, such as constants that the measurements could not determine, or a device that was never measured."""

    @model_validator(mode="after")
    def _check_quantiles(self) -> Self:
        lacking = [level for level in ("5", "95") if level not in self.quantiles]
        if lacking:
            raise SpecError(
                f"quantiles={self.quantiles} has no {lacking[0]!r}; give the levels '5' and '95', in per cent"
            )
        return self

    def interval(self, seconds: float) -> Interval:
        """Return the interval around a predicted step time, in seconds, from the quantiles at 5 and 95 per cent."""
        return Interval(seconds * self.quantiles["5"], seconds * self.quantiles["95"])


class Calibration(Fitted):
    """Constants for a type of GPU and its software. Each has a physical meaning; none is specific to one measurement.

    `HostCalibration` has those of CPU ranks of one machine.
    """

    device: str = ""
    """Catalogue name of the device that was measured."""

    matmul_efficiency: Share = 0.75
    """Fraction of the peak FLOP/s that very large matrix products reach."""
    fp8_efficiency: Share = 0.6
    """Fraction of the fp8 peak FLOP/s that very large fp8 matrix products reach."""
    half_size: NonNegativeFloat = 200.0
    """w, in elements: the time of an m x k by k x n matrix product is multiplied by 1 + w (1/m + 1/n + 1/k)."""
    attention_efficiency: Share = 0.4
    """Fraction of the peak FLOP/s that fused attention kernels reach, counting only the causal half of the scores."""
    attention_half_seq: NonNegativeFloat = 0.0
    """s, in tokens: the time of fused attention is multiplied by 1 + s / sequence length."""
    unfused_efficiency: Share = 0.4
    """Fraction of the peak FLOP/s that unfused attention reaches in its matrix products, counting all scores."""
    memory_efficiency: Share = 0.8
    """Fraction of the memory bandwidth that element-wise operators reach."""
    head_efficiency: Share = 1.0
    """Fraction of `matmul_efficiency` that the output projection reaches where the vocabulary is not sharded (no
    padding)."""
    launch_s: NonNegativeFloat = 5e-6
    """Host time to launch one kernel, in seconds; a block takes at least the launch time of its kernels."""
    launch_jitter: NonNegativeFloat = 0.0
    """Relative growth of the launch time per additional tensor-parallel rank: each collective waits for the slowest
    host."""
    intra_efficiency: Share = 0.8
    """Fraction of the bandwidth inside a node that collectives reach."""
    inter_efficiency: Share = 0.8
    """Fraction of the bandwidth between nodes that collectives reach."""
    collective_s: NonNegativeFloat = 10e-6
    """Time to start one collective, in seconds."""
    pipeline_efficiency: Share = 0.8
    """Fraction of the bandwidth that messages between pipeline stages reach, counting waits as transfer time."""
    gradient_overlap: Fraction = 0.0
    """Fraction of the gradient reduction that is hidden behind the last backward pass (ZeRO stages 0 to 2)."""
    shard_overlap: Fraction = 0.8
    """Fraction of ZeRO-3's all-gathers and reduce-scatters that is hidden behind computation."""
    optimizer_efficiency: Share = 0.7
    """Fraction of the memory bandwidth that the optimizer update reaches."""
    step_s: NonNegativeFloat = 1e-3
    """Fixed time per step, in seconds: data loading, loss scaling, clipping, logging."""

    ridge: PositiveFloat | None = None
    """Peak FLOP/s divided by memory bandwidth of the measured device, in FLOP per byte. For another device, `half_size`
    is scaled by the ratio of the two."""
    constant_mfu: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Median MFU of the fitted measurements, by data set and precision: a baseline on the scoreboard."""
    constant_rate: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Like `constant_mfu`, but counting recomputed FLOPs and excluding a pipeline bubble of (p - 1) / m, with p stages
    and m micro-batches. The scoreboard's plain formula uses this constant."""
    scores: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Scores by data set, on held-out measurements: ``mape`` and ``max`` in per cent, ``rank`` correlation, and the
    number of measurements (``rows``). ``cross-validated`` contains the scores of a five-fold cross-validation over all
    known measurements."""
    measured_on: str = ""
    """The machine and software on which the constants were measured."""
    source: str = ""
    fitted: tuple[str, ...] = ()
    """Hashes of the inputs of the measurements to which the constants were fitted; scores exclude these rows."""

    @classmethod
    def of(cls, device: Device | str) -> Calibration:
        """Return the calibration with this name or for this device, or one transferred from a similar measured device.

        A transferred calibration keeps the fractions of peak FLOP/s and bandwidth, and scales `half_size` by the ratio
        of the devices' FLOP per byte. Its prediction interval is twice as wide (on a log scale), and `note` names the
        calibration that it was transferred from.

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
    """Return all calibrations that ship with Shardscope; if a device has several, the preferred one comes first."""
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
        f"half_size is scaled by {scale:.2f}, the ratio of FLOP per byte, and the interval is twice as wide",
    )
