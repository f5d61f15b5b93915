"""The command line: `shardscope COMMAND`; `shardscope --help` lists the commands.

Exit status:
    0    success
    1    a rank failed, no trial of a study was completed, a check or comparison found a difference, or this machine
         cannot run jobs (`doctor`)
    2    the command cannot run, for example because its job is invalid; a line on stderr gives the reason
    130  interrupted by Ctrl-C (143: by SIGTERM); the run was stopped as well
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from shardscope._version import __version__
from shardscope.commands import (
    accuracy,
    cache,
    calibrate,
    check,
    compare,
    demo,
    doctor,
    export,
    lab,
    logs,
    plan,
    predict,
    report,
    reproduce,
    resize,
    run,
    runs,
    scoreboard,
    show,
    simulate,
    stop,
    tune,
)
from shardscope.commands._output import coloured
from shardscope.commands._parser import Parser
from shardscope.errors import RunFailed, ShardscopeError

COMMANDS = (
    lab, demo, run, check, compare, reproduce, stop, resize, runs, show, logs, report, export, tune, predict, simulate,
    plan, scoreboard, calibrate, accuracy, doctor, cache,
)  # fmt: skip
"""All commands, in the order of the help: first steps, one run, all runs, tuning, large models, this machine."""
_ABOUT = "Describe a training job; predict its traffic, memory and time, run it on real processes, and compare the two."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = build_parser().parse_args(argv)
    try:
        status: int = arguments.carry_out(arguments)
    except RunFailed as error:
        _complain(error)
        return 1
    except ShardscopeError as error:
        _complain(error)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        sys.stderr.close()
        return 0
    return status


def _complain(error: Exception) -> None:
    print(f"{coloured('shardscope:', 'red', sys.stderr)} {error}", file=sys.stderr)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser for all commands and options."""
    parser = Parser(prog="shardscope", description=_ABOUT, epilog=_exit_statuses())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--version", action="version", version=f"shardscope {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        _add_command(commands, command)
    return parser


def _add_command(commands: Any, command: Any) -> None:
    """Add the subparser of a command module; the module's ``JSON``, if any, is the help text of ``--json``."""
    parser = commands.add_parser(
        command.__name__.rpartition(".")[2],
        help=command.HELP,
        **({"description": command.ABOUT} if hasattr(command, "ABOUT") else {}),
        **getattr(command, "PARSER", {}),
    )
    if hasattr(command, "add_options"):
        command.add_options(parser)
    if hasattr(command, "JSON"):
        parser.add_argument("--json", action="store_true", help=command.JSON)
    parser.set_defaults(carry_out=command.carry_out)


def _exit_statuses() -> str:
    return (__doc__ or "").partition("\n\n")[2].replace("Exit status:", "exit status:").strip()


if __name__ == "__main__":
    sys.exit(main())
