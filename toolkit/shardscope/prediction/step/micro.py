"""Time of one micro-batch through one stage, with computation, messages, waits and recomputation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.compute import work
from shardscope.analytic.compute.work import Matmul, Split
from shardscope.analytic.memory.frameworks import Framework
from shardscope.analytic.recomputation import recomputed_by_kind, recomputed_layers
from shardscope.prediction.step.machine import Machine
from shardscope.spec.model import Transformer

Floats = npt.NDArray[np.float64]

FORWARD_KERNELS, BACKWARD_KERNELS = 30.0, 60.0
"""Number of kernels that one block launches in an eager framework: about ten operators with a few kernels each in the
forward pass, and twice as many in the backward pass."""
COLLECTIVE_KERNELS = 2.0
"""Host time to launch one collective, relative to launching one kernel."""
SHARPNESS = 3.0
"""Exponent of `soft_maximum`; infinity would be the maximum."""
FLASH_BACKWARD = 2.5
"""Ratio of backward to forward FLOPs in fused attention: five matrix products instead of two (Dao et al. 2022)."""


class Pass(NamedTuple):
    """Time of one pass, forward or backward, by part, in seconds."""

    compute: Floats
    weight: Floats
    """The part of `compute` that computes weight gradients, which a schedule may defer."""
    tensor: Floats
    context: Floats
    expert: Floats
    waiting: Floats
    """Waits for the host to launch kernels."""

    @property
    def total(self) -> Floats:
        """Sum of all parts; `weight` is not added, as `compute` includes it."""
        return np.asarray(self.compute + self.tensor + self.context + self.expert + self.waiting)

    def times(self, factor: npt.ArrayLike) -> Pass:
        """Return every part multiplied by a factor."""
        factor = np.asarray(factor, float)
        return Pass(*(np.asarray(part * factor) for part in self))

    def plus(self, other: Pass) -> Pass:
        """Return the sum of both passes, part by part."""
        return Pass(*(np.asarray(a + b) for a, b in zip(self, other, strict=True)))


class SlowestStage(NamedTuple):
    """Times of one micro-batch through the slowest stage, in seconds."""

    forward: Pass
    backward: Pass
    recompute: Pass
    edge: Pass
    """Embedding and output projection, forward and backward, on the first and last stage."""
    spare: Floats
    """Slack of the last stage, which may have fewer layers, as a fraction of the slowest stage's time."""

    def slower(self, factor: Floats) -> SlowestStage:
        """Return the times of layers that are slower by these factors."""
        return self._replace(
            forward=self.forward.times(factor),
            backward=self.backward.times(factor),
            recompute=self.recompute.times(factor),
        )


def stage(
    model: Transformer,
    machine: Machine,
    split: Split,
    *,
    pipeline: npt.ArrayLike,
    recompute: npt.ArrayLike,
    most_recomputed: npt.ArrayLike = 0,
    sequence_parallel: npt.ArrayLike,
    flash: bool,
) -> SlowestStage:
    """Return the times of one micro-batch on the largest stage, and of embedding and output projection.

    The largest stage has ceil(layers / pipeline) layers.

    Args:
        model: The whole model.
        machine: Calibrated rates.
        split: How a micro-batch is split over devices; results have the shape of its arrays.
        pipeline: Number of pipeline stages.
        recompute: Index into `spec.layout.RECOMPUTE_NAMES`.
        most_recomputed: Largest number of layers that the stage recomputes; 0 for all.
        sequence_parallel: Whether norms and additions are split over the tensor-parallel ranks.
        flash: Whether attention is one fused kernel.
    """
    layers = np.ceil(model.layers / np.asarray(pipeline))
    routed = np.minimum(layers, model.num_mixture_layers)
    passes: list[Pass] | None = None
    dense_again, routed_again = recomputed_by_kind(layers - routed, routed, most_recomputed)
    for count, repeated, with_experts in (
        (layers - routed, dense_again, False), (routed, routed_again, True)
    ):  # fmt: skip
        if not np.any(count):
            continue
        block = _block(
            model, machine, split, sequence_parallel=sequence_parallel, flash=flash, with_experts=with_experts
        )
        forward, backward, again = _with_recompute(block, recompute, machine.framework)
        scaled = [forward.times(count), backward.times(count), again.times(repeated)]
        passes = scaled if passes is None else [a.plus(b) for a, b in zip(passes, scaled, strict=True)]
    assert passes is not None
    forward, backward, again = passes
    missing = _missing_layers(model, layers, pipeline)
    spare = missing / layers
    if np.any(most_recomputed):
        # the last stage lacks layers that are not recomputed, as long as it has any
        every, others = (recomputed_layers(count, most_recomputed) for count in (layers, layers - missing))
        lacking = (every - others) / every
        plain = forward.total + backward.total
        partly = (spare * plain + lacking * again.total) / (plain + again.total)
        spare = np.where(lacking == spare, spare, partly)  # bitwise identical if all layers are recomputed
    spare = np.broadcast_to(spare, np.shape(split.tensor))
    return SlowestStage(forward, backward, again, _edge(model, machine, split), spare)


def _missing_layers(model: Transformer, layers: Floats, pipeline: npt.ArrayLike) -> Floats:
    """Return how many fewer layers the last stage has than the other stages, which have `layers` layers each."""
    last = model.layers - (np.asarray(pipeline) - 1.0) * layers
    return np.asarray(layers - np.clip(last, 0.0, layers))


class _Block(NamedTuple):
    forward: Pass
    backward: Pass
    core: Pass
    """Forward pass of core attention alone, which selective recomputation repeats."""
    others: Pass
    """Work that selective recomputation of `Framework.every_other_product` repeats: half of the products, and all
    operations between them."""
    whole: Pass
    """Work that full recomputation repeats: the forward pass, without the operations after the last saved tensor if
    `Framework.stops_early`."""


def _with_recompute(block: _Block, recompute: npt.ArrayLike, framework: Framework) -> tuple[Pass, Pass, Pass]:
    kind = np.asarray(recompute)
    selected = block.others if framework.every_other_product else block.core
    again = block.whole.times(kind == 2).plus(selected.times(kind == 1))
    return block.forward, block.backward, again


def _block(
    model: Transformer,
    machine: Machine,
    split: Split,
    *,
    sequence_parallel: npt.ArrayLike,
    flash: bool,
    with_experts: bool,
) -> _Block:
    linear, moved = _linear_work(model, split, sequence_parallel, with_experts)
    products = _seconds(linear, machine.matmul_rate, machine.calibration.half_size)
    core, core_back = _core(model, machine, split, flash)
    elements = moved * (machine.value_bytes / 2) / machine.memory_rate
    tensor, context, expert = _communication(model, machine, split, sequence_parallel, with_experts)
    zero = np.zeros_like(products)
    more = np.where(flash or _has_fused_softmax(model, machine, split), 0.0, work.SEPARATE_KERNELS)
    forward = _direction(
        machine, split, products + core + elements, zero, (tensor, context, expert),
        kernels=FORWARD_KERNELS + more,
    )  # fmt: skip
    backward = _direction(
        machine, split, 2 * (products + elements) + core_back, products, (tensor, 2 * context, expert),
        kernels=BACKWARD_KERNELS + more,
    )  # fmt: skip
    whole, alone = forward, [zero] * 5
    if machine.framework.stops_early and not with_experts:
        last = _seconds(linear[-1:], machine.matmul_rate, machine.calibration.half_size)
        whole = _direction(
            machine, split, products - last + core + elements, zero, (tensor / 2, context, expert),
            kernels=FORWARD_KERNELS + more,
        )  # fmt: skip
    return _Block(forward, backward, Pass(core, *alone), Pass(products / 2 + elements, *alone), whole)


def _linear_work(
    model: Transformer, split: Split, sequence_parallel: npt.ArrayLike, with_experts: bool
) -> tuple[list[Matmul], Floats]:
    """Return a block's matrix products and the bytes moved by its other operations, both for the forward pass.

    Core attention is not included.
    """
    products = list(work.projections(model, split))
    moved = work.block_bytes(model, split, sequence_parallel=sequence_parallel)
    if with_experts:
        assert model.mixture is not None
        width = model.mixture.active * model.mixture.ffn + model.mixture.shared_ffn
        products += work.experts(model, split)
        moved = moved + work.routing_bytes(model, split)
    else:
        width = model.ffn
        products += work.feed_forward(model, split, width)
    return products, moved + work.activation_bytes(model, split, width)


def _core(model: Transformer, machine: Machine, split: Split, flash: bool) -> tuple[Floats, Floats]:
    """Return the times of core attention, forward and backward, in seconds."""
    products = work.attention_core(model, split, masked=not flash)
    cal = machine.calibration
    if flash:
        causal = sum(product.flops for product in products) / 2
        seconds = causal / machine.attention_rate * (1 + cal.attention_half_seq / work.attended_tokens(model))
        return np.asarray(seconds), np.asarray(FLASH_BACKWARD * seconds)
    moved = work.score_bytes(model, split) * (machine.value_bytes / 2)
    seconds = sum(product.flops for product in products) / machine.unfused_rate + moved / machine.memory_rate
    separate = work.separate_softmax_bytes(model, split, machine.value_bytes) / machine.memory_rate
    more = np.where(_has_fused_softmax(model, machine, split), 0.0, separate)
    return np.asarray(seconds + more), np.asarray(2 * seconds + more)


def _has_fused_softmax(model: Transformer, machine: Machine, split: Split) -> npt.NDArray[np.bool_]:
    return machine.has_megatron_softmax & work.fits_fused_softmax(model, split, machine.value_bytes)


def _communication(
    model: Transformer,
    machine: Machine,
    split: Split,
    sequence_parallel: npt.ArrayLike,
    with_experts: bool,
) -> tuple[Floats, Floats, Floats]:
    """Return the times of a block's tensor, context and expert parallel collectives in one pass, in seconds.

    Tensor: two all-reduces of the block's output (Megatron-LM, Shoeybi et al. 2019), or all-gathers and
    reduce-scatters of the same volume. Context: one all-gather of keys and values. Expert: two all-to-alls, which send
    tokens to their experts and back.
    """
    tokens = split.tokens(model.seq)
    output = tokens * model.hidden * machine.value_bytes
    tensor = 2 * machine.collective("all_reduce", output, split.tensor, np.ones_like(split.tensor))
    gathered = tokens * split.context * work.key_value_width(model, split) * machine.value_bytes
    context = machine.collective("all_gather", gathered, split.context, split.tensor)
    if not with_experts:
        return tensor, context, np.zeros_like(tensor)
    assert model.mixture is not None
    sent = output * model.mixture.active / np.where(np.asarray(sequence_parallel), split.tensor, 1.0)
    expert = 2 * machine.collective("all_to_all", sent, split.expert, split.tensor)
    return tensor, context, expert


def _direction(
    machine: Machine,
    split: Split,
    compute: Floats,
    weight: Floats,
    messages: tuple[Floats, Floats, Floats],
    *,
    kernels: Floats,
) -> Pass:
    """Return the time of one pass, with waits for the host to launch kernels.

    Computation hides a part of the tensor-parallel messages if the software splits matrix products into pieces and
    sends each piece when it is done (Wang et al. 2023, ASPLOS, "Overlap communication with dependent computation via
    decomposition").

    Under tensor parallelism, a part of the launches stays exposed even where computation takes much longer: each
    collective waits for the rank whose host is late. On eight A100, measured blocks take 1 to 3 ms longer than their
    products and messages, whatever the micro-batch.
    """
    cal = machine.calibration
    tensor, context, expert = messages
    tensor = tensor - np.minimum(cal.message_overlap * tensor, compute)
    many = split.tensor - 1
    launched = kernels + 2 * COLLECTIVE_KERNELS * (many > 0)
    host = launched * cal.launch_s * (1 + cal.launch_jitter * many)
    busy = compute + tensor + context + expert
    exposed = np.where(many > 0, cal.exposed_launch * launched * cal.launch_s, 0.0)
    waiting = np.asarray(soft_maximum(host, busy + exposed) - busy)
    return Pass(compute, weight, tensor, context, expert, waiting)


def soft_maximum(host: Floats, busy: Floats) -> Floats:
    """Return the time of a block whose launches and work take these times.

    Host and device wait for each other kernel by kernel. If both times are similar, the block therefore takes longer
    than their maximum: a sum of powers, with an exponent chosen by cross-validation over tables of measured steps.
    """
    return np.asarray((host**SHARPNESS + busy**SHARPNESS) ** (1 / SHARPNESS))


def _edge(model: Transformer, machine: Machine, split: Split) -> Pass:
    """Return the time of output projection, cross-entropy and embedding in both passes; they are never recomputed."""
    cal, tokens = machine.calibration, split.tokens(model.seq)
    rate = machine.wide_rate * np.where(split.tensor == 1, cal.head_efficiency, 1.0)
    product = work.head(model, split).seconds(1.0, cal.half_size) / rate
    entropy = work.logit_bytes(model, split) / machine.memory_rate
    embedding = 16.0 * tokens * model.hidden / machine.memory_rate
    output = tokens * model.hidden * machine.value_bytes
    tensor = 2 * machine.collective("all_reduce", output, split.tensor, np.ones_like(split.tensor))
    zero = np.zeros_like(product)
    return Pass(np.asarray(3 * product + entropy + embedding), product, tensor, zero, zero, zero)


def _seconds(products: Iterable[Matmul], rate: float, half_size: float) -> Floats:
    return np.asarray(sum(product.seconds(rate, half_size) for product in products))
