"""`shardscope simulate`: simulate a training step of a layout, a job or rank traces, event by event."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.commands import _options
from shardscope.commands._fields import given_fields
from shardscope.commands._job import read_job
from shardscope.commands._output import as_json
from shardscope.errors import SpecError
from shardscope.spec.layout import Layout
from shardscope.spec.link import Link

if TYPE_CHECKING:
    from shardscope.simulator import Simulation
_ONLY = {
    "model": ("cluster", "calibration", "software"),
    "job": ("cluster", "calibration", "software", "overlap", "trust_code"),
    "trace": ("link", "latency", "algorithm", "cluster"),
}
"""Options that affect each kind of simulation, besides common options. A model also takes the options of a layout."""


HELP = "simulate a step event by event: of a layout, of a job, or from traces of its ranks"
ABOUT = (
    "Simulate one training step event by event, and divide its time into parts. Give a model, a "
    "cluster and the options of a layout; or a job; or the Chakra traces of a step's ranks and a link."
)
JSON = "print the step, its lanes and links as JSON"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "model", nargs="?", help="a model from the catalogue, or the path of a Hugging Face config.json"
    )
    parser.add_argument("--job", type=Path, help="a job.json, such as the one in a run directory")
    parser.add_argument(
        "--trust-code", action="store_true", default=None, help="with --job: load the code saved next to it"
    )
    parser.add_argument(
        "--trace", nargs="+", metavar="FILE",
        help="Chakra traces, one of each rank, such as step.*.et; ranks are the numbers in their names",
    )  # fmt: skip
    _options.add_cluster_options(parser)
    _options.add_calibration(parser)
    _options.add_software_option(parser)
    parser.add_argument(
        "--link",
        help="with --trace: the link of each rank, such as 25GbE or 200 Gbit/s (default: the cluster's)",
    )
    parser.add_argument("--latency", help="with --link: its latency, such as 5 us")
    parser.add_argument(
        "--algorithm", action="append", metavar="OP=NAME",
        help="with --trace: algorithm of a collective, such as all_reduce=tree; can be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--overlap",
        action="store_true",
        default=None,
        help="with --job: overlap computation with the exchange of gradients",
    )
    parser.add_argument(
        "--straggler", action="append", default=[], metavar="RANK=FACTOR",
        help="a rank whose computations take longer, such as 3=1.5; can be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--jitter", type=float, default=0.0,
        help="standard deviation of each computation's time, relative to its mean (default: 0)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of the jitter (default: 0)")
    _options.add_layout_options(parser)


def carry_out(arguments: argparse.Namespace) -> int:
    """Print the simulated step."""
    found = _simulated(arguments)
    print(as_json(found.to_dict()) if arguments.json else found)
    return 0


def _simulated(arguments: argparse.Namespace) -> Simulation:
    from shardscope.simulator import simulate

    asked = [name for name in _ONLY if getattr(arguments, name) is not None]
    if len(asked) != 1:
        raise SpecError(
            "simulate needs a model with a layout, --job FILE, or --trace FILE ...; give one of them"
        )
    _check_options(arguments, asked[0])
    varied = {
        "stragglers": _unique("--straggler", map(_factor, arguments.straggler)), "jitter": arguments.jitter,
        "seed": arguments.seed,
    }  # fmt: skip
    if arguments.trace is not None:
        algorithms = _unique("--algorithm", map(_algorithm, arguments.algorithm or []))
        return simulate.chakra(_by_rank(arguments.trace), _link(arguments), algorithms=algorithms, **varied)
    cluster, known = _options.build_cluster(arguments), _options.named_calibration(arguments.calibration)
    if arguments.job is not None:
        job = read_job(arguments.job, trust_code=bool(arguments.trust_code))
        overlap = bool(arguments.overlap)
        return simulate(
            job, cluster, calibration=known, software=arguments.software, overlap=overlap, **varied
        )
    if cluster is None:
        raise SpecError(
            "a model is simulated on a cluster; add --cluster, such as --cluster a100-80gb --nodes 4"
        )
    layout = Layout(**given_fields(arguments, Layout))
    return simulate(
        _options.named_model(arguments),
        cluster,
        layout,
        calibration=known,
        software=arguments.software,
        **varied,
    )


def _check_options(arguments: argparse.Namespace, asked: str) -> None:
    """Reject options that have no effect on this kind of simulation.

    Raises:
        SpecError: An option has no effect; the message names it.
    """
    layout = [*Layout.model_fields, "seq"]
    known = {*_ONLY[asked], *(layout if asked == "model" else ())}
    others = dict.fromkeys([each for names in _ONLY.values() for each in names] + layout)
    what = "a model" if asked == "model" else f"--{asked}"
    _options.refuse(
        arguments,
        [name for name in others if name not in known],
        f"has no effect with {what}; leave {{flag}} out",
    )


def _by_rank(paths: list[str]) -> list[str]:
    """Return the paths in the order of the rank numbers in their names; a shell lists step.10.et before step.2.et.

    Raises:
        SpecError: The rank of a file cannot be inferred from the names.
    """
    numbers = [tuple(map(int, re.findall(r"\d+", Path(path).name))) for path in paths]
    if len(paths) > 1 and (not all(numbers) or len(set(numbers)) < len(paths)):
        raise SpecError(
            "--trace needs files whose names differ in the number of the rank, such as step.0.et and step.1.et"
        )
    return [path for _, path in sorted(zip(numbers, paths, strict=True))]


def _unique(flag: str, pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if key in found:
            raise SpecError(f"{flag} is given twice for {key}; give it once")
        found[key] = value
    return found


def _factor(text: str) -> tuple[int, float]:
    rank, _, factor = text.partition("=")
    try:
        return int(rank), float(factor)
    except ValueError:
        raise SpecError(
            f"--straggler {text!r} is not RANK=FACTOR; write for example --straggler 3=1.5"
        ) from None


def _algorithm(text: str) -> tuple[str, str]:
    op, equals, name = text.partition("=")
    if not equals:
        raise SpecError(f"--algorithm {text!r} is not OP=NAME; write for example --algorithm all_reduce=tree")
    return op, name


def _link(arguments: argparse.Namespace) -> Link:
    """Return the link of each rank: the one given by name, else the link between nodes, or the one inside a single
    node.
    """
    cluster = _options.build_cluster(arguments)
    if (arguments.link is None) == (cluster is None):
        raise SpecError("--trace needs --link or --cluster; give one, such as --link 25GbE")
    if arguments.link is not None:
        return Link.of(arguments.link, latency_s=arguments.latency, field="--link")
    assert cluster is not None
    if arguments.latency is not None:
        raise SpecError("--latency has no effect without --link; add --link, or leave --latency out")
    return cluster.inter if cluster.nodes > 1 else cluster.intra
