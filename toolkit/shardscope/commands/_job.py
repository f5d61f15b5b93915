"""The options that describe a job, and the job built from them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from shardscope.commands._fields import add_field, flag_of, given_fields, methods_of, parts_of
from shardscope.errors import SpecError, UntrustedCode
from shardscope.spec import Job, Link, Method
from shardscope.spec.units import parse

_MOST_BYTES = 16 * 2**20
_FLAGS = {
    "world_size": ("--ranks",),
    "batch.global_batch": ("--batch", "--global-batch"),
    "batch.micro_batch": ("--micro-batch",),
}
"""Options whose names differ from those of their fields."""
_ABOUT = {
    "model": "model by name",
    "data": "data by name, or a path",
    "strategy": "strategy, perhaps with its setting, as in pipeline:gpipe",
    "optimizer": "update rule",
    "lr_schedule": "learning-rate schedule",
    "compression": "how gradients are compressed",
    "loss": "cross-entropy or mse",
}
"""Help texts for fields whose docstrings describe values that only Python can give."""
_DEFAULTS = {"model": "gpt-nano", "data": "what the model reads"}
"""Defaults of options, if they differ from those of the fields."""
_EXAMPLES = {"optimizer": "weight_decay=0.1", "lr_schedule": "warmup_steps=10", "compression": "ratio=0.01"}
"""An example setting for each field that holds a method."""
_BY_HAND = ("link", "name")
"""Fields whose options are not generated: bandwidth and latency of a link, and the name of a run or a study."""


def add_job_options(parser: argparse.ArgumentParser, *, steps: int = 100) -> None:
    """Add the options that `build_job` reads, one per field; `steps` is the default number of steps in the help."""
    parser.add_argument(
        "--job", type=Path, help="a job.json, such as a run directory holds; options change it"
    )
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="run the code that lies beside the file of --job, where its model, data or loss is a function",
    )
    defaults, parts, settable = {**_DEFAULTS, "steps": str(steps)}, dict(parts_of(Job)), _settable()
    for name in Job.model_fields:
        if name in parts:
            for field in parts[name].model_fields:
                place = f"{name}.{field}"
                add_field(parser, parts[name], place, flags=_FLAGS.get(place, ()))
        elif name not in _BY_HAND:
            add_field(
                parser,
                Job,
                name,
                flags=_FLAGS.get(name, ()),
                about=_ABOUT.get(name),
                default=defaults.get(name),
            )
        if name in settable:
            parser.add_argument(
                f"{flag_of(name)}-set", action="append", metavar="NAME=VALUE",
                help=f"a setting of it, such as {_EXAMPLES.get(name, 'NAME=VALUE')}; may be given several times",
            )  # fmt: skip
        if name == "optimizer":
            parser.add_argument("--lr", type=float, help="learning rate (default: the optimizer's own)")
    parser.add_argument(
        "--link-bandwidth",
        help='bandwidth at which each rank sends and receives, such as "100 Mbit/s"; needs --link-latency too',
    )
    parser.add_argument(
        "--link-latency", help='additional time that every message takes, such as "1 ms", or 0'
    )


def job_flag(place: str) -> str:
    """Return the option that sets a field of a job."""
    return _FLAGS.get(place, (flag_of(place),))[0]


def build_job(arguments: argparse.Namespace) -> Job:
    """Build the job from the options alone, or from a job file with the options as changes.

    Raises:
        SpecError: The file cannot be read, or the job is not valid.
    """
    base = _read_job(arguments.job, trust_code=arguments.trust_code) if arguments.job else None
    fields = given_fields(arguments, Job)
    for kind in _settable():
        method = _method(kind, arguments, base)
        if method is not None:
            fields[kind] = method
    for name, part in parts_of(Job):
        changes = given_fields(arguments, part, name)
        if changes:
            usual = Job.model_fields[name].get_default(call_default_factory=True)
            fields[name] = (usual if base is None else getattr(base, name)).replace(**changes)
    link = _link(base.link if base is not None else None, arguments)
    if link is not None:
        fields["link"] = link
    if base is not None:
        return base.replace(**fields)
    fields.setdefault("model", "gpt-nano")
    fields.setdefault("data", _data_for(fields["model"]))
    return Job(**fields)


def _settable() -> tuple[str, ...]:
    """Return the method fields whose settings have an option; a strategy's settings are part of its short string."""
    return tuple(name for name, _ in methods_of(Job) if name != "strategy")


def _link(base: Link | None, arguments: argparse.Namespace) -> Link | None:
    """Return the link from the options, on top of the job file's link; None if no link option is given."""
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
    """Return the method that the options select for a field; None without such options.

    If its name is that of the job file's method, it is that method with changed settings, else a new one.
    """
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
    """Parse text such as ``ratio=0.01`` to a name and a JSON value, or a string if the value is not JSON.

    Raises:
        SpecError: The text is not NAME=VALUE, or sets the name of the method.
    """
    name, equals, value = text.partition("=")
    option = flag_of(kind)
    if equals and name == "name":
        raise SpecError(f"{option}-set {text!r} names the method, not a setting of it; use {option} {value}")
    if not equals or not name:
        raise SpecError(
            f"{option}-set {text!r} is not NAME=VALUE; write for example {_EXAMPLES.get(kind, kind)}"
        )
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _read_job(path: Path, *, trust_code: bool) -> Job:
    try:
        if (
            path.is_fifo() and not path.is_symlink()
        ):  # a pipe from the shell's process substitution is a symlink
            raise SpecError(
                f"job={str(path)!r} is a pipe that might never be written to; name a job.json, or /dev/stdin"
            )
        with path.open("rb") as file:  # reads at most this much, even from a sparse file of a terabyte
            job = Job.from_json(file.read(_MOST_BYTES).decode())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise SpecError(f"job={str(path)!r} cannot be read ({reason}); name a job.json") from None
    return with_code(job, path.resolve(), trust_code=trust_code)


def with_code(job: Job, path: Path, *, trust_code: bool) -> Job:
    """Add the functions saved next to the job's file; at a terminal, ask whether to trust them.

    Raises:
        UntrustedCode: There are such functions, and they are not trusted.
    """
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
