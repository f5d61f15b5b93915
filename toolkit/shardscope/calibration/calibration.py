"""Calibrations: constants measured on one type of GPU that convert counts of FLOP, bytes and calls to seconds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from math import exp
from pathlib import Path
from typing import Annotated, NamedTuple, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator, model_validator

from shardscope.calibration.layer_shape import OTHERS, is_shape
from shardscope.calibration.software import software_of
from shardscope.errors import SpecError, quoted, unknown_name
from shardscope.show import Part, Sentences, Shown, Table
from shardscope.spec._base import Spec
from shardscope.spec.catalogue import has
from shardscope.spec.cluster import Device
from shardscope.spec.link import Link
from shardscope.spec.numbers import Fraction, require_plausible, sizes_in
from shardscope.spec.units import duration_text

Share = Annotated[float, Field(gt=0, le=1)]


FACTORS: dict[str, float] = {
    "scale": 0.12,
    "matmul_efficiency": 0.08,
    "fp8_efficiency": 0.2,
    "half_size": 0.4,
    "attention_efficiency": 0.4,
    "attention_half_seq": 0.7,
    "unfused_efficiency": 0.3,
    "memory_efficiency": 0.1,
    "head_efficiency": 0.3,
    "launch_s": 0.7,
    "launch_jitter": 0.7,
    "exposed_launch": 0.7,
    "intra_efficiency": 0.25,
    "pcie_efficiency": 0.25,
    "inter_efficiency": 0.4,
    "collective_s": 0.6,
    "message_overlap": 0.8,
    "pipeline_efficiency": 0.4,
    "gradient_overlap": 0.4,
    "shard_copies": 0.7,
    "shard_overlap": 0.2,
    "optimizer_efficiency": 0.25,
    "step_s": 0.8,
}
"""Constants that differ between clusters with the same software and device, and standard deviations of their
logarithms; ``scale`` is a common factor of all times."""

_LARGEST_COVARIANCE = 100.0
"""Largest covariance of two logarithms that is plausible; a standard deviation of 10 is a factor of 22,000."""

_MOST_ROWS = 20
"""Maximum number of measured steps that are shown."""
_HEADER = ("row", "measured", "predicted", "left out", "weight")
_UNSCALED = (
    "half_size", "attention_half_seq", "head_efficiency", "launch_jitter", "exposed_launch", "gradient_overlap",
    "shard_copies", "shard_overlap", "message_overlap",
)  # fmt: skip
"""Factors that are independent of a common scale of all times."""
FRACTIONS = ("efficiency", "overlap")
"""Ends of the names of factors that are at most 1."""


class Interval(NamedTuple):
    """Interval around a predicted step time, in seconds, that contained 90 % of the held-out measurements."""

    low: float
    high: float


class Fitted(Shown, Spec):
    """Base class of calibrations: a name, quantiles of the prediction's error, and caveats."""

    name: str
    quantiles: dict[str, PositiveFloat] = Field(default_factory=lambda: {"5": 0.7, "50": 1.0, "95": 1.45})
    """Quantiles of measured / predicted time on held-out measurements, by level in per cent. They give the
    prediction interval."""
    note: str = ""
    """Caveats, such as constants that the measurements do not determine, or a device that was never measured."""

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        require_plausible({name: value for name, value in sizes_in(self).items() if name != "covariance"})
        return self

    @model_validator(mode="after")
    def _check_quantiles(self) -> Self:
        lacking = [level for level in ("5", "95") if level not in self.quantiles]
        if lacking:
            raise SpecError(
                f"quantiles={self.quantiles} has no {lacking[0]!r}; give the levels '5' and '95', in per cent"
            )
        for level in self.quantiles:
            if not re.fullmatch(r"\d{1,2}(\.\d+)?", level):
                raise SpecError(
                    f"quantiles has the level {quoted(level)}; give levels in per cent below 100, such as '5' or '97.5'"
                )
        ordered = [self.quantiles[level] for level in sorted(self.quantiles, key=float)]
        if ordered != sorted(ordered):
            raise SpecError(
                f"quantiles={self.quantiles} do not increase with their level; give increasing ones"
            )
        return self

    def interval(self, seconds: float) -> Interval:
        """Return the interval around a predicted step time, in seconds, from the quantiles at 5 and 95 per cent."""
        return Interval(seconds * self.quantiles["5"], seconds * self.quantiles["95"])

    def save(self, path: str | Path) -> Path:
        """Write the calibration to a JSON file, and return its path."""
        Path(path).write_text(self.to_json(), encoding="utf-8")
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a calibration from a JSON file.

        Raises:
            SpecError: The file cannot be read, or does not contain a calibration.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # a name with a null byte raises ValueError
            raise SpecError(
                f"calibration={str(path)!r} cannot be read: {error}; give the path of a saved one"
            ) from None
        return cls.from_json(text)


class FittedRow(Spec):
    """One measured step that a calibration was fitted to."""

    label: str
    measured_s: PositiveFloat
    predicted_s: PositiveFloat
    """Step time predicted by the calibration, in seconds."""
    left_out_s: PositiveFloat | None = None
    """Step time predicted by a calibration fitted without the rows of this configuration, in seconds; None with fewer
    than three configurations."""
    weight: Fraction
    """Weight in the fit: 1 for a row that agrees with the others, near 0 for an outlier."""


class Calibration(Fitted):
    """Constants for a type of GPU and its software. Each has a physical meaning; none is specific to one measurement.

    `HostCalibration` has the constants of CPU ranks of one machine.
    """

    device: str = ""
    """Catalogue name of the device that was measured."""
    software: str = ""
    """Software that ran the measurements: a name in `calibration.software.SOFTWARE`, an alias, or empty."""

    is_only: bool = False
    """Whether no other cluster was measured with this device and software; predictions for both then use it."""

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
    exposed_launch: NonNegativeFloat = 0.0
    """Wait of a block under tensor parallelism, relative to the time to launch its kernels: at each collective, devices
    that are not limited by their hosts wait for the host of the slowest rank, too."""
    intra_efficiency: Share = 0.8
    """Fraction of the bandwidth inside a node that collectives reach."""
    pcie_efficiency: Share = 0.35
    """Like `intra_efficiency`, but over PCIe, where messages pass through the host's bridges, which devices share."""
    inter_efficiency: Share = 0.8
    """Fraction of the bandwidth between nodes that collectives reach."""
    collective_s: NonNegativeFloat = 10e-6
    """Time to start one collective, in seconds."""
    message_overlap: Fraction = 0.0
    """Fraction of tensor-parallel messages that is hidden behind computation, as with Megatron-Core's tp_comm_overlap
    or torchtitan's asynchronous tensor parallelism."""
    pipeline_efficiency: Share = 0.8
    """Fraction of the bandwidth that messages between pipeline stages reach, counting waits as transfer time."""
    gradient_overlap: Fraction = 0.0
    """Fraction of the gradient reduction that is hidden behind the last backward pass (ZeRO stages 0 to 2)."""
    shard_copies: NonNegativeFloat = 0.0
    """Bytes that a device moves in its memory per byte that ZeRO 2 and 3 gather or reduce, at the rate of element-wise
    operators: copies of each layer's tensors into a flat buffer and back account for about 4, and waits of layers for
    each other for the remainder. Measured clusters have about 8 to 40."""
    shard_overlap: Fraction = 0.8
    """Fraction of ZeRO-3's all-gathers and reduce-scatters that is hidden behind computation."""
    optimizer_efficiency: Share = 0.7
    """Fraction of the memory bandwidth that the optimizer update reaches."""
    step_s: NonNegativeFloat = 1e-3
    """Fixed time per step, in seconds: data loading, loss scaling, clipping, logging."""

    shapes: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Measured factors of a layer's time, by the names of `calibration.layer_shape`. Shapes without a measured
    factor have the factor 1 and wider intervals, because the constants' errors were estimated with the factors."""

    ridge: PositiveFloat | None = None
    """Peak FLOP/s divided by memory bandwidth of the measured device, in FLOP per byte. For another device, `half_size`
    is scaled by the ratio of the two devices' values."""
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
    covariance: tuple[tuple[float, ...], ...] = ()
    """Covariance of the logarithms of the constants on another cluster, in the order of `FACTORS`; empty if they are
    independent with the usual standard deviations."""
    rows: tuple[FittedRow, ...] = ()
    """The measured steps, if `ss.calibrate` fitted the constants to them."""

    @field_validator("shapes")
    @classmethod
    def _check_shapes(cls, given: dict[str, float]) -> dict[str, float]:
        for name in given:
            if name != OTHERS and not is_shape(name):
                raise SpecError(
                    f"shapes has the name {quoted(name)}, which is not the name of a layer shape; give names from "
                    f"shardscope.calibration.layer_shape.shape_of(model, layout), or {OTHERS!r} for all others"
                )
        return given

    @field_validator("software")
    @classmethod
    def _name_software(cls, given: str) -> str:
        return software_of(given).name if given else given

    @model_validator(mode="after")
    def _check_covariance(self) -> Self:
        if self.covariance and {len(self.covariance), *map(len, self.covariance)} != {len(FACTORS)}:
            raise SpecError(
                f"covariance has {len(self.covariance)} rows; give {len(FACTORS)} rows of as many numbers, or omit it"
            )
        largest = max((abs(each) for row in self.covariance for each in row), default=0.0)
        if largest > _LARGEST_COVARIANCE:
            raise SpecError(
                f"covariance has the number {quoted(largest)}, which is too large for logarithms; fit the "
                "calibration again "
                "with ss.calibrate(cluster, rows=...)"
            )
        return self

    def _shown(self) -> list[Part]:
        """Return the headline, the note, the errors, and the measured steps, those with low weight first."""
        low, high = self.quantiles["5"], self.quantiles["95"]
        where = (
            f"{self.device or 'an unknown device'}; measured on {self.measured_on or 'an unknown cluster'}"
        )
        factors = [factor for name, factor in self.shapes.items() if name != OTHERS]
        lines = [
            f"Calibration {self.name}",
            f"Software {self.software or 'unknown'} on {where}",
            *([f"Note: {self.note}"] if self.note else []),
            f"On the measured cluster, 90% of steps take {low:.2f} to {high:.2f} times the predicted time",
        ]
        if factors:
            lines.append(
                f"Layers of {len(factors)} measured shapes take {min(factors):.2f} to {max(factors):.2f} times as "
                "long as the constants predict"
            )
        for name, score in self.scores.items():
            errors = f"mean error {score['mape']:.1f}%, worst {score['max']:.1f}%"
            lines.append(f"{name}: {errors}, {score['rows']:.0f} rows")
        rows = [_cells(row) for row in sorted(self.rows, key=lambda row: row.weight)[:_MOST_ROWS]]
        rest = len(self.rows) - len(rows)
        more = f"and {rest} more" if rest else ""
        return [Sentences(lines), Table(_HEADER, rows, more=more, num_left=len(_HEADER))]

    def moved(self, steps: Mapping[str, float]) -> Self:
        """Return the calibration with its constants multiplied by the exponentials of `steps`, keys of `FACTORS`.

        The scale multiplies all times: it divides every rate and multiplies every fixed time. Fractions stay at most 1.
        """
        scale, changes = steps.get("scale", 0.0), {}
        for name, step in steps.items():
            if name == "scale":
                continue
            sign = 0.0 if name in _UNSCALED else 1.0 if name.endswith("_s") else -1.0
            value = getattr(self, name) * exp(step + sign * scale)
            changes[name] = min(value, 1.0) if name.endswith(FRACTIONS) else value
        return self.model_copy(update=changes)

    def intra_rate(self, link: Link) -> float:
        """Return the rate that collectives reach over this link between the devices of a node, in bytes per second."""
        return link.bandwidth * (self.pcie_efficiency if link.is_pcie else self.intra_efficiency)

    @classmethod
    def of(cls, device: Device | str, software: str | None = None) -> Calibration:
        """Return the calibration with this name, or the one that predictions for this device and software use.

        Args:
            device: A device, the name of one, or the name of a calibration.
            software: Name of the software; None for the software of a calibration of this device, or else
                Megatron-Core.

        Raises:
            SpecError: No calibration and no device has this name, or the software is not known.

        Example:
            >>> Calibration.of("b200-megatron").device
            'b200'
        """
        from shardscope.calibration.choice import calibration_for  # imports this module

        known = {one.name: one for one in catalogue()}
        name = device if isinstance(device, str) else device.name
        measured = known.get(name) or next((one for one in known.values() if one.device == name), None)
        if measured is not None and software is None:
            return measured
        if isinstance(device, str) and not has("devices", device):
            if measured is not None:
                raise SpecError(
                    f"{device!r} is a calibration of {measured.software}; omit software, or give a device"
                )
            raise unknown_name("calibration", device, known)
        chosen = software_of(software or "megatron-core")
        return calibration_for(Device.of(device) if isinstance(device, str) else device, chosen)


def _cells(row: FittedRow) -> list[str]:
    measured = row.measured_s
    predicted = (
        "" if seconds is None else f"{duration_text(seconds)} ({seconds / measured - 1:+.1%})"
        for seconds in (row.predicted_s, row.left_out_s)
    )
    return [row.label, duration_text(measured), *predicted, f"{row.weight:.2f}"]


@cache
def catalogue() -> tuple[Calibration, ...]:
    """Return all calibrations that ship with Shardscope; if a device has several, the preferred one comes first."""
    folder = files("shardscope.calibration") / "catalogue" / "calibrations"
    texts = {
        entry.name: entry.read_text("utf-8") for entry in folder.iterdir() if entry.name.endswith(".json")
    }
    every = [Calibration.from_json(texts[name]) for name in sorted(texts)]
    return tuple(sorted(every, key=lambda one: (one.device, not one.name.endswith("megatron"))))


def ridge_of(device: Device) -> float:
    """Return the device's FLOP per byte: its peak in 16-bit matrix products divided by its memory bandwidth."""
    peaks = device.peak_flops
    wide = next(
        (peaks[name] for name in ("bf16", "fp16", "tf32", "fp32") if name in peaks), max(peaks.values())
    )
    return wide / device.memory_bandwidth
