"""Sparse gradients, which hold only the rows that an embedding has looked up, and which optimizers accept them.

torch's SGD accepts them in its plain form. AdamW, LAMB and LARS move every row in every step and refuse them. Where
ranks exchange gradients, those of embeddings are dense from the start.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardscope.errors import SpecError
from shardscope.spec.optimizer import Optimizer


def refuse_sparse(layer: str, optimizer: str) -> SpecError:
    """The error for a sparse gradient of this layer or parameter under an optimizer that moves every row."""
    return SpecError(
        f"{layer!r} has a sparse gradient, which optimizer={optimizer!r} does not support; "
        "build its embedding with sparse=False, or use optimizer='sgd'"
    )


def settle_sparse_embeddings(model: nn.Module, *, optimizer: Optimizer, world_size: int) -> None:
    """Check every trained ``nn.Embedding(sparse=True)`` of the model, and make its gradient dense on several ranks.

    Raises:
        SpecError: The optimizer does not support sparse gradients.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or not module.sparse:
            continue
        if not module.weight.requires_grad:
            continue
        if not optimizer.takes_sparse:
            raise refuse_sparse(name, optimizer.name)
        module.sparse = world_size == 1


def refuse_in_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before a step of AdamW: refuse a sparse gradient that no module announced."""
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if _is_sparse(parameter.grad):
                raise refuse_sparse(name, "adamw")


def prepare_sgd(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before a step of SGD: prepare gradients and momenta for torch's fused kernel.

    The kernel needs the momenta of all parameters in a group or of none. So a parameter whose first gradient comes late
    starts from a momentum of 0, which gives the same result as the plain form. The kernel accepts no sparse gradient.
    SGD without momentum and decay then uses the plain form, which moves only the gradient's rows. With momentum or
    decay every row moves, so the gradient becomes dense.
    """
    for group in optimizer.param_groups:
        moves_all = group["momentum"] or group["weight_decay"] or hasattr(optimizer, "found_inf")
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if _is_sparse(parameter.grad):
                group["fused"] = bool(moves_all)
                parameter.grad = parameter.grad.to_dense() if moves_all else parameter.grad
            if group["momentum"] and "momentum_buffer" not in optimizer.state[parameter]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _is_sparse(grad: Tensor | None) -> bool:
    return grad is not None and grad.is_sparse
