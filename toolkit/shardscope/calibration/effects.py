"""Effects of software and devices on the calibration constants, estimated from all measured tables together.

The logarithm of each constant is the sum of its usual value and of the effects of the software's family, of the
software, of the device's peak FLOP/s (a trend), of its architecture, and of the pair of software and architecture.
`tests/published/hierarchy.py` fits them, with one more effect for each table, whose standard deviation is the usual
difference between clusters. A cluster that was never measured thus gets the constants that similar clusters share, and
an interval that includes their differences.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from math import exp, log
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from shardscope.calibration.attention_kernels import KERNELS
from shardscope.calibration.calibration import FACTORS, Calibration, ridge_of
from shardscope.calibration.software import SOFTWARE, Software
from shardscope.spec import catalogue
from shardscope.spec.cluster import Device

OTHER = "other"


@cache
def _fitted() -> Mapping[str, Any]:
    text = (files("shardscope.calibration") / "catalogue" / "effects" / "fitted.json").read_text("utf-8")
    return cast("Mapping[str, Any]", json.loads(text))


def table_scores() -> Mapping[str, Mapping[str, float]]:
    """Return the scores of all tables, each predicted by effects fitted without that table; errors in per cent."""
    return cast("Mapping[str, Mapping[str, float]]", _fitted()["tables"])


def fitted_effects() -> Mapping[str, Mapping[str, float]]:
    """Return the effects by name: the number that each adds to the logarithm of each factor of a calibration."""
    return cast("Mapping[str, Mapping[str, float]]", _fitted()["effects"])


def architecture(device: str) -> str:
    """Return the architecture of a device, which determines its effect; ``other`` if none is known for its chip."""
    found = (name for name, devices in _fitted()["architectures"].items() if device in devices)
    return next(found, OTHER)


def trend_of(device: Device) -> float:
    """Return the factor of the trend: the logarithm of the 16-bit peak FLOP/s relative to an A100's.

    The trend is between generations of devices. A device from the catalogue thus keeps its factor if its peak FLOP/s
    are changed; otherwise constants that do not concern computation would change as well, such as `step_s`.
    """
    known = Device.of(device.name) if catalogue.has("devices", device.name) else device
    peaks = known.peak_flops
    peak = next((peaks[name] for name in ("bf16", "fp16") if name in peaks), max(peaks.values()))
    return log(peak / _fitted()["trend_from"])


def effects_of(software: Software, device: Device) -> dict[str, float]:
    """Return the factor of each effect that applies to a software on a device, by the effect's name."""
    chip = architecture(device.name)
    return {
        "all": 1.0,
        f"family {software.family}": 1.0,
        f"software {software.measured_as}": 1.0,
        "trend": trend_of(device),
        f"device {chip}": 1.0,
        f"pair {software.measured_as} {chip}": 1.0,
    }


def usual(software: Software, device: Device) -> Calibration:
    """Return the calibration that all effects are relative to.

    `half_size` is in proportion to the FLOP per byte, and fused attention has the published speed of its kernel. This
    speed is for long sequences; the `attention_half_seq` of 300 used with it is an assumption, for which no scores of
    left-out tables are recorded.
    """
    constants = dict(_fitted()["usual"])
    constants["half_size"] *= ridge_of(device) / _fitted()["ridge_from"]
    published = KERNELS[software.attention].get(architecture(device.name))
    constants["attention_efficiency"] = published or constants["attention_efficiency"]
    return Calibration(name="usual", device=device.name, ridge=ridge_of(device), **constants)


def composed(software: Software, device: Device) -> Calibration:
    """Return the expected calibration of a software and a device on a cluster that was not measured."""
    base, steps = usual(software, device), dict.fromkeys(FACTORS, 0.0)
    for effect, factor in effects_of(software, device).items():
        for name, value in fitted_effects().get(effect, {}).items():
            steps[name] += factor * value
    return base.moved(steps).replace(
        name=f"{software.name} on {device.name}",
        software=software.name,
        quantiles=_quantiles(row_noise(software.name)),
        covariance=_covariance(software, device).tolist(),
        constant_mfu=_fitted()["constant_mfu"],
        constant_rate=_fitted()["constant_rate"],
        fitted=tuple(_fitted()["fitted"]),
        measured_on="other clusters",
        source=_fitted()["source"],
        note=_note(software, device),
    )


def row_noise(software: str) -> float:
    """Return the standard deviation of the logarithm of measured / predicted time of a row, given its constants.

    Intervals use this value, which includes the errors of the formulas; see `fitted_noise`.
    """
    return float(_fitted()["noise"][SOFTWARE[software].measured_as])


def fitted_noise(software: str) -> float:
    """Return the most likely standard deviation of rows, which determines how much a measured step changes constants.

    Intervals need the larger value of `row_noise` to contain enough rows of all tables.
    """
    return row_noise(software) / float(_fitted()["noisier"])


def _quantiles(noise: float) -> dict[str, float]:
    return {"5": exp(-1.645 * noise), "50": 1.0, "95": exp(1.645 * noise)}


def _covariance(software: Software, device: Device) -> npt.NDArray[np.float64]:
    """Return the covariance of the logarithms of the constants on a new cluster, estimated from all tables."""
    chip, known = architecture(device.name), _fitted()["covariances"]
    if chip != OTHER:
        return _symmetric(known[f"{software.measured_as} {chip}"])
    trend = trend_of(device)
    parts = (
        _symmetric(known[f"{software.measured_as} {OTHER} {power}"]) * trend**power for power in range(3)
    )
    return np.asarray(sum(parts, np.zeros((len(FACTORS), len(FACTORS)))))


def _symmetric(triangle: Sequence[float]) -> npt.NDArray[np.float64]:
    found = np.zeros((len(FACTORS), len(FACTORS)))
    found[np.tril_indices(len(FACTORS))] = triangle
    return found + np.tril(found, -1).T


def _note(software: Software, device: Device) -> str:
    known = _fitted()["measured"]
    pair = [software.measured_as, architecture(device.name)]
    if pair in known:
        same = [name for name in _fitted()["architectures"][pair[1]] if name != device.name]
        where = (
            f"{device.name}, or of devices with the same chip ({', '.join(same)})" if same else device.name
        )
        told = f"its constants were measured with {SOFTWARE[pair[0]].label} on other clusters of {where}"
        return "; ".join(filter(None, [told, software.caveat]))
    measured = [f"{name} on {chip}" for name, chip in known if name == pair[0] or chip == pair[1]]
    nearest = f"the most similar measurements are {', '.join(measured[:4])}" if measured else ""
    never = f"{software.label} was never measured on {device.name}, so the interval is wider"
    return "; ".join(filter(None, [never, nearest, software.caveat]))
