"""What runs on the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import shardscope as ss


class OnOneRank(ss.OwnAllReduce):
    def reduce_(self, buffer: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(buffer) for _ in range(self.context.world_size)]
        torch.distributed.all_gather(parts, buffer)
        return buffer.copy_(self.settings.scale * torch.stack(parts).sum(0))


class LionStep(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            blend, decay = group["betas"]
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    momentum = state.setdefault("momentum", torch.zeros_like(weight))
                    weight.sub_(momentum.lerp(weight.grad, 1 - blend).sign(), alpha=group["lr"])
                    momentum.lerp_(weight.grad, 1 - decay)


def keep_first(share: float) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The two functions of a codec that sends the first numbers as floats of 16 bits."""

    def unpack(packet: torch.Tensor, count: int) -> torch.Tensor:
        out = torch.zeros(count)
        out[: packet.numel() // 2] = packet.view(torch.float16)
        return out

    return lambda values: values[: int(share * len(values))].half(), unpack
