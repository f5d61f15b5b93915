"""Captions of the animation: a heading, a sentence and one line per transfer, for every round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardscope_widgets.figures._ring import PHASE_NAMES, RingInfo, Transfer
from shardscope_widgets.words import bytes_text, seconds_text

_SENTENCES = {
    "reduce_scatter": "Every rank passes one chunk on to its neighbour, which adds it to its own gradients.",
    "all_gather": "Finished sums travel around the ring; every rank keeps a copy and passes it on.",
}


def chunk_letter(chunk: int) -> str:
    """Return the letter of a chunk; a letter cannot be mistaken for a rank or a count."""
    return chr(ord("A") + chunk % 26)


def captions(info: RingInfo) -> list[dict[str, Any]]:
    """Return one caption per round, in the form that the JavaScript code reads."""
    return [_caption(info, transfers) for transfers in info.rounds]


def _caption(info: RingInfo, transfers: Sequence[Transfer]) -> dict[str, Any]:
    first = transfers[0]
    name = PHASE_NAMES[first.phase]
    of = f"round {first.round + 1} of {info.world_size - 1}"
    took = max(t.end_ms for t in transfers) - min(t.start_ms for t in transfers)
    return {
        "phase": name,
        "round": of,
        "title": f"{name[0].upper()}{name[1:]}, {of}",
        "words": f"{_SENTENCES[first.phase]} This round took {seconds_text(took / 1e3)}.",
        "transfers": [transfer_text(t) for t in transfers],
    }


def transfer_text(transfer: Transfer) -> str:
    """Describe a transfer, as in ``rank 1 sends chunk D (12.5 kB) to rank 2``."""
    way = f"rank {transfer.source} sends chunk {chunk_letter(transfer.chunk)}"
    return f"{way} ({bytes_text(transfer.num_bytes)}) to rank {transfer.target}"
