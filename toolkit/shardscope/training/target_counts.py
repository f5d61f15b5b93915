"""Number of targets over which a loss takes its mean: the weight of that mean in a mean over several batches.

    cross-entropy, HF labels     targets that are not -100
    mse                          elements
    torch's own losses           as their ``ignore_index``, ``weight`` and ``reduction`` say, also in a `partial`
    a user's own loss            as declared by ``loss.count``, a function of the targets that returns their number

    def masked(output, target): ...
    masked.count = lambda target: (target > 0).sum()     # or a method `count`, if the loss is an object

A loss that is a sum declares ``loss.reduction = "sum"``, as torch's losses do. A loss that declares neither is assumed
to be a mean over its rows.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from shardscope.errors import DataError, quoted

Count = Callable[[Any], float]
"""Function from the targets of a micro-batch to the number of them that count, or to the sum of their weights."""

IGNORED = -100
"""The target that PyTorch's cross-entropy ignores."""
_OF_CLASSES = (functional.cross_entropy, functional.nll_loss)


def classes_count(ignored: int = IGNORED, weight: Tensor | None = None) -> Count:
    """Return the count of PyTorch's cross-entropy: the targets that are not `ignored`, each with its class's weight.

    Targets that are probabilities of classes all count.
    """

    def count(target: Any) -> float:
        if not isinstance(target, Tensor) or target.is_floating_point():
            return elements_count(target)
        counted = target != ignored
        return float(
            counted.sum() if weight is None else weight.to(target.device)[target[counted]].double().sum()
        )

    return count


def elements_count(target: Any) -> float:
    """Return the number of elements; 1 for targets that are not a tensor."""
    return float(target.numel()) if isinstance(target, Tensor) else 1.0


def stated_count(loss: Any, name: str) -> Count | None:
    """Return the count that a user's loss declares by ``count``, or the known count of a PyTorch loss; else None."""
    if _takes_targets(getattr(loss, "count", None)):
        return partial(_checked, loss.count, name)
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and _computes_as(
        loss, nn.CrossEntropyLoss, nn.NLLLoss
    ):
        return classes_count(loss.ignore_index, loss.weight)
    given = loss.keywords if isinstance(loss, partial) else {}
    if _without_keywords(loss) in _OF_CLASSES:
        return classes_count(given.get("ignore_index", IGNORED), given.get("weight"))
    return None


def is_sum(loss: Any) -> bool:
    """Return whether a user's loss declares that it is a sum, by ``reduction`` as PyTorch's losses do."""
    given = loss.keywords if isinstance(loss, partial) else {}
    return given.get("reduction", getattr(_without_keywords(loss), "reduction", None)) == "sum"


def smooths_uncounted(loss: Any) -> bool:
    """Return whether label smoothing assigns a nonzero loss to targets of classes with weight 0, which do not count."""
    given = loss.keywords if isinstance(loss, partial) else vars(loss) if isinstance(loss, nn.Module) else {}
    weight = getattr(loss, "weight", given.get("weight"))
    return isinstance(weight, Tensor) and bool(given.get("label_smoothing") and (weight == 0).any())


def _takes_targets(count: Any) -> bool:
    """Return whether an object's ``count`` is a function of one argument, and not a number or another method."""
    try:
        inspect.signature(count).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def _computes_as(loss: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Return whether a loss computes the same as one of these PyTorch classes, and is not an overriding subclass."""
    is_own = {"forward", "__call__"} & vars(loss).keys() or type(loss).__call__ is not nn.Module.__call__
    return not is_own and type(loss).forward in [kind.forward for kind in kinds]


def _without_keywords(loss: Any) -> Any:
    return loss.func if isinstance(loss, partial) and not loss.args else loss


def _checked(count: Callable[[Any], Any], name: str, target: Any) -> float:
    found = count(target)
    is_number = isinstance(found, int | float) or (isinstance(found, Tensor) and found.numel() == 1)
    value = float(found) if is_number else math.nan
    if not (math.isfinite(value) and value >= 0):
        raise DataError(
            f"loss={name}: its count returned {quoted(found)}; return the number of targets that count, 0 or more"
        )
    return value
