"""Divides a model over the ranks of a tensor group, and maps between whole tensors and this rank's parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardscope.errors import SpecError
from shardscope.spec.divisors import divisors_text
from shardscope.spec.tensor_plan import Division, TensorPlan
from shardscope.training import _compat
from shardscope.training.sharding import ReduceSquares, TensorPart, local
from shardscope.training.tensor.axis import TensorAxis
from shardscope.training.tensor.linear import divide_linear, has_own_code, is_linear, output_dim
from shardscope.training.tensor.norms import LayerSquares
from shardscope.training.tensor.of_transformers import resize_splits, shipped_plan
from shardscope.training.tensor.sequence import divide_sequences, gather_input
from shardscope.training.tensor.summed import sum_gradients


class Cut(NamedTuple):
    """How a tensor is divided: along one dimension, in `groups` equal parts, each of which is divided by itself."""

    dim: int
    groups: int = 1


class TensorSplit:
    """A model divided over the ranks of a tensor group.

    Args:
        axis: The ranks of the group.
        plan: Which layers are divided; None uses the plan of the model's own method `tensor_plan`.
        cuts_sequences: Whether the plan's ``sequence`` layers process a part of each sequence on each rank.

    Attributes:
        cuts: The divided parameters, by name; under every name of a shared one.
    """

    def __init__(
        self, axis: TensorAxis, plan: TensorPlan | None = None, *, cuts_sequences: bool = False
    ) -> None:
        self.axis, self.plan, self.cuts_sequences = axis, plan, cuts_sequences
        self.cuts: dict[str, Cut] = {}

    # A model.

    def divide(self, model: nn.Module) -> nn.Module:
        """Divide the planned layers of `model`, in place, and return it.

        Raises:
            SpecError: There is no plan, it does not match the model's layers, or a layer cannot be divided.
        """
        plan = self.plan or plan_of(model)
        unused = dict.fromkeys(plan.rules)
        planned: dict[str, list[tuple[str, nn.Module, Division]]] = defaultdict(list)
        for name, module in model.named_modules():
            pattern, division = plan.pattern(name), plan.division(name)
            if pattern is not None and division is not None:
                unused.pop(pattern, None)
                planned[division.kind].append((name, module, division))
        if unused:
            raise _unused(next(iter(unused)), plan, model)
        divided = [*planned["columns"], *planned["rows"]]
        for each in divided:
            self._require_divisible(*each)
        self._require_own(model, divided)
        for _, layer, _ in planned["shared"]:
            sum_gradients(layer, [own for own, _ in layer.named_parameters(recurse=False)], self.axis)
        by_sequence = self._by_sequence(model, [(name, layer) for name, layer, _ in planned["sequence"]])
        gathered = {name: layer for name, layer, _ in planned["gathered"] if _is_within(name, by_sequence)}
        for name, layer, division in divided:
            self._divide(
                model, name, layer, division,
                divides_sequences=_is_within(name, by_sequence), is_gathered=_is_within(name, gathered),
            )  # fmt: skip
        for layer in gathered.values():
            gather_input(layer, self.axis)
        if by_sequence:
            divide_sequences([*by_sequence.items()], self.cuts, self.axis)
        return model

    def _by_sequence(
        self, model: nn.Module, planned: Iterable[tuple[str, nn.Module]]
    ) -> dict[str, nn.Module]:
        """Return the outermost layers that process a part of each sequence on each rank, if sequences are divided."""
        found: dict[str, nn.Module] = {}
        for name, layer in planned:
            if not _is_within(name, found):
                found[name] = _with_forward(name, layer)
        if not self.cuts_sequences:
            return {}
        if not found:
            raise _no_sequence(model)
        return found

    def _require_divisible(self, name: str, module: nn.Module, division: Division) -> None:
        """Raise the error that says why a layer cannot be divided, if it cannot."""
        if not is_linear(module):
            raise SpecError(
                f"TensorPlan: layer {name!r} is a {type(module).__name__}; only linear layers can be divided, so leave "
                "it out of the plan"
            )
        if has_own_code(module):
            raise SpecError(
                f"TensorPlan: layer {name!r} has a forward pass or a weight of its own class {type(module).__name__}, "
                "which cannot be divided; leave it out of the plan, or use torch.nn.Linear"
            )
        size, of_outputs = self.axis.size, output_dim(module)
        is_columns = division.kind == "columns"
        width = module.get_parameter("weight").shape[of_outputs if is_columns else 1 - of_outputs]
        what = "outputs" if is_columns else "inputs"
        if width % division.groups:
            able = divisors_text(width if width % size else width // size, near=division.groups)
            raise SpecError(
                f"TensorPlan: 'columns:{division.groups}' does not divide the {width} outputs of layer {name!r}; use "
                f"'columns:N' with N one of {able}"
            )
        if width % (division.groups * size):
            parts = "" if division.groups == 1 else f" in {division.groups} parts"
            raise SpecError(
                f"tensor={size} does not divide the {width} {what}{parts} of layer {name!r}; use one of "
                f"{divisors_text(width // division.groups, near=size)}"
            )

    def _require_own(self, model: nn.Module, planned: list[tuple[str, nn.Module, Division]]) -> None:
        """Refuse a divided weight that the model also uses under another name, where it would be needed whole."""
        for name, layer, _ in planned:
            known = {f"{name}.{own}" for own, _ in layer.named_parameters()}
            held = {id(parameter) for parameter in layer.parameters()}
            for other, parameter in model.named_parameters(remove_duplicate=False):
                if id(parameter) in held and other not in known:
                    raise SpecError(
                        f"TensorPlan: layer {name!r} shares its weight with {other!r}, which needs it whole; leave the "
                        "layer out of the plan"
                    )

    def _divide(
        self, model: nn.Module, name: str, layer: nn.Module, division: Division, **settings: bool
    ) -> None:
        is_columns, of_outputs = division.kind == "columns", output_dim(layer)
        self.cuts[f"{name}.weight"] = Cut(of_outputs if is_columns else 1 - of_outputs, division.groups)
        if is_columns and layer.bias is not None:
            self.cuts[f"{name}.bias"] = Cut(0, division.groups)
        for own, parameter in layer.named_parameters():
            if f"{name}.{own}" in self.cuts:
                parameter.data = self.own(f"{name}.{own}", parameter.data).clone()
        divide_linear(layer, division.kind, self.axis, **settings)
        if is_columns:
            part = layer.get_parameter("weight").shape[of_outputs] // division.groups
            resize_splits(model.get_submodule(name.rpartition(".")[0]), part * self.axis.size, part)

    # A tensor with the shape of a parameter.

    def own(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, which is contiguous; the tensor itself if it is not divided."""
        if name not in self.cuts:
            return whole
        dim, groups = self.cuts[name]
        parts: Tensor = whole.unflatten(dim, (groups, self.axis.size, -1))
        return parts.select(dim + 1, self.axis.rank).flatten(dim, dim + 1).contiguous()

    def joined(self, name: str, parts: list[Tensor]) -> Tensor:
        """Return the whole tensor of all ranks' parts."""
        dim, groups = self.cuts[name]
        grouped = [part.unflatten(dim, (groups, -1)) for part in parts]
        return torch.cat(grouped, dim + 1).flatten(dim, dim + 1)

    def whole(self, name: str, part: Tensor) -> Tensor:
        """Return the whole tensor of which this rank has a part; called by all ranks, in the same order."""
        if (to_whole := getattr(part, "full_tensor", None)) is not None:  # of the data axis
            part = to_whole()
        return self.joined(name, self.axis.of_all_ranks(part)) if name in self.cuts else part

    def shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole tensor for the shape of a part."""
        if name not in self.cuts:
            return shape
        dim = self.cuts[name].dim
        return (*shape[:dim], shape[dim] * self.axis.size, *shape[dim + 1 :])

    def piece(self, name: str, part: Tensor) -> Tensor:
        """Return this rank's part as a piece of the whole tensor, for checkpoints; the tensor itself if not divided.

        The part may itself be a piece of what the ranks of another axis divide.
        """
        if name not in self.cuts:
            return part
        dim, groups = self.cuts[name]
        own_part, held = part, [(local(part), _compat.offsets_of(part))]
        if isinstance(part, TensorPart):
            own_part, held = part.part, [*part.boxes]
        width, boxes = part.shape[dim] // groups, []
        for (own, offsets), group in product(held, range(groups)):
            first = offsets[dim]
            start = max(first, group * width)
            end = min(first + own.shape[dim], (group + 1) * width)
            if start < end:
                at = start + width * (group * (self.axis.size - 1) + self.axis.rank)
                view = own.narrow(dim, start - first, end - start)
                boxes.append((view, (*offsets[:dim], at, *offsets[dim + 1 :])))
        return TensorPart.of(own_part, self.shape(name, tuple(part.shape)), boxes)

    def wholes(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict with whole tensors; called by all ranks."""
        return {
            name: self.whole(name, value.detach()) if isinstance(value, Tensor) else value
            for name, value in state.items()
        }

    # Norms of gradients and layers.

    def layer_sums(self, inner: ReduceSquares | None) -> ReduceSquares:
        """Return the function that sums the squares of layers over all their parts.

        Args:
            inner: Function that sums them over the data axis; None if each of its ranks has the same ones.
        """
        return LayerSquares(self.axis, frozenset(self.cuts), inner)

    def grad_sum(self, inner: ReduceSquares | None) -> ReduceSquares:
        """Return the function that sums the square of the gradient; `inner` as in `layer_sums`."""
        return lambda square: self.axis.total(square if inner is None else inner(square))

    def largest(self, inner: Callable[[Tensor], object] | None) -> Callable[[Tensor], object]:
        """Return the function that shares an overflow flag; `inner` does so along the data axis."""

        def share(flag: Tensor) -> None:
            if inner is not None:
                inner(flag)
            self.axis.largest_(flag)

        return share


def box_of(held: Tensor, whole: Tensor) -> Tensor:
    """Return the elements of a whole tensor that `held`, which may be a DTensor's shard, has."""
    own = local(held)
    if own is held or not own.numel():
        return whole if own is held else whole.new_empty(own.shape)
    for dim, (start, size) in enumerate(zip(_compat.offsets_of(held), own.shape, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole


def _is_within(name: str, layers: Iterable[str]) -> bool:
    """Return whether a layer is a part of one of `layers`."""
    return any(name.startswith(f"{layer}.") for layer in layers)


def _with_forward(name: str, module: nn.Module) -> nn.Module:
    """Return a layer that works on parts of sequences; refuse a container, which is never called."""
    if type(module).forward is nn.Module.forward:
        raise SpecError(
            f"TensorPlan: {name!r} is a {type(module).__name__}, which is not called itself; use "
            f"'{name}.*': 'sequence'"
        )
    return module


def _no_sequence(model: nn.Module) -> SpecError:
    return SpecError(
        f"sequence_parallel=True needs to know which layers work on a part of each sequence, and the plan of "
        f"{type(model).__name__} has none; add rules such as 'blocks.*': 'sequence' to the plan, or use "
        "sequence_parallel=False"
    )


def plan_of(model: nn.Module) -> TensorPlan:
    """Return the plan that a model's own method `tensor_plan` gives, or that a model of transformers ships.

    Raises:
        SpecError: The model has neither.
    """
    own = getattr(model, "tensor_plan", None)
    if own is None and (shipped := shipped_plan(model)) is not None:
        return shipped
    if own is None:
        raise SpecError(
            f"tensor parallelism needs a plan of which layers are divided, and model={type(model).__name__} has none; "
            "use a GPT, give the model a method tensor_plan, or the strategy "
            "tensor_plan=ss.TensorPlan({'*.up': 'columns', '*.down': 'rows'})"
        )
    found = own()
    return found if isinstance(found, TensorPlan) else TensorPlan(rules=dict(found))


def _unused(pattern: str, plan: TensorPlan, model: nn.Module) -> SpecError:
    """Return the error for a rule that divides no layer: an earlier rule matches its layers first, or it has none."""
    for name, _ in model.named_modules():
        if fnmatchcase(name, pattern):
            first = plan.pattern(name)
            return SpecError(
                f"TensorPlan: rule {pattern!r} has no effect, because {first!r} matches layer {name!r} before it; "
                f"put {pattern!r} before {first!r}, or leave it out"
            )
    return SpecError(
        f"TensorPlan: no layer of the model is named {pattern!r}; use names of model.named_modules(), such as "
        f"{_some_linear(model)!r}"
    )


def _some_linear(model: nn.Module) -> str:
    return next((name for name, module in model.named_modules() if isinstance(module, nn.Linear)), "")


def outputs_of(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of a model's output."""
    from shardscope.training.tensors_in import tensors_in

    yield from (tensor for tensor in tensors_in(value) if tensor.is_floating_point())
