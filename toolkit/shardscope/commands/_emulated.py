"""The option that describes an emulated cluster; its keys are the arguments of `Cluster.emulated`."""

from __future__ import annotations

import argparse
from inspect import signature
from typing import Any

from shardscope.errors import SpecError, quoted, unknown_name
from shardscope.spec.cluster import Cluster, EmulatedCluster

_EXAMPLE = "nodes=4,bandwidth=1 Gbit/s,latency=1 ms"


def add_emulation_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that `build_emulated` reads."""
    keys = ", ".join(signature(Cluster.emulated).parameters)
    parser.add_argument(
        "--emulate",
        metavar="KEY=VALUE,...",
        help=f"train on a cluster emulated on this Linux machine, for example '{_EXAMPLE}'; keys: {keys}; those for "
        "single nodes take NODE:VALUE;NODE:VALUE, as in 'slowdown=3:2'; --ranks defaults to one per device",
    )


def build_emulated(arguments: argparse.Namespace) -> EmulatedCluster | None:
    """Return the emulated cluster given by the option, and set the number of ranks if it is not given; None without it.

    Raises:
        SpecError: A key is unknown, or a value is not valid.
    """
    if arguments.emulate is None:
        return None
    cluster = Cluster.emulated(**dict(_pair(text) for text in arguments.emulate.split(",")))
    if arguments.world_size is None and arguments.job is None:
        arguments.world_size = cluster.num_devices
    return cluster


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = (part.strip() for part in text.partition("="))
    known = signature(Cluster.emulated).parameters
    if not equals or not value:
        raise SpecError(
            f"--emulate {quoted(text)} is not KEY=VALUE; write for example --emulate '{_EXAMPLE}'"
        )
    if key not in known:
        raise unknown_name("--emulate key", key, list(known))
    kind = str(known[key].annotation)
    if kind == "int":
        return key, _whole(key, value)
    if "Mapping" in kind or "Rates" in kind:
        return key, {
            _whole(key, node): rate for node, rate in (_part(key, each) for each in value.split(";"))
        }
    return key, value


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
