"""What every description of a model answers, and the ways to get one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.spec._base import Spec

if TYPE_CHECKING:
    from shardscope.spec.model.transformer import Transformer


class Model(Spec):
    """A model described, not built: `Model.of`, `Model.transformer` and their siblings make one."""

    name: str = "model"
    """What tables and figures call it."""

    @classmethod
    def transformer(cls, **sizes: Any) -> Transformer:
        """A transformer by its sizes; fields as in `Transformer`.

        Example:
            >>> Model.transformer(layers=2, hidden=64, heads=4, vocab=256, seq=128).num_params
            124672
        """
        from shardscope.spec.model.transformer import Transformer

        return Transformer(**sizes)
