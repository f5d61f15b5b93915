"""Lookup tables for a search: times of one micro-batch and of model-state operations, for the combinations that occur.

A search through a million layouts has a million rows, but only a few thousand combinations of tensor degree,
micro-batch and similar settings. Times that depend only on these settings are computed once per combination:
`micro.stage` computes the times of one micro-batch, and `weights` those of operations on model states (reducing
gradients, gathering parameters, updating, and moving states to the host and back).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication.compression import compression_cost
from shardscope.analytic.communication.ring import is_inside_node
from shardscope.analytic.compute import work
from shardscope.analytic.compute.work import Matmul, Split
from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import RECIPES, activation_bytes_per_layer
from shardscope.analytic.memory.frameworks import MEGATRON_CORE
from shardscope.analytic.memory.offload import refetched_share
from shardscope.analytic.recomputation import recomputed_by_kind
from shardscope.calibration.layer_shape import factor_of, layer_shape
from shardscope.prediction.step.machine import Machine
from shardscope.prediction.step.micro import SlowestStage, stage
from shardscope.spec.compression import Compression
from shardscope.spec.layout import RECOMPUTE_NAMES
from shardscope.spec.model import Transformer
from shardscope.spec.optimizer import OptimizerStates

Floats = npt.NDArray[np.float64]


class TakenColumns(dict[str, Floats]):
    """Columns for some rows of a `LookupTable`, each looked up on first use."""

    def __init__(self, columns: dict[str, Floats], index: npt.NDArray[np.intp]) -> None:
        super().__init__()
        self._columns, self._index = columns, index

    def __missing__(self, name: str) -> Floats:
        column = self._columns[name]
        self[name] = column if column.size == 1 else column.take(self._index, mode="clip")
        return self[name]


class LookupTable(NamedTuple):
    """Columns with one value per combination of settings, and for each row the index of its combination."""

    row: npt.NDArray[np.intp]
    columns: dict[str, Floats]

    @classmethod
    def of(cls, row: npt.NDArray[np.intp], columns: dict[str, Floats]) -> LookupTable:
        """Build a table; a column whose values are all equal is stored as a single value."""
        kept = {
            name: column if column.min() != column.max() else column[:1] for name, column in columns.items()
        }
        return cls(row, kept)

    def take(self, rows: slice) -> TakenColumns:
        """Return the columns for some rows."""
        return TakenColumns(self.columns, self.row[rows])


def micro_table(model: Transformer, machine: Machine, layouts: Layouts) -> LookupTable:
    """Return the times of one micro-batch, in seconds, for each combination of the settings that they depend on."""
    found = Distinct.of(
        layouts.tensor, layouts.micro_batch, layouts.context, layouts.expert, layouts.pipeline,
        layouts.recompute, layouts.sequence_parallel, layouts.most_recomputed,
    )  # fmt: skip
    tensor, micro_batch, context, expert, pipeline, recompute, sequence, most = found.columns
    split = Split.of(tensor=tensor, micro_batch=micro_batch, context=context, expert=expert)
    times = stage(
        model, machine, split, pipeline=pipeline, recompute=recompute, most_recomputed=most,
        sequence_parallel=sequence, flash=layouts.flash_attention,
    )  # fmt: skip
    if machine.calibration.shapes:
        sizes = (tensor, micro_batch, context, expert, sequence)
        times = times.slower(_shape_factors(model, machine, layouts, sizes))
    tokens = split.tokens(model.seq)
    message = tokens * model.hidden * machine.value_bytes / split.tensor
    cal, cluster = machine.calibration, machine.cluster
    sent = np.where(pipeline > 1, message / cal.pipeline_efficiency, 0.0)
    started = np.where(pipeline > 1, cal.collective_s, 0.0)
    hops = [sent / link.bandwidth + started for link in (cluster.intra, cluster.inter)]
    saved = _saved_bytes(
        model, layouts, split, pipeline=pipeline, recompute=recompute, most=most, sequence_parallel=sequence
    )
    columns = _micro_columns(times, hops, saved / cluster.device.host_bandwidth)
    columns["refetched"] = refetched_share(recompute, np.ceil(model.layers / pipeline), most)
    return LookupTable.of(found.row, columns)


def _shape_factors(
    model: Transformer, machine: Machine, layouts: Layouts, sizes: tuple[Ints, Ints, Ints, Ints, Ints]
) -> Floats:
    """Return the calibration's factor of the layer's shape for each combination.

    `sizes` are the columns of tensor degree, micro-batch, context and expert degree, and sequence parallelism.
    """
    known, keys = machine.calibration.shapes, list(zip(*(each.tolist() for each in sizes), strict=True))
    named = {}
    for key in dict.fromkeys(keys):
        name = layer_shape(
            model, tensor=key[0], micro_batch=key[1], context=key[2], expert=key[3],
            sequence_parallel=bool(key[4]), precision=layouts.precision, flash=layouts.flash_attention,
        )  # fmt: skip
        named[key] = factor_of(known, name)
    return np.array([named[key] for key in keys])


def _saved_bytes(
    model: Transformer,
    layouts: Layouts,
    split: Split,
    *,
    pipeline: npt.ArrayLike,
    recompute: npt.ArrayLike,
    most: npt.ArrayLike,
    sequence_parallel: npt.ArrayLike,
) -> Floats:
    """Return the bytes of activations that the largest stage saves for one micro-batch; offloading would move these."""
    layers = np.ceil(model.layers / np.asarray(pipeline))
    routed = np.minimum(layers, model.num_mixture_layers)
    saved = np.zeros(np.shape(split.tensor))
    dense_again, routed_again = recomputed_by_kind(layers - routed, routed, most)
    for count, again, mixed in ((layers - routed, dense_again, False), (routed, routed_again, True)):
        for index, kind in enumerate(RECOMPUTE_NAMES):
            here = again * (np.asarray(recompute) == index) + (count - again) * (kind == "none")
            if not np.any(here):
                continue
            saved += here * activation_bytes_per_layer(
                model, micro_batch=split.micro_batch, tensor=split.tensor, context=split.context,
                sequence_parallel=sequence_parallel, recompute=kind, flash_attention=layouts.flash_attention,
                mixed=mixed, recipe=RECIPES[layouts.precision], framework=MEGATRON_CORE,
            )  # fmt: skip
    return saved


def _micro_columns(times: SlowestStage, hops: list[Floats], saved: Floats) -> dict[str, Floats]:
    f, b, r, e = times.forward, times.backward, times.recompute, times.edge
    return {
        "compute": f.compute + b.compute,
        "forward compute": f.compute,
        "backward compute": b.compute,
        "recompute": r.compute,
        "tensor": f.tensor + b.tensor + r.tensor,
        "context": f.context + b.context + r.context,
        "expert": f.expert + b.expert + r.expert,
        "waiting": f.waiting + b.waiting + r.waiting,
        "forward": f.total,
        "weight": b.weight,
        "input": b.total - b.weight + r.total,
        "edge": e.total,
        "edge compute": e.compute,
        "edge tensor": e.tensor,
        "spare": times.spare,
        "near hop": hops[0],
        "far hop": hops[1],
        "saved": saved,
    }


def state_table(model: Transformer, machine: Machine, layouts: Layouts) -> LookupTable:
    """Return the times of model-state traffic and updates, in seconds, for each combination of relevant settings."""
    found = Distinct.of(
        layouts.tensor, layouts.pipeline, layouts.context, layouts.expert, layouts.data, layouts.shard,
        layouts.zero, layouts.compression,
    )  # fmt: skip
    tensor, pipeline, context, expert, data, shard, zero = (
        np.asarray(column, float) for column in found.columns[:-1]
    )
    states = weights(
        model, machine, tensor=tensor, pipeline=pipeline, context=context, expert=expert, data=data,
        shard=shard, zero=zero, compression=found.columns[-1], compressions=layouts.compressions,
        precision=layouts.precision, kept=layouts.optimizer.states,
    )  # fmt: skip
    return LookupTable.of(found.row, _state_columns(states))


def _state_columns(states: WeightTimes) -> dict[str, Floats]:
    return {name: column for name, column in states._asdict().items() if name.endswith("_s")}


Ints = npt.NDArray[np.int64]


class Distinct(NamedTuple):
    """The distinct combinations of values in some columns, and for each row the index of its combination."""

    columns: tuple[Ints, ...]
    row: npt.NDArray[np.intp]

    @classmethod
    def of(cls, *columns: npt.ArrayLike) -> Distinct:
        """Find the distinct combinations in columns of non-negative integers, all of the same length."""
        given = [np.asarray(column) for column in columns]
        if len(given[0]) < 256:
            return cls(tuple(np.asarray(column, np.int64) for column in given), np.arange(len(given[0])))
        key, sizes, values = np.zeros(len(given[0]), np.int32), [], []
        for column in given:
            known, rank = _ranked(column)
            key *= np.int32(len(known))
            key += rank
            sizes.append(len(known))
            values.append(known)
        if np.prod([float(size) for size in sizes]) > 2**31 - 1:
            return cls._by_sorting(given)
        seen = np.bincount(key, minlength=int(np.prod(sizes)))
        present = np.flatnonzero(seen)
        place = np.zeros(len(seen), np.intp)
        place[present] = np.arange(len(present))
        parts = np.unravel_index(present, sizes)
        return cls(tuple(known[part] for known, part in zip(values, parts, strict=True)), place.take(key))

    @classmethod
    def _by_sorting(cls, columns: list[npt.NDArray[np.int64]]) -> Distinct:
        rows, inverse = np.unique(np.stack(columns), axis=1, return_inverse=True)
        return cls(tuple(rows), inverse.ravel())


def _ranked(column: npt.NDArray[np.int64]) -> tuple[Ints, npt.NDArray[np.int32]]:
    """Return the sorted distinct values of a column, and for each row the index of its value among them."""
    if (column == column[0]).all():
        return np.array([column[0]], np.int64), np.zeros(len(column), np.int32)
    if column.max() > 1 << 20:
        known, rank = np.unique(column, return_inverse=True)
        return known, rank.astype(np.int32)
    known = np.flatnonzero(np.bincount(column))
    place = np.zeros(known[-1] + 1, np.int32)
    place[known] = np.arange(len(known), dtype=np.int32)
    return known, place.take(column)


class WeightTimes(NamedTuple):
    """Parameter counts on one device of the slowest stage, and times of operations on these parameters, in seconds."""

    dense: Floats
    """Number of elements in parameters outside experts, which every replica has."""
    experts: Floats
    """Number of elements in the experts' parameters, which have fewer replicas."""
    reduce_s: Floats
    """Time to reduce all gradients: an all-reduce for ZeRO 0, a reduce-scatter for ZeRO 1 to 3."""
    gather_s: Floats
    """Time to gather all parameters once; 0 for ZeRO 0."""
    codec_s: Floats
    """Time to pack and unpack compressed gradients."""
    tied_s: Floats
    """Time to sum the gradients of a tied embedding over the first and the last stage."""
    update_s: Floats
    """Time of the optimizer update on the device's share, including `products_s`."""
    products_s: Floats
    """The part of `update_s` for matrix products of optimizers such as Muon, which run on the device even if
    momentum is offloaded; 0 for other optimizers."""
    host_update_s: Floats
    """Time of the update on the host, which reads and writes each device's states at the bandwidth of the device's host
    link."""
    weights_s: Floats
    """Time to transfer once, over the host link, the weights that the rank stores."""
    gradients_s: Floats
    """Time to transfer once, over the host link, the gradients that the rank stores."""
    owned_weights_s: Floats
    """Time to transfer once, over the host link, the weights that the rank updates."""
    owned_gradients_s: Floats
    """Time to transfer once, over the host link, the gradients of the weights that the rank updates."""


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
) -> WeightTimes:
    """Return the times of model-state operations for each combination, in seconds.

    ZeRO 2 and 3 run their collectives layer by layer: they copy each layer's tensors into a flat buffer and back, and
    wait for each other. The time for this is proportional to the bytes and inversely proportional to the device's
    memory bandwidth, whatever the links. Measured steps agree: the same software reaches a small fraction of a fast
    network's bandwidth, and nearly all of a slow network's.

    Args:
        model: The model.
        machine: Calibrated rates.
        tensor: Tensor-parallel degree; this and the other arrays have the same shape, one value per combination.
        pipeline: Number of pipeline stages.
        context: Context-parallel degree.
        expert: Expert-parallel degree.
        data: Number of data-parallel replicas.
        shard: Ranks over which ZeRO shards model states.
        zero: ZeRO stage.
        compression: Index into `compressions`; 0 means uncompressed.
        compressions: Compression methods.
        precision: A precision recipe of `spec.layout`.
        kept: Size of the optimizer state.
    """
    dense, experts = stage_elements(model, tensor=tensor, pipeline=pipeline, expert=expert)
    recipe = RECIPES[precision]
    cal, replicas = machine.calibration, data * context
    owners = np.where(zero >= 1, shard, 1.0)
    copied_s = cal.shard_copies / machine.memory_rate
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
        sharded = np.where(within > 1, copied_s * elements, 0.0)
        gathered = machine.collective("all_gather", elements * recipe.parameter, within, stride)
        gathered = gathered + np.where(zero == 3, sharded * recipe.parameter, 0.0)
        scattered = scattered + np.where(zero >= 2, sharded * recipe.gradient, 0.0)
        two_links = is_inside_node(machine.cluster, within, stride) & ~is_inside_node(
            machine.cluster, group / within, stride * within
        )
        reduced = _hybrid(two_links, scattered, between, np.where(zero == 3, gathered, 0.0))
        plain_s = np.where(zero >= 1, reduced, whole)
        reduce_s = reduce_s + np.where(compression == 0, plain_s, packed_s)
        codec = codec + coding_s
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
    return WeightTimes(
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


def _hybrid(two_links: npt.NDArray[np.bool_], scattered: Floats, between: Floats, gathered: Floats) -> Floats:
    """Return the time of reduce-scatters within shards and of all-reduces between them, in seconds.

    If each shard group lies within a node and replicas are on several nodes, both use different links at the same time
    (PyTorch's HSDP has a separate stream for the all-reduces). Parameters gathered meanwhile use the link of the
    reduce-scatters.
    """
    return np.where(two_links, np.maximum(scattered, between - gathered), scattered + between)


def _tied(  # noqa: PLR0917
    model: Transformer,
    machine: Machine,
    tensor: Floats,
    stage_ranks: Floats,
    pipeline: Floats,
    gradient_bytes: int,
) -> Floats:
    """Return the time of a tied embedding's all-reduce over the first and last stage, in seconds.

    See Narayanan et al. 2021, arXiv 2104.04473, section 4.
    """
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
    """Return the time to orthogonalise the hidden matrices, divided evenly among the ranks that update them."""
    tensor, pipeline, expert = degrees
    layers, with_experts = _layers(model, pipeline)

    def seconds(weights: Sequence[Matmul]) -> Floats:
        steps = [product for weight in weights for product in work.orthogonalised(weight)]
        rate, half = machine.wide_rate, machine.calibration.half_size
        return np.asarray(sum(product.seconds(rate, half) for product in steps)) / tensor

    found = work.weights(model, Split.of(expert=expert))
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
    """Return the times to transfer compressed gradients, and to pack and unpack them, in seconds."""
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
    """Return the numbers of weight elements on one device of the largest stage: outside experts, and in experts.

    Args:
        model: The model.
        tensor: Tensor-parallel degree; a number or an array.
        pipeline: Number of pipeline stages.
        expert: Expert-parallel degree.
    """
    split = Split.of(tensor=tensor, expert=expert)
    found = work.weights(model, split)
    layers, with_experts = _layers(model, pipeline)
    vocabulary = model.vocab * model.hidden * np.where(np.asarray(pipeline) == 1, 1 if model.tied else 2, 1)
    dense = layers * _elements(found.attention) + (layers - with_experts) * _elements(found.dense)
    dense = dense + with_experts * _elements(found.shared) + vocabulary / split.tensor
    return np.asarray(dense), np.asarray(with_experts * _elements(found.routed))


def _layers(model: Transformer, pipeline: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Return the number of layers on the largest stage, and how many of them have experts."""
    layers = np.ceil(model.layers / np.asarray(pipeline, float))
    return layers, np.minimum(layers, model.num_mixture_layers)


def _elements(products: Sequence[Matmul]) -> Floats:
    return np.asarray(sum(product.n * product.k * product.times for product in products))
