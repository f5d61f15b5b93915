"""ZeRO 1 to 3 follow one process."""

from __future__ import annotations

import shardscope as ss
from conformance.strategy import TWO_CASES, StrategyConformance


class TestZero1(StrategyConformance):
    strategy = ss.Zero1(bucket_mb=0.02)  # several buckets even for a tiny model
    cases = TWO_CASES


class TestZero2(StrategyConformance):
    strategy = ss.Zero2()
    cases = TWO_CASES


class TestZero3(StrategyConformance):
    strategy = ss.Zero3()
    cases = TWO_CASES
