"""The curve of step time against bandwidth for workers with given properties, from formulas alone; see `curve`."""

from __future__ import annotations

from shardscope.analytic.communication.compression import compression_cost
from shardscope.measure.compression.arguments import USUAL
from shardscope.measure.compression.curve import PredictedStep, Worth
from shardscope.spec import Compression, Link

_ELEMENT_BYTES = 4


def stated_speedup(
    num_bytes: float, workers: int, link: Link, *, compute_s: float, codec_bandwidth: float
) -> Worth:
    """Return steps with and without compression, in which workers compute, then pack, and then send over a ring.

    Methods without a formula for their compression time are left out.

    Args:
        num_bytes: Bytes of the uncompressed gradient, in fp32.
        workers: Number of workers.
        link: Link of each worker.
        compute_s: Compute time of one worker per step, in seconds.
        codec_bandwidth: Rate at which compression and decompression read and write memory, in bytes per second.
    """
    steps = []
    for method in (Compression("none"), *USUAL):
        if method.is_on and method.codec_passes is None:
            continue
        cost = compression_cost(
            method, num_bytes / _ELEMENT_BYTES, workers, link.bandwidth, latency=link.latency_s,
            codec_bandwidth=codec_bandwidth, element_bytes=_ELEMENT_BYTES,
        )  # fmt: skip
        sent, codec_s, wire_s = (float(each) for each in (cost.sent_bytes, cost.codec_s, cost.wire_s))
        steps.append(PredictedStep(method, sent, compute_s, codec_s, wire_s))
    return Worth(link, tuple(steps))
