"""Wrappers around PyTorch APIs that are private or differ between releases."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

HAS_FUSED_ADAMW = hasattr(torch, "_fused_adamw_")
"""Whether PyTorch's fused AdamW kernel can be called without an optimizer object (true for PyTorch 2.11 to 2.13)."""


def fused_adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Take one AdamW step with a learning rate of 1 and no weight decay, by PyTorch's fused kernel.

    Tensors at the same index must be contiguous and have the same shape, dtype and device. `steps` are step counts that
    already include this step, as one-element float32 tensors.
    """
    torch._fused_adamw_(
        list(params),
        list(grads),
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        list(steps),
        lr=1.0,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=0.0,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


def top_saved_tensors_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Return the pack and unpack hooks of this thread's innermost `saved_tensors_hooks` context; one must be active."""
    from torch._C._autograd import _top_saved_tensors_default_hooks

    pack, unpack = _top_saved_tensors_default_hooks(False)
    return pack, unpack


def leave_out_of_ddp(model: nn.Module, names: Sequence[str]) -> None:
    """Let `DistributedDataParallel` neither broadcast these parameters of a model nor reduce their gradients."""
    ignore = nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model  # noqa: SLF001
    ignore(model, list(names))  # type: ignore[no-untyped-call]


def is_in_backward() -> bool:
    """Return whether this thread runs a backward pass, or a forward pass that one repeats."""
    from torch._C import _current_graph_task_id

    return _current_graph_task_id() != -1


def is_in_checkpoint() -> bool:
    """Return whether this thread runs a region of `torch.utils.checkpoint`, or recomputes one."""
    from torch._C._autograd import _top_saved_tensors_default_hooks

    hooks = _top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def all_gather_single(output: Tensor, part: Tensor, group: ProcessGroup) -> None:
    """Gather the parts of all ranks into one contiguous tensor, in the order of the ranks (renamed in PyTorch 2.13)."""
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    gather(output.view(-1), part.view(-1), group=group)  # gloo refuses an output with a dimension of ranks


def reduce_scatter_single(part: Tensor, terms: Tensor, group: ProcessGroup) -> None:
    """Sum the ranks' contiguous tensors, and scatter the sum over the ranks (renamed in PyTorch 2.13)."""
    renamed = hasattr(dist, "reduce_scatter_single")
    scatter = dist.reduce_scatter_single if renamed else dist.reduce_scatter_tensor
    scatter(part.view(-1), terms.view(-1), group=group)


def function_modes() -> list[Any]:
    """Return the active modes that replace functions of torch, the outermost first."""
    from torch.overrides import _get_current_function_mode_stack

    return list(_get_current_function_mode_stack())


class SavedTensor:
    """The detached result of an operation, with a check for later in-place modification."""

    def __init__(self, result: Tensor) -> None:
        from torch.utils.checkpoint import _detach_helper

        self.result: Tensor = _detach_helper(
            result
        )  # in a dispatch mode, the version of a plain `detach` does not count later changes
        self._version = self.result._version  # noqa: SLF001

    @property
    def is_unchanged(self) -> bool:
        """Whether the result has not been modified in place since the operation returned it."""
        return bool(self.result._version == self._version)  # noqa: SLF001


def offsets_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the offset, in each dimension, of this rank's shard within a DTensor; zeros for any other tensor."""
    pieces = getattr(tensor, "__create_chunk_list__", None)  # torch.distributed.checkpoint uses it too
    return (0,) * tensor.ndim if pieces is None else tuple(pieces()[0].offsets)


def fsdp_params(model: nn.Module) -> list[Any]:
    """Return FSDP2's internal record of each parameter that it shards in `model`; empty if it shards none."""
    groups = [group for unit in fsdp_modules(model) for group in _fsdp_groups(unit)]
    return [param for group in groups for param in group.fsdp_params]


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Return the modules in `model` that are FSDP2 units, gathered one at a time; empty if FSDP2 shards nothing."""
    return [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]


def _fsdp_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()  # noqa: SLF001
    several = getattr(state, "_fsdp_param_groups", None)
    if several is None:  # torch 2.11 has one group per module
        return [group for group in [getattr(state, "_fsdp_param_group", None)] if group is not None]
    return list(several)


class FsdpUnit(NamedTuple):
    """One FSDP2 parameter group and its settings.

    Attributes:
        parameters: The group's sharded parameters, as `model.parameters()` yields them between steps.
        shapes: Shapes of the parameters before sharding.
        gathered_element_bytes: Bytes per element of the all-gathered parameters.
        reduced_element_bytes: Bytes per element of the gradients in the reduce-scatter.
        frees: Whether the gathered parameters are freed after the forward pass.
        num_shards: Number of ranks over which the parameters are sharded.
        num_replicas: Number of groups of such ranks, each with all parameters (HSDP).
        exchanges: Whether the next backward pass reduces gradients over ranks.
    """

    parameters: list[Any]
    shapes: list[tuple[int, ...]]
    gathered_element_bytes: int
    reduced_element_bytes: int
    frees: bool
    num_shards: int
    num_replicas: int
    exchanges: bool


def fsdp_units(model: nn.Module) -> list[FsdpUnit]:
    """Return the FSDP2 parameter groups in `model`, in the order of its modules; empty if FSDP2 shards nothing."""
    groups = [group for module in fsdp_modules(model) for group in _fsdp_groups(module)]
    return [_unit_of(group) for group in groups if group.fsdp_params]


def _unit_of(group: Any) -> FsdpUnit:
    params = group.fsdp_params
    gathered = group.mp_policy.param_dtype or params[0].sharded_param.dtype
    return FsdpUnit(
        [param.sharded_param for param in params],
        [tuple(param._orig_size) for param in params],  # noqa: SLF001
        gathered.itemsize,
        (group.mp_policy.reduce_dtype or gathered).itemsize,
        group.post_forward_mesh_info is not None,
        group.mesh_info.shard_mesh_size,
        getattr(group.mesh_info, "replicate_mesh_size", 1),
        group.reduce_grads,
    )


def reduce_gradients(root: Any, *, reshards: bool) -> None:
    """Reduce the gradients that a backward pass without FSDP2's reductions has left in the units of a root unit.

    As `PipelineStage.perform_reduce_grad`, which does so only after the last pass.

    Args:
        root: The root unit.
        reshards: Whether to free the gathered parameters.
    """
    root.set_is_last_backward(True)
    root.set_reshard_after_backward(reshards)
    root.set_requires_gradient_sync(True)
    state = root._get_fsdp_state()  # noqa: SLF001
    for unit in fsdp_modules(root):
        for group in _fsdp_groups(unit):
            group.post_backward()
    state._root_post_backward_final_callback()  # noqa: SLF001


def gather_for_views(unit: Any) -> None:
    """Make FSDP2 gather a unit's parameters for the backward pass even if the caller modifies the output in place.

    If the unit's output is a view, modifying it in place, as in ``y = block(x); y += x``, removes FSDP2's hook from it.
    The base of the view keeps its autograd node, so the same hook is also registered on that node. If both hooks run,
    the second does nothing.
    """
    state = unit._get_fsdp_state()  # noqa: SLF001

    def again(_: Any) -> None:
        state._pre_backward(None)  # noqa: SLF001

    def after_forward(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        views = [tensor for tensor in _tensors(output) if tensor._base is not None]  # noqa: SLF001
        if not views:
            return
        given = {id(_viewed(tensor)) for tensor in _tensors((args, kwargs))}
        for whole in map(_viewed, views):
            if whole.grad_fn is not None and id(whole) not in given:
                whole.grad_fn.register_prehook(again)

    unit.register_forward_hook(after_forward, with_kwargs=True)


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _viewed(tensor: Tensor) -> Tensor:
    """Return the base of a view; a tensor that is not a view is returned unchanged."""
    return tensor if tensor._base is None else tensor._base  # noqa: SLF001


def buckets_of(tensors: Sequence[Tensor], bucket_bytes: int) -> list[list[int]]:
    """Return the indices of the tensors in each bucket that DistributedDataParallel would fill, in the given order.

    Each bucket has one dtype and one device, and is closed after its tensors reach `bucket_bytes`.
    """
    if not tensors:
        return []
    found, _ = dist._compute_bucket_assignment_by_size([*tensors], [bucket_bytes])  # noqa: SLF001
    return [list(bucket) for bucket in found]


def first_left_out(ddp: nn.parallel.DistributedDataParallel) -> str | None:
    """Return the name of a parameter that received no gradient in the last backward pass, or None if all received one.

    DDP does not reduce the bucket of such a parameter, so the other gradients in the bucket are not averaged over
    ranks.
    """
    try:
        ddp._check_reducer_finalized()  # noqa: SLF001
    except RuntimeError as error:
        named: list[str] = [name for name, p in ddp.module.named_parameters() if p.requires_grad]
        indices = re.search(r"did not receive grad for rank \d+: (\d+)", str(error))
        if indices is None:
            raise
        return named[int(indices[1])]
    return None


def holds_parameters(unit: Any) -> bool:
    """Return whether this FSDP2 unit shards any parameters; the root unit shards none if all belong to blocks."""
    return bool(_fsdp_groups(unit))


def stock_collectives(unit: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the all-gather and the reduce-scatter that FSDP2 uses for a unit by default."""
    group = _fsdp_groups(unit)[0]
    return group._all_gather_comm, group._reduce_scatter_comm  # noqa: SLF001


def skip_prefetch(unit: Any) -> None:
    """Turn off FSDP2's prefetching from this unit: no other unit's parameters are gathered during its backward pass."""
    for group in _fsdp_groups(unit):
        group._backward_prefetch = lambda: None  # noqa: SLF001


def reuse_compile_guards(unit: Any) -> None:
    """Make FSDP2 apply `torch.compiler.disable` to a unit's hooks once, instead of in each call.

    Each application creates closures in reference cycles, which the garbage collector must then collect.
    """
    state = unit._get_fsdp_state()  # noqa: SLF001
    for name in ("_pre_backward", "_root_post_backward_final_callback"):
        _guard_once(state, name)
    for group in _fsdp_groups(unit):
        _guard_once(group, "pre_backward")
        _guard_once(group, "post_backward")
    for hooks, name in (
        (unit._forward_pre_hooks, "_pre_forward"),  # noqa: SLF001
        (unit._forward_hooks, "_post_forward"),  # noqa: SLF001
    ):
        handle = getattr(state, f"{name}_hook_handle", None)
        if handle is not None and handle.id in hooks and hooks[handle.id] == getattr(state, name):
            _guard_once(state, name)
            hooks[handle.id] = getattr(state, name)


def _guard_once(owner: Any, name: str) -> None:
    raw = getattr(getattr(type(owner), name), "__wrapped__", None)
    if raw is not None:  # otherwise this release of PyTorch does not guard it
        bound = MethodType(raw, owner)
        setattr(owner, name, torch.compiler.disable(bound, recursive=True, reason="skipping FSDP hooks"))


def label_while_profiling() -> None:
    """Make FSDP2 label its work only while a profiler runs, because it sets about ten labels per unit and step."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    label = _fsdp_param_group.record_function
    if label is not _Label:
        _Label.real = label
        _fsdp_param_group.record_function = _Label  # type: ignore[misc]


class _Label:
    """Replacement for `torch.profiler.record_function` in FSDP2's module; a no-op while no profiler runs."""

    real: Any

    def __new__(cls, name: str, args: str | None = None) -> Any:
        return cls.real(name, args) if torch.autograd._profiler_enabled() else _NO_LABEL  # noqa: SLF001


_NO_LABEL = nullcontext()


def report_gradients(unit: Any, names: Mapping[int, str], report: Callable[[tuple[str, ...]], None]) -> None:
    """Make FSDP2 report which parameters of a unit have a gradient, just before it reduces the unit's gradients.

    Args:
        unit: The module on which `fully_shard` was called.
        names: Names of all parameters in the model, by `id`.
        report: Function that is called with the names of the parameters that have a gradient.
    """
    for group in _fsdp_groups(unit):
        named = [(names[id(param.sharded_param)], param) for param in group.fsdp_params]
        group.post_backward = _reporting(named, group.post_backward, report)


def _reporting(
    named: Sequence[tuple[str, Any]], reduce: Callable[..., None], report: Callable[[tuple[str, ...]], None]
) -> Callable[..., None]:
    def post_backward(*unused: Any) -> None:
        report(tuple(name for name, param in named if _has_gradient(param)))
        reduce(*unused)

    return post_backward


def _has_gradient(param: Any) -> bool:
    whole = getattr(param, "_unsharded_param", None)  # set by the first all-gather
    return whole is not None and (whole.grad is not None or param.unsharded_accumulated_grad is not None)


def before_backward(unit: Any) -> Callable[[Tensor], Tensor]:
    """Return the hook that FSDP2 registers on a unit's outputs; it gathers the parameters when a gradient arrives."""
    hook: Callable[[Tensor], Tensor] = unit._get_fsdp_state()._pre_backward  # noqa: SLF001
    return hook


def overflow_flags(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the overflow flags that `unscale_` has set: one-element tensors, one per device.

    A flag is 1 if a gradient is not finite, else 0. The scaler reads the flags to decide whether to take the step;
    callers may write to them.
    """
    state = scaler._per_optimizer_states[id(optimizer)]  # noqa: SLF001
    return list(state["found_inf_per_device"].values())
