"""`shardscope plan`: rank all layouts (parallel degrees and other settings) of a model on a cluster."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from shardscope.commands import _options
from shardscope.commands._fields import add_field, given_fields
from shardscope.commands._output import aligned, as_json
from shardscope.errors import SpecError
from shardscope.spec.layout import Layout
from shardscope.spec.layout_optimizer import optimizer_names
from shardscope.spec.units import gib_text

if TYPE_CHECKING:
    from shardscope.planner import PlanRow, Plans

_OF_A_LAYOUT = ("precision", "optimizer")
"""Fields of a layout that have their own option because they are not searched; ``--fix`` sets searched fields."""


HELP = "search every layout of a model on a cluster and rank those that fit"
JSON = "print plans and counts as JSON"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    _options.add_model_and_cluster(parser)
    _options.add_seq_option(parser)
    add_field(parser, Layout, "global_batch", default="about 4 million tokens")
    parser.add_argument(
        "--objective", default="time", metavar="NAME or NAME=WEIGHT,...",
        help="time, dollars, headroom, tokens_per_s, or weights: time=2,headroom=1 (default: time)",
    )  # fmt: skip
    parser.add_argument(
        "--fix",
        action="append",
        default=[],
        metavar="AXIS=VALUE[,VALUE]",
        help="search only these values of a field, for example tensor=8",
    )
    for name in _OF_A_LAYOUT:
        add_field(parser, Layout, name, names=optimizer_names() if name == "optimizer" else ())
    _options.add_calibration(parser)
    _options.add_software_option(parser, "; or any, to also search settings that no framework supports")
    parser.add_argument("--top", type=int, default=10, help="rows of the table (default: 10)")
    parser.add_argument(
        "--config", type=int, metavar="RANK",
        help="print the settings with which the framework runs the plan with this number, instead of the table",
    )  # fmt: skip


def carry_out(arguments: argparse.Namespace) -> int:
    """Print the best layouts, and why the first is better than the second; return 1 if no layout fits."""
    if arguments.config is not None and arguments.json:
        raise SpecError("--config prints settings, and --json plans and counts; use one of them")
    plans = _search(arguments)
    if arguments.config is not None:
        _print_config(plans, arguments.config)
    elif arguments.json:
        print(as_json(plans.to_dict()))
    elif len(plans):
        print(_table(plans))
    else:
        print(f"{_title(plans)}\n{plans.problem}")
    return 0 if len(plans) else 1


def _print_config(plans: Plans, rank: int) -> None:
    """Print only the settings to standard output, so that they can be redirected to a file."""
    config = plans.trainer_config(rank)
    print(f"{config.trainer}. {' '.join(config.remarks)}", file=sys.stderr)
    print(config)


def _search(arguments: argparse.Namespace) -> Plans:
    from shardscope.planner import plan

    return plan(
        _options.named_model(arguments),
        _options.cluster_of(arguments),
        _objective(arguments.objective),
        top=arguments.top,
        calibration=_options.named_calibration(arguments.calibration),
        software=arguments.software,
        fix=dict(_fixed(text) for text in arguments.fix),
        **given_fields(arguments, Layout),
    )


def _objective(text: str) -> str | dict[str, float]:
    if "=" not in text:
        return text
    try:
        return {name: float(weight) for name, weight in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise SpecError(
            f"--objective {text!r} is not NAME=WEIGHT,...; write for example time=2,headroom=1"
        ) from None


def _fixed(text: str) -> tuple[str, list[Any]]:
    axis, equals, values = text.partition("=")
    if not (equals and values):
        raise SpecError(
            f"--fix {text!r} is not AXIS=VALUE; write for example --fix tensor=8 or --fix zero=1,2"
        )
    return axis.replace("-", "_"), [_value(value) for value in values.split(",")]


def _value(text: str) -> Any:
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    return int(text) if text.lstrip("-").isdigit() else text


def _title(plans: Plans) -> str:
    from shardscope.spec.units import work_text

    cluster, model = plans.asked.cluster, plans.asked.model
    work = work_text(plans.global_batch, model.seq)
    return f"{model.name} on {cluster.num_devices} x {cluster.device.name}, {work}"


def _table(plans: Plans) -> str:
    from shardscope.planner import short
    from shardscope.planner.explain import seconds
    from shardscope.planner.table import advice, dollars_text, offload_text, recommended
    from shardscope.prediction.failures import failures_text, layout_failures

    def cells(plan: PlanRow) -> list[str]:
        dollars = "" if plan.dollars is None else dollars_text(plan.dollars)
        return [
            str(plan.rank), seconds(plan.step_time_s), f"{plan.tokens_per_s:,.0f}", dollars,
            gib_text(plan.headroom_bytes), *[plan.software] * is_mixed, short(plan.layout),
        ]  # fmt: skip

    is_mixed = len(plans.software) > 1
    header = ["#", "step", "tokens/s", "cost of a step", "headroom", *["software"] * is_mixed, "layout"]
    rows = aligned(header, [cells(plan) for plan in plans])
    advised = f"Plan {recommended(plans).rank} is recommended. {advice(plans)}"
    counts = ", ".join(f"{reason} {count:,}" for reason, count in plans.rejected.items())
    told = f"\n\n{plans.explain(1, 2)}" if len(plans) > 1 else ""
    failures = failures_text(
        layout_failures(plans.asked.model, plans.asked.cluster, plans.best.layout),
        plans.asked.cluster.num_devices,
    )
    rejected = f"{plans.considered:,} combinations were considered. Rejected, by reason: {counts}."
    title = f"{_title(plans)}. {offload_text(plans)}" if plans.needs_offload else _title(plans)
    return "\n".join(filter(None, [title, f"{rows}\n\n{advised}{told}\n", failures, rejected, plans.caveat]))
