"""Choice of the calibration for a device and software, and the assumptions behind it."""

from __future__ import annotations

from functools import lru_cache

from shardscope.calibration.calibration import FACTORS, Calibration, catalogue, ridge_of
from shardscope.calibration.effects import OTHER, architecture, composed
from shardscope.calibration.host_calibration import AnyCalibration, HostCalibration
from shardscope.calibration.layer_shape import OTHERS
from shardscope.calibration.software import Software, assumed_software, software_of
from shardscope.errors import SpecError, require
from shardscope.spec.cluster import Cluster, Device
from shardscope.spec.layout import Layout


def calibration_for(device: Device, software: Software) -> Calibration:
    """Return the calibration that predictions for a device and software use.

    If exactly one cluster was measured with this software on this chip, its calibration is returned. Otherwise, the
    calibration is composed of the effects that clusters with this software or this device share; see
    `calibration.effects`.
    """
    return _calibration_for(device.model_dump_json(), software)


@lru_cache(maxsize=128)
def _calibration_for(described: str, software: Software) -> Calibration:
    """Return the calibration for a device, given as JSON since a device has mappings, which cannot be cache keys."""
    device = Device.from_json(described)
    chip = architecture(device.name)
    for one in catalogue():
        if one.is_only and one.software == software.measured_as and chip == architecture(one.device) != OTHER:
            found = _on_same_chip(without_foreign_shapes(one, device, software), device)
            return found if found.software == software.name else found.replace(software=software.name)
    return composed(software, device)


def _on_same_chip(one: Calibration, device: Device) -> Calibration:
    """Return the calibration for another device with the same chip, such as one with less memory."""
    if one.device == device.name:
        return one
    ridge = ridge_of(device)
    scale = ridge / (one.ridge or ridge)
    told = f"constants were measured on {one.device}, which has the same chip as {device.name}"
    return one.replace(
        device=device.name, ridge=ridge, half_size=one.half_size * scale, note=_joined(told, one.note)
    )


def without_foreign_shapes(one: Calibration, device: Device, software: Software) -> Calibration:
    """Return the calibration without factors of shapes if these were measured on another device or with other software.

    Intervals are then as wide as for shapes that were not measured.
    """
    is_same = one.software == "" or software_of(one.software).measured_as == software.measured_as
    if set(one.shapes) <= {OTHERS} or (is_same and one.device in {"", device.name}):
        return one
    told = (
        f"factors of layer shapes, measured on {one.device or 'an unknown device'} with "
        f"{one.software or 'unknown software'}, are not used"
    )
    return one.replace(shapes={OTHERS: 1.0}, note=_joined(one.note, told))


def calibration_of(
    cluster: Cluster,
    calibration: AnyCalibration | None,
    *,
    software: str | None = None,
    layout: Layout | None = None,
) -> Calibration:
    """Return the calibration for a prediction; its note names the assumptions.

    Args:
        cluster: The cluster.
        calibration: The given calibration; None to choose it by the cluster's device and the software.
        software: The given software; None for the calibration's software, or else the software that the
            layout suggests.
        layout: The layout, or one with the settings that all layouts of a search share.

    Raises:
        SpecError: The calibration is a `HostCalibration` or not a calibration, or the software is not known.
    """
    if isinstance(calibration, Calibration):
        given = software or calibration.software or "megatron-core"
        calibration = without_foreign_shapes(calibration, cluster.device, software_of(given))
    elif isinstance(calibration, HostCalibration):
        raise SpecError(
            f"calibration={calibration.name!r} is for CPU ranks and has no effect on "
            f"{cluster.device.name}; omit it, or "
            "give one for its device, such as ss.Calibration.of('h100-fsdp')"
        )
    elif calibration is not None:
        require(
            calibration, Calibration, by="calibration", write="calibration=ss.Calibration.of('a100-megatron')"
        )
    if calibration is not None and (software is None or software_of(software).name == calibration.software):
        return calibration
    if software is not None:
        chosen = software_of(software)
        if calibration is None:
            return calibration_for(cluster.device, chosen)
        if calibration.software and software_of(calibration.software).measured_as == chosen.measured_as:
            return calibration.replace(software=chosen.name)
        told = f"given for {chosen.name}, though it was measured with {calibration.software or 'unknown software'}"
        return calibration.replace(
            software=chosen.name, note=_joined(calibration.note, told), covariance=_widened(calibration)
        )
    assumed = assumed_software(layout or Layout())
    found = calibration_for(cluster.device, assumed.software)
    told = f"software={assumed.software.name!r} is assumed {assumed.because}; give software=... for another"
    return found.model_copy(update={"note": _joined(told, found.note)})


def _widened(calibration: Calibration) -> list[list[float]]:
    """Return the covariance for other software: the usual variances between clusters are added once more."""
    usual = [
        [sd**2 * (row == column) for column in range(len(FACTORS))] for row, sd in enumerate(FACTORS.values())
    ]
    before = calibration.covariance or usual
    return [[one + more for one, more in zip(*pair, strict=True)] for pair in zip(before, usual, strict=True)]


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))
