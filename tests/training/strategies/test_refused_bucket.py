"""A bucket that one rank refuses: the rank sends none of those after it, and raises what it refused it with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import shardscope as ss
from conformance.ranks import RankPool
from conformance.strategy import job
from shardscope.training.compression import Bucket, NotFinite
from shardscope.training.context import RankContext
from shardscope.training.trainer import Trainer


def deep() -> nn.Module:
    """Several buckets of 0.002 MiB, and several units."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 9), *(nn.Sequential(nn.Linear(9, 9)) for _ in range(4)), nn.Linear(9, 10)
    )


@pytest.mark.ranks(2)  # no rank hears of another
@pytest.mark.parametrize(
    "strategy",
    [*(cls(bucket_mb=0.0005) for cls in (ss.AllReduce, ss.Ring, ss.Zero1)), "zero-2", "zero-3"],
    ids=lambda s: getattr(s, "kind", s),
)
def test_buckets_after_a_refused_one_are_not_sent(pool: RankPool, tmp_path: Path, strategy: Any) -> None:
    def body(context: RankContext) -> tuple[list[list[str]], str]:
        ours = job(
            model=deep, data="digits", strategy=strategy, world_size=2, compression="int8", precision="fp32"
        )
        trainer, asked = Trainer(ours, context, tmp_path), []

        def refuse(bucket: Bucket, *_: Any) -> None:
            asked.append(list(bucket.names))
            raise NotFinite(f"{bucket.names[0]} on rank {context.rank}")

        trainer.strategy.compressor.mean_ = trainer.strategy.compressor.scatter_mean = refuse
        try:
            trainer.take_step(1)
        except NotFinite as error:
            return asked, str(error)
        finally:
            trainer.strategy.close()
        return asked, "nothing"

    for rank, (asked, said) in enumerate(pool.run(body, tmp_path)):
        assert len(asked) == 1
        assert said == f"{asked[0][0]} on rank {rank}"
