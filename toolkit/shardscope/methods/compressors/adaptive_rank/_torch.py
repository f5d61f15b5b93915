"""PowerSGD with a separate rank for each layer, as low as an error bound allows.

Every few steps, each matrix M is approximated with the largest rank R, and the error at each lower rank r is estimated.
This error has two parts. The first consists of the singular values of the approximation beyond the first r, which are
computed from the right factor. The second is the part of M that all R directions miss. To estimate it, the products of
M with a few random vectors (probes) are sent with the left factors: the squared norm of their part outside the span of
P is an unbiased estimate (Halko, Martinsson and Tropp 2011, section 4.3). Both parts depend only on sums over all ranks
of the job, so all of them choose the same r without further messages.

A matrix that is not larger than its factors of rank R is sent uncompressed in such a step, and its singular values are
computed directly. With error feedback, the sum of gradient and residual is approximated, so the bound also limits the
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
        error: Largest norm of the error of a matrix's approximation, relative to the norm of the matrix.
        update_every: Number of steps between measurements of the error; the first compressed step always measures it.
        feedback: Whether to add the compression error of a step to the next step's gradient, on each rank.
        seed: The job's seed.
        warmup_steps: Number of steps at the start whose gradients are sent uncompressed.
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
        looks = self._measures(name, step)
        rank = self.rank if looks else min(self._ranks[name], self.rank)  # may be larger in a checkpoint
        return FactoredTensor(
            name, values, out, rank if pays(rank, *values.shape) else 0, PROBES if looks else 0
        )

    def _measures(self, name: str, step: int) -> bool:
        return name not in self._ranks or (step - 1) % self.update_every == 0

    def learn(self, parts: list[FactoredTensor], left: list[Tensor], right: list[Tensor], step: int) -> None:
        factors = iter(zip(left, right, strict=True))
        turned: dict[str, Tensor] = {}
        for part in parts:
            pair = next(factors) if part.rank else None
            if part.probes:
                turned[part.name] = (
                    self._rank_from_matrix(part) if pair is None else self._rank_from_factors(part, *pair)
                )
        self._keep(turned, step)

    def _rank_from_factors(self, part: FactoredTensor, p: Tensor, q: Tensor) -> Tensor:
        """Choose the rank of a matrix from its factors; return the right factor, rotated to principal directions."""
        span, images = p[: part.rank].double(), p[part.rank :].double()
        missed = images - (images @ span.T) @ span
        columns = part.values.shape[1]  # probes have a mean squared norm of 1, not 1 per element
        tail = float(missed.square().sum()) * columns / part.probes
        squares, turn = _principal(q.double() @ q.double().T)
        self._ranks[part.name] = least_rank(squares, tail, self.error)
        return (turn @ q.double()).float()

    def _rank_from_matrix(self, part: FactoredTensor) -> Tensor:
        """Choose the rank of a matrix that was sent uncompressed; return its principal directions as right factor."""
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
        tail: Squared norm of the part of the matrix that these singular values do not cover.
        error: Largest norm of the error, relative to the norm of the matrix.
    """
    left = squares.flip(0).cumsum(0).flip(0) + tail  # at index k: squared error at rank k
    enough = (left <= error**2 * left[0]).nonzero()
    return max(int(enough[0]), 1) if len(enough) else len(squares)


def _principal(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of a Gram matrix in descending order, clamped at 0, and its eigenvectors as rows."""
    values, vectors = torch.linalg.eigh(gram)
    return values.flip(0).clamp_(min=0), vectors.flip(1).T
