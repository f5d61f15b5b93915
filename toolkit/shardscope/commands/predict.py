"""`shardscope predict`: predict the step time and memory of one layout, broken down into parts."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from shardscope.commands import _options
from shardscope.commands._fields import given_fields
from shardscope.commands._output import as_json
from shardscope.errors import SpecError
from shardscope.spec.layout import Layout

if TYPE_CHECKING:
    from shardscope.calibration.host_calibration import AnyCalibration
    from shardscope.prediction.budget import Budgeted
    from shardscope.spec.cluster import Cluster
    from shardscope.spec.model import Transformer


HELP = "predict step time and memory of one layout, broken down into parts"
ABOUT = (
    "Predict step time and memory of one layout of a model on a cluster, broken down into parts. "
    "Without any option of a layout, the fastest layout that fits is chosen."
)
JSON = "print the values and their terms as JSON"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    _options.add_model_and_cluster(parser)
    _options.add_calibration(parser)
    _options.add_software_option(parser)
    parser.add_argument(
        "--tokens", type=float, help="also predict hours and dollars to train on this many tokens"
    )
    _options.add_layout_options(parser)


def carry_out(arguments: argparse.Namespace) -> int:
    """Print the prediction; return 1 if the layout does not fit in memory."""
    from shardscope.prediction.layout import predict_layout

    known, software = _options.named_calibration(arguments.calibration), arguments.software
    cluster, model = _options.cluster_of(arguments), _options.named_model(arguments)
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
    """Return the fastest layout that fits in memory, and print it to stderr.

    Raises:
        SpecError: No layout fits; the message names the options to add.
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
