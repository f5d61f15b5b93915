"""What leaves the device: bytes that the host and its drives hold instead, and bytes that travel in every step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory.states import known_recipe
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import OFFLOAD_NAMES

Floats = npt.NDArray[np.float64]

OFFLOADS_OPTIMIZER = np.array([name in ("optimizer", "states", "all") for name in OFFLOAD_NAMES])
OFFLOADS_STATES = np.array([name in ("states", "all") for name in OFFLOAD_NAMES])
OFFLOADS_ACTIVATIONS = np.array([name in ("activations", "all") for name in OFFLOAD_NAMES])


class Traffic(NamedTuple):
    """What goes between one device and its host, each way: bytes, or the seconds they take."""

    to_host: Floats
    to_device: Floats

    def plus(self, other: Traffic) -> Traffic:
        """Both together."""
        return Traffic(self.to_host + other.to_host, self.to_device + other.to_device)

    def times(self, factor: npt.ArrayLike) -> Traffic:
        """These bytes times a number."""
        count = np.asarray(factor)
        return Traffic(np.asarray(self.to_host * count), np.asarray(self.to_device * count))


class StepTraffic(NamedTuple):
    """When it goes: in each micro-batch's forward pass, in its backward pass, and once a step at the update."""

    forward: Traffic
    backward: Traffic
    update: Traffic


class Away(NamedTuple):
    """What a rank may keep on its host: bytes, or the seconds that they take to get there or back once."""

    weights: Floats
    """Those the rank keeps: all that it computes with, or under ZeRO 3 its partition of them."""
    gradients: Floats
    """The same: all of them, or under ZeRO 2 and 3 its partition."""
    owned_weights: Floats
    """Of the part that the rank updates."""
    owned_gradients: Floats
    saved: Floats
    """By its layers, of one micro-batch."""


def tiers(offloaded: Floats, host_capacity: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Bytes of a rank in the host's memory, and what is left for its drives once `host_capacity` is full."""
    host = np.minimum(offloaded, host_capacity)
    return host, offloaded - host


def drive_room(cluster: Cluster) -> float:
    """Bytes that a device's share of its node's drives holds; drives of unknown bandwidth (0) hold nothing."""
    return cluster.nvme_bytes / cluster.per_node if cluster.nvme_bandwidth else 0.0


def host_room(cluster: Cluster) -> float:
    """Bytes that a device's share of its host's memory holds."""
    return cluster.host_memory_bytes / cluster.per_node


def step_traffic(offload: npt.ArrayLike, recompute: npt.ArrayLike, away: Away) -> StepTraffic:
    """What an offloaded layout sends to its host and takes from it, and when. Broadcasts.

    The optimizer's update on the host takes the gradients of the rank's partition and gives back its weights
    (ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840, section 4.1: 2M + 2M bytes for M parameters). Offloaded weights
    come once for each forward and each backward pass, once more where everything is recomputed, and gradients go
    once a backward pass (ZeRO-Infinity, Rajbhandari et al. 2021, arXiv 2104.07857, sections 4.1 and 5.1; each rank
    brings its own partition, 6.1); activations go in the forward and come back in the backward pass.

    Args:
        offload: Index into `spec.layout.OFFLOAD_NAMES`.
        recompute: Index into `spec.layout.RECOMPUTE_NAMES`.
        away: In bytes or in seconds, which is what the result is then in.
    """
    kind = np.asarray(offload)
    states, activations = OFFLOADS_STATES[kind], OFFLOADS_ACTIVATIONS[kind]
    only_optimizer = OFFLOADS_OPTIMIZER[kind] & ~states
    saved, weights = away.saved * activations, away.weights * states
    passes_back = 1 + (np.asarray(recompute) == 2)
    return StepTraffic(
        forward=Traffic(to_host=saved, to_device=weights),
        backward=Traffic(to_host=away.gradients * states, to_device=weights * passes_back + saved),
        update=Traffic(
            to_host=away.owned_gradients * only_optimizer, to_device=away.owned_weights * only_optimizer
        ),
    )


def offload_traffic(
    layouts: Layouts,
    *,
    parameters: Floats,
    owned: Floats,
    saved: Floats,
    gradients: Floats | None = None,
) -> Traffic:
    """Bytes that one device sends to its host and takes from it in one step: `step_traffic` of all micro-batches.

    Args:
        layouts: The layouts.
        parameters: Elements of the weights that the rank keeps: all that it computes with, or under ZeRO 3 its part.
        owned: Elements that the rank updates.
        saved: Bytes that its layers save of one micro-batch.
        gradients: Elements of the gradients that the rank keeps; None where they are as many as the weights.
    """
    recipe = known_recipe(layouts.precision)
    away = Away(
        weights=parameters * recipe.parameter,
        gradients=(parameters if gradients is None else gradients) * recipe.gradient,
        owned_weights=owned * recipe.parameter,
        owned_gradients=owned * recipe.gradient,
        saved=saved,
    )
    step = step_traffic(layouts.offload, layouts.recompute, away)
    return step.forward.plus(step.backward).times(layouts.num_micro_batches).plus(step.update)
