"""Data parallel by `DistributedDataParallel` and the backend's own all-reduce."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardscope.errors import SpecError
from shardscope.spec import strategy as spec
from shardscope.training.strategies.base import Strategy


class AllReduce(Strategy):
    """Each bucket of gradients is reduced as soon as the backward pass has filled it."""

    name = "all-reduce"

    def wrap(self, model: nn.Module) -> nn.Module:
        settings = self.job.strategy
        assert isinstance(settings, spec.Bucketed)
        self.ddp = DistributedDataParallel(
            model,
            process_group=self.context.group,
            bucket_cap_mb=settings.bucket_mb,
            gradient_as_bucket_view=True,
        )
        return self.ddp

    def finish_exchange(self) -> None:
        absent = next(
            (name for name, p in self.model.named_parameters() if p.requires_grad and p.grad is None), None
        )
        if absent is not None:  # DistributedDataParallel would only say so in the next step
            raise SpecError(
                f"parameter {absent!r} took no part in the loss, and strategy={self.name!r} needs a gradient of each; "
                "use it, or freeze it with requires_grad_(False)"
            )

    def no_exchange(self) -> AbstractContextManager[Any]:
        return self.ddp.no_sync()
