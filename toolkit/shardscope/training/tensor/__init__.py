"""Tensor parallelism: layers of which each rank of a tensor group holds a part, as ordinary local parameters.

    split = TensorSplit(axis, plan)     the ranks of the group, and how layers are divided
    split.divide(model)                 replaces the weights of divided layers by this rank's parts
    split.whole(name, part)             gathers a whole tensor, such as for a checkpoint

A divided model is an ordinary, smaller model, to which any data-parallel strategy applies. Its layers communicate in
their forward and backward passes, so all ranks of a group run the same passes on the same samples.
"""

from shardscope.training.tensor.axis import Message, TensorAxis, recording
from shardscope.training.tensor.split import Cut, TensorSplit

__all__ = ["Cut", "Message", "TensorAxis", "TensorSplit", "recording"]
