"""PowerSGD with a separate rank for each layer, as low as an error bound allows.

Every few steps each matrix is approximated at the largest rank R, and the error is measured. The error of using
the best r of R directions has two terms: the approximation's singular values beyond the first r, which follow from the
right factor, and the part that all R directions miss. To estimate the latter, images of a few random directions are
sent with the left factors: the squared norm of their part outside the span of P is an unbiased estimate (Halko,
Martinsson and Tropp 2011, section 4.3). Both terms depend only on sums over all ranks, so all ranks choose the same
rank without further messages.

A matrix whose factors of rank R would not be smaller is sent uncompressed in such a step, and its singular values are
computed directly. With error feedback, the gradient plus its residual is approximated, so the bound also limits the
residual.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardscope.methods.compressors.adaptive_rank import PROBES
from shardscope.methods.compressors.powersgd._torch import FactoredTensor, PowerSgdCompressor, pays

_RANK = "rank."


class AdaptiveRankCompressor(PowerSgdCompressor):
    """Compressor that exchanges low-rank factors with the lowest rank that an error bound allows.

    Args:
        rank: Largest rank.
        error: Largest error norm of a matrix's approximation, relative to the matrix's norm.
        update_every: Number of steps between two measurements; the first is made in the first compressed step.
        feedback: Add this rank's compression error of a step to its next gradient.
        seed: The job's seed.
        warmup_steps: Steps at the start whose gradients are sent uncompressed.
    """

    name = "adaptive-rank"

    def __init__(
        self, rank: int, error: float, update_every: int, *, feedback: bool, seed: int, warmup_steps: int = 0
    ) -> None:
        super().__init__(rank, feedback=feedback, seed=seed, warmup_steps=warmup_steps)
        self.error, self.update_every = error, update_every
        self._ranks: dict[str, int] = {}

    def part_of(self, name: str, values: Tensor, out: Tensor, step: int) -> FactoredTensor:
        if not pays(1, *values.shape):
            return FactoredTensor(name, values, out, 0)
        looks = self._looks_at(name, step)
        rank = self.rank if looks else min(self._ranks[name], self.rank)  # a checkpoint's may be larger
        return FactoredTensor(
            name, values, out, rank if pays(rank, *values.shape) else 0, PROBES if looks else 0
        )

    def _looks_at(self, name: str, step: int) -> bool:
        return name not in self._ranks or (step - 1) % self.update_every == 0

    def learn(self, parts: list[FactoredTensor], left: list[Tensor], right: list[Tensor], step: int) -> None:
        factors = iter(zip(left, right, strict=True))
        turned: dict[str, Tensor] = {}
        for part in parts:
            pair = next(factors) if part.rank else None
            if part.probes:
                turned[part.name] = self._look(part) if pair is None else self._look_at_factors(part, *pair)
        self._keep(turned, step)

    def _look_at_factors(self, part: FactoredTensor, p: Tensor, q: Tensor) -> Tensor:
        """Choose the rank, and return the right factor, rotated so that its best directions come first."""
        span, images = p[: part.rank].double(), p[part.rank :].double()
        missed = images - (images @ span.T) @ span
        columns = part.values.shape[1]  # probes have a mean squared norm of 1, not 1 per element
        tail = float(missed.square().sum()) * columns / part.probes
        squares, turn = _principal(q.double() @ q.double().T)
        self._ranks[part.name] = least_rank(squares, tail, self.error)
        return (turn @ q.double()).float()

    def _look(self, part: FactoredTensor) -> Tensor:
        """Choose the rank for a matrix that was sent uncompressed, and return its best directions as right factor."""
        matrix = part.out.double()
        is_wide = matrix.shape[0] <= matrix.shape[1]
        squares, turn = _principal(matrix @ matrix.T if is_wide else matrix.T @ matrix)
        self._ranks[part.name] = min(least_rank(squares, 0.0, self.error), self.rank)
        return (turn @ matrix if is_wide else turn)[: self.rank].float()

    @property
    def plan(self) -> dict[str, int]:
        return dict(self._ranks)

    @property
    def figures(self) -> dict[str, float]:
        ranks = {f"{_RANK}{name}": float(rank) for name, rank in self._ranks.items()}
        mean = {"rank": sum(ranks.values()) / len(ranks)} if ranks else {}
        return {**super().figures, **mean, **ranks}

    def state_dict(self) -> dict[str, Tensor]:
        ranks = {f"{_RANK}{name}": torch.tensor(rank) for name, rank in self._ranks.items()}
        return {**super().state_dict(), **ranks}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        self._ranks = {
            key.removeprefix(_RANK): int(rank) for key, rank in state.items() if key.startswith(_RANK)
        }


def least_rank(squares: Tensor, tail: float, error: float) -> int:
    """Return the lowest rank, at least 1, with a relative error of at most `error`; the full rank if no rank suffices.

    Args:
        squares: Squared singular values in descending order.
        tail: Squared norm of the part that these singular values do not cover.
        error: Largest norm of the error, relative to the whole norm.
    """
    left = squares.flip(0).cumsum(0).flip(0) + tail  # at index k: squared norm that k directions miss
    enough = (left <= error**2 * left[0]).nonzero()
    return max(int(enough[0]), 1) if len(enough) else len(squares)


def _principal(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues in descending order, clamped to be non-negative, and their eigenvectors as rows."""
    values, vectors = torch.linalg.eigh(gram)
    return values.flip(0).clamp_(min=0), vectors.flip(1).T
