"""`shardscope tune`: tune the settings of a job in a study of real runs; print each trial, then the Pareto front."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardscope.commands._job import add_job_options, build_job, job_flag
from shardscope.commands._options import add_root
from shardscope.commands._output import aligned, as_json
from shardscope.commands._signals import Terminated, sigterm_interrupts
from shardscope.errors import SpecError
from shardscope.foreign_file import parsed_json
from shardscope.tuning.objectives import DEFAULT_OBJECTIVES, OBJECTIVES
from shardscope.tuning.progress import StudyProgress, measuring_text, settings_text, value_text

if TYPE_CHECKING:
    from shardscope.spec import Job
    from shardscope.tuning.records import TrialRecord
    from shardscope.tuning.session import StudySession

_OF_A_NEW_STUDY = ("space", "objective", "batch_range", "name", "baselines")


def _objectives_text() -> str:
    """Return descriptions of all objectives, one per line."""
    rows = [f"    {name:9} {about}" for name, about in OBJECTIVES.items()]
    return "\n".join(["objectives, all measured, lower is better:", *rows])


HELP = "tune the settings of a job in a study of real runs"
ABOUT = (
    "Tune the settings of a job; every trial is a real run.\n"
    "Ctrl-C stops the study without losing anything; --resume NAME resumes it."
)
PARSER = {"epilog": _objectives_text(), "formatter_class": argparse.RawDescriptionHelpFormatter}
JSON = "print the result as JSON and no progress"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_job_options(parser)
    _add_study_options(parser)


def _add_study_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--space", action="append", metavar="NAME=RANGE",
        help="a setting to search: optimizer.lr=1e-4:1e-1:log for an interval, optimizer=adamw,lamb for choices, "
        "batch=32:256 for powers of two, 'compression[topk].ratio=0.01:0.1' for a setting of one choice; can be "
        "repeated (default: a search space that suits the job)",
    )  # fmt: skip
    parser.add_argument("--trials", type=int, help="total number of trials of the study (default: 40)")
    parser.add_argument(
        "--objective", action="append", metavar="NAME",
        help=f"objective to minimise, listed below; can be repeated (default: {', '.join(DEFAULT_OBJECTIVES)})",
    )  # fmt: skip
    parser.add_argument("--name", help="name of the study (default: model and strategy)")
    parser.add_argument(
        "--storage", help="URL of an Optuna storage (default: a journal file next to the runs)"
    )
    parser.add_argument("--sampler", default="auto", help="auto, tpe, gp, qmc, nsga, cma-es, random")
    parser.add_argument(
        "--pruner",
        help="dominance, none; for one objective also median, hyperband, ... (default: depends on the objectives)",
    )
    parser.add_argument(
        "--promote",
        type=int,
        metavar="N",
        help="train all trials for a few steps, then continue only the best 1 in N from their checkpoints",
    )
    parser.add_argument(
        "--parallel", type=int, default=1, help="number of trials to run at the same time (default: 1)"
    )
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="time limit; --resume resumes the study"
    )
    parser.add_argument(
        "--batch-range", choices=("noise", "job"),
        help="without --space: centre the searched batch sizes on the measured gradient noise scale (noise) or on the "
        "job's batch (job) (default: noise)",
    )  # fmt: skip
    parser.add_argument(
        "--baselines", action=argparse.BooleanOptionalAction, default=None,
        help="run the unchanged job, AdamW and SGD with Nesterov momentum at their usual learning rates, and settings "
        "from the literature before sampled ones (default: yes)",
    )  # fmt: skip
    add_root(parser)
    known = parser.add_mutually_exclusive_group()
    known.add_argument(
        "--resume",
        metavar="NAME",
        help="resume the study with this name, with the arguments it was created with",
    )
    known.add_argument("--report", metavar="NAME", help="only print the results of the study with this name")


def carry_out(arguments: argparse.Namespace) -> int:
    """Open the study, run its trials, and print the Pareto front."""
    name = arguments.resume or arguments.report
    if name is not None:
        _check_nothing_new(arguments)
    job = build_job(arguments) if name is None else None  # reports errors before the slow imports
    space = read_space(arguments.space or ())
    given = {
        "trials": arguments.trials, "objectives": arguments.objective, "name": name or arguments.name,
        "storage": arguments.storage, "sampler": arguments.sampler, "pruner": arguments.pruner,
        "promote": arguments.promote, "parallel": arguments.parallel, "root": arguments.root,
        "seed": arguments.seed or 0, "batch_range": arguments.batch_range or "noise",
        "baselines": arguments.baselines is not False,
    }  # fmt: skip

    from shardscope.tuning.session import StudySession
    from shardscope.tuning.tune import set_after

    session, began = None, time.monotonic()
    on_probe = None if arguments.json else _say_measuring
    try:
        with sigterm_interrupts():
            with set_after(arguments.timeout) as stopping:
                session = StudySession.open(job, space, stopping=stopping, on_probe=on_probe, **given)
            if arguments.report is None:
                _run(session, arguments, began)
    except KeyboardInterrupt as interrupt:
        print(f"\nstopped; nothing is lost. Resume with: {_again(session, arguments)}", file=sys.stderr)
        return 143 if isinstance(interrupt, Terminated) else 130
    return _tell(session, arguments)


def _say_measuring(probe: Job) -> None:
    print(measuring_text(probe), file=sys.stderr)


def _run(session: StudySession, arguments: argparse.Namespace, began: float) -> None:
    left_s = None if arguments.timeout is None else arguments.timeout - (time.monotonic() - began)
    with StudyProgress(session, quiet=arguments.json) as progress:
        session.run(timeout_s=left_s, on_tick=lambda _: progress.draw())


def _tell(session: StudySession, arguments: argparse.Namespace) -> int:
    """Print the results; return 1 if trials have ended but none has completed."""
    from shardscope.tuning.records import NOT_BEGUN

    records = session.records()
    print(as_json(as_dict(session, records)) if arguments.json else as_text(session, records))
    counted = [record for record in records if record.counted and record.state not in (*NOT_BEGUN, "running")]
    if arguments.report is None and len(counted) < session.driver.trials:
        print(
            f"stopped after {arguments.timeout:g} s; resume with: {_again(session, arguments)}",
            file=sys.stderr,
        )
    if counted and not any(record.values for record in records):
        print(
            f"shardscope: no trial was completed; the last one ended because {counted[-1].reason}",
            file=sys.stderr,
        )
        return 1
    return 0


def _again(session: StudySession | None, arguments: argparse.Namespace) -> str:
    """Return the command that resumes the study, including its options ``--storage`` and ``--root``."""
    if session is None:
        return "the same command; no trial had started"
    parts = ["shardscope", "tune", "--resume", session.study.study_name]
    if arguments.storage is not None:
        parts += ["--storage", session.where]
    if arguments.root is not None:
        parts += ["--root", str(arguments.root)]
    return shlex.join(parts)


def _check_nothing_new(arguments: argparse.Namespace) -> None:
    """Reject options that apply only to a new study, because ``--resume`` or ``--report`` names an existing one.

    Raises:
        SpecError: Such an option was given.
    """
    scratch = argparse.ArgumentParser()
    add_job_options(scratch)
    default = scratch.parse_args([])
    fixed = (*(name for name in vars(default) if name not in ("seed", "trust_code")), *_OF_A_NEW_STUDY)
    given = [name for name in fixed if getattr(arguments, name) != getattr(default, name, None)]
    if given:
        option = job_flag(given[0])
        raise SpecError(
            f"{option} applies only to a new study, but --{'resume' if arguments.resume else 'report'} names an "
            f"existing one; leave {option} out, or create another study"
        )


def read_space(options: Sequence[str]) -> dict[str, Any] | None:
    """Parse the ``--space`` options into parameters of a `Space`; return None if none are given.

    Raises:
        SpecError: A value does not have the form NAME=RANGE, or a name is given twice.

    Example:
        >>> read_space(["optimizer=adamw,lamb", "optimizer.lr=1e-4:1e-1:log"])
        {'optimizer': ['adamw', 'lamb'], 'optimizer.lr': (0.0001, 0.1, 'log')}
    """
    space: dict[str, Any] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not (name and equals and text):
            raise SpecError(
                f"--space {option!r} is not NAME=RANGE; write for example optimizer.lr=1e-4:1e-1:log or "
                "optimizer=adamw,lamb"
            )
        if name in space:
            raise SpecError(f"--space names {name!r} twice; name it once")
        space[name] = _parameter(name, text, option)
    return space or None


def _parameter(name: str, text: str, option: str) -> Any:
    """Parse a range into an interval if it contains a colon, else into a list of choices.

    Strategies are always parsed as choices, because their names may contain colons.
    """
    if ":" not in text or name == "strategy":
        values = [_value(part) for part in text.split(",")]
        if len(values) < 2:
            raise SpecError(
                f"--space {option!r} has only one choice; write {name}=LOW:HIGH, or several choices separated by commas"
            )
        return values
    low, high, *log = text.split(":")
    ends = [_value(low), _value(high)]
    if log not in ([], ["log"]) or not all(isinstance(end, int | float) for end in ends):
        raise SpecError(
            f"--space {option!r} is not a valid interval; write {name}=LOW:HIGH or {name}=LOW:HIGH:log"
        )
    if name != "batch":
        return (*ends, *log)

    from shardscope.spec.space import PowersOfTwo

    return PowersOfTwo(low=ends[0], high=ends[1])


def _value(text: str) -> Any:
    """Parse a JSON value, or return the text itself."""
    try:
        return parsed_json(text)
    except ValueError:
        return text


def as_text(session: StudySession, records: Sequence[TrialRecord]) -> str:
    """Return the Pareto front as a table, the report, and where the study is stored."""
    report = session.report()
    names, front = session.definition.objectives, report.front
    rows = [
        [str(one.number), *(value_text(n, (one.values or {})[n]) for n in names), settings_text(one.params)]
        for one in front
    ]
    parts = [aligned(["trial", *names, "settings"], rows)] if rows else []
    if records:
        parts.append(str(report))
    parts.append(
        f"The study is stored in {session.where}\nOpen it in Optuna Dashboard: {session.dashboard_command()}"
    )
    return "\n\n".join(parts)


def as_dict(session: StudySession, records: Sequence[TrialRecord]) -> dict[str, Any]:
    """Return the study, its Pareto front and its trials as a JSON object."""
    report = session.report()
    front = {record.number for record in report.front}
    return {
        "study": report.name, "where": session.where, "dashboard": session.dashboard_command(),
        "trials_wanted": session.driver.trials, "objectives": list(session.definition.objectives),
        "states": dict(report.states), "samplers": dict(report.samplers), "batches": report.batches,
        "verdict": report.verdict, "front": sorted(front), "front_by_noise": list(report.by_noise),
        "trials": [
            {
                "number": record.number, "state": record.state, "counted": record.counted,
                "params": dict(record.params), "values": dict(record.values or {}), "reason": record.reason,
                "alarms": list(record.alarms), "origin": record.origin, "sampler": record.sampler, "run": record.run,
            }
            for record in records
        ],
    }  # fmt: skip
