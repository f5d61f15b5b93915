"""Lists the tensors of a model and its optimizer by type of memory, for strategies that keep no other tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from shardscope.training._compat import fsdp_params
from shardscope.training.memory.storages import Held


def held_by_default(model: nn.Module, optimizer: Optimizer, roots: Sequence[nn.Module] = ()) -> Held:
    """Return the tensors of a model and its PyTorch optimizer, by type of memory; FSDP2 may have sharded the model.

    Args:
        model: The model.
        optimizer: Its optimizer.
        roots: The modules that FSDP2 has sharded, if it is not the model itself, such as the stages of a pipeline.
    """
    sharded = [param for root in roots or [model] for param in fsdp_params(root)]
    whole = [param._unsharded_param for param in sharded if hasattr(param, "_unsharded_param")]  # noqa: SLF001
    gathered = {id(param) for param in whole}  # model.parameters() lists these while gathered
    own = [param.sharded_param for param in sharded]
    own += [param for param in model.parameters() if id(param) not in gathered]
    grads = [param.grad for param in [*own, *whole] if param.is_leaf]  # no others have one
    grads += [param.unsharded_accumulated_grad for param in sharded]
    state = [
        value
        for row in list(optimizer.state.values())
        if isinstance(row, dict)  # an entry of no parameter may be a number
        for value in list(row.values())
    ]  # copied to lists, as the threads of a parameter server may add entries meanwhile
    return {
        "parameters": [*own, *model.buffers()],
        "gradients": [grad for grad in grads if grad is not None],
        "optimizer": [value for value in state if isinstance(value, Tensor)],
        "gathered": [output for param in sharded for output in param.all_gather_outputs],
        "buffers": list(getattr(optimizer, "work_space", ())),
    }
