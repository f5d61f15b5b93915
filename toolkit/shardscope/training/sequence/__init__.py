"""Context parallelism: each rank of a context group holds an equal part of every sequence.

    split = SequenceSplit(axis, "ring")   the ranks of the group, and how attention communicates
    split.part(batch)                     this rank's part of each tensor of a batch
    split.install(model)                  the model now takes parts of sequences, as this rank gets them
    with split.passing(model, length):    layers that are called here do, as those of a pipeline's stage

All layers but attention treat each token by itself, so only attention communicates, in both passes. Context ranks are
data ranks as far as gradients go: with equal parts, the mean over them is the mean over the sequence's tokens.
"""

from shardscope.training.sequence.axis import SequenceAxis
from shardscope.training.sequence.split import SequenceSplit, length_of, passing

__all__ = ["SequenceAxis", "SequenceSplit", "length_of", "passing"]
