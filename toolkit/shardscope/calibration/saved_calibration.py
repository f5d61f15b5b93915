"""The calibrations that `ss.calibrate` saved for this user: one of this machine, and one of each emulated cluster."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

from shardscope.calibration.host_calibration import HostCalibration
from shardscope.disk_cache import cache_dir, store
from shardscope.errors import DataError, SpecError
from shardscope.spec.cluster import EmulatedCluster


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


def check_can_save(cluster: EmulatedCluster | None) -> None:
    """Check that the calibration of this machine, or of an emulated cluster, can be saved.

    Raises:
        DataError: It cannot.
    """
    try:
        path = path_of(cluster)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryFile(dir=path.parent):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home folder
        raise DataError(
            f"the calibration cannot be saved: {error}; set SHARDSCOPE_CACHE to a directory that you can write, or "
            "pass save=False (--no-save)"
        ) from None


def chosen(cluster: EmulatedCluster | None = None) -> Chosen:
    """Return the calibration for predictions of CPU ranks: the saved one of the cluster or of this machine.

    A saved calibration of another machine is ignored, as is one that cannot be read. Without any, the calibration that
    ships with Shardscope is used; see `HostCalibration.shipped`.
    """
    ignored = None
    for which in (cluster, None) if cluster is not None else (None,):
        found = saved(which)
        why = found.why_not_here() if isinstance(found, HostCalibration) else found
        if isinstance(found, HostCalibration) and why is None:
            return Chosen(found, is_saved=True, ignored=ignored)
        if why is not None and ignored is None:
            again = "ss.calibrate()" if which is None else "ss.calibrate(cluster)"
            ignored = f"{why} It is ignored; run {again}."
    return Chosen(_shipped(), is_saved=False, ignored=ignored)


def saved(cluster: EmulatedCluster | None = None) -> HostCalibration | str | None:
    """Return the saved calibration, whatever machine it is of; None if there is none.

    A file that cannot be read gives a sentence that says so.
    """
    with suppress(DataError, RuntimeError):  # RuntimeError: this user has no home folder
        path = path_of(cluster)
        with suppress(FileNotFoundError, NotADirectoryError):
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
