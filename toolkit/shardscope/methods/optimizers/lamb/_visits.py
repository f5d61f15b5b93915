"""The order in which LAMB's Triton kernel visits the tiles of all layers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def stages_of(
    num_tiles: npt.NDArray[np.int64], *, adapts: bool, ahead: int | None
) -> list[npt.NDArray[np.int32]]:
    """Return the visits to tiles of layers in each stage of a step, in order; one row per visit, for `step_layers`.

    Args:
        num_tiles: Number of tiles of each layer.
        adapts: Whether the layers have trust ratios; without, there are no second visits.
        ahead: Number of first visits to other layers between a layer's last first visit and its second visits, so that
            second visits do not wait for unfinished first visits; None to put all second visits in a second stage.
    """
    layers = np.repeat(np.arange(len(num_tiles)), num_tiles)
    ends = np.cumsum(num_tiles, dtype=np.int64)[layers]
    tiles = np.arange(len(layers)) - (ends - num_tiles[layers])
    first = np.stack([layers, tiles], axis=1).astype(np.int32)
    # the last tiles first: they may be in the cache even if the layer does not fit
    second = np.stack([layers, tiles - num_tiles[layers]], axis=1).astype(np.int32)
    if not adapts:
        return [first]
    if ahead is None:
        return [first, second]
    places = np.concatenate([2 * np.arange(len(layers)), 2 * (ends - 1 + ahead) + 1])
    return [np.concatenate([first, second])[np.argsort(places, kind="stable")]]
