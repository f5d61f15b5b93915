"""The option that describes an emulated cluster; its keys are the arguments of `Cluster.emulated`."""

from __future__ import annotations

import argparse
from inspect import signature
from typing import Any

from shardscope.errors import SpecError, quoted, unknown_name
from shardscope.spec.cluster import Cluster, EmulatedCluster

_EXAMPLE = "nodes=4,bandwidth=1 Gbit/s,latency=1 ms"
_NONE = "none"


def add_emulation_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that `build_emulated` reads."""
    keys = ", ".join(signature(Cluster.emulated).parameters)
    parser.add_argument(
        "--emulate",
        metavar="KEY=VALUE,...",
        help=f"train on a cluster emulated on this Linux machine, for example '{_EXAMPLE}'; keys: {keys}; those for "
        "single nodes take NODE:VALUE;NODE:VALUE, as in 'slowdown=3:2'; --ranks defaults to one per device; with "
        "--resume, 'none' resumes on this machine itself a run that was on an emulated cluster",
    )


def build_emulated(arguments: argparse.Namespace) -> EmulatedCluster | None:
    """Return the emulated cluster given by the option, or the cluster of the run to resume; None for this
    machine itself.

    Sets the number of ranks in `arguments` if the user has not given it.

    Raises:
        RunNotFound: The run to resume does not exist.
        RunUnreadable: The cluster of the run to resume is unknown, because its file is corrupt.
        SpecError: A key is unknown or given twice, or a value is not valid.
    """
    text = arguments.emulate
    cluster = _of_run_to_resume(arguments) if text is None else emulated_from(text)
    if cluster is None:
        return None
    if arguments.world_size is None and arguments.job is None:
        arguments.world_size = cluster.num_devices
    return cluster


def emulated_from(text: str | None) -> EmulatedCluster | None:
    """Return the emulated cluster that the option's text describes; None for None and ``none``.

    Raises:
        SpecError: A key is unknown or given twice, or a value is not valid.
    """
    return None if text is None or text == _NONE else Cluster.emulated(**_arguments(text))


def _of_run_to_resume(arguments: argparse.Namespace) -> EmulatedCluster | None:
    # --cluster says where the job is predicted
    if arguments.resume is None or arguments.cluster is not None:
        return None
    from shardscope.runtime.record.rundir import cluster_of, find_resumable

    return cluster_of(find_resumable(arguments.resume, arguments.root))


def _arguments(text: str) -> dict[str, Any]:
    found: dict[str, str] = {}
    for pair in text.split(","):
        key, value = _pair(pair)
        if key in found:
            several = f"{key}={found[key]};{value}" if _is_by_node(key) else f"{key}={value}"
            raise SpecError(f"--emulate has {key} twice; give it once, for example {several}")
        found[key] = value
    return {key: _value(key, value) for key, value in found.items()}


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = (part.strip() for part in text.partition("="))
    known = signature(Cluster.emulated).parameters
    if not equals or not value:
        raise SpecError(
            f"--emulate {quoted(text)} is not KEY=VALUE; write for example --emulate '{_EXAMPLE}'"
        )
    if key not in known:
        raise unknown_name("--emulate key", key, list(known))
    return key, value


def _is_by_node(key: str) -> bool:
    kind = str(signature(Cluster.emulated).parameters[key].annotation)
    return "Mapping" in kind or "Rates" in kind


def _value(key: str, text: str) -> Any:
    if _is_by_node(key):
        return _by_node(key, text)
    is_whole = str(signature(Cluster.emulated).parameters[key].annotation) == "int"
    return _whole(key, text) if is_whole else text


def _by_node(key: str, text: str) -> dict[int, str]:
    found: dict[int, str] = {}
    for part in text.split(";"):
        number, value = _part(key, part)
        node = _whole(key, number)
        if node in found:
            raise SpecError(
                f"--emulate {key} has node {node} twice; give it once, for example {key}={node}:{value}"
            )
        found[node] = value
    return found


def _part(key: str, text: str) -> tuple[str, str]:
    node, colon, value = (part.strip() for part in text.partition(":"))
    if not colon or not value:
        raise SpecError(f"--emulate {key}={quoted(text)} is not NODE:VALUE; write for example {key}=3:2")
    return node, value


def _whole(key: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise SpecError(f"--emulate {key}={quoted(text)} is not a whole number; give one") from None
