"""What a step does once or for each shard: reduce gradients, gather parameters, update, move to the host and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication.compression import compression_cost
from shardscope.analytic.compute import matmul
from shardscope.analytic.compute.matmul import Matmul, Split
from shardscope.analytic.memory import RECIPES
from shardscope.prediction.step.machine import Machine
from shardscope.spec.compression import Compression
from shardscope.spec.model import Transformer
from shardscope.spec.optimizer import OptimizerStates

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
    tied_s: Floats
    """Seconds of adding up the gradients of a tied embedding on the first and the last stage."""
    update_s: Floats
    """Seconds of the optimizer on its share, its products included."""
    products_s: Floats
    """Of these, the matrix products of Muon and its like, which stay on the device wherever its momentum is; else 0."""
    host_update_s: Floats
    """The same on the host, which reads and writes its memory for each device at the rate of the device's link."""
    weights_s: Floats
    """Seconds of bringing the weights that the rank keeps over the link to its host, once."""
    gradients_s: Floats
    """The same of the gradients that it keeps."""
    owned_weights_s: Floats
    """The same of the weights that the rank updates."""
    owned_gradients_s: Floats


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
    compressions: tuple[Compression, ...],
    precision: str,
    kept: OptimizerStates,
) -> Weights:
    """Times of the model states' traffic for each combination; arrays of one shape, `compression` of indices."""
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
        packed_s, coding_s = _compressed(machine, elements, (compression, compressions), group, stride)
        plain_s = np.where(zero >= 1, scattered + between, whole)
        reduce_s = reduce_s + np.where(compression == 0, plain_s, packed_s)
        codec = codec + coding_s
        gathered = machine.collective("all_gather", elements * recipe.parameter, within, stride)
        gather_s = gather_s + np.where(zero >= 1, gathered, 0.0)
    started = np.where((zero == 3) & (replicas > 1), layers * cal.collective_s, 0.0)
    own = dense / owners + experts / expert_owners
    state_bytes = (
        recipe.parameter + recipe.gradient + 2.0 * (recipe.master + kept.bytes_per_param(recipe.state))
    )
    device = machine.cluster.device
    update = own * state_bytes / (device.memory_bandwidth * cal.optimizer_efficiency)
    products = np.zeros_like(update)
    if kept.orthogonalizes:
        products = _muon(model, machine, (tensor, pipeline, expert), owners, expert_owners)
    whole, link = dense + experts, device.host_bandwidth
    return Weights(
        dense,
        experts,
        reduce_s + started,
        gather_s + started,
        codec,
        tied_s=_tied(model, machine, tensor, tensor * replicas, pipeline, recipe.gradient),
        update_s=update + products,
        products_s=products,
        host_update_s=own * state_bytes / link,
        weights_s=np.where(zero == 3, own, whole) * recipe.parameter / link,
        gradients_s=np.where(zero >= 2, own, whole) * recipe.gradient / link,
        owned_weights_s=own * recipe.parameter / link,
        owned_gradients_s=own * recipe.gradient / link,
    )


def _tied(  # noqa: PLR0917
    model: Transformer,
    machine: Machine,
    tensor: Floats,
    stage_ranks: Floats,
    pipeline: Floats,
    gradient_bytes: int,
) -> Floats:
    """The embedding's all-reduce between first and last stage (Narayanan et al. 2021, arXiv 2104.04473, section 4)."""
    if not model.tied:
        return np.zeros_like(tensor)
    size = model.vocab * model.hidden / tensor * gradient_bytes
    seconds = machine.collective("all_reduce", size, 2, stage_ranks * np.maximum(pipeline - 1, 1))
    return np.where(pipeline > 1, seconds, 0.0)


def _muon(
    model: Transformer,
    machine: Machine,
    degrees: tuple[Floats, Floats, Floats],
    owners: Floats,
    expert_owners: Floats,
) -> Floats:
    """Seconds of orthogonalising the hidden matrices, shared evenly by the ranks that update them and each its part."""
    tensor, pipeline, expert = degrees
    layers, with_experts = _layers(model, pipeline)

    def seconds(weights: Sequence[Matmul]) -> Floats:
        steps = [product for weight in weights for product in matmul.orthogonalised(weight)]
        rate, half = machine.wide_rate, machine.calibration.half_size
        return np.asarray(sum(product.seconds(rate, half) for product in steps)) / tensor

    found = matmul.weights(model, Split.of(expert=expert))
    dense = layers * seconds(found.attention) + (layers - with_experts) * seconds(found.dense)
    dense = dense + with_experts * seconds(found.shared)
    return np.asarray(dense / owners + with_experts * seconds(found.routed) / expert_owners)


def _compressed(
    machine: Machine,
    elements: Floats,
    packing: tuple[npt.NDArray[np.int64], tuple[Compression, ...]],
    group: Floats,
    stride: Floats,
) -> tuple[Floats, Floats]:
    """Seconds on the wire and in the codec of compressed gradients; whoever owns a shard keeps its part of the sum."""
    wire, codec = np.zeros_like(elements), np.zeros_like(elements)
    compression, methods = packing
    rate, latency = machine.link(group, stride)
    for index in np.unique(compression[compression > 0]):
        cost = compression_cost(
            methods[index],
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
    split = Split.of(tensor=tensor, expert=expert)
    found = matmul.weights(model, split)
    layers, with_experts = _layers(model, pipeline)
    vocabulary = model.vocab * model.hidden * np.where(np.asarray(pipeline) == 1, 1 if model.tied else 2, 1)
    dense = layers * _elements(found.attention) + (layers - with_experts) * _elements(found.dense)
    dense = dense + with_experts * _elements(found.shared) + vocabulary / split.tensor
    return np.asarray(dense), np.asarray(with_experts * _elements(found.routed))


def _layers(model: Transformer, pipeline: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Of the largest stage, and those of them with experts."""
    layers = np.ceil(model.layers / np.asarray(pipeline, float))
    return layers, np.minimum(layers, model.num_mixture_layers)


def _elements(products: Sequence[Matmul]) -> Floats:
    return np.asarray(sum(product.n * product.k * product.times for product in products))
