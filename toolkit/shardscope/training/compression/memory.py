"""What a rank remembers of what it has not sent: nothing, or the residual of error feedback.

A memory turns a bucket's gradient into the values that are packed (`before`), and learns what came back of them
(`after`). It is part of every checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from shardscope.training.compression.bucket import Bucket, Kept, squares_by_tensor


class Memory:
    """Remembers nothing: each step's gradient is packed as it is."""

    is_needed = False
    """Whether `after` must be told what came back, which costs unpacking one's own packet."""
    keeps_values = False
    """Whether what came back is simply taken off the values that `before` gave, where they lie, instead of a call of
    `after`."""

    seen: dict[str, float] | None = None
    """Squared norms of what steps have brought since `watch`, by tensor; None while nobody asks."""

    def watch(self, is_on: bool) -> None:
        """From here on, note what comes in, or no longer."""
        self.seen = {} if is_on else None

    def note(self, names: Sequence[str], sizes: Sequence[int], flat: Tensor) -> None:
        """What a step has brought for these tensors, if anybody asks; exchanges of one step add up."""
        if self.seen is not None:
            for name, square in squares_by_tensor(names, flat.split(list(sizes))).items():
                self.seen[name] = self.seen.get(name, 0.0) + square

    def before(self, bucket: Bucket) -> Tensor:
        """The values to pack, flat float32; `bucket.flat` itself where that will do."""
        return bucket.flat.float()

    def after(self, bucket: Bucket, values: Tensor, back: Tensor) -> None:
        """What of `values` got through."""

    @property
    def kept(self) -> dict[str, Kept]:
        """What must be saved, by kind; what is owed to the mean gradient comes first."""
        return {}

    @property
    def owed(self) -> dict[str, Kept]:
        """What is still to be sent, by kind."""
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        """All that is remembered, by kind and name."""
        return {
            f"{kind}.{name}": tensor
            for kind, kept in self.kept.items()
            for name, tensor in kept.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state_dict` gave."""
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
        self.residual = Kept()
        self._kind = kind

    def before(self, bucket: Bucket) -> Tensor:
        self.note(bucket.names, bucket.sizes, bucket.flat)
        residual = self.residual.of(bucket)
        return residual.add_(bucket.flat)

    def after(self, bucket: Bucket, values: Tensor, back: Tensor) -> None:
        assert values.data_ptr() == self.residual.of(bucket).data_ptr()
        values.sub_(back)

    @property
    def kept(self) -> dict[str, Kept]:
        return {self._kind: self.residual}

    @property
    def owed(self) -> dict[str, Kept]:
        return self.kept
