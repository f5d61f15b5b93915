"""LAMB: Adam with each layer's step scaled to the norm of the layer's weights.

You et al., Large batch optimization for deep learning: training BERT in 76 minutes (ICLR 2020), Algorithm 2.
With a layer's weights ``w``, Adam's update ``r`` and ``u = r + decay * w``, the layer moves by ``-lr * |w| / |u| * u``.
"""

# ruff: noqa: SLF001 - torch documents its foreach operations under these names

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from shardscope.errors import SpecError
from shardscope.methods.optimizers.lamb._torch_loops import Advance, advance_layer_, chosen_loop, factors_of
from shardscope.training.optim._checks import check_bound, check_choice, check_fraction, check_non_negative
from shardscope.training.optim._kernels import (
    AdamMoments,
    AdamRun,
    Number,
    Scalars,
    Tensors,
    add_scaled_,
    at_most,
    fused_moments_,
    plain_moments_,
    scale_into,
    sums_of_squares,
)
from shardscope.training.optim._layerwise import (
    LayerBatch,
    LayerwiseOptimizer,
    Staged,
    reduced,
    total_squares,
)
from shardscope.training.optim.route import why_not_triton
from shardscope.training.sharding import ReduceSquares, global_norm, local

if TYPE_CHECKING:
    from shardscope.methods.optimizers.lamb._torch_launch import KernelStep

Form = Literal["auto", "compiled", "fused", "plain", "triton"]

COMPILED_ELEMENTS = 1 << 21
"""Minimum number of elements for which ``form="auto"`` uses the compiled loop; with fewer, loading numba takes as long
as hundreds of steps."""


class TorchLamb(LayerwiseOptimizer):
    """LAMB, with options that cover the differences between published versions; the defaults are those of the paper.

    Args:
        params: Parameters, named parameters, or groups of either.
        lr: Learning rate, at least 0.
        betas: Decay per step of the first and second moment, each in [0, 1).
        eps: Constant that is added to the square root of the second moment, at least 0.
        weight_decay: Weight decay, at least 0; see `decay_form`.
        bias_correction: Divide the moments by ``1 - beta**step``.
        grad_averaging: Weight the gradient by ``1 - betas[0]`` in the first moment; False gives it weight 1.
        decay_form: ``inside``: weight decay is part of the update that the trust ratio scales. ``decoupled``: weight
            decay is applied separately, as in AdamW.
        clamp: Upper bound of the weight norm in the trust ratio; None for no bound.
        trust_clip: Clip trust ratios at 1.
        max_grad_norm: Clip all gradients to this global norm first; None for no clipping. The gradient tensors
            themselves are not changed.
        adapt: Whether to use trust ratios; False is meant for individual parameter groups, such as biases and norms.
        form: ``compiled`` does the first phase in one loop compiled by numba, which needs contiguous float32 tensors on
            a CPU; ``fused`` updates the moments in torch's fused AdamW kernel, which needs contiguous tensors on a CPU
            and `grad_averaging`; ``triton`` does the whole step in one kernel, which needs Triton, a C compiler for it,
            and contiguous float32 tensors on an NVIDIA GPU; ``plain`` uses ordinary operations. For 2**21 elements or
            more, ``auto`` uses the compiled loop or the Triton kernel if possible (and ``SHARDSCOPE_CODECS`` is not
            ``torch``), and otherwise the fused kernel where possible. The forms differ by rounding errors.
        reduce_squares: Function that sums the layers' squared norms over ranks, for sharded tensors; called once per
            step.
        reduce_grad_square: Function that sums the squared norm of all gradients over all ranks, for shards and pipeline
            stages with `max_grad_norm`; called once per step by every rank. Default: `reduce_squares`.
        duplicate_grad_params: Parameters that are left out of the squared norm of all gradients, because another rank
            counts their gradients (tied copies).

    Raises:
        SpecError: An option is out of range; or, in the first step, the `form` is not possible.
    """

    method = "lamb"
    _loop: Advance | None = None  # the compiled loop, if this step uses it
    _kernels: KernelStep | None = None  # the launches of the Triton kernel, if the last step used it

    def __init__(
        self,
        params: Any,
        lr: float = 2e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        decay_form: Literal["inside", "decoupled"] = "inside",
        clamp: float | None = None,
        trust_clip: bool = False,
        max_grad_norm: float | None = None,
        adapt: bool = True,
        form: Form = "auto",
        reduce_squares: ReduceSquares | None = None,
        reduce_grad_square: ReduceSquares | None = None,
        duplicate_grad_params: Sequence[nn.Parameter] = (),
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "grad_averaging": grad_averaging,
            "decay_form": decay_form,
            "clamp": clamp,
            "trust_clip": trust_clip,
            "adapt": adapt,
        }
        super().__init__(params, defaults, reduce_squares=reduce_squares)
        for group in self.param_groups:
            check_non_negative(group, "lr", "eps", "weight_decay")
            check_fraction(group, "betas")
            check_bound("clamp", group["clamp"])
            check_choice("decay_form", group["decay_form"], ("inside", "decoupled"))
        check_bound("max_grad_norm", max_grad_norm)
        check_choice("form", form, get_args(Form))
        self.max_grad_norm = max_grad_norm
        self.form = form
        self.reduce_grad_square = reduce_grad_square or reduce_squares
        self.duplicate_grad_params = list(duplicate_grad_params)
        self._grad_factor: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        own = ("max_grad_norm", "form", "reduce_grad_square", "duplicate_grad_params", "_grad_factor")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._kernels = None  # the kernels update the moments of the previous state

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(param),
            "exp_avg_sq": torch.zeros_like(param),
        }

    def _repeat(self) -> bool:
        if self._kernels is None or not self._kernels.fits(self.param_groups):
            return False
        self._run(self._kernels)
        return True

    def _update(self, batches: list[LayerBatch]) -> None:
        self._kernels = self._kernels_for(batches)
        if self._kernels is None:
            super()._update(batches)
        else:
            self._run(self._kernels)

    def _kernels_for(self, batches: list[LayerBatch]) -> KernelStep | None:
        """Return the launches of the Triton kernel for this and similar steps; None if the step takes another form."""
        if self.form == "auto":
            num_elements = sum(batch.num_elements for batch in batches if batch.weights[0].is_cuda)
            if num_elements < COMPILED_ELEMENTS:
                return None
        elif self.form != "triton":
            return None
        reason = why_not_triton()
        if reason is None:
            from shardscope.methods.optimizers.lamb._torch_launch import KernelStep, why_not_kernel

            params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            held = [(param, self.state[param]) for param in params]
            reason = why_not_kernel(batches, held)
            if reason is None:
                return KernelStep(batches, held, is_sharded=self.reduce_squares is not None)
        if self.form == "triton":
            raise SpecError(f"form='triton' is not possible, because {reason}; use form='auto'")
        return None

    def _run(self, kernels: KernelStep) -> None:
        """Take a step in launches of the Triton kernel."""
        launches = kernels.launches
        for launch in launches:
            launch.count_step()
        self._grad_factor = self._clipping([launch.grads for launch in launches])
        for launch in launches:
            launch.begin(self._grad_factor)
        waiting = [launch for launch in launches if launch.adapts]
        if waiting and self.reduce_squares is not None:
            names = [name for launch in waiting for name in launch.updated.names]
            sums = reduced([launch.squares for launch in waiting], self.reduce_squares, names)
            for launch, squares in zip(waiting, sums, strict=True):
                launch.finish(squares, self._ratios(squares, launch.group))
        for launch in launches:
            launch.release()
        self._last = [launch.updated for launch in launches]

    def _prepare(self, batches: list[LayerBatch]) -> None:
        """Increment the step counters of all layers, and compute the factor that clips gradients to `max_grad_norm`."""
        self._loop = self._chosen_loop(batches)
        if self.form in {"compiled", "fused"}:
            for batch in batches:
                self._check_form(batch)
        steps = [step for batch in batches for step in batch.column("step")]
        if steps:
            torch._foreach_add_(steps, 1)
        self._grad_factor = self._clipping([batch.grads for batch in batches])

    def _clipping(self, batches: list[list[Tensor]]) -> Tensor | None:
        """Return the factor that clips gradients to `max_grad_norm`; None if it is known to be 1.

        Args:
            batches: All gradients, in batches of equal dtype and device.
        """
        if (max_norm := self.max_grad_norm) is None:
            return None
        counted = [grads for batch in batches if (grads := self._counted(batch))]
        device = batches[0][0].device if batches else torch.device("cpu")
        squares = [torch.stack([*sums_of_squares(grads)]).to(device, torch.float64) for grads in counted]
        none = torch.zeros(1, dtype=torch.float64, device=device)
        total = torch.cat(squares).sum(dim=0, keepdim=True) if squares else none
        if self.reduce_grad_square is not None:
            total = self.reduce_grad_square(total)
        if device.type != "cpu":  # reading the norm would synchronise with the device
            return (max_norm / total[0].sqrt()).clamp(max=1.0)
        norm = global_norm(total, [grad for grads in counted for grad in grads], self.reduce_grad_square)
        factor = (max_norm / norm).clamp(max=1.0)
        return None if factor == 1 else factor

    def _chosen_loop(self, batches: list[LayerBatch]) -> Advance | None:
        """Return the compiled loop for the layers that it supports; None if this step does not use it."""
        if self.form in {"fused", "plain"}:
            return None
        num_elements = sum(batch.num_elements for batch in batches if _fits_compiled(batch))
        return chosen_loop() if self.form == "compiled" or num_elements >= COMPILED_ELEMENTS else None

    def _check_form(self, batch: LayerBatch) -> None:
        names = ", ".join(str(layer.name) for layer in batch.layers)
        if self.form == "fused" and not _fits_fused(batch):
            raise SpecError(
                f"form='fused' needs contiguous tensors on a CPU and grad_averaging=True, which is not the case for "
                f"{names}; use form='auto'"
            )
        if self.form == "compiled" and (self._loop is None or not _fits_compiled(batch)):
            raise SpecError(
                f"form='compiled' needs numba and contiguous float32 tensors on a CPU, which is not the case for "
                f"{names}; use form='auto', or run pip install numba"
            )

    def _counted(self, grads: list[Tensor]) -> list[Tensor]:
        """Return the gradients, except gradients that another rank counts in the global norm."""
        left_out = {
            local(param.grad).data_ptr() for param in self.duplicate_grad_params if param.grad is not None
        }
        return [grad for grad in grads if grad.data_ptr() not in left_out]

    def _stage(self, batch: LayerBatch) -> Staged:
        if self._loop is not None and _fits_compiled(batch):
            return self._stage_compiled(batch, self._loop)
        group = batch.group
        moments = AdamMoments.of(group)
        advance_ = fused_moments_ if self.form != "plain" and _fits_fused(batch) else plain_moments_
        updates = self._scratch.take(batch)
        squares: list[Tensor] = []
        for run in self._runs(batch, updates):
            _decay(run, group)
            weight_squares = sums_of_squares(run.weights) if group["adapt"] else []
            advance_(run, moments)
            update_squares = sums_of_squares(run.updates) if group["adapt"] else []
            squares += [*weight_squares, *update_squares]
        return Staged(batch, updates, total_squares(squares, len(batch.layers)))

    def _stage_compiled(self, batch: LayerBatch, advance: Advance) -> Staged:
        group, updates = batch.group, self._scratch.take(batch)
        decay = group["weight_decay"] if group["decay_form"] == "inside" else 0.0
        if group["decay_form"] == "decoupled":
            _decay_separately(batch.weights, group)
        factor = 1.0 if self._grad_factor is None else float(self._grad_factor)
        moments = AdamMoments.of(group)
        counts = moments.counts(batch.column("step"))
        factors = {count: factors_of(moments, count, decay, factor) for count in set(counts)}
        columns = batch.weights, batch.grads, batch.column("exp_avg"), batch.column("exp_avg_sq"), updates
        squares = [
            advance_layer_(advance, tensors, factors[count])
            for count, *tensors in zip(counts, *columns, strict=True)
        ]
        of_weights, of_updates = ([pair[row] for pair in squares] for row in (0, 1))
        return Staged(batch, updates, (of_weights, of_updates) if group["adapt"] else None)

    def _runs(self, batch: LayerBatch, updates: list[Tensor]) -> Iterator[AdamRun]:
        steps = batch.column("step")
        factor = self._grad_factor
        columns = batch.weights, batch.grads, batch.column("exp_avg"), batch.column("exp_avg_sq"), updates
        for weights, grads, exp_avgs, exp_avg_sqs, pieces in batch.pieces(*columns):
            scaled = grads if factor is None else torch._foreach_mul(grads, factor.to(grads[0]))
            yield AdamRun(weights, scaled, exp_avgs, exp_avg_sqs, pieces, steps)

    def _ratio(self, weight_norm: Number, divisor: Number, group: dict[str, Any]) -> Number:
        bounded = weight_norm if group["clamp"] is None else at_most(weight_norm, group["clamp"])
        ratio = bounded / divisor
        return at_most(ratio, 1.0) if group["trust_clip"] else ratio

    def _bound(self, weight_norm: float, divisor: float, group: dict[str, Any]) -> str | None:
        clamp = group["clamp"]
        bounded = weight_norm if clamp is None else at_most(weight_norm, clamp)
        if group["trust_clip"] and bounded > divisor:
            return "trust_clip"
        return "clamp" if bounded < weight_norm else None

    def _apply(self, staged: Staged, ratios: Scalars | None) -> None:
        weights, lr = staged.batch.weights, staged.batch.group["lr"]
        if ratios is None:
            torch._foreach_add_(weights, staged.directions, alpha=lr)
        else:
            add_scaled_(weights, staged.directions, lr, ratios)


def _fits_fused(batch: LayerBatch) -> bool:
    return AdamMoments.of(batch.group).fit_fused_kernel and all(layer.is_flat for layer in batch.layers)


def _fits_compiled(batch: LayerBatch) -> bool:
    return batch.weights[0].dtype == torch.float32 and all(layer.is_flat for layer in batch.layers)


def _decay(run: AdamRun, group: dict[str, Any]) -> None:
    """Initialise the updates with the weight-decay term, or apply decoupled weight decay directly to the weights."""
    decay = group["weight_decay"]
    if group["decay_form"] == "inside":
        scale_into(run.updates, run.weights, -decay)
        return
    scale_into(run.updates, run.weights, 0.0)
    _decay_separately(run.weights, group)


def _decay_separately(weights: Tensors, group: dict[str, Any]) -> None:
    """Apply decoupled weight decay directly to the weights."""
    if decay := group["weight_decay"]:
        # not weights *= 1 - lr * decay: in float32 the rounding errors of that factor would accumulate over the steps
        torch._foreach_add_(weights, weights, alpha=-group["lr"] * decay)
