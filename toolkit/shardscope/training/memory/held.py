"""Tensors that a model and its optimizer hold, for strategies that add nothing to them."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from shardscope.training._compat import fsdp_params
from shardscope.training.memory.storages import Held


def held_by_default(model: nn.Module, optimizer: Optimizer) -> Held:
    """The tensors of a model, which FSDP2 may shard, and of a torch optimizer, by kind."""
    sharded = fsdp_params(model)
    whole = [param._unsharded_param for param in sharded if hasattr(param, "_unsharded_param")]  # noqa: SLF001
    gathered = {id(param) for param in whole}  # while gathered, these are the model's own attributes
    own = [param.sharded_param for param in sharded]
    own += [param for param in model.parameters() if id(param) not in gathered]
    grads = [param.grad for param in [*own, *whole]]
    grads += [param.unsharded_accumulated_grad for param in sharded]
    state = [
        value for row in list(optimizer.state.values()) for value in list(row.values())
    ]  # a server's threads add
    return {
        "parameters": [*own, *model.buffers()],
        "gradients": [grad for grad in grads if grad is not None],
        "optimizer": [value for value in state if isinstance(value, Tensor)],
        "gathered": [output for param in sharded for output in param.all_gather_outputs],
        "buffers": list(getattr(optimizer, "work_space", ())),
    }
