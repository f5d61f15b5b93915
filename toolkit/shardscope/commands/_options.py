"""Groups of options that several commands share, and the objects that they describe: a run, a cluster, a layout, ..."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.calibration.software import software_names
from shardscope.commands._fields import add_field, flag_of
from shardscope.errors import RunNotFound, RunUnreadable, SpecError, quoted
from shardscope.spec.compression import compression_names
from shardscope.spec.layout import Layout, searched_schedules
from shardscope.spec.layout_optimizer import optimizer_names

if TYPE_CHECKING:
    from shardscope.calibration.host_calibration import AnyCalibration
    from shardscope.runtime import Run
    from shardscope.spec.cluster import Cluster
    from shardscope.spec.model import Transformer


def refuse(arguments: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Raise an error if one of these options is given.

    Args:
        arguments: The parsed arguments.
        names: Names of the options, as in `arguments`.
        why: Message on why the option has no effect and what to do, with ``{flag}`` for the option.

    Raises:
        SpecError: One of the options is given.
    """
    for name in names:
        if getattr(arguments, name) is not None:
            raise SpecError(f"{flag_of(name)} {why.format(flag=flag_of(name))}")


# Runs.


def add_root(parser: argparse.ArgumentParser) -> None:
    """Add the option with the folder of the runs."""
    parser.add_argument(
        "--root", type=Path, metavar="FOLDER", help="folder of the runs (default: $SHARDSCOPE_RUNS or ./runs)"
    )


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument RUN and the option ``--root``."""
    parser.add_argument("run", metavar="RUN", help="a run's id, as `shardscope runs` lists it, or its path")
    add_root(parser)


def attach(name: str, root: Path | None) -> Run:
    """Return the run with this id or path.

    Raises:
        RunNotFound: There is no such run; the message suggests the nearest id, and the command that lists all runs.
        RunUnreadable: The run exists but is corrupt, or private to another user.
    """
    from shardscope.runtime import Run, runs

    try:
        return Run.attach(name, root)
    except RunUnreadable:
        raise
    except RunNotFound:
        known = [run.id for run in runs(root)]
    containing = [each for each in known if name.lower() in each.lower()]
    near = containing[:1] or get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    where = "" if root is None else f" --root {root}"
    raise RunNotFound(f"no run {quoted(name)}; {hint}`shardscope runs{where}` lists all runs")


# Clusters and their calibrations.


def add_model_and_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a model and a cluster; `cluster_of` reads the arguments of the cluster."""
    parser.add_argument("model", help="a model from the catalogue, or the path of a Hugging Face config.json")
    parser.add_argument("cluster", help="a device or a node from the catalogue, for example a100-80gb")
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes (default: 1)")
    parser.add_argument("--per-node", type=int, help="devices per node (default: as in the standard node)")
    parser.add_argument(
        "--device-mtbf-hours",
        type=float,
        help="mean time between failures of one device; the time to train then includes checkpoints and failures",
    )


def cluster_of(arguments: argparse.Namespace) -> Cluster:
    """Return the cluster that the arguments of `add_model_and_cluster` describe.

    Raises:
        SpecError: The cluster is not in the catalogue, or a number is invalid.
    """
    from shardscope.spec.cluster import Cluster

    return Cluster.of(
        arguments.cluster, nodes=arguments.nodes, per_node=arguments.per_node,
        device_mtbf_hours=arguments.device_mtbf_hours,
    )  # fmt: skip


def add_cluster_options(parser: argparse.ArgumentParser, *, only_with: str = "") -> None:
    """Add the options that `build_cluster` reads; `only_with` starts the help text, such as ``with --predict: ``."""
    parser.add_argument(
        "--cluster",
        help=f"{only_with}a device or a node from the catalogue, for example h100 (default: this machine)",
    )
    parser.add_argument("--nodes", type=int, help="with --cluster: number of nodes (default: 1)")
    parser.add_argument(
        "--per-node", type=int, help="with --cluster: devices per node (default: as in the standard node)"
    )


def build_cluster(arguments: argparse.Namespace) -> Cluster | None:
    """Return the cluster given by the options; None without ``--cluster``, which means this machine.

    Raises:
        SpecError: The cluster is not in the catalogue, or cluster options are given without ``--cluster``.
    """
    from shardscope.spec.cluster import Cluster

    if arguments.cluster is not None:
        return Cluster.of(
            arguments.cluster,
            nodes=1 if arguments.nodes is None else arguments.nodes,
            per_node=arguments.per_node,
        )
    refuse(
        arguments,
        ("nodes", "per_node"),
        "has no effect without --cluster; add --cluster, or leave {flag} out",
    )
    return None


def add_calibration(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a calibration and the training software."""
    parser.add_argument(
        "--calibration",
        help="name of a GPU's calibration (default: chosen from the cluster's device and the software), or path of a "
        "file that shardscope calibrate has written (default for jobs on this machine: the saved one)",
    )


def add_software_option(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Add the option that names the training software; `more` are further choices, in words."""
    parser.add_argument(
        "--software",
        help=f"framework that runs the layout: {', '.join(software_names())}{more} (default: chosen from the layout)",
    )


def named_calibration(given: str | None) -> AnyCalibration | None:
    """Return the calibration in a file that ends in .json, or the one with this name; None for None.

    A file with the constants of a host gives a `HostCalibration`; calibrations of GPUs lack these constants.

    Raises:
        SpecError: The file cannot be read, or no calibration has this name.
    """
    from shardscope.calibration.calibration import Calibration
    from shardscope.calibration.host_calibration import HostCalibration

    if given is None:
        return None
    if Path(given).suffix != ".json":
        return Calibration.of(given)
    try:
        is_of_host = '"constants"' in Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        is_of_host = True  # its `load` says what is wrong with the file
    return HostCalibration.load(given) if is_of_host else Calibration.load(given)


# Layouts.


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


def named_model(arguments: argparse.Namespace) -> Transformer:
    """Return the model with its sequence length.

    Raises:
        SpecError: The model is not a transformer.
    """
    from shardscope.spec.model import Model, Transformer

    model = Model.of(arguments.model)
    if not isinstance(model, Transformer):
        raise SpecError(
            f"model={arguments.model!r} is not a transformer, and only transformers have layouts; choose another model"
        )
    return model if arguments.seq is None else model.replace(seq=arguments.seq)
