"""Data parallel by the backend's own all-reduce."""

from __future__ import annotations

from typing import ClassVar, Literal

from shardscope.spec.compression import Carriage
from shardscope.spec.numbers import MessageMiB
from shardscope.spec.strategy.base import StrategySpec


class Bucketed(StrategySpec):
    """Base of data-parallel strategies that exchange gradients in buckets, overlapped with the backward pass."""

    has_exchanges: ClassVar[bool] = True
    bucket_mb: MessageMiB = 25.0
    """Size of a gradient bucket in MiB; a bucket is sent as soon as all its gradients are there. 0 < value <= 1024."""


class AllReduce(Bucketed):
    """DistributedDataParallel with the backend's own all-reduce, buckets overlapped with the backward pass."""

    kind: Literal["all-reduce"] = "all-reduce"
    carries: ClassVar[frozenset[Carriage]] = frozenset({"sums", "packets", "layers", "steps"})
