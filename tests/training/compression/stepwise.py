"""What a strategy brings together for a method that works over several steps, on one rank; and such methods in full.

The references know one process, mean gradients and float64; there is no exchange in them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import shardscope as ss
from conformance.compressor import SHAPES, bucket_of, carrier_of, gradients, job_of
from conformance.optimizers import build_optimizer
from shardscope.training.compression import Bucket, Compressor, build_compressor
from shardscope.training.compression.codec import Codec
from shardscope.training.context import RankContext

Shapes = Sequence[tuple[int, ...]]


def start(shapes: Shapes = SHAPES) -> Tensor:
    """The weights that every rank starts from, flat."""
    return gradients(99, shapes=shapes)


def split(flat: Tensor, shapes: Shapes = SHAPES) -> Iterator[Tensor]:
    """The tensors of these shapes in a flat one."""
    for piece, shape in zip(flat.split([math.prod(shape) for shape in shapes]), shapes, strict=True):
        yield piece.view(shape)


class Replica:
    """One rank's weights, optimizer and compressor."""

    def __init__(
        self,
        compression: ss.Compression,
        context: RankContext,
        *,
        optimizer: ss.Optimizer | None = None,
        compressor: Compressor | None = None,
        shapes: Shapes = SHAPES,
    ) -> None:
        job = job_of(compression, context.world_size)
        self.context, self.shapes = context, shapes
        self.weights = {
            f"p{i}": nn.Parameter(piece.clone()) for i, piece in enumerate(split(start(shapes), shapes))
        }
        made = build_compressor(job) if compressor is None else compressor
        assert made is not None
        self.compressor, self.carrier = made, carrier_of(context)
        self.optimizer = build_optimizer(
            optimizer or job.optimizer, self.weights.items(), is_freezable=made.freezes_variance
        )
        made.attach(self.optimizer, self.weights)

    def step(self, step: int, flat: Tensor, *, first: int = 0) -> Tensor:
        """One step with these gradients of this rank; returns what the ranks came to.

        All tensors go in one bucket, or the `first` so many in one and the rest in another.
        """
        self.compressor.begin_step(step)
        mean = flat.clone()
        whole = bucket_of(mean, step, self.shapes)
        split_at = sum(whole.sizes[:first])
        for part, piece in ((slice(first), mean[:split_at]), (slice(first, None), mean[split_at:])):
            if piece.numel():
                bucket = Bucket(whole.names[part], whole.shapes[part], piece, step)
                self.compressor.mean_(bucket, self.carrier)
        for weight, grad in zip(self.weights.values(), split(mean, self.shapes), strict=True):
            weight.grad = grad
        self.optimizer.step()
        self.compressor.after_step(list(self.weights.values()), self.carrier, step)
        return mean

    def settled(self) -> Tensor:
        """The weights that the run would be evaluated with, the same on all ranks, flat."""
        averaged = self.compressor.averaged(self.carrier)
        return torch.cat(
            [averaged.get(weight, weight).detach().reshape(-1) for weight in self.weights.values()]
        )

    def flat(self) -> Tensor:
        """This rank's weights."""
        return torch.cat([weight.detach().reshape(-1) for weight in self.weights.values()])


class Verbatim(Codec):
    """Packets that are the values themselves."""

    def num_bytes(self, num_elements: int) -> int:
        return 4 * num_elements

    def encode(self, values: Tensor, packet: Tensor, seed: int) -> None:
        packet.view(torch.float32).copy_(values)

    def decode(self, packet: Tensor, out: Tensor, seed: int, *, add: bool = False) -> None:
        values = packet.view(torch.float32)
        out.copy_(out + values if add else values)


@dataclass
class FrozenAdam:
    """AdamW (Loshchilov and Hutter, Algorithm 2) whose second moment, with its correction, stops after a warm-up.

    No root of it is then less than a tenth of its layer's, but for those that are zero.
    """

    weights: list[Tensor]
    warmup: int
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decay: float = 0.01
    t: int = 0

    def __post_init__(self) -> None:
        self.weights = [weight.double() for weight in self.weights]
        self.m = [torch.zeros_like(weight) for weight in self.weights]
        self.v = [torch.zeros_like(weight) for weight in self.weights]

    def step(self, grads: Sequence[Tensor]) -> None:
        self.t += 1
        for i, grad in enumerate(grads):
            self.move(i, grad.double())

    def update(self, i: int, grad: Tensor) -> Tensor:
        """Adam's bare update."""
        beta1, beta2 = self.betas
        self.m[i] = beta1 * self.m[i] + (1 - beta1) * grad
        if self.t <= self.warmup:
            self.v[i] = beta2 * self.v[i] + (1 - beta2) * grad**2
        if self.t == self.warmup + 1:
            least = 0.01 * self.v[i].mean()
            self.v[i] = torch.where(self.v[i] > 0, self.v[i].maximum(least), 0.0)
        v_hat = self.v[i] / (1 - beta2 ** min(self.t, self.warmup))
        return self.m[i] / (1 - beta1**self.t) / (v_hat.sqrt() + self.eps)

    def move(self, i: int, grad: Tensor) -> None:
        update = self.update(i, grad)
        self.weights[i] = self.weights[i] * (1 - self.lr * self.decay) - self.lr * update


@dataclass
class FrozenLamb(FrozenAdam):
    """1-bit LAMB (Li et al. 2021, Algorithm 1) with bias corrections, and without any code."""

    lr: float = 2e-3
    eps: float = 1e-6
    ratio: dict[int, float] = field(default_factory=dict)
    factor: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fresh = [torch.zeros_like(weight) for weight in self.weights]

    def move(self, i: int, grad: Tensor) -> None:
        bare = self.update(i, grad)
        whole = bare + self.decay * self.weights[i]
        beta2 = self.betas[1]
        if self.t == self.warmup + 1:
            self.fresh[i] = self.v[i].clone()
        self.fresh[i] = beta2 * self.fresh[i] + (1 - beta2) * grad**2
        if self.t <= self.warmup:
            has_norm = bool(self.weights[i].norm() > 0 and whole.norm() > 0)
            ratio = float(self.weights[i].norm() / whole.norm()) if has_norm else 1.0
            if has_norm:  # 1 stands for no ratio, and joins no average of them
                self.ratio[i] = 0.9 * self.ratio[i] + 0.1 * ratio if i in self.ratio else ratio
        else:
            ratio = self.ratio.get(i, 1.0) * self.follow(i, float(bare.norm() / whole.norm()))
        self.weights[i] = self.weights[i] - self.lr * ratio * whole

    def follow(self, i: int, share: float) -> float:
        """The layer's factor of this step."""
        beta2, last = self.betas[1], self.factor.get(i, 1.0)
        frozen = (self.v[i] / (1 - beta2**self.warmup)).sqrt() + self.eps
        fresh = (self.fresh[i] / (1 - beta2**self.t)).sqrt() + self.eps
        share = min(share, 1.0)
        wanted = float((frozen / fresh).max()) * share + 1 - share
        wanted = min(max(wanted, 0.5), 4.0)
        self.factor[i] = min(max(wanted, 0.9 * last), 1.1 * last)
        return self.factor[i]
