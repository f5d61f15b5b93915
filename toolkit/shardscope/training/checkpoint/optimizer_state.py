"""Optimizer state in checkpoints: every entry is restored with its type and dtype, bitwise identical.

A tensor with the shape of its parameter is stored like the parameter: whole, or as the ranks' pieces, from which any
number of ranks can resume. All other entries are stored unchanged. If such an entry differs between ranks, every rank
stores its own under ``own.RANK.``, and only ranks that hold the same pieces can resume from it. Loading creates the
entries that the checkpoint has.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardscope.errors import CheckpointError
from shardscope.training.checkpoint.agreement import gather_items
from shardscope.training.checkpoint.optimizer_trees import (
    ENTRIES,
    Packing,
    entry_text,
    put_together,
    tensors_of,
)
from shardscope.training.checkpoint.values import encode
from shardscope.training.context import RankContext
from shardscope.training.optim.holding import Holding, SavedCheckpoint, bytes_of, digest_of
from shardscope.training.optim.state import STEP, NamedOptimizer, Sections, tensors_in

_OWN, _LAYOUT = "own.", "layout"
Place = tuple[str, Any]
"""Section and key of an entry."""


def state_to_save(
    named: NamedOptimizer | None, context: RankContext | None, holding: Holding
) -> dict[str, Any]:
    """Return an optimizer's state for a checkpoint.

    Args:
        named: The optimizer; None on a rank without one.
        context: Context of the ranks that save one common state, all of which call this; None if each saves its own.
        holding: How the ranks hold the parameters.
    """
    sections = {} if named is None else named.sections()
    held = {} if named is None else _parameters(named)
    if holding.is_split:
        assert context is not None
        sections = _with_those_of_empty_pieces(sections, held, context)
    whole = _of_whole_shape(sections, held)
    if holding.is_split:
        assert context is not None
        whole = {place for place in whole if _is_laid_out(sections[place[0]][place[1]], held[place[0]])}
        whole = _on_all_ranks(whole, sections, context, held)
    rest = [
        (section, key)
        for section, entries in sections.items()
        for key in entries
        if (section, key) not in whole
    ]
    own = (
        set[Place]()
        if context is None
        else _differing(rest, sections, context, held if holding.is_split else None)
    )
    packing = Packing()
    joined = _joined(whole, sections, holding)
    for section, entries in sections.items():
        shared = {k: joined.get((section, k), v) for k, v in entries.items() if (section, k) not in own}
        if shared:
            packing.add(
                section, shared, {k for k in shared if (section, k) in joined}, _parameter(section, held)
            )
    if context is not None and own:
        apart = Packing(f"{_OWN}{context.rank}.")
        for section, entries in sections.items():
            mine = {k: v for k, v in entries.items() if (section, k) in own}
            if mine:
                apart.add(section, mine, (), _parameter(section, held))
        packing.flat |= {**apart.flat, f"{apart.within}{_LAYOUT}": holding.layout}
    return packing.flat


def _parameters(named: NamedOptimizer) -> dict[str, Tensor]:
    """Return the parameters by the name of the section that has their entries."""
    return {f"{one.within}state.{name}": p for one in named.inner() for name, p in one.parameters.items()}


def _parameter(section: str, held: Mapping[str, Tensor]) -> Tensor:
    return held.get(section, next(iter(held.values())))


def _of_whole_shape(sections: Sections, held: Mapping[str, Tensor]) -> set[Place]:
    """Return the entries with the shape of the rank's piece of their parameter.

    If the piece has a single element, a scalar entry may have its shape too; larger pieces then decide for this key.
    """
    same: dict[tuple[str, Any], list[bool]] = {}
    pairs = [
        (section, key, value, held[section])
        for section, entries in sections.items()
        if section in held
        for key, value in entries.items()
        if isinstance(value, Tensor) and value.layout == torch.strided
    ]
    for section, key, value, piece in pairs:
        if piece.numel() != 1:
            same.setdefault((section.partition("state.")[0], key), []).append(value.shape == piece.shape)
    return {
        (section, key)
        for section, key, value, piece in pairs
        if value.shape == piece.shape
        and (piece.numel() != 1 or all(same.get((section.partition("state.")[0], key), [key != STEP])))
    }


def _with_those_of_empty_pieces(
    sections: Sections, held: Mapping[str, Tensor], context: RankContext
) -> Sections:
    """Add entries for empty pieces, which the optimizer has skipped, modelled on those of the first rank that has them.

    Otherwise, the entries would differ between ranks, and no other number of ranks could resume from them.
    """
    lacking = {section for section, piece in held.items() if not piece.numel() and section not in sections}
    asked = set[str]().union(*gather_items(context, lacking))
    if not asked:
        return sections
    whole = _of_whole_shape(sections, held)
    mine = {
        section: {
            key: value.dtype if (section, key) in whole else value
            for key, value in sections[section].items()
            if (section, key) in whole or all(tensor.numel() < 2 for tensor in tensors_in(value))
        }
        for section in asked & sections.keys()
    }
    offered: Sections = {}
    for each in gather_items(context, mine):
        offered = each | offered
    return sections | {
        section: {
            key: torch.empty_like(held[section], dtype=value) if isinstance(value, torch.dtype) else value
            for key, value in offered[section].items()
        }
        for section in lacking & offered.keys()
    }


def _is_laid_out(value: Tensor, piece: Tensor) -> bool:
    """Return whether a tensor has the memory layout of the piece, which is its layout after loading."""
    is_usual = value.is_contiguous() and piece.is_contiguous()
    return is_usual or value.numel() < 2 or value.stride() == torch.empty_like(piece).stride()


def _on_all_ranks(
    whole: set[Place], sections: Sections, context: RankContext, held: Mapping[str, Tensor]
) -> set[Place]:
    """Return the entries that have the shape of the piece, and the same dtype, on all ranks that hold the parameter."""
    mine = {place: str(sections[place[0]][place[1]].dtype) for place in whole}
    if len({*gather_items(context, digest_of(sorted((s, repr(k), d) for (s, k), d in mine.items())))}) == 1:
        return whole
    every = gather_items(context, (mine, {*held}))
    return {
        place
        for place in whole
        if all(each.get(place) == mine[place] for each, theirs in every if place[0] in theirs)
    }


def _differing(
    rest: list[Place], sections: Sections, context: RankContext, pieces: Mapping[str, Tensor] | None
) -> set[Place]:
    """Return the entries that each rank saves on its own.

    If parameters are sharded, these include tensors whose shape is not that of the parameter's shard, because their
    contents may depend on how it was sharded.

    Args:
        rest: The entries.
        sections: The optimizer's sections.
        context: Context of the ranks that save one common state.
        pieces: This rank's pieces of the parameters by section; None if parameters are not sharded.
    """
    values = {place: sections[place[0]][place[1]] for place in rest}
    mine = {place: digest_of(encode(entry_text(*place), digested(value))) for place, value in values.items()}
    shaped = {
        place
        for place, value in values.items()
        if pieces is not None
        and "state." in place[0]
        and any(tensor.numel() > 1 for tensor in tensors_in(value))
    }
    if len({*gather_items(context, digest_of(sorted((s, repr(k), d) for (s, k), d in mine.items())))}) == 1:
        return shaped
    every = gather_items(context, (mine, pieces and {*pieces}))
    return shaped | {
        place
        for place, digest in mine.items()
        if any(
            each.get(place, digest if theirs is None else None) != digest
            for each, theirs in every
            if theirs is None or _is_of(place[0], theirs)
        )
    }


def digested(value: Any) -> Any:
    """Return a value with its tensors, which may be large, replaced by digests of their bytes."""
    if isinstance(value, dict):
        return {key: digested(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(digested, value))
    if isinstance(value, deque):
        return deque(map(digested, value), value.maxlen)
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized:
        return value
    digest = hashlib.blake2b(bytes_of(value).numpy().data, digest_size=16).hexdigest()
    return ["tensor", str(value.dtype), list(value.shape), digest]


def _joined(whole: set[Place], sections: Sections, holding: Holding) -> dict[Place, Tensor]:
    """Return the unsharded tensors of the entries `whole`; all ranks gather them in the same order."""
    found: dict[Place, Tensor] = {}
    kinds: dict[tuple[str, Any], dict[str, Tensor]] = {}
    for section, entries in sections.items():
        for key, value in entries.items():
            if (section, key) in whole:
                prefix, _, name = section.partition("state.")
                kinds.setdefault((prefix, key), {})[name] = value
    for (prefix, key), parts in sorted(kinds.items(), key=_text_of_key):
        found |= {(f"{prefix}state.{name}", key): tensor for name, tensor in holding.join(parts).items()}
    return found


def _text_of_key(item: tuple[Any, Any]) -> str:
    """Return a text by which to sort the items of a dictionary with keys of any type."""
    return repr(item[0])


def state_to_fill(
    named: NamedOptimizer | None, reader: SavedCheckpoint, holding: Holding, *, within: str, rank: int
) -> dict[str, Any]:
    """Return empty tensors and trees for the part of a checkpoint that belongs to this optimizer.

    Args:
        named: The optimizer; None on a rank without one.
        reader: The checkpoint.
        holding: How the ranks hold the parameters.
        within: Prefix of the optimizer's keys in the checkpoint.
        rank: This rank.

    Raises:
        CheckpointError: An entry of the checkpoint cannot be divided into the pieces that this rank holds.
    """
    if named is None:
        return {}
    saved = {key.removeprefix(within) for key in reader.keys if key.startswith(within)}
    own, held = f"{_OWN}{rank}.", _parameters(named)
    _require_layout(saved, reader, within, own, holding)
    trees = [key for prefix in ("", own) for key in saved if key.startswith(f"{prefix}{ENTRIES}")]
    filled: dict[str, Any] = {
        key: reader.fill({f"{within}{key}": None})[f"{within}{key}"]
        for key in trees
        if _is_of(key.partition(ENTRIES)[2], held)
    }
    template = _Templates(reader, holding, within, held)
    for key, tree in list(filled.items()):
        prefix, _, section = key.partition(ENTRIES)
        if holding.is_split and not prefix:
            template.require_divisible(section, tree)
        for at, is_whole in tensors_of(tree):
            filled[f"{prefix}{at}"] = template.of(section, f"{prefix}{at}", is_whole=is_whole)
    for key in saved:
        section, _, name = key.rpartition(".")
        if (
            section in held
            and f"{ENTRIES}{section}" not in saved
            and reader.described(within + key) is not None
        ):
            is_whole = name != STEP and template.has_whole_shape(section, key)
            filled[key] = template.of(section, key, is_whole=is_whole)
    return filled


def _is_of(section: str, held: Collection[str]) -> bool:
    """Return whether a section belongs to this optimizer, and not to a parameter that the optimizer does not have."""
    return section.replace("group.", "state.", 1) in held or not {"state.", "group."} & {
        section.rpartition(":")[2][:6]
    }


def _require_layout(
    saved: set[str], reader: SavedCheckpoint, within: str, own: str, holding: Holding
) -> None:
    others = sorted(key for key in saved if key.startswith(_OWN) and ENTRIES in key)
    if not others:
        return
    at = f"{own}{_LAYOUT}"
    layout = reader.fill({within + at: None})[within + at] if at in saved else None
    if layout != holding.layout:
        tree = reader.fill({within + others[0]: None})[within + others[0]]
        section, key = others[0].partition(ENTRIES)[2], tree[1][0][0]
        raise CheckpointError(
            f"{entry_text(section, key)} differs between the ranks that saved it and cannot be divided among other "
            "ranks; resume with the strategy and the world size that saved it"
        )


@dataclass(frozen=True)
class _Templates:
    """Makes empty tensors for the tensors of a checkpoint."""

    reader: SavedCheckpoint
    holding: Holding
    within: str
    held: Mapping[str, Tensor]

    def of(self, section: str, key: str, *, is_whole: bool) -> Tensor:
        shape, dtype = self._described(key)
        if not is_whole:
            return torch.empty(shape, dtype=dtype)
        parameter = self.held[section]
        model = self.within.removesuffix("optimizer.") + "model."
        name = section.partition("state.")[2]
        weights = self.reader.described(f"{model}{name}")
        if weights is not None and weights[1] == dtype:  # a job with another precision resumes from it
            dtype = parameter.dtype
        return self.holding.whole(name, parameter, dtype)

    def has_whole_shape(self, section: str, key: str) -> bool:
        return self._described(key)[0] == self._whole_shape(section)

    def require_divisible(self, section: str, tree: list[Any]) -> None:
        """Raise `CheckpointError` if a tensor's shape differs from its parameter's, so that it cannot be sharded."""
        if section not in self.held:
            return
        for key, node in tree[1]:
            for at, is_whole in tensors_of(node):
                shape = self._described(at)[0]
                if not is_whole and torch.Size(shape).numel() > 1:
                    raise CheckpointError(
                        f"{entry_text(section, key)} has shape {shape}instead of the parameter's, so ranks that hold "
                        "pieces of the parameters cannot resume from it; resume with the strategy that saved it"
                    )

    def _described(self, key: str) -> tuple[tuple[int, ...], torch.dtype]:
        found = self.reader.described(self.within + key)
        if found is None:
            raise KeyError(self.within + key)
        return found

    def _whole_shape(self, section: str) -> tuple[int, ...]:
        return self.holding.shape(section.partition("state.")[2], self.held[section])


def load_state(named: NamedOptimizer, flat: Mapping[str, Any], holding: Holding, *, rank: int) -> None:
    """Load optimizer state that `state_to_fill` returned, filled from a checkpoint."""
    held, sections = _parameters(named), dict[str, dict[Any, Any]]()
    for prefix in ("", f"{_OWN}{rank}."):
        for key, tree in flat.items():
            if key.startswith(f"{prefix}{ENTRIES}"):
                section = key.removeprefix(f"{prefix}{ENTRIES}")
                take = _taker(flat, prefix, section, held, holding)
                sections.setdefault(section, {}).update(put_together(tree, take))
    trees = {key.removeprefix(ENTRIES) for key in flat if key.startswith(ENTRIES)}
    groups = {
        id(p): group for one in named.inner() for group in one.optimizer.param_groups for p in group["params"]
    }
    for key, tensor in flat.items():
        section, _, name = key.rpartition(".")
        if section in held and section not in trees and isinstance(tensor, Tensor):
            parameter = held[section]
            is_whole = name != STEP and tuple(tensor.shape) == holding.shape(
                section.partition("state.")[2], parameter
            )
            group = groups[id(parameter)]
            is_elsewhere = (
                not is_whole and name == STEP and not (group.get("fused") or group.get("capturable"))
            )
            taken = _taker(flat, "", section, held, holding)(key, is_whole, is_elsewhere)
            sections.setdefault(section, {})[name] = taken
    named.load(sections)


def _taker(
    flat: Mapping[str, Any], prefix: str, section: str, held: Mapping[str, Tensor], holding: Holding
) -> Callable[..., Tensor]:
    parameter = _parameter(section, held)

    def take(at: str, is_whole: bool, is_elsewhere: bool, strides: list[int] | None = None) -> Tensor:
        tensor: Tensor = flat[f"{prefix}{at}"]
        if strides is not None and not (is_whole and holding.is_split):
            tensor = torch.empty_strided(
                tensor.shape, strides, dtype=tensor.dtype, device=tensor.device
            ).copy_(tensor)
        if is_whole:
            tensor = holding.part(section.partition("state.")[2], tensor)
            return tensor.cpu() if is_elsewhere else tensor
        return tensor if is_elsewhere else tensor.to(parameter.device)

    return take
