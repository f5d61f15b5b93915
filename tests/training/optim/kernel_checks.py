"""What must hold for LAMB's Triton kernel on any device: a GPU, or the host in Triton's interpreter.

As a program, makes all checks in the interpreter, with tiles so small that layers have many.
"""

from __future__ import annotations

import copy
import os
import weakref

import torch
from torch import nn

from shardscope.methods.optimizers.lamb._torch import TorchLamb
from training.optim.problems import gradients, parameters, step, worst_difference

VARIANTS = [
    {},
    {"bias_correction": False, "clamp": 10.0, "decay_form": "decoupled"},
    {"max_grad_norm": 1.0, "weight_decay": 0.0, "adapt": False, "grad_averaging": False},
    {"trust_clip": True, "clamp": 0.5, "max_grad_norm": 1.0},
    {"reduce_squares": lambda squares: squares},
]


def on_device(device, shapes=((), (7,), (3, 5), (64, 31), (128, 8)), seed=0):
    params = parameters(torch.float32, shapes, seed)
    flat = torch.cat([torch.zeros(1), *[param.detach().flatten() for param in params]]).to(device)
    # the last two parameters begin anywhere in a buffer, as shards do
    views = flat[1:].split([param.numel() for param in params])
    return [
        nn.Parameter(view.view_as(param) if i >= len(params) - 2 else view.view_as(param).clone())
        for i, (view, param) in enumerate(zip(views, params, strict=True))
    ]


def steps(optimizer, params, count, *, late=()):
    """Take steps; parameters in `late` get no gradient in the first two."""
    for number, grads in enumerate(gradients(params, count)):
        for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
            param.grad = None if number < 2 and i in late else grad.to(param.device)
        optimizer.step()
    return [param.detach().clone() for param in params]


def agrees_with_plain(device, options, count=3):
    one, two = on_device(device), on_device(device)
    kernel, plain = TorchLamb(one, form="triton", **options), TorchLamb(two, form="plain", **options)
    assert worst_difference(steps(kernel, one, count), steps(plain, two, count)) < 1e-6
    found, wanted = kernel.trust_ratios(), plain.trust_ratios()
    assert found.keys() == wanted.keys()
    assert all(abs(found[name] - ratio) <= 1e-5 * ratio for name, ratio in wanted.items())


def takes_layers_as_they_come(device, _):
    """Frozen at first, without elements, or in groups of their own settings."""
    results = []
    for form in ("triton", "plain"):
        params = [*on_device(device), nn.Parameter(torch.zeros(0, device=device))]
        groups = [{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:], "adapt": False}]
        results.append(steps(TorchLamb(groups, form=form), params, 3, late=(1, 4)))
    assert worst_difference(*results) < 1e-6


def keeps_what_is_not_finite(device, _):
    weights = [[1.0, float("inf")], [1.0, 2.0], [1.0, 2.0]]
    grads = [[1.0, 1.0], [1.0, float("nan")], [1.0, float("inf")]]
    moved = []
    for form in ("triton", "plain"):
        params = [nn.Parameter(torch.tensor(values, device=device)) for values in weights]
        step(
            TorchLamb(params, form=form, weight_decay=0.0),
            params,
            torch.tensor(grads, device=device).unbind(),
        )
        moved.append([param.detach() for param in params])
    for one, other in zip(*moved, strict=True):
        assert not other.isfinite().all()
        assert torch.equal(one, other) or torch.equal(one.isnan(), other.isnan())


def resumes_bit_exactly(device, _):
    params = on_device(device)
    optimizer = TorchLamb(params, form="triton")
    steps(optimizer, params, 2)
    saved = copy.deepcopy((optimizer.state_dict(), [param.detach() for param in params]))
    expected = steps(optimizer, params, 2)
    resumed = [nn.Parameter(tensor) for tensor in saved[1]]
    successor = TorchLamb(resumed, lr=9.0, form="triton")
    successor.load_state_dict(saved[0])
    assert all(map(torch.equal, steps(successor, resumed, 2), expected))


def takes_what_is_loaded_into_an_optimizer_in_use(device, _):
    results = []
    for form in ("triton", "plain"):
        params = on_device(device)
        optimizer = TorchLamb(params, form=form)
        steps(optimizer, params, 1)
        saved = copy.deepcopy(optimizer.state_dict())
        steps(optimizer, params, 3)
        optimizer.load_state_dict(saved)
        for group in optimizer.param_groups:
            group["lr"] = 0.5
        results.append(steps(optimizer, params, 2))
        assert all(state["step"] == 3 for state in optimizer.state.values())
    assert worst_difference(*results) < 1e-6


def holds_no_gradient_between_steps(device, options):
    params = on_device(device)
    optimizer = TorchLamb(params, form="triton", **options)
    for count in (1, 2):  # the second step runs the launches of the first again
        steps(optimizer, params, count)
        alive = [weakref.ref(param.grad) for param in params]
        optimizer.zero_grad(set_to_none=True)
        assert [reference() for reference in alive] == [None] * len(params)


CHECKS = {
    **{f"agrees with plain {i}": (agrees_with_plain, options) for i, options in enumerate(VARIANTS)},
    "layers as they come": (takes_layers_as_they_come, None),
    "not finite": (keeps_what_is_not_finite, None),
    "resumes": (resumes_bit_exactly, None),
    "no gradient between steps": (holds_no_gradient_between_steps, {}),
    "no clipped gradient between steps": (holds_no_gradient_between_steps, {"max_grad_norm": 1.0}),
    "loads into one in use": (takes_what_is_loaded_into_an_optimizer_in_use, None),
}


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1"
    from shardscope.methods.optimizers.lamb import _torch_launch

    _torch_launch.TILE = 256
    for check, argument in CHECKS.values():
        check("cpu", argument)


if __name__ == "__main__":
    main()
