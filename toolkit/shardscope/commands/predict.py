"""`shardscope predict`: step time and memory of one layout, part by part."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from shardscope.errors import SpecError
from shardscope.spec.layout import (
    Layout,
    Offload,
    Precision,
    Recompute,
    searched_schedules,
)

if TYPE_CHECKING:
    from shardscope.analytic.predict import Prediction
    from shardscope.spec.model import Transformer

_COUNTS = (
    "data", "tensor", "pipeline", "context", "expert", "zero", "shard", "global_batch", "micro_batch",
    "virtual_stages",
)  # fmt: skip
_CHOICES: dict[str, Callable[[], tuple[str, ...]]] = {
    "schedule": searched_schedules,
    "recompute": partial(get_args, Recompute),
    "precision": partial(get_args, Precision),
    "offload": partial(get_args, Offload),
}
_METHODS = {
    "optimizer": "update rule, such as lamb, adafactor, adam8bit, muon (default: adamw)",
    "compression": "how gradients are compressed, such as int8, topk, powersgd (default: none)",
}


def add_to(commands: Any) -> None:
    """Add this command to the parser's commands."""
    parser = commands.add_parser(
        "predict",
        help="predict step time and memory of one layout, part by part",
        description="Predict step time and memory of one layout of a model on a cluster, part by part.",
    )
    parser.add_argument("model", help="a model of the catalogue, or the path of a Hugging Face config.json")
    parser.add_argument("cluster", help="a device or a node of the catalogue, for example a100-80gb")
    parser.add_argument("--nodes", type=int, default=1, help="nodes (default: 1)")
    parser.add_argument("--per-node", type=int, help="devices of a node (default: the usual node's)")
    parser.add_argument("--seq", type=int, help="tokens of a sequence (default: the model's)")
    parser.add_argument("--calibration", help="name of a calibration (default: the device's)")
    parser.add_argument("--tokens", type=float, help="also predict hours and dollars for so many tokens")
    for name in _COUNTS:
        default = Layout.model_fields[name].default
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=default, help=f"(default: {default})"
        )
    for name, names in _CHOICES.items():
        default = Layout.model_fields[name].default
        parser.add_argument(f"--{name}", choices=names(), default=default, help=f"(default: {default})")
    for name, about in _METHODS.items():
        parser.add_argument(f"--{name}", metavar="NAME", help=about)
    parser.add_argument("--sequence-parallel", action="store_true", help="cut norms over the tensor ranks")
    parser.add_argument("--no-flash-attention", action="store_true", help="attention in separate kernels")
    parser.add_argument("--json", action="store_true", help="print the figures and their terms as JSON")
    parser.set_defaults(carry_out=carry_out)


def carry_out(arguments: argparse.Namespace) -> int:
    """Print the prediction; 1 if it does not fit in memory."""
    from shardscope.analytic.predict import predict
    from shardscope.spec.calibration import Calibration
    from shardscope.spec.cluster import Cluster

    known = Calibration.of(arguments.calibration) if arguments.calibration else None
    cluster = Cluster.of(arguments.cluster, nodes=arguments.nodes, per_node=arguments.per_node)
    found = predict(_model(arguments), cluster, _layout(arguments), known)
    training = _training(found, arguments.tokens)
    if arguments.json:
        print(json.dumps({**found.to_dict(), **training}, indent=2))
    else:
        print(found)
        for name, value in training.items():
            print(f"{name} for {arguments.tokens:.4g} tokens: {value:.4g}")
    return 0 if found.fits else 1


def _training(found: Prediction, tokens: float | None) -> dict[str, float]:
    """Hours for so many tokens, and dollars where the cluster has a price."""
    if tokens is None:
        return {}
    figures = {"hours": found.time_to_train(tokens) / 3600}
    if found.cluster.price_per_device_hour is not None:
        figures["dollars"] = found.dollars(tokens)
    return figures


def _model(arguments: argparse.Namespace) -> Transformer:
    from shardscope.spec.model import Model, Transformer

    model = Model.of(arguments.model)
    if not isinstance(model, Transformer):
        raise SpecError(
            f"model={arguments.model!r} is no transformer, whose layout alone can be predicted; use another"
        )
    return model if arguments.seq is None else model.replace(seq=arguments.seq)


def _layout(arguments: argparse.Namespace) -> Layout:
    fields = {name: getattr(arguments, name) for name in (*_COUNTS, *_CHOICES)}
    methods = {name: getattr(arguments, name) for name in _METHODS}
    fields |= {name: method for name, method in methods.items() if method is not None}
    return Layout(
        **fields,
        sequence_parallel=arguments.sequence_parallel,
        flash_attention=not arguments.no_flash_attention,
    )
