"""Pages of the reference for the commands, from the parser that the command line itself uses."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from textwrap import indent

from rst import table, title, toctree

from shardscope.cli import build_parser


def command_pages() -> Iterator[tuple[str, str]]:
    """Return file name and text of a page for each command, and of one that lists them."""
    parser = build_parser()
    (group,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    helps = {
        name: action.help or "" for name, action in zip(group.choices, group._choices_actions, strict=True)
    }
    text = title("Command line") + f"{prose(parser.description)}\n\n"
    text += table([(f":doc:`{name} <command-{name}>`", prose(about)) for name, about in helps.items()])
    text += (
        title("Exit status", "-") + ".. code-block:: text\n\n" + indent(parser.epilog or "", "   ") + "\n\n"
    )
    yield "commands.rst", text + toctree(f"command-{name}" for name in group.choices)
    for name, command in group.choices.items():
        yield f"command-{name}.rst", _page(f"shardscope {name}", command, helps[name])


def _page(name: str, parser: argparse.ArgumentParser, about: str) -> str:
    formatter = argparse.HelpFormatter(prog=f"{name} [OPTIONS]", width=1000)
    formatter.add_usage(None, parser._get_positional_actions(), [], prefix="")
    about = parser.description or f"{about[0].upper()}{about[1:]}."
    text = title(name) + f"{prose(about)}\n\n"
    text += f".. code-block:: text\n\n   {formatter.format_help().strip()}\n\n.. program:: {name}\n\n"
    for group in parser._action_groups:
        actions = [each for each in group._group_actions if not isinstance(each, argparse._HelpAction)]
        if actions:
            text += title((group.title or "").capitalize(), "-")
            text += f"{prose(group.description)}\n\n" if group.description else ""
        text += "".join(_option(action, parser._get_formatter()) for action in actions)
    return text + (f"{prose(parser.epilog)}\n" if parser.epilog else "")


def _option(action: argparse.Action, formatter: argparse.HelpFormatter) -> str:
    """Return an argument or an option, with the value that it takes and the text of the help."""
    written = action.option_strings
    default = "_get_default_metavar_for_optional" if written else "_get_default_metavar_for_positional"
    value = "" if action.nargs == 0 else formatter._format_args(action, getattr(formatter, default)(action))
    signature = ", ".join(f"{option} {value}".strip() for option in written) or value
    about = formatter._expand_help(action) if action.help else ""
    return f".. option:: {signature}\n\n   {prose(about)}\n\n"


def prose(text: str | None) -> str:
    """Return help as reStructuredText: names of options and what stands between single backquotes are code."""
    parts = re.split(r"(`[^`]+`|(?<![\w-])--[\w-]+)", " ".join((text or "").split()))
    parts[::2] = [re.sub(r"([*\\|_])", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [f"``{part.strip('`')}``" for part in parts[1::2]]
    return "".join(parts)
