"""What a step does once or for each shard: reduce gradients, gather parameters, update, move to the host and back."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication.compression import compression_cost
from shardscope.analytic.compute import matmul
from shardscope.analytic.compute.matmul import Matmul, Split
from shardscope.analytic.memory import RECIPES
from shardscope.analytic.memory.states import state_bytes_per_param
from shardscope.analytic.step.machine import Machine
from shardscope.spec.layout import COMPRESSION_NAMES
from shardscope.spec.model import Transformer

Floats = npt.NDArray[np.float64]


class Weights(NamedTuple):
    """Parameters of one device on its slowest stage, and what reducing and gathering them takes."""

    dense: Floats
    """Elements that all replicas share."""
    experts: Floats
    """Elements of its experts, which fewer replicas share."""
    reduce_s: Floats
    """Seconds of reducing all gradients: an all-reduce for ZeRO 0, a reduce-scatter from there."""
    gather_s: Floats
    """Seconds of gathering all parameters once; 0 for ZeRO 0."""
    codec_s: Floats
    """Seconds of packing and unpacking compressed gradients."""
    update_s: Floats
    """Seconds of the optimizer on its share."""
    host_s: Floats
    """Seconds of the optimizer's traffic to the host and its update there, if it is offloaded."""
    stream_s: Floats
    """Seconds of bringing the stage's parameters from the host once."""


def weights(
    model: Transformer,
    machine: Machine,
    *,
    tensor: Floats,
    pipeline: Floats,
    context: Floats,
    expert: Floats,
    data: Floats,
    shard: Floats,
    zero: Floats,
    compression: npt.NDArray[np.int64],
    precision: str,
    optimizer: str,
) -> Weights:
    """Times of the model states' traffic for each combination; arrays of one shape."""
    dense, experts = stage_elements(model, tensor=tensor, pipeline=pipeline, expert=expert)
    recipe = RECIPES[precision]
    cal, replicas = machine.calibration, data * context
    owners = np.where(zero >= 1, shard, 1.0)
    reduce_s = gather_s = codec = np.zeros_like(dense)
    layers = np.ceil(model.layers / pipeline)
    expert_owners = np.maximum(owners / expert, 1.0)
    for elements, group, stride, sharing in (
        (dense, replicas, tensor, owners),
        (experts, np.maximum(replicas / expert, 1.0), tensor * expert, expert_owners),
    ):
        if not np.any(elements):
            continue
        within = np.minimum(np.where(zero >= 1, sharing, group), group)
        scattered = machine.collective("reduce_scatter", elements * recipe.gradient, within, stride)
        between = machine.collective(
            "all_reduce", elements * recipe.gradient / within, group / within, stride * within
        )
        whole = machine.collective("all_reduce", elements * recipe.gradient, group, stride)
        packed_s, coding_s = _compressed(machine, elements, compression, group, stride)
        plain_s = np.where(zero >= 1, scattered + between, whole)
        reduce_s = reduce_s + np.where(compression == 0, plain_s, packed_s)
        codec = codec + coding_s
        gathered = machine.collective("all_gather", elements * recipe.parameter, within, stride)
        gather_s = gather_s + np.where(zero >= 1, gathered, 0.0)
    started = np.where((zero == 3) & (replicas > 1), layers * cal.collective_s, 0.0)
    own = dense / owners + experts / expert_owners
    state_bytes = (
        recipe.parameter
        + recipe.gradient
        + 2.0 * (recipe.master + state_bytes_per_param(optimizer, recipe.state))
    )
    device = machine.cluster.device
    update = own * state_bytes / (device.memory_bandwidth * cal.optimizer_efficiency)
    host = own * (recipe.parameter + recipe.gradient + state_bytes) / device.host_bandwidth
    stream = (dense + experts) * recipe.parameter / device.host_bandwidth
    return Weights(dense, experts, reduce_s + started, gather_s + started, codec, update, host, stream)


def _compressed(
    machine: Machine,
    elements: Floats,
    compression: npt.NDArray[np.int64],
    group: Floats,
    stride: Floats,
) -> tuple[Floats, Floats]:
    """Seconds on the wire and in the codec of compressed gradients; whoever owns a shard keeps its part of the sum."""
    wire, codec = np.zeros_like(elements), np.zeros_like(elements)
    rate, latency = machine.link(group, stride)
    for index in np.unique(compression[compression > 0]):
        cost = compression_cost(
            COMPRESSION_NAMES[index],
            elements,
            group,
            rate,
            latency=latency,
            codec_bandwidth=machine.memory_rate,
        )
        wire = np.where(compression == index, cost.wire_s + machine.started(group), wire)
        codec = np.where(compression == index, cost.codec_s, codec)
    return wire, codec


def stage_elements(
    model: Transformer, *, tensor: npt.ArrayLike, pipeline: npt.ArrayLike, expert: npt.ArrayLike
) -> tuple[Floats, Floats]:
    """Matrix elements of one device of the largest stage: shared by all replicas, and of its routed experts."""
    one = Split.of()
    attention = _elements(matmul.projections(model, one))
    plain = _elements(matmul.feed_forward(model, one, model.ffn))
    routed = shared = 0.0
    if model.mixture is not None:
        every = matmul.experts(model, one)
        routed = _elements(every[1:3])
        shared = _elements((every[0], *every[3:]))
    layers = np.ceil(model.layers / np.asarray(pipeline, float))
    with_experts = np.minimum(layers, model.num_mixture_layers)
    vocabulary = model.vocab * model.hidden * np.where(np.asarray(pipeline) == 1, 1 if model.tied else 2, 1)
    dense = layers * attention + (layers - with_experts) * plain + with_experts * shared + vocabulary
    degree = np.asarray(tensor, float)
    return np.asarray(dense / degree), np.asarray(with_experts * routed / (degree * np.asarray(expert)))


def _elements(products: tuple[Matmul, ...]) -> float:
    return float(sum(product.n * product.k * product.times for product in products))
