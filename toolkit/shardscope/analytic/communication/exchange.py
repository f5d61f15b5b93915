"""What a step of a job exchanges without compression, over all ranks: what compressed runs are held against."""

from __future__ import annotations

from shardscope.analytic.communication.all_reduce import all_reduce_bytes
from shardscope.analytic.communication.gossip import gossip_mix_bytes
from shardscope.errors import SpecError
from shardscope.spec import strategy as spec


def exchanged_bytes(
    strategy: spec.StrategySpec, gradient_bytes: int, world_size: int, *, micro_batches: int = 1
) -> float:
    """Bytes of gradients and parameters that all ranks together send in a step, uncompressed.

    The textbook's totals, which the modules beside this one count to the byte for each rank: here headers, norms and
    FSDP2's padding are left out. With S bytes of gradients: 2(W-1) S for every all-reduce and ZeRO-1; in groups of N
    ranks, R of them, R (N-1) S for each collective of ZeRO-2 and 3, and 2(R-1) S between the groups (Rajbhandari et
    al. 2020, section 7); S from and to each worker that is not where its server is; S to each neighbour in gossip.

    Args:
        strategy: With its settings.
        gradient_bytes: S, of one whole gradient as it is uncompressed.
        world_size: W.
        micro_batches: Forward and backward passes a step.

    Raises:
        SpecError: The strategy exchanges no gradients in this sense.
    """
    size = float(gradient_bytes)
    if isinstance(strategy, spec.Bucketed | spec.Zero1):
        return float(all_reduce_bytes(gradient_bytes, world_size))
    if isinstance(strategy, spec.FullySharded):
        gathers = 1 if isinstance(strategy, spec.Zero2) else 2 * micro_batches
        inside = (world_size - strategy.replicas) * (micro_batches + gathers) * size
        return inside + 2 * (strategy.replicas - 1) * size
    if isinstance(strategy, spec.ParameterServer):
        remote = len(strategy.workers(world_size)) - (0 if strategy.dedicated else 1)
        return 2 * remote * size
    if isinstance(strategy, spec.Gossip):
        return world_size * gossip_mix_bytes(gradient_bytes, world_size) / strategy.mix_every
    raise SpecError(
        f"strategy={strategy.kind!r} exchanges no gradients that could be compressed; use a data-parallel one"
    )
