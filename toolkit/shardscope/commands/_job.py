"""The options that describe a job, and the job that comes of them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.errors import SpecError, UntrustedCode

if TYPE_CHECKING:
    from shardscope.spec import Job, Link, Method


_MOST_BYTES = 16 * 2**20
_METHODS = {
    "optimizer": ("update rule, such as sgd, adamw, lamb, lars (default: adamw)", "weight_decay=0.1"),
    "lr_schedule": (
        "how the learning rate moves, such as cosine, linear (default: constant)",
        "warmup_steps=10",
    ),
    "compression": ("how gradients are compressed, such as int8, topk (default: none)", "ratio=0.01"),
}
"""The kinds of methods that have options of their own: what help says, and a setting as an example."""


def add_job_options(parser: argparse.ArgumentParser, *, steps: int = 100) -> None:
    """Add the options that `build_job` reads; `steps` is the default that the help names."""
    parser.add_argument(
        "--job", type=Path, help="a job.json, such as a run directory holds; options change it"
    )
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="run the code that lies beside the file of --job, where its model, data or loss is a function",
    )
    parser.add_argument("--model", help="model by name (default: gpt-nano)")
    parser.add_argument("--data", help="data by name, or a path (default: what the model reads)")
    parser.add_argument(
        "--strategy", help="strategy, such as ring, tree, zero-3, pipeline:gpipe (default: ring)"
    )
    parser.add_argument("--ranks", type=int, dest="world_size", help="number of ranks (default: 2)")
    parser.add_argument("--lr", type=float, help="learning rate (default: the optimizer's own)")
    parser.add_argument("--batch", type=int, help="samples a step, over all ranks (default: 64)")
    parser.add_argument(
        "--micro-batch", type=int, help="samples a forward pass on one rank (default: all its share)"
    )
    for kind, (about, example) in _METHODS.items():
        option = kind.replace("_", "-")
        parser.add_argument(f"--{option}", metavar="NAME", help=about)
        parser.add_argument(
            f"--{option}-set", action="append", metavar="NAME=VALUE",
            help=f"a setting of it, such as {example}; may be given several times",
        )  # fmt: skip
    parser.add_argument("--precision", help="fp32, fp64, bf16-mixed, fp16-mixed (default: fp32)")
    parser.add_argument("--recompute", help="none, selective, full (default: none)")
    parser.add_argument("--steps", type=int, help=f"optimizer steps (default: {steps})")
    parser.add_argument(
        "--link-bandwidth",
        help='what each rank may send and receive, such as "100 Mbit/s"; needs --link-latency too',
    )
    parser.add_argument("--link-latency", help='how long every message takes besides, such as "1 ms", or 0')
    parser.add_argument("--seed", type=int, help="seed of weights and data order (default: 0)")


def build_job(arguments: argparse.Namespace) -> Job:
    """The job that the options describe, alone or as changes to a file.

    Raises:
        SpecError: The file cannot be read, or no such job can exist.
    """
    from shardscope.spec import Batch, Job

    base = _read_job(arguments.job, trust_code=arguments.trust_code) if arguments.job else None
    names = ("model", "data", "strategy", "world_size", "precision", "recompute", "steps", "seed", "name")
    given = vars(arguments)
    fields = {name: given[name] for name in names if given.get(name) is not None}
    for kind in _METHODS:
        method = _method(kind, arguments, base)
        if method is not None:
            fields[kind] = method
    if arguments.batch is not None or arguments.micro_batch is not None:
        start_batch = base.batch if base is not None else Batch()
        sizes = {"global_batch": arguments.batch, "micro_batch": arguments.micro_batch}
        fields["batch"] = start_batch.replace(
            **{name: size for name, size in sizes.items() if size is not None}
        )
    link = _link(base.link if base is not None else None, arguments)
    if link is not None:
        fields["link"] = link
    if base is not None:
        return base.replace(**fields)
    fields.setdefault("model", "gpt-nano")
    fields.setdefault("data", _data_for(fields["model"]))
    return Job(**fields)


def _link(base: Link | None, arguments: argparse.Namespace) -> Link | None:
    """The link that the options describe, or None."""
    from shardscope.spec import Link
    from shardscope.spec.units import parse

    bandwidth, latency = arguments.link_bandwidth, arguments.link_latency
    given = {}
    if bandwidth is not None:
        given["bandwidth"] = parse(bandwidth, "bytes/s", field="--link-bandwidth")
    if latency is not None:
        given["latency"] = parse(latency, "s", field="--link-latency")
    if not given:
        return None
    known = {} if base is None else {"bandwidth": base.bandwidth, "latency": base.latency_s}
    return Link(**{**known, **given})


def _method(kind: str, arguments: argparse.Namespace, base: Job | None) -> Method | None:
    """The file's, changed, where the method stays the same; else a new one. None where no option asks for any."""
    from shardscope.spec import Job

    name, given = getattr(arguments, kind), getattr(arguments, f"{kind}_set") or []
    settings = dict(_setting(kind, text) for text in given)
    if kind == "optimizer" and arguments.lr is not None:
        settings["lr"] = arguments.lr
    if name is None and not settings:
        return None
    usual: Method = Job.model_fields[kind].get_default(call_default_factory=True)
    start = usual if base is None else getattr(base, kind)
    kept = start.changed if name in {None, start.name} else {}
    made: Method = usual.base_class().by_name(name or start.name, **{**kept, **settings})
    return made


def _setting(kind: str, text: str) -> tuple[str, Any]:
    """``ratio=0.01`` as a name and a number, a truth value or a word.

    Raises:
        SpecError: It has no such form.
    """
    name, equals, value = text.partition("=")
    option = f"--{kind.replace('_', '-')}"
    if equals and name == "name":
        raise SpecError(f"{option}-set {text!r} sets no setting but the method; use {option} {value}")
    if not equals or not name:
        raise SpecError(f"{option}-set {text!r} is no NAME=VALUE; write for example {_METHODS[kind][1]}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _read_job(path: Path, *, trust_code: bool) -> Job:
    from shardscope.spec import Job

    try:
        if path.is_fifo() and not path.is_symlink():  # one that a shell has made for us is a link to it
            raise SpecError(
                f"job={str(path)!r} is a pipe that might never be written to; name a job.json, or /dev/stdin"
            )
        with path.open("rb") as file:  # of a sparse file of a terabyte no more than this is read
            job = Job.from_json(file.read(_MOST_BYTES).decode())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise SpecError(f"job={str(path)!r} cannot be read ({reason}); name a job.json") from None
    return _with_code(job, path.resolve(), trust_code=trust_code)


def _with_code(job: Job, path: Path, *, trust_code: bool) -> Job:
    """The job with the functions beside its file; somebody at a terminal is asked whether to trust them."""
    from shardscope.runtime.load_job import add_code

    try:
        return add_code(job, path, trust_code=trust_code)
    except UntrustedCode as error:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        print(f"shardscope: {error}", file=sys.stderr)
        if input("Run this code? [y/N] ").strip().lower() not in {"y", "yes"}:
            raise
    return add_code(job, path, trust_code=True)


def _data_for(model: str) -> str:
    from shardscope.spec.models import model_config

    return "digits" if model_config(model).reads == "images" else "python-source"
