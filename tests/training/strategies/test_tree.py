"""Data parallel over the tree follows one process."""

from __future__ import annotations

import shardscope as ss
from conformance.strategy import TWO_CASES, StrategyConformance


class TestTree(StrategyConformance):
    strategy = ss.Tree(
        bucket_mb=0.02, slice_mb=0.002
    )  # several buckets of several slices even for a tiny model
    cases = TWO_CASES
