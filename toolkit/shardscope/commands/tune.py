"""`shardscope tune`: tune the settings of a job in a study of real runs; print each trial, then the Pareto front."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.commands._job import add_job_options, build_job, job_flag
from shardscope.commands._json import as_json
from shardscope.commands._runs import ROOT_HELP
from shardscope.commands._signals import Terminated, sigterm_interrupts
from shardscope.commands._space import read_space
from shardscope.commands._study import as_dict, as_text
from shardscope.errors import SpecError
from shardscope.tuning.objectives import DEFAULT_OBJECTIVES, OBJECTIVES
from shardscope.tuning.progress import StudyProgress, measuring_text

if TYPE_CHECKING:
    from shardscope.spec import Job
    from shardscope.tuning.session import StudySession

_OF_A_NEW_STUDY = ("space", "objective", "batch_range", "name", "baselines")


def add_to(commands: Any) -> None:
    """Add this command to the parser's commands."""
    parser = commands.add_parser(
        "tune",
        help="tune the settings of a job in a study of real runs",
        description="Tune the settings of a job; every trial is a real run.\n"
        "Ctrl-C stops the study without losing anything; --resume NAME resumes it.",
        epilog=_objectives_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_job_options(parser)
    _add_study_options(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON and no progress")
    parser.set_defaults(carry_out=carry_out)


def _objectives_text() -> str:
    """Return descriptions of all objectives, one per line."""
    rows = [f"    {name:9} {about}" for name, about in OBJECTIVES.items()]
    return "\n".join(["objectives, all measured, lower is better:", *rows])


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
    parser.add_argument("--storage", help="URL of an Optuna storage (default: a journal beside the runs)")
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
    parser.add_argument("--root", type=Path, metavar="FOLDER", help=ROOT_HELP)
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
    """Print the results; return 1 if trials have ended but none was completed."""
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
