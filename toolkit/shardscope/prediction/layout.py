"""Predict the step time, memory and cost of one layout of a model on a cluster, as sums of terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardscope.analytic.compute.flops import hardware_flops, model_flops
from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import memory_term
from shardscope.analytic.memory.offload import drive_bytes_per_device
from shardscope.analytic.recomputation import recomputed_in_model
from shardscope.analytic.reliability import Reliability
from shardscope.analytic.terms import Term
from shardscope.calibration.calibration import Calibration, Interval
from shardscope.calibration.choice import calibration_of
from shardscope.calibration.host_calibration import AnyCalibration
from shardscope.calibration.software import memory_model
from shardscope.calibration.spread import Floats, Widened, stacked, widened
from shardscope.prediction.budget import Budgeted
from shardscope.prediction.failures import failures_text, layout_failures
from shardscope.prediction.step.machine import Machine, memory_with, room_on
from shardscope.prediction.step.step import step_time
from shardscope.prediction.step.term import time_term
from shardscope.show import Part, Sentences, Shown, Tree
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout, short
from shardscope.spec.model import Transformer
from shardscope.spec.units import duration_text, gib_text, work_text


@dataclass(frozen=True, repr=False)
class Prediction(Shown, Budgeted):
    """Prediction for one layout; `time` and `memory` are trees of terms."""

    model: Transformer
    cluster: Cluster
    layout: Layout
    calibration: Calibration
    time: Term
    """Time of one optimizer step, in seconds."""
    memory: Term
    """Peak memory of the device with the highest peak, in bytes."""

    @property
    def step_time_s(self) -> float:
        """Time of one optimizer step, in seconds."""
        return self.time.value

    @property
    def interval(self) -> Interval:
        """90 % prediction interval of the step time on clusters of this kind, in seconds; see `uncertainty`."""
        return self.uncertainty.interval

    @cached_property
    def uncertainty(self) -> Widened:
        """90 % prediction interval of the step time, and the constants that contribute most to its width."""
        return uncertainty_of(self.model, self.cluster, self.layout, self.calibration)

    @property
    def software(self) -> str:
        """Name of the software that the prediction assumes; empty if its calibration names none."""
        return self.calibration.software

    @property
    def peak_bytes(self) -> float:
        """Peak memory of the device with the highest peak, in bytes."""
        return self.memory.value

    @property
    def fits(self) -> bool:
        """Whether every device has enough room for tensors, and offloaded data fit on the host and its drives."""
        return self.peak_bytes <= self.room_bytes and not self._offload_overflow_bytes

    @property
    def room_bytes(self) -> float:
        """Bytes that tensors can take on a device: its memory without the driver's context and free blocks that the
        allocator keeps; see `analytic.memory.tensor_room`.
        """
        return room_on(self.cluster, self.software)

    @property
    def _offload_overflow_bytes(self) -> float:
        """Offloaded bytes of a device that exceed its shares of host memory and drives."""
        parts = memory_with(self.model, Layouts.of([self.layout]), self.cluster, self.software)
        return max(0.0, float(parts.nvme[0]) - drive_bytes_per_device(self.cluster))

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, over all devices."""
        return self.layout.global_batch * self.model.seq / self.step_time_s

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: model FLOPs (3 x forward) divided by the devices' peak FLOPs in one step."""
        return self._utilization(model_flops(self.model, self.layout.global_batch))

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization: like `mfu`, but including the FLOPs of recomputation."""
        return self._utilization(
            hardware_flops(
                self.model,
                self.layout.global_batch,
                recompute=self.layout.recompute,
                layers=recomputed_in_model(self.layout, self.model.layers),
            )
        )

    def _utilization(self, flops: Any) -> float:
        machine = Machine.of(self.cluster, self.calibration, self.layout.precision)
        return machine.utilization(float(flops), self.num_devices, self.step_time_s)

    @cached_property
    def reliability(self) -> Reliability | None:
        """Expected cost of failures and checkpoints at the optimal interval; None without a failure rate."""
        return layout_failures(self.model, self.cluster, self.layout)

    @property
    def num_devices(self) -> int:
        """Number of devices that the layout uses."""
        return self.layout.num_devices

    @property
    def priced(self) -> Cluster:
        """The cluster whose price `dollars` uses."""
        return self.cluster

    def to_dict(self) -> dict[str, object]:
        """Return all values and both trees of terms in a JSON-compatible form."""
        return {
            "model": self.model.name,
            "seq": self.model.seq,
            "cluster": self.cluster.name,
            "layout": self.layout.model_dump(mode="json"),
            "software": self.software,
            "calibration": self.calibration.name,
            "note": self.calibration.note,
            "uncertain": dict(self.uncertainty.shares),
            "step_time_s": self.step_time_s,
            "interval_s": list(self.interval),
            "peak_bytes": self.peak_bytes,
            "room_bytes": self.room_bytes,
            "fits": self.fits,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "goodput": self.goodput,
            "time": self.time.to_dict(),
            "memory": self.memory.to_dict(),
        }

    def _shown(self) -> list[Part]:
        return [Sentences(self._headline()), Tree(self.time), Tree(self.memory, unit="GiB")]

    def _headline(self) -> list[str]:
        low, high = map(duration_text, self.interval)
        held = f"{gib_text(self.peak_bytes)} of {gib_text(self.room_bytes)} for tensors"
        work = work_text(self.layout.global_batch, self.model.seq)
        return [
            f"{self.model.name} on {self.layout.num_devices} x {self.cluster.device.name}, {work}",
            f"layout: {short(self.layout)}",
            f"step {duration_text(self.step_time_s)} ({low} to {high}), "
            f"{self.tokens_per_s:,.0f} tokens/s, MFU {self.mfu:.1%}, HFU {self.hfu:.1%}; peak memory per device {held}"
            + ("" if self.fits else ": it does not fit"),
            f"software {self.software or 'unknown'}, calibration {self.calibration.name}"
            + (f": {self.calibration.note}" if self.calibration.note else ""),
            self.uncertainty.sentence,
            *filter(None, [failures_text(self.reliability, self.num_devices)]),
        ]


def uncertainty_of(model: Transformer, cluster: Cluster, layout: Layout, calibration: Calibration) -> Widened:
    """Return the 90 % interval of a layout's step time, and the constants that contribute most to its width."""

    def seconds(calibrations: Sequence[Calibration]) -> Floats:
        table = Layouts.of([layout] * len(calibrations))
        return step_time(model, table, cluster, stacked(calibrations)).total

    return widened(seconds, calibration)


def predict_layout(
    model: Transformer,
    cluster: Cluster,
    layout: Layout,
    calibration: AnyCalibration | None = None,
    *,
    software: str | None = None,
) -> Prediction:
    """Predict the step time and memory of a layout from closed-form formulas and the cluster's calibration.

    Args:
        model: The model.
        cluster: The cluster; the layout must use all of its devices.
        layout: The layout.
        calibration: The cluster's constants; None to use the constants of its device and the software. If
            these were never measured together, the constants of similar devices and software are used:
            `Calibration.note` says so, and the `interval` of the prediction is wider.
        software: Name of the framework that runs the layout, which determines constants and memory; None for
            the calibration's software, or else the software that the layout suggests.

    Raises:
        SpecError: The layout does not use exactly the cluster's devices, or the model or batch cannot be divided as the
            layout specifies.
    """
    layout.check(model, cluster)
    known = calibration_of(cluster, calibration, software=software, layout=layout)
    return Prediction(
        model=model,
        cluster=cluster,
        layout=layout,
        calibration=known,
        time=time_term(model, layout, cluster, known),
        memory=memory_term(model, layout, cluster.device, framework=memory_model(known.software)),
    )
