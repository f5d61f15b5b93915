"""Optimizers: which update rule, with which settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

from pydantic import BeforeValidator, Field, SerializeAsAny

from shardscope.spec.look import YOUR_OWN, Look
from shardscope.spec.method import Method, required

Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Off = Literal["off"]


class OptimizerStates(NamedTuple):
    """What an optimizer keeps besides the weights and their gradients: the terms of the memory formulas."""

    tensors: float = 2
    """Tensors of its parameter's shape, for each parameter: 1 for a momentum, 2 for both of Adam's moments."""
    counter_bytes: int = 0
    """Bytes for each parameter tensor, whatever its size: 4 for a float32 step counter."""
    per_factor: float = 0
    """Elements for each row and each column of a matrix, as Adafactor keeps sums of them."""
    outside_hidden: float = 0
    """Tensors that embeddings, the output projection and vectors have besides, where another rule updates them."""
    element_bytes: float | None = None
    """Bytes of an element of its state, scales included; None for those of the precision, 4 as a rule."""
    buffers_updates: bool = False
    """Whether updates wait in a buffer for the norms of their tensors, as in our layer-wise optimizers."""
    orthogonalizes: bool = False
    """Whether updates of hidden matrices go through five Newton-Schulz steps, whose matrix products take time."""

    def bytes_per_param(self, element_bytes: float = 4) -> float:
        """Bytes of `tensors` for each parameter; `element_bytes` is the precision's."""
        return self.tensors * (self.element_bytes or element_bytes)


class Parameters(Protocol):
    """What an optimizer updates on one rank: whole parameters, shards of them, or the layers of a pipeline's stage."""

    @property
    def reduce_squares(self) -> Any:
        """Sums the squares of layers' norms over the ranks that hold shards of them; None where layers are whole."""

    @property
    def reduce_grad_square(self) -> Any:
        """Sums the one square of all gradients over all ranks that hold distinct ones; None where one holds all."""

    @property
    def uncounted(self) -> Any:
        """Parameters whose gradients another rank counts already in that square."""

    @property
    def is_freezable(self) -> bool:
        """Whether compression will freeze the second moment and exchange first moments."""

    @property
    def take_fused(self) -> bool:
        """Whether torch has fused kernels for all of them."""

    def groups(self, exclude: str = "none", **instead: Any) -> list[dict[str, Any]]:
        """Named parameters as `torch.optim.Optimizer` takes them.

        Args:
            exclude: ``1d`` puts tensors of at most one dimension into a group of their own; ``none`` makes one group.
            instead: Settings of that group, in place of the optimizer's, such as ``weight_decay=0.0``.
        """


class NormSums(NamedTuple):
    """Sums of squares, in float64, that an update needs over all ranks."""

    of_layers: int = 0
    """Numbers of the one all-reduce over ranks that hold pieces of the same tensors."""
    of_gradient: int = 0
    """Numbers of the one over ranks that hold distinct gradients: the square of all of them, or none."""


class Optimizer(Method):
    """An update rule with its settings.

    Derive an optimizer of your own from this class: give it a `name`, its settings as fields with defaults, among them
    `lr`, and `build`; and `states`, unless it keeps two tensors for each parameter. A rule that moves each element by
    itself is right under every strategy; one that looks at whole tensors must sum over shards with
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
    """Learning rate before the schedule, above 0."""

    usual_rates: ClassVar[tuple[float, float] | None] = None
    """Learning rates to search by default; None takes a decade either side of the default."""
    scaling: ClassVar[Literal["linear", "sqrt"]] = "sqrt"
    """How the learning rate follows the batch size: by the rules of `analytic.large_batch.scaled_lr`."""
    takes_sparse: ClassVar[bool] = False
    """Whether it takes gradients that hold only the rows that an embedding has looked up."""
    without_ratios: ClassVar[tuple[str, float] | None] = None
    """Of a layer-wise optimizer: the rule that is left where a layer has no trust ratio, and that rule's usual rate."""
    advice: ClassVar[Mapping[str, str]] = {}
    """Of a layer-wise optimizer: what to do where a trust ratio is held at a bound, by bound."""
    look: ClassVar[Look] = YOUR_OWN
    """How figures draw it."""

    if TYPE_CHECKING:

        def __init__(self, name: str, **settings: Any) -> None: ...

    @property
    def states(self) -> OptimizerStates:
        """What it keeps, with these settings, for predictions of memory; by default two tensors for each parameter.

        Example:
            >>> Optimizer("sgd").states.tensors, Optimizer("sgd", momentum=0.9).states.tensors
            (0, 1)
        """
        return OptimizerStates()

    @property
    def carries(self) -> str:
        """What its state is, in a word or two: only an optimizer that carries the same can take it up.

        Example:
            >>> Optimizer("adamw").carries == Optimizer("lamb").carries
            True
        """
        return f"{self.name} state"

    def norm_sums(self, dimensions: Sequence[int]) -> NormSums:  # noqa: ARG002
        """What ranks that hold pieces of the parameters add up in an update, to know the norms of the whole.

        Args:
            dimensions: Of each trained tensor.
        """
        return NormSums()

    def buffered(self, dimensions: Sequence[int]) -> list[list[int]]:
        """Which updates wait in a buffer for norms, by the places of their tensors; groups are batched apart.

        Args:
            dimensions: Of each trained tensor.
        """
        return [[*range(len(dimensions))]] if self.states.buffers_updates else []

    @required
    def build(self, parameters: Parameters) -> Any:
        """The `torch.optim.Optimizer` that does it, on one rank.

        Args:
            parameters: What it updates there.
        """
        raise NotImplementedError

    @classmethod
    def is_layerwise(cls) -> bool:
        """Whether layers have trust ratios."""
        return cls.without_ratios is not None

    @classmethod
    def rates(cls) -> tuple[float, float]:
        """Learning rates to search by default: lowest and highest."""
        usual = float(cls.model_fields["lr"].default)
        return cls.usual_rates or (usual / 10, usual * 10)


AnyOptimizer = Annotated[SerializeAsAny[Optimizer], BeforeValidator(Optimizer.resolve)]
"""A field that takes an optimizer, its name, its class or its JSON."""
