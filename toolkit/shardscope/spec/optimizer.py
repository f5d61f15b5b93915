"""Optimizers: update rules with their settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, Self

from pydantic import BeforeValidator, Field, SerializeAsAny

from shardscope.spec.look import YOUR_OWN, MethodStyle
from shardscope.spec.method import Method, required

Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Off = Literal["off"]


class OptimizerStates(NamedTuple):
    """Size of the optimizer state, without weights and gradients, as terms of the memory formulas."""

    tensors: float = 2
    """State tensors per parameter with the parameter's shape: 1 for momentum, 2 for Adam's two moments."""
    counter_bytes: int = 0
    """Bytes per parameter tensor, independent of its size: 4 for a float32 step counter."""
    per_factor: float = 0
    """State elements per row and per column of a matrix, as in Adafactor, which keeps row and column sums."""
    outside_hidden: float = 0
    """Additional state tensors for embeddings, output projection and vectors, if a different rule updates them."""
    element_bytes: float | None = None
    """Bytes per state element, including scales; None for the element size of the precision, usually 4."""
    buffers_updates: bool = False
    """Whether updates are buffered until the norms of their tensors are known, as in layer-wise optimizers."""
    orthogonalizes: bool = False
    """Whether updates of hidden matrices go through five Newton-Schulz steps, whose matrix products take time."""

    def bytes_per_param(self, element_bytes: float = 4) -> float:
        """Return the bytes of state `tensors` per parameter; `element_bytes` is the element size of the precision."""
        return self.tensors * (self.element_bytes or element_bytes)

    def moved_bytes_per_param(self, element_bytes: float = 4) -> float:
        """Return the bytes per parameter that an update reads and writes: gradient, weight and state tensors."""
        return element_bytes * (3 + 2 * self.tensors)


class Parameters(Protocol):
    """The parameters that an optimizer updates on one rank: whole tensors, shards, or layers of a pipeline stage."""

    @property
    def reduce_squares(self) -> Any:
        """A function that sums squared layer norms over the ranks that hold shards; None if layers are whole."""

    @property
    def reduce_grad_square(self) -> Any:
        """A function that sums the squared gradient norm over ranks with distinct gradients; None if not needed."""

    @property
    def duplicate_grad_params(self) -> Any:
        """Parameters whose gradients another rank already counts in the squared global norm."""

    @property
    def is_freezable(self) -> bool:
        """Whether compression will freeze the second moment and exchange first moments."""

    @property
    def take_fused(self) -> bool:
        """Whether torch has fused optimizer kernels for all of these parameters."""

    def groups(self, exclude: str = "none", **instead: Any) -> list[dict[str, Any]]:
        """Return named parameter groups for `torch.optim.Optimizer`.

        Args:
            exclude: ``1d`` puts tensors of at most one dimension into a separate group; ``none`` makes one group.
            instead: Settings that override the optimizer's in that separate group, such as ``weight_decay=0.0``.
        """


class NormSums(NamedTuple):
    """Number of float64 sums of squares that an optimizer update all-reduces."""

    of_layers: int = 0
    """Number of elements in the all-reduce over ranks that hold shards of the same tensors."""
    of_gradient: int = 0
    """Number of elements in the all-reduce over ranks with distinct gradients: 1 for the squared global norm, or 0."""


SCALING_EXPONENTS: Mapping[str, float] = {"linear": 1.0, "sqrt": 0.5}
"""Exponent p of each scaling rule: the learning rate is proportional to the batch size to the power of p."""


class Optimizer(Method):
    """An update rule with its settings.

    Derive your own optimizer from this class: give it a `name`, its settings as fields with defaults (including
    `lr`), and `build`. Define `states` too, unless the optimizer keeps two tensors per parameter. An element-wise rule
    is correct under every strategy. A rule that needs norms of whole tensors must sum over shards with
    `Parameters.reduce_squares`.

    Example:
        >>> Optimizer("lamb", variant="apex").settings["max_grad_norm"]
        1.0
        >>> Optimizer("lamb", variant="apex", max_grad_norm="off").settings["max_grad_norm"]
        'off'
    """

    kind = "optimizer"
    folder = "optimizers"
    needs_code = ("states",)

    lr: Positive = 1e-3
    """Learning rate before the schedule is applied; above 0."""

    usual_rates: ClassVar[tuple[float, float] | None] = None
    """Lowest and highest learning rate to search by default; None for a decade on either side of the default `lr`."""
    scaling: ClassVar[Literal["linear", "sqrt"]] = "sqrt"
    """Rule for scaling the learning rate with the batch size; see `analytic.large_batch.scaled_lr`."""
    takes_sparse: ClassVar[bool] = False
    """Whether the optimizer accepts sparse gradients, which contain only the rows that an embedding looked up."""
    without_ratios: ClassVar[tuple[str, float] | None] = None
    """For a layer-wise optimizer: name of its update rule without trust ratios, and that rule's usual learning rate."""
    advice: ClassVar[Mapping[str, str]] = {}
    """For a layer-wise optimizer: advice to give if trust ratios are clipped at a bound, by the bound's name."""
    look: ClassVar[MethodStyle] = YOUR_OWN
    """Colour, dash and marker in plots."""

    if TYPE_CHECKING:

        def __init__(self, name: str, **settings: Any) -> None: ...

    def scaled(self, growth: float) -> Self:
        """Return the optimizer for a batch that is `growth` times as large: its learning rate follows `scaling`.

        Example:
            >>> Optimizer("sgd", lr=0.1).scaled(4.0).lr, Optimizer("lamb", lr=0.1).scaled(4.0).lr
            (0.4, 0.2)
        """
        return self if growth == 1 else self.replace(lr=self.lr * growth ** SCALING_EXPONENTS[self.scaling])

    @property
    def states(self) -> OptimizerStates:
        """Size of the optimizer state with these settings, for memory predictions; by default 2 tensors per parameter.

        Example:
            >>> Optimizer("sgd").states.tensors, Optimizer("sgd", momentum=0.9).states.tensors
            (0, 1)
        """
        return OptimizerStates()

    @property
    def carries(self) -> str:
        """Short description of the optimizer state; a run can resume only from state with the same description.

        Example:
            >>> Optimizer("adamw").carries == Optimizer("lamb").carries
            True
        """
        return f"{self.name} state"

    def norm_sums(self, dimensions: Sequence[int]) -> NormSums:  # noqa: ARG002
        """Return how many sums of squares an update all-reduces, so that ranks with shards know norms of whole tensors.

        Args:
            dimensions: Number of dimensions of each trained tensor.
        """
        return NormSums()

    def buffered(self, dimensions: Sequence[int]) -> list[list[int]]:
        """Return the indices of tensors whose updates are buffered until norms are known: one list per parameter group.

        Args:
            dimensions: Number of dimensions of each trained tensor.
        """
        return [[*range(len(dimensions))]] if self.states.buffers_updates else []

    @required
    def build(self, parameters: Parameters) -> Any:
        """Build the `torch.optim.Optimizer` for one rank.

        Args:
            parameters: The parameters that the optimizer updates on this rank.
        """
        raise NotImplementedError

    @classmethod
    def is_layerwise(cls) -> bool:
        """Return whether the optimizer is layer-wise, that is, computes a trust ratio for each layer."""
        return cls.without_ratios is not None

    @classmethod
    def rates(cls) -> tuple[float, float]:
        """Return the lowest and highest learning rate to search by default."""
        usual = float(cls.model_fields["lr"].default)
        return cls.usual_rates or (usual / 10, usual * 10)


AnyOptimizer = Annotated[SerializeAsAny[Optimizer], BeforeValidator(Optimizer.resolve)]
"""A field that accepts an optimizer, its name, its class or its JSON."""
