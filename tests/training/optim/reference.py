"""LAMB and LARS as the papers write them: one tensor, one line a formula, no thought of speed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class LambReference:
    """You et al. (ICLR 2020), Algorithm 2, with the choices in which published versions differ."""

    weights: list[Tensor]
    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    bias_correction: bool = True
    grad_averaging: bool = True
    decay_form: str = "inside"
    clamp: float | None = None
    trust_clip: bool = False
    max_grad_norm: float | None = None
    adapt: bool = True
    ratios: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.t = 0
        self.m = [torch.zeros_like(w) for w in self.weights]
        self.v = [torch.zeros_like(w) for w in self.weights]

    def step(self, grads: list[Tensor]) -> None:
        self.t += 1
        self.ratios = []
        if self.max_grad_norm is not None:
            norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in grads))
            grads = [g / max(1.0, norm / self.max_grad_norm) for g in grads]
        for i, g in enumerate(grads):
            self._step(i, g)

    def _step(self, i: int, g: Tensor) -> None:
        w, (beta1, beta2), decay = self.weights[i], self.betas, self.weight_decay
        self.m[i] = beta1 * self.m[i] + ((1 - beta1) if self.grad_averaging else 1) * g
        self.v[i] = beta2 * self.v[i] + (1 - beta2) * g**2
        m_hat = self.m[i] / (1 - beta1**self.t) if self.bias_correction else self.m[i]
        v_hat = self.v[i] / (1 - beta2**self.t) if self.bias_correction else self.v[i]
        r = m_hat / (v_hat.sqrt() + self.eps)
        if self.decay_form == "inside":
            u = r + decay * w
        else:
            u, w = r, w - self.lr * decay * w
        ratio = self._ratio(norm_of(w), norm_of(u))
        self.ratios.append(ratio)
        self.weights[i] = w - self.lr * ratio * u

    def _ratio(self, weight_norm: float, update_norm: float) -> float:
        if not self.adapt or weight_norm == 0 or update_norm == 0:
            return 1.0
        phi = weight_norm if self.clamp is None else min(weight_norm, self.clamp)
        return min(phi / update_norm, 1.0) if self.trust_clip else phi / update_norm


@dataclass
class LarsReference:
    """You et al. (2017), with the choices in which published versions differ."""

    weights: list[Tensor]
    lr: float = 1.0
    momentum: float = 0.9
    weight_decay: float = 1e-4
    eps: float = 0.0
    trust_coefficient: float = 1e-3
    momentum_form: str = "classic"
    norm_of: str = "parts"
    nesterov: bool = False
    trust_clip: bool = False
    adapt: bool = True
    ratios: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.v = [torch.zeros_like(w) for w in self.weights]

    def step(self, grads: list[Tensor]) -> None:
        self.ratios = []
        for i, g in enumerate(grads):
            self._step(i, g)

    def _step(self, i: int, g: Tensor) -> None:
        w, m = self.weights[i], self.momentum
        u = g + self.weight_decay * w
        if self.momentum_form == "post":
            self.v[i] = m * self.v[i] + u
            move = u + m * self.v[i] if self.nesterov else self.v[i]
            self.weights[i] = w - self.lr * self._ratio(norm_of(w), norm_of(move)) * move
            return
        divisor = norm_of(u)
        if self.norm_of == "parts":
            divisor = norm_of(g) + self.weight_decay * norm_of(w)
        scaled = self._ratio(norm_of(w), divisor) * u
        if self.momentum_form == "classic":
            self.v[i] = m * self.v[i] + self.lr * scaled
            self.weights[i] = w - (m * self.v[i] + self.lr * scaled if self.nesterov else self.v[i])
        else:
            self.v[i] = m * self.v[i] + scaled
            self.weights[i] = w - self.lr * (m * self.v[i] + scaled if self.nesterov else self.v[i])

    def _ratio(self, weight_norm: float, divisor: float) -> float:
        self.ratios.append(self._formula(weight_norm, divisor))
        return self.ratios[-1]

    def _formula(self, weight_norm: float, divisor: float) -> float:
        if not self.adapt or weight_norm == 0 or divisor == 0:
            return 1.0
        ratio = self.trust_coefficient * weight_norm / (divisor + self.eps)
        return min(ratio / self.lr, 1.0) if self.trust_clip else ratio


def norm_of(tensor: Tensor) -> float:
    return math.sqrt(float((tensor.double() ** 2).sum()))
