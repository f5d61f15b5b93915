"""The calibrations that `ss.calibrate` saved for this user: one of this machine, and one of each emulated cluster."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from shardscope.disk_cache import cache_dir, store
from shardscope.errors import DataError, SpecError
from shardscope.spec.cluster import EmulatedCluster
from shardscope.spec.host_calibration import HostCalibration


class Chosen(NamedTuple):
    """The calibration that predictions use, and a sentence that says why a saved one is not used."""

    calibration: HostCalibration
    is_saved: bool
    ignored: str | None = None


def path_of(cluster: EmulatedCluster | None) -> Path:
    """Return the path of the saved calibration of this machine, or of an emulated cluster; it may not exist.

    Raises:
        DataError: Another user owns the cache directory or can write to it.
    """
    which = "machine" if cluster is None else sha256(cluster.to_json().encode()).hexdigest()[:16]
    return cache_dir() / f"calibration-{which}.json"


def save(found: HostCalibration) -> Path:
    """Save a calibration as the default for its machine or emulated cluster, and return its path.

    Raises:
        DataError: Another user owns the cache directory or can write to it.
        OSError: The file cannot be written.
    """
    path = path_of(found.cluster)
    store(path, lambda file: file.write(found.to_json().encode()))
    return path


def chosen(cluster: EmulatedCluster | None = None) -> Chosen:
    """Return the calibration for predictions of CPU ranks: the saved one of the cluster or of this machine.

    A saved calibration of another machine is ignored, as is one that cannot be read. Without any, the calibration that
    ships with Shardscope is used; see `HostCalibration.shipped`.
    """
    ignored = None
    for which in (cluster, None) if cluster is not None else (None,):
        found = saved(which)
        if isinstance(found, HostCalibration):
            ignored = found.why_not_here()
            if ignored is None:
                return Chosen(found, is_saved=True)
        elif found is not None:
            ignored = found
    if ignored is not None:
        ignored += " It is ignored; run ss.calibrate()."
    return Chosen(_shipped(), is_saved=False, ignored=ignored)


def saved(cluster: EmulatedCluster | None = None) -> HostCalibration | str | None:
    """Return the saved calibration, whatever machine it is of; None if there is none.

    A file that cannot be read gives a sentence that says so.
    """
    with suppress(DataError, RuntimeError):  # RuntimeError: this user has no home folder
        path = path_of(cluster)
        with suppress(FileNotFoundError):
            return _read(path, path.stat().st_mtime_ns)
    return None


@lru_cache(maxsize=16)
def _read(path: Path, _changed_ns: int) -> HostCalibration | str:
    try:
        return HostCalibration.load(path)
    except SpecError as error:
        return f"The saved calibration cannot be read: {error}."


@lru_cache(maxsize=1)
def _shipped() -> HostCalibration:
    return HostCalibration.shipped()
