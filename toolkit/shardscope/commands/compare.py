"""`shardscope compare`: compare a run with its prediction, or several runs with each other."""

from __future__ import annotations

import argparse

from shardscope.commands import _options
from shardscope.commands._output import as_json
from shardscope.errors import SpecError

HELP = "compare a run with its prediction, or runs with each other"
ABOUT = (
    "With one run: compare it with its prediction for this machine, or for the cluster on which it "
    "ran, term by term: bytes and messages by collective, memory by type, step time by part. Exit status 1 if a "
    "measured value differs from an exact prediction, or lies outside predicted bounds. With several runs: compare "
    "the settings in which they differ, and their results."
)
JSON = "print the comparison as JSON"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("run", nargs="+", help="a run's id, as `shardscope runs` lists it, or its path")
    parser.add_argument(
        "--baseline",
        metavar="RUN",
        help="with several runs: the baseline, relative to which changes are given",
    )
    _options.add_root(parser)
    _options.add_cluster_options(parser)
    _options.add_calibration(parser)


def carry_out(arguments: argparse.Namespace) -> int:
    """Print the comparison of one run with its prediction, or of several runs with each other."""
    return _with_prediction(arguments) if len(arguments.run) == 1 else _with_each_other(arguments)


def _with_prediction(arguments: argparse.Namespace) -> int:
    """Print the comparison; return 1 if a value differs from an exact prediction or is outside predicted bounds."""
    from shardscope.measure.compare.of_run import compare

    if arguments.baseline is not None:
        raise SpecError(
            "--baseline has no effect with one run; give two or more runs, or leave --baseline out"
        )
    run, cluster = _options.attach(arguments.run[0], arguments.root), _options.build_cluster(arguments)
    found = compare(run, cluster, calibration=_options.named_calibration(arguments.calibration))
    print(as_json(found.to_dict()) if arguments.json else found)
    return 1 if found.disagreeing else 0


def _with_each_other(arguments: argparse.Namespace) -> int:
    """Print the comparison of several runs."""
    from shardscope.measure.compare_runs.of_runs import compare_runs

    why = "has no effect with several runs; give one run, or leave {flag} out"
    _options.refuse(arguments, ("cluster", "nodes", "per_node", "calibration"), why)
    runs = [_options.attach(name, arguments.root) for name in arguments.run]
    baseline = None if arguments.baseline is None else _options.attach(arguments.baseline, arguments.root)
    found = compare_runs(runs, baseline=baseline)
    print(as_json(found.to_dict()) if arguments.json else found)
    return 0
