"""Command-line options that describe a cluster, required or in place of this machine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from shardscope.errors import SpecError

if TYPE_CHECKING:
    from shardscope.spec.cluster import Cluster


def add_model_and_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of commands that are about a model on a cluster; `cluster_of` reads those of the cluster."""
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
        SpecError: It is not in the catalogue, or a number is invalid.
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
    """Return the cluster given by the options; None, for this machine, without ``--cluster``.

    Raises:
        SpecError: The cluster is not in the catalogue, or there are options of a cluster without ``--cluster``.
    """
    from shardscope.spec.cluster import Cluster

    if arguments.cluster is not None:
        return Cluster.of(
            arguments.cluster,
            nodes=1 if arguments.nodes is None else arguments.nodes,
            per_node=arguments.per_node,
        )
    for option in ("nodes", "per_node"):
        if getattr(arguments, option) is not None:
            flag = f"--{option.replace('_', '-')}"
            raise SpecError(f"{flag} has no effect without --cluster; add --cluster, or leave {flag} out")
    return None
