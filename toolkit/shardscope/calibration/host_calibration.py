"""Calibrations of CPU ranks: constants measured on one machine, each with an interval.

`ss.calibrate` measures this machine or an emulated cluster, and saves one calibration of each for this user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator, model_validator

from shardscope.calibration import calibration_view as view
from shardscope.calibration.calibration import Calibration, Fitted, Interval
from shardscope.calibration.constants import CONSTANTS, NOT_FITTED, OUTDATED
from shardscope.disk_cache import cache_dir, store
from shardscope.errors import DataError, SpecError
from shardscope.show import Part
from shardscope.spec._base import Spec
from shardscope.spec.cluster import EmulatedCluster

if TYPE_CHECKING:
    import pandas as pd


HostTransport = Literal["shm", "tcp", "network"]
"""How ranks exchange messages: through shared memory, over TCP on this machine, or over TCP between emulated nodes."""


BUSY = 0.25
"""Load per core above which a calibration counts as disturbed by other programs."""
THIS_MACHINE = "this machine"
"""Name of the calibrations that `ss.calibrate` measures without a cluster."""


class Constant(Spec):
    """One measured constant, with the interval that contains 90 % of the values of repeated measurements."""

    name: str
    """Name in `shardscope.calibration.constants.CONSTANTS`, which has its unit and meaning."""
    value: PositiveFloat
    low: NonNegativeFloat
    high: PositiveFloat
    ranks: Annotated[int, Field(ge=1)] | None = None
    """Number of ranks for which the constant holds; None if it holds for any number."""
    transport: HostTransport | None = None
    """Transport for which the constant holds; None if it holds for any transport."""
    nodes: tuple[int, int] | None = None
    """Emulated nodes that send and receive; None if the constant is not specific to two nodes."""
    is_measured: bool = True
    """Whether runs on the calibration's machine determined the value; False if it was measured on another machine, and
    scaled by the speed of this machine."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name not in CONSTANTS:
            raise SpecError(f"name={self.name!r} is not a constant; use {', '.join(CONSTANTS)}")
        if not self.low <= self.value <= self.high:
            raise SpecError(
                f"{self.name}={self.value:.6g} is outside its interval {self.low:.6g} to {self.high:.6g}; give a "
                "low and a high that enclose it"
            )
        return self

    @property
    def key(self) -> tuple[str, int | None, str | None, tuple[int, int] | None]:
        """Key that identifies the constant in its calibration."""
        return self.name, self.ranks, self.transport, self.nodes


class HostMachine(Spec):
    """Properties of a machine that the constants depend on: processor, number of cores, version of torch."""

    cpu: str
    cores: PositiveFloat
    """Cores that a process may use."""
    torch: str

    @classmethod
    def here(cls) -> HostMachine:
        """Return the properties of this machine."""
        from shardscope.machine import cpu_model, usable_cores  # needs psutil, which a web page does not have

        return cls.model_construct(cpu=cpu_model(), cores=usable_cores(), torch=_torch())

    def difference(self, other: HostMachine) -> str | None:
        """Return a clause on the properties in which another machine differs; None if there are none."""
        for name in type(self).model_fields:
            mine, its = getattr(self, name), getattr(other, name)
            if mine != its:
                return (
                    f"{name} was {mine:g} and is {its:g}"
                    if name == "cores"
                    else f"{name} was {mine} and is {its}"
                )
        return None


class HostCalibration(Fitted):
    """Constants for CPU ranks of one machine, or of a cluster that is emulated on it; `ss.calibrate` measures them.

    `ss.predict`, `ss.simulate` and `ss.compare` take it as `calibration`.
    """

    machine: HostMachine
    cluster: EmulatedCluster | None = None
    """The emulated cluster that was measured; None for the machine itself."""
    constants: tuple[Constant, ...]
    numpy_flops: PositiveFloat
    """FLOP/s of NumPy's matrix products on one core when the constants were measured, by which constants are scaled for
    machines that were not measured."""
    numpy_bandwidth: PositiveFloat
    """Memory bandwidth of a NumPy kernel on one core at that time, in bytes per second, also used for scaling."""
    measured_at: str
    """Date and time at which the measurement ended, in UTC: ``2026-11-26 02:10``."""
    took_s: NonNegativeFloat = 0.0
    """Duration of the measurement, in seconds."""
    load_average: NonNegativeFloat | None = None
    """Load by other programs, in processes: the mean number that ran or waited for a core between the runs of the
    measurement (in a container, its share of the host's), or on systems other than Linux the load average of the minute
    before. None if unknown, as in sandboxes that do not count processes."""
    is_brief: bool = False
    """Whether the measurement was brief, such as the demo's; a later brief measurement may replace it."""
    num_runs: Annotated[int, Field(ge=0)] = 0
    """Number of runs to which the constants were fitted."""
    error: NonNegativeFloat | None = None
    """Median of |predicted / measured - 1| over these runs, each predicted by constants fitted without it; None with
    too few runs."""

    @field_validator("constants", mode="before")
    @classmethod
    def _without_outdated(cls, constants: Any) -> Any:
        """Leave out constants of earlier versions, so that the calibration lacks those that replace them."""
        if not isinstance(constants, list | tuple):
            return constants
        return [row for row in constants if not (isinstance(row, Mapping) and row.get("name") in OUTDATED)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        keys = [each.key for each in self.constants]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise SpecError(
                f"constants has {twice[0]!r} twice for the same ranks and transport; give it once"
            )
        return self

    @property
    def was_busy(self) -> bool:
        """Whether other programs used the cores during the measurement, so that its constants may be too slow."""
        return (self.load_average or 0.0) > BUSY * self.machine.cores

    def interval(self, seconds: float) -> Interval:
        """Return the interval around a predicted step time, in seconds.

        The interval follows from the quantiles. If n other programs ran on c cores during the measurement, ranks may be
        up to 1 + n / c times faster on a quiet machine, so the lower end is divided by this factor.
        """
        low, high = super().interval(seconds)
        return Interval(low / (1.0 + (self.load_average or 0.0) / self.machine.cores), high)

    def value(self, name: str, *, ranks: float = 1, transport: str | None = None) -> float:
        """Return a constant; between measured numbers of ranks, it is interpolated on logarithmic scales.

        Args:
            name: Name of the constant.
            ranks: Number of ranks. Beyond the measured numbers, the value is extrapolated from the last two.
            transport: ``shm``, ``tcp`` or ``network``, for a constant that depends on it.

        Raises:
            SpecError: The calibration has no such constant.
        """
        rows = self.rows(name, transport)
        shares = knot_shares(ranks, [row.ranks or 1 for row in rows])
        return float(np.exp(shares @ np.log([row.value for row in rows])))

    def rows(self, name: str, transport: str | None = None) -> list[Constant]:
        """Return the rows of a constant that are not specific to two nodes, one for each number of ranks.

        Raises:
            SpecError: The calibration has no such constant.
        """
        found = [
            row
            for row in self.constants
            if row.name == name and row.nodes is None and row.transport in (transport, None)
        ]
        if not found:
            over = "" if transport is None else f" over {transport}"
            raise SpecError(f"calibration {self.name!r} has no {name}{over}; measure it with ss.calibrate()")
        return sorted(found, key=lambda row: row.ranks or 1)

    def has_measured(self, ranks: int) -> bool:
        """Whether this number of ranks was measured."""
        return any(row.ranks == ranks and row.is_measured for row in self.constants if row.name == "slowdown")

    def has(self, name: str, transport: str | None = None) -> bool:
        """Whether the calibration has this constant."""
        return any(row.name == name and row.transport in (transport, None) for row in self.constants)

    def why_not_here(self) -> str | None:
        """Return a sentence on why the constants cannot be used on this machine; None if they can."""
        found = self.machine.difference(HostMachine.here())
        if found is not None:
            return f"The calibration of {self.measured_at} is from another machine: {found}."
        known = {*NOT_FITTED, *(row.name for row in self.constants)}
        lacking = [name for name in CONSTANTS if name not in known]
        if lacking:
            return (
                f"The calibration of {self.measured_at} is from an earlier version: it has no {lacking[0]}."
            )
        return None

    @property
    def label(self) -> str:
        """Place (elsewhere, the processor) and date of the measurement: ``this machine, calibrated on 2026-11-26``."""
        is_elsewhere = self.name == THIS_MACHINE and not self.is_of_this_machine
        where = f"{self.machine.cpu} with {self.machine.cores:g} cores" if is_elsewhere else self.name
        return f"{where}, calibrated on {self.measured_at[:10]}"

    @property
    def is_of_this_machine(self) -> bool:
        """Whether the calibration is of a machine with this processor, number of cores and version of torch."""
        return self.machine == HostMachine.here()

    def frame(self) -> pd.DataFrame:
        """Return a data frame with one row per constant: name, transport, ranks, nodes, value, low, high, unit."""
        return view.frame_of(self.constants)

    def _shown(self) -> list[Part]:
        return view.shown(self)

    @classmethod
    def shipped(cls) -> Self:
        """Return the calibration that ships with Shardscope, of a machine with two cores."""
        path = files("shardscope.calibration") / "catalogue" / "hosts" / "shipped.json"
        return cls.from_json(path.read_text("utf-8"))


AnyCalibration = Calibration | HostCalibration
"""A calibration of a type of GPU, or of the CPU ranks of one machine."""


def knot_shares(ranks: float, knots: Sequence[float]) -> NDArray[np.float64]:
    """Return the exponents with which the values at `knots` are multiplied to interpolate at `ranks`; they sum to 1.

    Interpolation is linear between the logarithms. Below the first knot, its value holds; beyond the last knot,
    the value is extrapolated from the last two.

    Args:
        ranks: Number of ranks.
        knots: Numbers of ranks with known values, in ascending order.
    """
    at, shares = np.log2(knots), np.zeros(len(knots))
    if len(knots) == 1 or ranks <= knots[0]:
        shares[0] = 1.0
        return shares
    after = min(int(np.searchsorted(at, np.log2(ranks))), len(knots) - 1)
    share = (np.log2(ranks) - at[after - 1]) / (at[after] - at[after - 1])
    shares[after - 1], shares[after] = 1.0 - share, share
    return shares


@cache
def _torch() -> str:
    return version("torch")


class Chosen(NamedTuple):
    """The calibration that predictions use, and a sentence on why a saved one is not used."""

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
        DataError: The calibration cannot be saved.
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

    A saved calibration of another machine, or one that cannot be read, is ignored. Without a usable one, the
    calibration that ships with Shardscope is used; see `HostCalibration.shipped`.
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
    """Return the saved calibration, even if it is from another machine; None if there is none.

    If the file cannot be read, the result is a sentence that says so.
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
