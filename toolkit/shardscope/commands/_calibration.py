"""The option that names a calibration: of a type of GPU, or a file from `shardscope calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardscope.spec.host_calibration import AnyCalibration

CALIBRATION_HELP = (
    "name of a GPU's calibration (default: the cluster's device), or the path of one that shardscope calibrate has "
    "written (default: the one saved for this machine)"
)


def named_calibration(given: str | None) -> AnyCalibration | None:
    """Return the calibration in a file that ends in .json, or the one with this name; None for None.

    Raises:
        SpecError: The file cannot be read, or no calibration has this name.
    """
    from shardscope.spec.calibration import Calibration
    from shardscope.spec.host_calibration import HostCalibration

    if given is None:
        return None
    return HostCalibration.load(given) if Path(given).suffix == ".json" else Calibration.of(given)
