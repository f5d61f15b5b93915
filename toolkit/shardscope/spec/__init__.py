"""Immutable, JSON-serialisable descriptions of jobs, and of models, clusters and layouts too large to run.

Imports no torch. Names are imported when first used (PEP 562), so looking up a model does not import the code for jobs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardscope.spec.cluster import Cluster, Device
    from shardscope.spec.compression import Compression
    from shardscope.spec.job import Batch, Checkpoint, Job, Record
    from shardscope.spec.layout import Layout
    from shardscope.spec.link import Link
    from shardscope.spec.lr_schedule import LRSchedule
    from shardscope.spec.method import Method
    from shardscope.spec.model import Model
    from shardscope.spec.optimizer import Optimizer
    from shardscope.spec.strategy import Strategy
    from shardscope.spec.user_code import UserCode

_HOMES = {
    "cluster": ("Cluster", "Device"),
    "compression": ("Compression",),
    "job": ("Batch", "Checkpoint", "Job", "Record"),
    "layout": ("Layout",),
    "link": ("Link",),
    "lr_schedule": ("LRSchedule",),
    "method": ("Method",),
    "model": ("Model",),
    "optimizer": ("Optimizer",),
    "strategy": ("Strategy",),
    "user_code": ("UserCode",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Batch",
    "Checkpoint",
    "Cluster",
    "Compression",
    "Device",
    "Job",
    "LRSchedule",
    "Layout",
    "Link",
    "Method",
    "Model",
    "Optimizer",
    "Record",
    "Strategy",
    "UserCode",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
