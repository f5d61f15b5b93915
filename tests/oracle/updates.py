"""Update rules for the oracle: SGD and AdamW are torch's loops, LAMB and LARS are written from their papers.

LAMB: You et al., Large batch optimization for deep learning (ICLR 2020), Algorithm 2. LARS: You, Gitman and Ginsburg,
Large batch training of convolutional networks (2017), equations 5 and 6, and the two other places that libraries give
the learning rate and the ratio. Both tensor by tensor, with one formula a line.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

DEFAULTS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1},
    "nesterov": {"lr": 0.1, "momentum": 0.9},
    "adamw": {"lr": 1e-3, "weight_decay": 0.01},
    "lamb": {"lr": 2e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01},
    "lars": {"lr": 1.0, "momentum": 0.9, "weight_decay": 1e-4, "trust_coefficient": 1e-3},
}
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "v3": {"bias_correction": False},
    "apex": {"max_grad_norm": 1.0, "adapt_undecayed": False},
    "nvlamb": {"max_grad_norm": 1.0},
    "timm": {"max_grad_norm": 1.0, "adapt_undecayed": False},
    "pytorch-optimizer": {
        "bias_correction": False,
        "clamp": 10.0,
        "decay_form": "decoupled",
        "weight_decay": 0.0,
    },
}


def build(name: str, settings: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of this name; ``exclude="1d"`` takes decay and ratio off biases, norms and single numbers."""
    settings = dict(settings)
    exclude, variant = settings.pop("exclude", "none"), settings.pop("variant", None)
    settings = {**DEFAULTS[name], **PRESETS.get(variant or "", {}), **settings}
    trained = [p for p in model.parameters() if p.requires_grad]
    plain = [p for p in trained if exclude == "1d" and p.ndim <= 1]
    decayed = [p for p in trained if not any(p is other for other in plain)]
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0, "plain": True}]
    groups = [group for group in groups if group["params"]]
    match name:
        case "adamw":
            return torch.optim.AdamW(groups, **settings, foreach=False, fused=False)
        case "lamb":
            return Lamb(groups, settings)
        case "lars":
            return Lars(groups, settings)
    return Sgd(groups, **settings, nesterov=name == "nesterov", foreach=False, fused=False)


class Sgd(torch.optim.SGD):
    """torch's own, which adds no decay to a sparse gradient: that gets its zeros written out, and is the same."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"] if group["weight_decay"] else ():
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
        return super().step(closure)


def norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


class Lamb(torch.optim.Optimizer):
    """Algorithm 2, with what published versions do otherwise as settings; refuses sparse gradients, as AdamW does."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if any(grad.is_sparse for grad in grads):
            raise RuntimeError("LAMB does not support sparse gradients")
        bound = self.defaults.get("max_grad_norm", "off")
        whole = math.sqrt(sum(norm(grad) ** 2 for grad in grads))
        factor = 1.0 if bound == "off" or whole <= bound else bound / whole
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is not None:
                    self._move(weights, weights.grad * factor, group)

    def _move(self, w: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        (beta1, beta2), decay, lr = group["betas"], group["weight_decay"], group["lr"]
        state = self.state[w]
        if not state:
            state.update(t=0, m=torch.zeros_like(w), v=torch.zeros_like(w))
        state["t"] += 1
        state["m"] = beta1 * state["m"] + (1 - beta1 if group.get("grad_averaging", True) else 1.0) * g
        state["v"] = beta2 * state["v"] + (1 - beta2) * g * g
        t = state["t"] if group.get("bias_correction", True) else math.inf
        r = state["m"] / (1 - beta1**t) / ((state["v"] / (1 - beta2**t)).sqrt() + group["eps"])
        if group.get("decay_form", "inside") == "inside":
            r = r + decay * w
        else:
            w.sub_(lr * decay * w)
        adapts = not group.get("plain") and (
            group.get("adapt_undecayed", True) or self.defaults["weight_decay"] > 0
        )
        w.sub_(lr * (self._ratio(norm(w), norm(r), group) if adapts else 1.0) * r)

    @staticmethod
    def _ratio(of_weights: float, of_update: float, group: dict[str, Any]) -> float:
        if of_weights == 0 or of_update == 0:
            return 1.0
        clamp = group.get("clamp", "off")
        ratio = (of_weights if clamp == "off" else min(of_weights, clamp)) / of_update
        return min(ratio, 1.0) if group.get("trust_clip") else ratio


class Lars(torch.optim.Optimizer):
    """Equations 5 and 6, or with rate and ratio after the velocity."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is not None:
                    self._move(weights, weights.grad, group)

    def _move(self, w: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        momentum, lr, form = group["momentum"], group["lr"], group.get("momentum_form", "classic")
        u = g + group["weight_decay"] * w
        v = self.state[w].get("v", torch.zeros_like(w))
        if form == "post":
            self.state[w]["v"] = v = momentum * v + u
            along = u + momentum * v if group.get("nesterov") else v
            w.sub_(lr * self._ratio(norm(w), norm(along), group) * along)
            return
        parts = norm(g) + group["weight_decay"] * norm(w)
        q = self._ratio(norm(w), parts if group.get("norm_of", "parts") == "parts" else norm(u), group)
        inside, outside = (lr, 1.0) if form == "classic" else (1.0, lr)
        self.state[w]["v"] = v = momentum * v + inside * q * u
        w.sub_(outside * (momentum * v + inside * q * u if group.get("nesterov") else v))

    @staticmethod
    def _ratio(of_weights: float, divisor: float, group: dict[str, Any]) -> float:
        if group.get("plain") or of_weights == 0 or divisor == 0:
            return 1.0
        ratio = group["trust_coefficient"] * of_weights / (divisor + group.get("eps", 0.0))
        return min(ratio / group["lr"], 1.0) if group.get("trust_clip") else ratio


def in_blocks(values: np.ndarray, block: int, largest: int) -> np.ndarray:
    """Values rounded to integers of at most `largest` times a scale for each block."""
    back = np.empty_like(values)
    for i in range(0, values.size, block):
        part = values[i : i + block]
        scale = np.abs(part).max() / np.float32(largest)
        back[i : i + block] = np.clip(np.rint(part / scale), -largest, largest) * scale if scale else 0
    return back
