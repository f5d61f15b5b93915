"""A package whose methods each lack a member that their kind asks for."""

from __future__ import annotations

import shardscope as ss


class Unpacked(ss.PackedCompression):
    name = "unpacked"

    def packet_bytes(self, num_elements: int) -> int:
        return num_elements


class Stepless(ss.Optimizer):
    name = "stepless"


class Flat(ss.LRSchedule):
    name = "flat"


class Orderless(ss.PipelineSchedule):
    name = "orderless"


class Unbuilt(ss.BucketedStrategy):
    name = "unbuilt"


class Whole(ss.LRSchedule):
    """The one that lacks nothing."""

    name = "whole"

    def factor_after_warmup(self, step: int, steps: int) -> float:
        return 1.0
