"""The command line: `shardscope COMMAND`; `shardscope --help` lists the commands.

Exit status:
    0    done
    1    a rank failed, no trial of a study was completed, a check or comparison found a difference, or this machine
         cannot run jobs (`doctor`)
    2    the command or the job as described cannot be carried out; one line on stderr says why
    130  stopped by Ctrl-C (143 by SIGTERM); the run was stopped with it
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from shardscope._version import __version__
from shardscope.commands import (
    check,
    compare,
    demo,
    doctor,
    export,
    lab,
    plan,
    predict,
    reproduce,
    run,
    runs,
    scoreboard,
    stop,
    tune,
)
from shardscope.errors import RunFailed, ShardscopeError

COMMANDS = (
    lab, run, compare, tune, check, demo, plan, predict, scoreboard, runs, reproduce, export, stop, doctor,
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = build_parser().parse_args(argv)
    try:
        status: int = arguments.carry_out(arguments)
    except RunFailed as error:
        print(f"shardscope: {error}", file=sys.stderr)
        return 1
    except ShardscopeError as error:
        print(f"shardscope: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        sys.stderr.close()
        return 0
    return status


def build_parser() -> argparse.ArgumentParser:
    """Return the parser for all commands and options."""
    parser = argparse.ArgumentParser(
        prog="shardscope", description="A laboratory for distributed training.", epilog=_exit_statuses()
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--version", action="version", version=f"shardscope {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return parser


def _exit_statuses() -> str:
    return (__doc__ or "").partition("\n\n")[2].replace("Exit status:", "exit status:").strip()


if __name__ == "__main__":
    sys.exit(main())
