"""What leaves the device: bytes that the host and its drives hold instead, and bytes that travel in every step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory.columns import Floats
from shardscope.analytic.memory.states import known_recipe
from shardscope.spec.layout import OFFLOAD_NAMES

OFFLOADS_OPTIMIZER = np.array([name in ("optimizer", "states", "all") for name in OFFLOAD_NAMES])
OFFLOADS_STATES = np.array([name in ("states", "all") for name in OFFLOAD_NAMES])
OFFLOADS_ACTIVATIONS = np.array([name in ("activations", "all") for name in OFFLOAD_NAMES])


class Traffic(NamedTuple):
    """Bytes between one device and its host in one step."""

    to_host: Floats
    to_device: Floats


def tiers(offloaded: Floats, host_capacity: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Bytes of a rank in the host's memory, and what is left for its drives once `host_capacity` is full."""
    host = np.minimum(offloaded, host_capacity)
    return host, offloaded - host


def offload_traffic(layouts: Layouts, *, parameters: Floats, owned: Floats, saved: Floats) -> Traffic:
    """Bytes that one device sends to its host and takes from it in one step.

    The optimizer's update on the host takes the gradients of the rank's partition and gives back its weights
    (ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840, section 4.1: 2M + 2M bytes for M parameters). Offloaded parameters
    come twice in each micro-batch, once more where everything is recomputed, and gradients go once (ZeRO-Infinity,
    Rajbhandari et al. 2021, arXiv 2104.07857, section 5.1); activations go once and come once.

    Args:
        layouts: The layouts.
        parameters: Elements that the rank computes with.
        owned: Elements that the rank updates.
        saved: Bytes that its layers save of one micro-batch.
    """
    recipe, kind = known_recipe(layouts.precision), layouts.offload
    passes = 2 + (layouts.recompute == 2)
    moved = saved * layouts.num_microbatches * OFFLOADS_ACTIVATIONS[kind]
    weights_in = recipe.parameter * np.where(
        OFFLOADS_STATES[kind],
        parameters * passes * layouts.num_microbatches,
        owned * OFFLOADS_OPTIMIZER[kind],
    )
    gradients_out = recipe.gradient * np.where(
        OFFLOADS_STATES[kind], parameters * layouts.num_microbatches, owned * OFFLOADS_OPTIMIZER[kind]
    )
    return Traffic(to_host=gradients_out + moved, to_device=weights_in + moved)
