"""A schedule of the learning rate and one of a pipeline."""

from __future__ import annotations

import shardscope as ss


class Sawtooth(ss.LRSchedule):
    """Falls by half within a period, and starts again."""

    name = "sawtooth"

    period: int = 4

    def factor_after_warmup(self, step: int, steps: int) -> float:
        return 1 - 0.5 * ((step - 1) % self.period) / self.period


class Patient(ss.PipelineSchedule):
    """1F1B that lets one more forward pass go ahead."""

    name = "patient"

    ahead: int = 1

    def order(self, rank: int, ranks: int, microbatches: int, held: int) -> list[tuple[str, int, int]]:
        warm = min(microbatches, ranks - rank + self.ahead)
        ops = [("F", rank, i) for i in range(warm)]
        for i in range(microbatches):
            ops += [("B", rank, i)] + [("F", rank, warm + i)] * (warm + i < microbatches)
        return ops
