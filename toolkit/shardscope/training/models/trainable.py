"""Rejects models that cannot be trained, before they are cast to a job's precision."""

from __future__ import annotations

from torch import nn

from shardscope.errors import SpecError


def require_trainable(model: nn.Module) -> None:
    """Reject a model without trainable parameters, or with tensors that a job cannot hold.

    Complex tensors, such as those of rotary embeddings, would lose their imaginary part when cast to a precision.

    Raises:
        SpecError: The model cannot be trained.
    """
    kind = f"model of type {type(model).__name__}"
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise SpecError(
            f"{kind} has no trainable parameter; set requires_grad=True on the parameters to train"
        )
    tensors = [("parameter", *each) for each in model.named_parameters()]
    for what, name, tensor in [*tensors, *(("buffer", *each) for each in model.named_buffers())]:
        if tensor.is_complex():
            raise SpecError(
                f"{kind} has the {what} {name!r} of {str(tensor.dtype).removeprefix('torch.')}, but jobs train real "
                "numbers; store it with torch.view_as_real, and use torch.view_as_complex in the forward pass"
            )
        if tensor.is_meta:
            raise SpecError(
                f"{kind} has the {what} {name!r} on the meta device, without values; create it on the CPU"
            )
