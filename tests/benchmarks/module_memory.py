"""Peak memory predicted from shapes over the peak that `MemTracker` sees, on real ranks, for every combination.

Run it as ``python tests/benchmarks/module_memory.py [samples a rank]``: models, optimizers, recomputation, one process
and replicas and ZeRO 1 to 3 on 2 and 4 ranks. The ratio is the one furthest from 1 among the ranks; states that are not
predicted to the byte are marked.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from conformance.peaks import BATCH, DATA, Measured, job_of, predicted, tracked
from conformance.ranks import RankPool
from shardscope.spec.model.step import RECOMPUTE_MODES

OPTIMIZERS = ("adamw", "lamb")
STRATEGIES = {
    1: ("single",),
    2: ("all-reduce", "zero-1", "zero-2", "zero-3"),
    4: ("zero-1", "zero-2", "zero-3"),
}


def furthest(job: object, ranks: list[Measured]) -> tuple[float, bool]:
    """The worst ratio, and whether the states of all ranks are exact."""
    pairs = [(predicted(job, rank), measured) for rank, measured in enumerate(ranks)]  # type: ignore[arg-type]
    ratios = [expected.peak / measured.peak for expected, measured in pairs]
    exact = all(
        (p.parameters, p.gradients, p.optimizer) == (m.parameters, m.gradients, m.optimizer) for p, m in pairs
    )
    return max(ratios, key=lambda ratio: abs(ratio - 1)), exact


def main() -> None:
    batch = int(sys.argv[1]) if len(sys.argv) > 1 else BATCH
    worst = 1.0
    print(
        f"{batch} samples a rank; predicted over measured peak, with recomputation {', '.join(RECOMPUTE_MODES)}"
    )
    for world_size, strategies in STRATEGIES.items():
        pool = RankPool(world_size)
        for model in DATA:
            for optimizer in OPTIMIZERS:
                for strategy in strategies:
                    cells = []
                    for recompute in RECOMPUTE_MODES:
                        job = job_of(model, strategy, world_size, optimizer, recompute, batch)
                        with tempfile.TemporaryDirectory() as folder:
                            ratio, exact = furthest(job, pool.run(tracked(job), Path(folder)))
                        worst = max(worst, ratio, key=lambda value: abs(value - 1))
                        cells.append(f"{ratio:.5f}{' ' if exact else '!'}")
                    name = f"{world_size} {model:<9} {optimizer:<6} {strategy:<11}"
                    print(name, *cells, sep="  ", flush=True)
        pool.close()
    print(f"furthest from 1: {worst:.5f}; ! marks states that differ by a byte or more")


if __name__ == "__main__":
    main()
