"""Which layers of a model mix the samples of a micro-batch, so that its result depends on how a batch is cut."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def layers_that_mix(model: nn.Module) -> dict[str, list[str]]:
    """Return the kinds of layers whose output for a sample depends on the others, for the ``start`` event; or nothing.

    Known are batch norms, which take statistics of the micro-batch.
    """
    kinds = sorted({type(part).__name__ for part in model.modules() if isinstance(part, _BatchNorm)})
    return {"mixes_samples": kinds} if kinds else {}
