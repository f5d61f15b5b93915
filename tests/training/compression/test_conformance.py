"""Every method on real ranks; the conformance class says what for."""

from __future__ import annotations

from typing import ClassVar

import shardscope as ss
from conformance.compressor import CompressorConformance


class TestCasts(CompressorConformance):
    methods: ClassVar = [ss.Compression("fp16"), ss.Compression("bf16")]
    near: ClassVar = {"fp16": 1e-3, "bf16": 1e-2}


class TestBlocks(CompressorConformance):
    methods: ClassVar = [
        ss.Compression("int8"),
        ss.Compression("int8", feedback=True, block=64),
        ss.Compression("int8", exchange="gather"),
        ss.Compression("int4", feedback=True),
        ss.Compression("int4", exchange="gather", block=32),
    ]
    near: ClassVar = {"int8": 0.05, "int4": 0.5}
