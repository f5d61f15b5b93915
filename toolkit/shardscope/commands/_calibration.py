"""The option that names a calibration: of a type of GPU, or a file from `shardscope calibrate`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.calibration.software import software_names

if TYPE_CHECKING:
    from shardscope.calibration.host_calibration import AnyCalibration

CALIBRATION_HELP = (
    "name of a GPU's calibration (default: by the cluster's device and the software), or the path of one that "
    "shardscope calibrate has written (default for jobs on this machine: the saved one)"
)


def add_software_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the training software."""
    parser.add_argument(
        "--software",
        help=f"framework that runs the layout: {', '.join(software_names())} (default: by the layout)",
    )


def named_calibration(given: str | None) -> AnyCalibration | None:
    """Return the calibration in a file that ends in .json, or the one with this name; None for None.

    A file with the constants of a host, which a calibration of GPUs lacks, is a `HostCalibration`.

    Raises:
        SpecError: The file cannot be read, or no calibration has this name.
    """
    from shardscope.calibration.calibration import Calibration
    from shardscope.calibration.host_calibration import HostCalibration

    if given is None:
        return None
    if Path(given).suffix != ".json":
        return Calibration.of(given)
    try:
        is_of_host = '"constants"' in Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        is_of_host = True  # its `load` says what is wrong with the file
    return HostCalibration.load(given) if is_of_host else Calibration.load(given)
