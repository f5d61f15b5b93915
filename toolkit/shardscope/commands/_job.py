"""Command-line options that describe a job, and `build_job`, which builds the `Job` from them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from shardscope.commands._fields import add_field, flag_of, given_fields, methods_of, parts_of
from shardscope.commands._settings import PARTS, add_settings, parse_setting, part_with_settings
from shardscope.errors import SpecError, UntrustedCode
from shardscope.spec import Job, Link, Method
from shardscope.spec.models import model_config
from shardscope.spec.units import parse

T = TypeVar("T")

_MOST_BYTES = 16 * 2**20
_FLAGS = {
    "world_size": ("--ranks",),
    "batch.global_batch": ("--batch", "--global-batch"),
    "batch.micro_batch": ("--micro-batch",),
}
"""Options whose names differ from those of their fields, by field."""
_ABOUT = {
    "model": "model by name",
    "data": "data by name, or a path",
    "strategy": "strategy, optionally with a setting after a colon, such as pipeline:gpipe",
    "optimizer": "update rule",
    "lr_schedule": "learning-rate schedule",
    "compression": "how gradients are compressed",
    "loss": "cross-entropy or mse",
    "recovery": "maximum number of restarts from the newest checkpoint after failures, such as 3",
    "elastic": "numbers of ranks between which `shardscope resize` changes the run, such as 2:8",
}
"""Help texts for fields whose docstrings describe Python objects, which cannot be given on the command line."""
_SHAPES = {
    "batch.shares": "N,N,...|measured",
    "checkpoint.every": "STEPS|auto",
    "elastic": "LEAST:MOST",
    "recovery": "RESTARTS",
    "world_size": "RANKS",
}
"""Metavariables in the help, for options that take a number or a word."""
_DEFAULTS = {"model": "gpt-nano", "data": "digits or python-source, depending on the model"}
"""Default values as shown in the help, for options whose default differs from the field's."""
_EXAMPLES = {"optimizer": "weight_decay=0.1", "lr_schedule": "warmup_steps=10", "compression": "ratio=0.01"}
"""An example setting for each field whose value is a method."""
_BY_HAND = ("link", "name")
"""Fields without a generated option: a link has two options, and commands that need ``--name`` add it themselves."""


def add_job_options(parser: argparse.ArgumentParser, *, steps: int = 100) -> None:
    """Add the options that `build_job` reads; `steps` is the default number of steps to show in the help."""
    parser.add_argument(
        "--job", type=Path, help="a job.json, such as the one in a run directory; options override its fields"
    )
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="run the code saved next to the --job file; required if its model, data or loss is a Python function",
    )
    defaults, parts, settable = {**_DEFAULTS, "steps": str(steps)}, dict(parts_of(Job)), _settable()
    for name in Job.model_fields:
        if name in parts:
            for field in parts[name].model_fields:
                place = f"{name}.{field}"
                add_field(parser, parts[name], place, flags=_FLAGS.get(place, ()), shape=_SHAPES.get(place))
        elif name not in _BY_HAND:
            add_field(
                parser,
                Job,
                name,
                flags=_FLAGS.get(name, ()),
                about=_ABOUT.get(name),
                default=defaults.get(name),
                shape=_SHAPES.get(name),
            )
        if name in settable:
            add_settings(parser, name, _example(name))
        if name in PARTS:
            add_settings(parser, name, PARTS[name].example)
        if name == "optimizer":
            parser.add_argument("--lr", type=float, help="learning rate (default: the optimizer's own)")
    parser.add_argument(
        "--link-bandwidth",
        help='bandwidth at which each rank sends and receives, such as "100 Mbit/s"; needs --link-latency too',
    )
    parser.add_argument(
        "--link-latency", help='time added to every message, such as "1 ms", or 0; needs --link-bandwidth too'
    )


def job_flag(place: str) -> str:
    """Return the option that sets a field of a job."""
    return _FLAGS.get(place, (flag_of(place),))[0]


def build_job(arguments: argparse.Namespace) -> Job:
    """Build the job from the options; if ``--job`` names a file, the options override the fields of that job.

    Raises:
        SpecError: The file cannot be read, or the job is not valid.
    """
    base = read_job(arguments.job, trust_code=arguments.trust_code) if arguments.job else None
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
    for name in PARTS:
        changed = part_with_settings(name, arguments, base)
        if changed is not None:
            fields[name] = changed
    link = _link(base.link if base is not None else None, arguments)
    if link is not None:
        fields["link"] = link
    if base is not None:
        return base.replace(**fields)
    fields.setdefault("model", "gpt-nano")
    fields.setdefault("data", _data_for(fields["model"]))
    return Job(**fields)


def _settable() -> tuple[str, ...]:
    """Return the names of the fields with a ``--...-set`` option: all methods except the strategy.

    The settings of a strategy are part of its value, as in ``pipeline:gpipe``.
    """
    return tuple(name for name, _ in methods_of(Job) if name != "strategy")


def _link(base: Link | None, arguments: argparse.Namespace) -> Link | None:
    """Return the link given by the options, completed from the job file's link; None without a link option."""
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
    """Return the method that the options select for the field `kind`; None if no such option is given.

    The options change settings of the job file's method, or of the default method without a job file. If the options
    select another method, all other settings have the defaults of that method.
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
    """Parse the text of a method's setting.

    Raises:
        SpecError: The text is not NAME=VALUE, or NAME is ``name``, which is not a setting.
    """
    name, value = parse_setting(kind, text, _example(kind))
    if name == "name":
        option = flag_of(kind)
        raise SpecError(f"{option}-set {text!r} names the method, not a setting of it; use {option} {value}")
    return name, value


def _example(kind: str) -> str:
    return _EXAMPLES.get(kind, "NAME=VALUE")


def read_job(path: Path, *, trust_code: bool) -> Job:
    """Return the job in a file, with its code.

    Raises:
        SpecError: The file cannot be read, or its job is not valid.
    """
    try:
        if (
            path.is_fifo() and not path.is_symlink()
        ):  # a pipe from the shell's process substitution is a symlink
            raise SpecError(
                f"job={str(path)!r} is a named pipe, and reading it may block forever; give a job.json, or /dev/stdin"
            )
        with path.open("rb") as file:  # limited, as a sparse file can appear to hold a terabyte
            job = Job.from_json(file.read(_MOST_BYTES).decode())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise SpecError(f"job={str(path)!r} cannot be read ({reason}); give the path of a job.json") from None
    return with_code(job, path.resolve(), trust_code=trust_code)


def with_code(job: Job, path: Path, *, trust_code: bool) -> Job:
    """Return the job with the user's functions, loaded from the folder of its file; on a terminal, ask for permission.

    Args:
        job: The job as read from its file.
        path: Path of the job's file.
        trust_code: Whether to load the functions without asking; loading them runs code.

    Raises:
        UntrustedCode: The job needs user functions, and the user has not agreed to run their code.
    """
    from shardscope.runtime.record.load_job import add_code

    return if_trusted(lambda is_trusted: add_code(job, path, trust_code=is_trusted), trust_code=trust_code)


def if_trusted(load: Callable[[bool], T], *, trust_code: bool) -> T:
    """Return the result of `load`; if it requires trust in saved code, ask on a terminal whether to run the code.

    Args:
        load: Function of whether the code is trusted; raises `UntrustedCode` if the code must be trusted but is not.
        trust_code: Whether the code is trusted without asking.

    Raises:
        UntrustedCode: The user has not agreed to run the code.
    """
    try:
        return load(trust_code)
    except UntrustedCode as error:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        print(f"shardscope: {error}", file=sys.stderr)
        if input("Run this code? [y/N] ").strip().lower() not in {"y", "yes"}:
            raise
    return load(True)


def _data_for(model: str) -> str:
    """Return the name of the default data set for a model, which depends on the type of the model's input."""
    return "digits" if model_config(model).reads == "images" else "python-source"
