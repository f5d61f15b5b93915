"""What a study can minimise: the names, what each means, in which unit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from shardscope.errors import SpecError, unknown_name

OBJECTIVES: Mapping[str, str] = {
    "loss": "loss on held-back data at the end of the run, in the loss's own unit (cross-entropy: nats)",
    "error": "share of wrong answers on held-back data at the end, from 0 to 1; accuracy is 1 minus it",
    "seconds": "seconds of training: the median step of the slowest rank, its first ones left out, times the steps",
    "bytes": "bytes that all ranks together sent over the whole run",
    "memory": "most bytes that a rank held at a time, of the rank that held most",
}
"""What can be minimised, by measurement, all of it: the less the better."""
QUALITIES = ("loss", "error")
DEFAULT_OBJECTIVES = ("loss", "seconds", "bytes")


def check_objectives(names: Sequence[str], own: Collection[str] = ()) -> None:
    """Refuse names that nothing measures, and sets of them by which nothing can be chosen.

    Args:
        names: Of the objectives.
        own: Those that are functions of the user's.

    Raises:
        SpecError: One is unknown or given twice, or none says anything of quality.
    """
    for name in names:
        if name not in OBJECTIVES and name not in own:
            raise unknown_name("objective", name, OBJECTIVES)
    if len(set(names)) < len(names):
        raise SpecError(f"objectives={list(names)} name one twice; name each once")
    if not set(names) & {*QUALITIES, *own}:
        raise SpecError(
            f"objectives={list(names)} say nothing of quality, which the fewest steps would then win; add 'loss' or "
            "'error'"
        )
