"""Send and receive activations between stages during evaluation.

During training, all ranks know the shapes of messages in advance. During an evaluation, the last micro-batch may be
smaller, so each message is preceded by a header with the message's shape and dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardscope.training.context import RankContext

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_DIMS = 8
_TAG = 1 << 19  # different from the tags used in training


def send_activations(x: Tensor, peer: int, context: RankContext) -> None:
    """Send a floating-point tensor to a rank that calls `receive_activations`."""
    assert context.group is not None
    shape = [*x.shape, *[0] * (_MOST_DIMS - x.dim())]
    header = torch.tensor([_DTYPES.index(x.dtype), x.dim(), *shape])
    context.group.send([header], peer, _TAG).wait()
    context.group.send([x.detach().cpu().contiguous()], peer, _TAG + 1).wait()


def receive_activations(peer: int, context: RankContext) -> Tensor:
    """Receive a tensor that rank `peer` sends with `send_activations`."""
    assert context.group is not None
    header = torch.empty(2 + _MOST_DIMS, dtype=torch.int64)
    context.group.recv([header], peer, _TAG).wait()
    kind, dims, *shape = header.tolist()
    x = torch.empty(shape[:dims], dtype=_DTYPES[kind])
    context.group.recv([x], peer, _TAG + 1).wait()
    return x.to(context.device)
