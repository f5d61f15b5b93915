"""Data parallelism with `DistributedDataParallel` and the backend's all-reduce."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardscope.errors import SpecError, quoted
from shardscope.training._compat import buckets_of, first_left_out
from shardscope.training.collectives.packets import Packets
from shardscope.training.compression import Bucket, Carrier, Compressor
from shardscope.training.data import call
from shardscope.training.observe import random_state_kept
from shardscope.training.strategies._gradient_order import GradientOrder, ZeroGradients
from shardscope.training.strategies._hook import BucketHook, mean_of
from shardscope.training.strategies.base import LossFunction, Named, RankStrategy, no_gradient_error
from shardscope.training.twin import twin_of


class BucketedRank(RankStrategy):
    """Data parallelism in which each gradient bucket is reduced as soon as the backward pass has filled it."""

    hook: BucketHook | None = None
    """The hook that exchanges buckets; None if `DistributedDataParallel` does so by its own all-reduce."""
    adopted: Sequence[Sequence[Named]] | None = None
    """The buckets of adopted parameters, in the order in which they are exchanged; None if the strategy has wrapped a
    model."""

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.expert_split is not None and not any(p.requires_grad for _, p in self.own_parameters(model)):
            raise SpecError(
                f"strategy={self.settings.name!r} has no gradient to average on the data axis, because only experts "
                "are trained; use data='zero-1', or train another parameter too"
            )
        self.ddp = DistributedDataParallel(
            model,
            process_group=self.context.group,
            bucket_cap_mb=self.settings.bucket_mb,
            gradient_as_bucket_view=True,
        )
        self.arrivals = GradientOrder(model)
        if self.job.compression.is_on:
            self._register_hook()
        return self.ddp

    def take(self, named: Sequence[Named], roots: Sequence[nn.Module]) -> None:  # noqa: ARG002
        self._set_carrier()
        arriving = [(name, p) for name, p in reversed(named) if p.requires_grad]
        found = buckets_of([p for _, p in arriving], int(self.settings.bucket_mb * 2**20))
        self.adopted = [[arriving[index] for index in bucket] for bucket in found]

    def _set_carrier(self) -> None:
        group = self.context.group
        assert group is not None
        self.carrier = Carrier(self.sum_, Packets(group), self.context.meter, self.job.seed)

    def _register_hook(self) -> None:
        """Register a hook, so that `exchange_` exchanges the buckets."""
        self._set_carrier()
        self.hook = BucketHook(self.ddp, self.context, self.exchange_)

    def reduce_(self, buffer: Tensor) -> Tensor:
        """Sum a flat CPU tensor over all ranks, in place; called from one thread, in the same order on every rank."""
        dist.all_reduce(buffer, group=self.context.group)
        return buffer

    def sum_(self, buffer: Tensor) -> Tensor:
        """Sum a flat CPU tensor over all ranks by `reduce_`, and write the result to `buffer`.

        Raises:
            SpecError: `reduce_` did not return a tensor with the shape of `buffer`.
        """
        summed = self.reduce_(buffer)
        if not isinstance(summed, Tensor) or summed.shape != buffer.shape:
            raise SpecError(
                f"strategy={self.name!r}: {type(self).__name__}.reduce_ returned {quoted(summed)}; return the sum "
                "over all ranks of the tensor that it receives"
            )
        return buffer if summed.data_ptr() == buffer.data_ptr() else buffer.copy_(summed)

    def exchange_(self, bucket: Bucket) -> None:
        """Replace ``bucket.flat`` with its mean over all ranks."""
        if self.compressor is None:
            self.sum_(bucket.flat.div_(self.context.world_size))
        elif not self._divided:
            self.compressor.mean_(bucket, self.carrier)
        else:
            self._compress_apart(bucket, self.compressor)

    def _compress_apart(self, bucket: Bucket, compressor: Compressor) -> None:
        """Compress a bucket's whole tensors apart from the divided ones.

        All ranks of a tensor group have the same gradients of whole tensors, and so the same result.
        """
        views = bucket.views(bucket.flat)
        for is_divided in (False, True):
            names = [name for name in bucket.names if (name in self._divided) == is_divided]
            if names:
                flat = torch.cat([views[name].reshape(-1) for name in names])
                part = replace(bucket, names=names, shapes=[views[name].shape for name in names], flat=flat)
                compressor.mean_(part, self.carrier)
                for name, mean in part.views(flat).items():
                    views[name].copy_(mean)

    def warm_up_buckets(self, loss_function: LossFunction) -> None:
        """Run one forward and backward pass on the example, without an exchange, so that the buckets become
        final.

        `DistributedDataParallel` builds its final buckets in the order in which gradients arrived in the first backward
        pass. Compressor state is kept by bucket, so a resumed run must pack the same buckets as the interrupted run.
        """
        if self.hook is None or self.compressor is None:
            return
        twin = twin_of(self.model)
        if twin is None:  # no copy to test: use the reverse order of the parameters
            self.follow_order([name for name, p in self.model.named_parameters() if p.requires_grad][::-1])
            return
        inputs, targets = self.example()

        def loss() -> Tensor:
            with self.precision.autocast():
                return loss_function(call(self.module, inputs), targets)

        with random_state_kept(), self._standing_in(twin):
            self._pass_once(loss)

    @property
    def gradient_order(self) -> list[str]:
        return self.arrivals.names

    def follow_order(self, names: list[str]) -> None:
        """Use the buckets of the interrupted run, whose `gradient_order` is `names`, from the first step on."""
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if self.gradient_order or trained.keys() != set(names):  # already final, or other parameters
            return
        with self._standing_in(ZeroGradients([trained[name] for name in names])):
            self._pass_once(self.module)

    @contextmanager
    def _standing_in(self, module: nn.Module) -> Iterator[None]:
        """Return a context manager within which `DistributedDataParallel` calls `module` instead of the model.

        `module` must have the model's parameters.
        """
        model, broadcasts = self.ddp.module, self.ddp.broadcast_buffers
        self.ddp.module, self.ddp.broadcast_buffers = module, False
        try:
            yield
        finally:
            self.ddp.module, self.ddp.broadcast_buffers = model, broadcasts

    def _pass_once(self, loss: Callable[[], Tensor]) -> None:
        """Run one forward and backward pass and discard the gradients; if there is a hook, it exchanges nothing."""
        if self.hook is not None:
            self.hook.is_idle = True
        loss().backward()
        self.finish_exchange()
        if self.hook is not None:
            self.hook.is_idle = False
        self.model.zero_grad(set_to_none=True)

    def close(self) -> None:
        super().close()
        if self.hook is not None:
            self.hook.close()

    def _exchange_adopted(self, bucket: Sequence[Named]) -> None:
        """Replace the gradients of adopted parameters with their means; frees the bucket's copy on return."""
        gradients = [self._gradient(name, p) for name, p in bucket]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        mean_of(flat, bucket, self.context, self.exchange_)
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view(gradient.shape))

    def _gradient(self, name: str, parameter: nn.Parameter) -> Tensor:
        if parameter.grad is None:
            raise no_gradient_error(name, self.name)
        return parameter.grad

    def finish_exchange(self) -> None:
        if self.adopted is not None:
            for bucket in self.adopted:
                self._exchange_adopted(bucket)
            return
        if self.hook is not None:
            self.hook.finish()
        absent = None
        if any(p.grad is None for p in self.parameters):
            trained = ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)
            absent = next((name for name, p in trained if p.grad is None), None)
        of_last = first_left_out(self.ddp) if absent is None else None
        if absent or of_last:  # DistributedDataParallel would raise an error only in the next step
            where = "" if absent else " of the last micro-batch"
            raise no_gradient_error(absent or str(of_last), self.name, where=where)
        self.arrivals.stop()

    @property
    def layout(self) -> str:
        """Name of the layout; includes the bucket size, because each rank keeps residuals for its share of a bucket."""
        return f"{super().layout} buckets of {self.settings.bucket_mb:g} MB"

    def no_exchange(self) -> AbstractContextManager[Any]:
        return self.ddp.no_sync()
