"""Names of layer shapes: the settings that determine which kernels a layer runs, and how fast they are.

Libraries choose a kernel by shape, so speed jumps between shapes that differ little. A calibration can contain a
measured factor for each shape (`Calibration.shapes`), which applies to any number of layers, stages and replicas.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import get_args

from shardscope.spec.layout import Layout, Precision
from shardscope.spec.model import Transformer

OTHERS = ""
"""Name, in `Calibration.shapes`, of all shapes that are not listed there."""
SHAPE_SPREAD = 0.1
"""Standard deviation of the logarithm of a shape's factor, if the shape was not measured."""


def layer_shape(
    model: Transformer,
    *,
    tensor: int,
    micro_batch: int,
    context: int,
    expert: int,
    sequence_parallel: bool,
    precision: str,
    flash: bool,
) -> str:
    """Return the name of a layer's shape on one device.

    Example:
        >>> model = Transformer(layers=2, hidden=2048, heads=16, vocab=256, seq=1024)
        >>> shape = {"tensor": 4, "micro_batch": 2, "context": 1, "expert": 1}
        >>> layer_shape(model, **shape, sequence_parallel=False, precision="fp16-mixed", flash=False)
        '2048x8192, 16/16 heads, seq 1024, tensor 4, micro-batch 2, fp16-mixed, unfused'
    """
    kinds = [
        f"{model.hidden}x{model.ffn}" + " gated" * model.gated,
        f"{model.heads}/{model.kv_heads} heads" + _attention(model),
        f"seq {model.seq // context}" if model.seq % context == 0 else f"seq {model.seq / context:g}",
        f"tensor {tensor}" + " sequence" * sequence_parallel,
        f"micro-batch {micro_batch}",
        precision,
        "fused" if flash else "unfused",
    ]
    return ", ".join([*kinds, *_experts(model, expert)])


def _attention(model: Transformer) -> str:
    """Return the part of a name for latent attention or an unusual head size; empty for usual heads."""
    if model.latent is not None:
        sizes = model.latent
        ranks = f"ranks {sizes.query_rank}/{sizes.kv_rank}"
        return f" latent {ranks}, sizes {sizes.nope_size}+{sizes.rope_size}/{sizes.value_size}"
    return "" if model.heads * model.head_size == model.hidden else f" of {model.head_size}"


def _experts(model: Transformer, expert: int) -> list[str]:
    """Return the sizes of experts, and the number of layers with experts, because a factor applies to all layers."""
    mixture = model.mixture
    if mixture is None:
        return []
    shared = f" and {mixture.shared_ffn} shared" * bool(mixture.shared_ffn)
    return [
        f"{mixture.active} of {mixture.experts} experts of {mixture.ffn}{shared}",
        f"in {model.num_mixture_layers} of {model.layers} layers",
        f"expert {expert}",
    ]


def shape_of(model: Transformer, layout: Layout) -> str:
    """Return the name of the shape of a layer in a layout."""
    return layer_shape(
        model, tensor=layout.tensor, micro_batch=layout.micro_batch, context=layout.context, expert=layout.expert,
        sequence_parallel=layout.sequence_parallel, precision=layout.precision, flash=layout.flash_attention,
    )  # fmt: skip


_NAME = re.compile(
    r"\d+x\d+( gated)?, \d+/\d+ heads( latent ranks \d+/\d+, sizes \d+\+\d+/\d+| of \d+)?, seq [\d.e+]+, "
    r"tensor \d+( sequence)?, micro-batch \d+, (?P<precision>[\w-]+), (un)?fused"
    r"(, \d+ of \d+ experts of \d+( and \d+ shared)?, in \d+ of \d+ layers, expert \d+)?"
)
"""Pattern of the names that `layer_shape` returns."""


def is_shape(name: str) -> bool:
    """Return whether a text is a name that `layer_shape` can return."""
    found = _NAME.fullmatch(name)
    return found is not None and found["precision"] in get_args(Precision)


def factor_of(shapes: Mapping[str, float], name: str) -> float:
    """Return the factor of a shape in `Calibration.shapes`."""
    return shapes.get(name, shapes.get(OTHERS, 1.0))
