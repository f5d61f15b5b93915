"""Names of per-layer shapes: what determines which kernels run in a layer, and so how fast they are.

Libraries choose a kernel by shape, so speed jumps between shapes that differ little. A calibration can hold a measured
factor for each shape (`Calibration.shapes`), which then holds for any number of layers, stages and replicas.
"""

from __future__ import annotations

from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer


def layer_shape(
    model: Transformer,
    *,
    tensor: int,
    micro_batch: int,
    context: int,
    sequence_parallel: bool,
    precision: str,
    flash: bool,
) -> str:
    """Return the name of a layer's shape on one device.

    Example:
        >>> model = Transformer(layers=2, hidden=2048, heads=16, vocab=256, seq=1024)
        >>> shape = {"tensor": 4, "micro_batch": 2, "context": 1, "sequence_parallel": False}
        >>> layer_shape(model, **shape, precision="fp16-mixed", flash=False)
        '2048x8192, 16/16 heads, seq 1024, tensor 4, micro-batch 2, fp16-mixed, unfused'
    """
    kinds = [
        f"{model.hidden}x{model.ffn}" + " gated" * model.gated,
        f"{model.heads}/{model.kv_heads} heads",
        f"seq {model.seq // context}" if model.seq % context == 0 else f"seq {model.seq / context:g}",
        f"tensor {tensor}" + " sequence" * sequence_parallel,
        f"micro-batch {micro_batch}",
        precision,
        "fused" if flash else "unfused",
    ]
    return ", ".join(kinds)


def shape_of(model: Transformer, layout: Layout) -> str:
    """Return the name of the shape of a layer in a layout."""
    return layer_shape(
        model, tensor=layout.tensor, micro_batch=layout.micro_batch, context=layout.context,
        sequence_parallel=layout.sequence_parallel, precision=layout.precision, flash=layout.flash_attention,
    )  # fmt: skip
