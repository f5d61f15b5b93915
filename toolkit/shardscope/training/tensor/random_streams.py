"""Random numbers of the ranks of a tensor group: the same outside divided layers, each rank's own within them.

Outside, all ranks compute the same tensors, so dropout must draw the same mask on all of them. Between a layer of
columns and one of rows, each rank has other heads or units, which must get other masks; so must parts of sequences.
Megatron-LM keeps a second generator for this. Here torch's own generator gets another seed at both borders. The seed
itself encodes whether it is shared and which seed follows, so there is no state to save: a recomputed forward pass, for
which torch restores the generator, draws the same masks again wherever it begins.
"""

from __future__ import annotations

import hashlib

import torch

_TAG = 0x5AD
"""Value of the first bits of a seed from this module."""
_RANK_BITS, _WORD_BITS = 16, 32
_WORD = (1 << _WORD_BITS) - 1


def use_rank_stream(rank: int, device: torch.device) -> None:
    """Draw this rank's own random numbers from here on, unless it does so already; seeded by a shared number."""
    generator = _generator(device)
    if _rank_of(generator.initial_seed()) == 0:
        generator.manual_seed(_seed(_word(generator), rank + 1))


def use_shared_stream(device: torch.device) -> None:
    """Draw the random numbers that all ranks share from here on, if this rank has drawn its own."""
    generator = _generator(device)
    seed = generator.initial_seed()
    if rank := _rank_of(seed):
        generator.manual_seed(_seed(seed & _WORD ^ _mixed(rank), 0))


def _generator(device: torch.device) -> torch.Generator:
    """Return the generator from which dropout draws on a device."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[
        torch.cuda.current_device() if device.index is None else device.index
    ]


def _seed(word: int, rank: int) -> int:
    """Return a seed with a random word for a rank, counted from 1, or for all ranks if it is 0.

    The CPU's generator uses only the last 32 bits, so the rank changes them too.
    """
    return _TAG << (_RANK_BITS + _WORD_BITS) | rank << _WORD_BITS | (word ^ _mixed(rank))


def _rank_of(seed: int) -> int:
    """Return the rank in a seed of this module, counted from 1; 0 in any other seed."""
    is_own = seed >> (_RANK_BITS + _WORD_BITS) == _TAG
    return seed >> _WORD_BITS & ((1 << _RANK_BITS) - 1) if is_own else 0


def _mixed(rank: int) -> int:
    """Return 32 bits that differ between ranks; 0 for rank 0."""
    return rank * 0x9E3779B1 & _WORD  # odd, so no two ranks have the same


def _word(generator: torch.Generator) -> int:
    """Return 32 random bits from a generator, the same on all ranks; a GPU's does not have to be waited for."""
    if generator.device.type == "cuda":
        state = f"{generator.initial_seed()} {generator.get_offset()}"
        return int.from_bytes(hashlib.blake2b(state.encode(), digest_size=4).digest(), "little")
    return int(torch.randint(1 << _WORD_BITS, (), generator=generator, device="cpu"))
