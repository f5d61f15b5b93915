"""Checks and preparations for sparse gradients, which contain only the rows that an embedding has looked up.

PyTorch's SGD accepts sparse gradients in its variant without fused kernels. AdamW, LAMB and LARS update every row in
every step, and do not support them. If ranks exchange gradients, embeddings are set to produce dense gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardscope.errors import SpecError
from shardscope.spec.optimizer import Optimizer


def sparse_gradient_error(layer: str, optimizer: str) -> SpecError:
    """Return the error for a sparse gradient of `layer` with an optimizer that does not support it."""
    return SpecError(
        f"{layer!r} has a sparse gradient, which optimizer={optimizer!r} does not support; "
        "build its embedding with sparse=False, or use optimizer='sgd'"
    )


def prepare_sparse_embeddings(model: nn.Module, *, optimizer: Optimizer, world_size: int) -> None:
    """Check that the optimizer supports every trained ``nn.Embedding(sparse=True)`` in the model.

    With more than one rank, the embeddings are also set to produce dense gradients.

    Raises:
        SpecError: The optimizer does not support sparse gradients.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or not module.sparse:
            continue
        if not module.weight.requires_grad:
            continue
        if not optimizer.takes_sparse:
            raise sparse_gradient_error(name, optimizer.name)
        module.sparse = world_size == 1


def refuse_in_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise `SpecError` if a parameter has a sparse gradient; a hook that runs before each step of AdamW.

    `prepare_sparse_embeddings` does not detect sparse gradients that do not come from an embedding module.
    """
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if _is_sparse(parameter.grad):
                raise sparse_gradient_error(name, "adamw")


def prepare_sgd(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Prepare gradients and momenta for PyTorch's fused kernel; a hook that runs before each step of SGD.

    The kernel requires that all parameters in a group have a momentum buffer, or that none has. So a parameter that
    gets its first gradient in a later step starts with a momentum of 0, which gives the same result as without the
    kernel.

    The kernel does not accept sparse gradients. With momentum or weight decay, every row is updated anyway, and the
    gradient is converted to a dense one. Otherwise SGD runs without the kernel, and updates only the gradient's rows.
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
