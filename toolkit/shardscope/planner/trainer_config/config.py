"""The settings of a trainer: text to paste, and remarks on what the user has to add."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shardscope.spec.layout import Layout


class TrainerConfig(NamedTuple):
    """Settings of a trainer as text; `str` returns the text alone."""

    trainer: str
    """The trainer, such as ``Megatron-LM``, and where the text belongs."""
    text: str
    remarks: tuple[str, ...]
    """Sentences on what the text does not contain."""
    launch: str = ""
    """Command that starts the trainer on each node, without the flags; empty if none is written."""

    @property
    def command(self) -> str:
        """The command with its flags, or the text alone if there is no command."""
        return f"{self.launch} \\\n{self.text}" if self.launch else self.text

    def __str__(self) -> str:
        return self.text


def flags(settings: Mapping[str, object]) -> str:
    """Return command-line flags, one per line; True gives a flag without a value, and False omits the flag."""
    lines = [
        f"--{name}" if value is True else f"--{name} {value}"
        for name, value in settings.items()
        if value is not False
    ]
    return " \\\n".join(lines)


def partial_recomputation(layout: Layout, why: str) -> tuple[str, ...]:
    """Return a remark on `Layout.recompute_layers` for a trainer that recomputes every layer or none.

    Args:
        layout: The layout.
        why: Subject of the clause "recomputes every layer", such as ``torchtitan``.
    """
    if not layout.recompute_layers:
        return ()
    differs = (
        f"The layout recomputes only the first {layout.recompute_layers} layers of each stage: {why} recomputes every "
        "layer, which takes longer and less memory than predicted."
    )
    return (
        differs,
        "Checkpoint these layers in the model's code, or plan with fix={'recompute_layers': 0}.",
    )
