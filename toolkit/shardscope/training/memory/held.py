"""What a model and its optimizer hold, where a strategy adds nothing to them."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from shardscope.training.memory.storages import Held


def held_by_default(model: nn.Module, optimizer: Optimizer) -> Held:
    """The tensors of a model and of a torch optimizer, by kind."""
    parameters = list(model.parameters())
    state = [value for row in optimizer.state.values() for value in row.values()]
    return {
        "parameters": [*parameters, *model.buffers()],
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "optimizer": [value for value in state if isinstance(value, Tensor)],
        "buffers": list(getattr(optimizer, "work_space", ())),
    }
