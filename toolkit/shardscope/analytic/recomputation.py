"""Number of layers whose activations are recomputed, if only the first layers of each stage are recomputed.

With ``--recompute-method block``, Megatron-Core checkpoints the first ``--recompute-num-layers`` layers of each model
chunk; a number that exceeds the chunk's layers counts as all of them (megatron/core/transformer/transformer_block.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardscope.spec.partition import even_split

if TYPE_CHECKING:
    from shardscope.spec.layout import Layout


def layers_of_stage(layers: npt.ArrayLike, stages: npt.ArrayLike) -> Any:
    """Return the number of layers of the largest stage of an even split; an int if both arguments are ints.

    Args:
        layers: Number of layers in the model.
        stages: Number of stages: pipeline ranks times stages per rank.
    """
    return -(-layers // stages)  # type: ignore[operator]


def recomputed_layers(layers: npt.ArrayLike, most: npt.ArrayLike) -> Any:
    """Return how many of a device's layers are recomputed.

    Args:
        layers: Number of layers on the device.
        most: Largest number to recompute, that is, `Layout.recompute_layers` times the number of stages on the device;
            0 for all.
    """
    return np.where(np.asarray(most) > 0, np.minimum(layers, most), layers)


def recomputed_by_kind(dense: npt.ArrayLike, mixed: npt.ArrayLike, most: npt.ArrayLike) -> tuple[Any, Any]:
    """Return the numbers of recomputed layers without and with experts on a device; layers without experts come first.

    Args:
        dense: Number of layers without experts.
        mixed: Number of layers with experts.
        most: As in `recomputed_layers`.
    """
    every = recomputed_layers(np.add(dense, mixed), most)
    first = np.minimum(every, dense)
    return first, every - first


def recomputed_in_model(layout: Layout, layers: int) -> int:
    """Return how many layers of a model with `layers` layers are recomputed, on all devices of a pipeline together."""
    if layout.recompute == "none":
        return 0
    held = even_split(layers, layout.pipeline)
    return int(recomputed_layers(held, layout.recompute_layers * layout.virtual_stages).sum())
