"""A rank's memory of what it has not sent: nothing, or the residual of error feedback.

A memory turns a bucket's gradient into the values that are packed (`before`), and then receives the decoded values
(`after`). It is part of every checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from shardscope.training.compression.bucket import Bucket, BucketState, squares_by_tensor


class Memory:
    """Memory that keeps nothing: each step's gradient is packed unchanged."""

    is_needed = False
    """Whether the memory needs the decoded values, which costs unpacking the rank's own packet."""
    keeps_values = False
    """Whether the caller subtracts the decoded values in place from those that `before` returned, instead of calling
    `after`."""

    seen: dict[str, float] | None = None
    """Squared norms of the steps' inputs since `watch`, by tensor; None while not watched."""

    def watch(self, is_on: bool) -> None:
        """Start or stop recording the norms of inputs."""
        self.seen = {} if is_on else None

    def note(self, names: Sequence[str], sizes: Sequence[int], flat: Tensor) -> None:
        """Record the input of a step for these tensors, if watched; exchanges of one step add up."""
        if self.seen is not None:
            for name, square in squares_by_tensor(names, flat.split(list(sizes))).items():
                self.seen[name] = self.seen.get(name, 0.0) + square

    def before(self, bucket: Bucket) -> Tensor:
        """Return the values to pack, flat float32; `bucket.flat` itself where possible."""
        return bucket.flat.float()

    def after(self, bucket: Bucket, values: Tensor, back: Tensor) -> None:
        """Receive `back`, the decoded form of `values`."""

    @property
    def kept(self) -> dict[str, BucketState]:
        """Tensors that checkpoints must save, by kind; the residual of the mean gradient comes first."""
        return {}

    @property
    def residuals(self) -> dict[str, BucketState]:
        """Residuals, by kind."""
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        """All kept tensors, by kind and name."""
        return {
            f"{kind}.{name}": tensor
            for kind, kept in self.kept.items()
            for name, tensor in kept.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the state that `state_dict` returned."""
        for kind, kept in self.kept.items():
            prefix = f"{kind}."
            kept.load_state_dict(
                {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            )


class ErrorFeedback(Memory):
    """What a step leaves out is added to the next step's gradient (Seide et al. 2014; Karimireddy et al. 2019)."""

    is_needed = True
    keeps_values = True

    def __init__(self, kind: str = "residual") -> None:
        self.residual = BucketState()
        self._kind = kind

    def before(self, bucket: Bucket) -> Tensor:
        self.note(bucket.names, bucket.sizes, bucket.flat)
        residual = self.residual.of(bucket)
        return residual.add_(bucket.flat)

    @property
    def kept(self) -> dict[str, BucketState]:
        return {self._kind: self.residual}

    @property
    def residuals(self) -> dict[str, BucketState]:
        return self.kept
