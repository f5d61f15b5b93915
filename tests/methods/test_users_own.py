"""Methods of the user's own, as a notebook cell defines them: registered, trained, saved, run again, searched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import shardscope as ss

TOP = Path(__file__).parents[2]
CELL = """
class Sawtooth(ss.LRSchedule):
    "Falls by half within a period, and starts again."

    name = "sawtooth"

    period: int = 4

    def factor_after_warmup(self, step, steps):
        return 1 - DEPTH * ((step - 1) % self.period) / self.period
"""

OPTIMIZER = """
class Lion(ss.Optimizer):
    "Moves by the sign of its momentum (Chen et al. 2023, arXiv:2302.06675)."

    name = "lion"

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.99)

    def build(self, parameters):
        return LionStep(parameters.groups(), {"lr": self.lr, "betas": self.betas})


class LionStep(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            blend, decay = group["betas"]
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    momentum = state.setdefault("momentum", torch.zeros_like(weight))
                    weight.sub_(momentum.lerp(weight.grad, 1 - blend).sign(), alpha=group["lr"])
                    momentum.lerp_(weight.grad, 1 - decay)
"""


COMPRESSION = """
class FirstHalf(ss.PackedCompression):
    "Sends the first half of the numbers as floats of 16 bits; the rest waits."

    name = "first-half"

    share: float = 0.5
    feedback: bool = True

    def packet_bytes(self, num_elements):
        return 2 * int(self.share * num_elements)

    def codec(self):
        def unpack(packet, count):
            out = torch.zeros(count)
            out[: packet.numel() // 2] = packet.view(torch.float16)
            return out

        return ss.SimpleCodec(self.packet_bytes, lambda values: values[: int(self.share * len(values))].half(), unpack)
"""


def run_compression_cell() -> type[ss.Compression]:
    cell: dict[str, Any] = {"ss": ss, "torch": torch, "__name__": "__main__"}
    exec(COMPRESSION, cell)
    return cell["FirstHalf"]
