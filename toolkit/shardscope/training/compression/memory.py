"""Residuals that a rank keeps between steps: a base class that keeps none, and error feedback.

A `Memory` computes the values to pack from a bucket's gradient (`before`), and receives the decoded values after
packing (`after`). Its tensors are saved in every checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from shardscope.training.compression.bucket import Bucket, BucketState, squares_by_tensor


class Memory:
    """Base class, which keeps no residual: each step's gradient is packed unchanged."""

    is_needed = False
    """Whether the memory needs the decoded values, for which the rank must unpack its own packet."""
    keeps_values = False
    """Whether the tensor that `before` returns is the residual itself: the caller then subtracts the decoded values
    from it in place, and does not call `after`."""

    seen: dict[str, float] | None = None
    """Squared norms of the gradients received since ``watch(True)``, by tensor; None if not recording."""

    def watch(self, is_on: bool) -> None:
        """Start or stop recording the norms of the gradients that `before` receives."""
        self.seen = {} if is_on else None

    def note(self, names: Sequence[str], sizes: Sequence[int], flat: Tensor) -> None:
        """Add the squared norms of a bucket's tensors to `seen`, if recording.

        Args:
            names: Names of the tensors.
            sizes: Number of elements of each tensor.
            flat: The tensors, concatenated.
        """
        if self.seen is not None:
            for name, square in squares_by_tensor(names, flat.split(list(sizes))).items():
                self.seen[name] = self.seen.get(name, 0.0) + square

    def before(self, bucket: Bucket) -> Tensor:
        """Return the values to pack: a flat float32 tensor, which may be ``bucket.flat`` itself."""
        return bucket.flat.float()

    def after(self, bucket: Bucket, values: Tensor, back: Tensor) -> None:
        """Receive the decoded values after packing.

        Args:
            bucket: The bucket that was packed.
            values: The values that `before` returned for the bucket.
            back: The values decoded from the packet.
        """

    @property
    def kept(self) -> dict[str, BucketState]:
        """Tensors to save in checkpoints, by kind (such as ``residual``); the first is the gradient's residual."""
        return {}

    @property
    def residuals(self) -> dict[str, BucketState]:
        """The residuals among the kept tensors, by kind."""
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        """Return all kept tensors, under the key ``kind.name``."""
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
    """Error feedback: adds the compression error of one step to the gradient of the next step.

    Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; Karimireddy et al. 2019, "Error Feedback Fixes SignSGD".

    Args:
        kind: Kind under which the residual is saved in checkpoints.
    """

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
