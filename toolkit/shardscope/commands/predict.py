"""`shardscope predict`: predict the step time and memory of one layout, broken down into parts."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from shardscope.commands._calibration import CALIBRATION_HELP, add_software_option, named_calibration
from shardscope.commands._cluster import add_model_and_cluster, cluster_of
from shardscope.commands._fields import add_field, given_fields
from shardscope.commands._json import as_json
from shardscope.errors import SpecError
from shardscope.spec.layout import Layout, searched_schedules
from shardscope.spec.layout_compression import compression_names
from shardscope.spec.layout_optimizer import optimizer_names

if TYPE_CHECKING:
    from shardscope.calibration.host_calibration import AnyCalibration
    from shardscope.prediction.budget import Budgeted
    from shardscope.spec.cluster import Cluster
    from shardscope.spec.model import Transformer


def add_to(commands: Any) -> None:
    """Add this command to the parser's commands."""
    parser = commands.add_parser(
        "predict",
        help="predict step time and memory of one layout, broken down into parts",
        description="Predict step time and memory of one layout of a model on a cluster, broken down into parts. "
        "Without any option of a layout, the fastest layout that fits is chosen.",
    )
    add_model_and_cluster(parser)
    parser.add_argument("--calibration", help=CALIBRATION_HELP)
    add_software_option(parser)
    parser.add_argument(
        "--tokens", type=float, help="also predict hours and dollars to train on this many tokens"
    )
    add_layout_options(parser)
    parser.add_argument("--json", action="store_true", help="print the values and their terms as JSON")
    parser.set_defaults(carry_out=carry_out)


def add_layout_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a layout and of the model's sequence length."""
    add_seq_option(parser)
    names = {
        "schedule": searched_schedules(),
        "optimizer": optimizer_names(),
        "compression": compression_names(),
    }
    for name in Layout.model_fields:
        add_field(parser, Layout, name, names=names.get(name, ()))


def add_seq_option(parser: argparse.ArgumentParser) -> None:
    """Add the option of the model's sequence length that `named_model` reads."""
    parser.add_argument("--seq", type=int, help="tokens per sequence (default: the model's)")


def carry_out(arguments: argparse.Namespace) -> int:
    """Print the prediction; return 1 if the layout does not fit in memory."""
    from shardscope.prediction.layout import predict_layout

    known, software = named_calibration(arguments.calibration), arguments.software
    cluster, model = cluster_of(arguments), named_model(arguments)
    given = given_fields(arguments, Layout)
    layout = Layout(**given) if given else _fastest(model, cluster, known, software)
    found = predict_layout(model, cluster, layout, known, software=software)
    training = for_tokens(found, arguments.tokens)
    if arguments.json:
        print(as_json({**found.to_dict(), **training}))
    else:
        print(found)
        for name, value in training.items():
            print(f"{name} for {arguments.tokens:.4g} tokens: {value:.4g}")
    return 0 if found.fits else 1


def _fastest(
    model: Transformer, cluster: Cluster, known: AnyCalibration | None, software: str | None
) -> Layout:
    """Return the fastest layout that fits, and say on stderr which it is.

    Raises:
        SpecError: None fits; the message says which options to add.
    """
    from shardscope.planner import plan, short

    plans = plan(model, cluster, top=1, calibration=known, software=software)
    if not len(plans):
        raise SpecError(
            f"no layout of {model.name} fits on {cluster.num_devices} x {cluster.device.name}: {plans.problem} Add "
            f"nodes (--nodes {2 * cluster.nodes}), or give a layout (such as --tensor 8 --zero 3)"
        )
    print(
        f"chosen from {plans.considered:,} combinations as the fastest that fits: {short(plans.best.layout)}; "
        "`shardscope plan` ranks the others",
        file=sys.stderr,
    )
    return plans.best.layout


def for_tokens(found: Budgeted, tokens: float | None) -> dict[str, float]:
    """Return the time to train on `tokens` tokens, in hours, and its cost in dollars if the cluster has a price.

    The dictionary has the keys ``hours`` and ``dollars``; it is empty if `tokens` is None.
    """
    if tokens is None:
        return {}
    figures = {"hours": found.time_to_train(tokens) / 3600}
    if found.priced is not None and found.priced.price_per_device_hour is not None:
        figures["dollars"] = found.dollars(tokens)
    return figures


def named_model(arguments: argparse.Namespace) -> Transformer:
    """Return the model with its sequence length.

    Raises:
        SpecError: It is not a transformer.
    """
    from shardscope.spec.model import Model, Transformer

    model = Model.of(arguments.model)
    if not isinstance(model, Transformer):
        raise SpecError(
            f"model={arguments.model!r} is not a transformer, and only transformers have layouts; choose another model"
        )
    return model if arguments.seq is None else model.replace(seq=arguments.seq)
