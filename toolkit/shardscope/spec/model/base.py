"""What every description of a model answers, and the ways to get one."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.spec._base import Spec

if TYPE_CHECKING:
    from shardscope.spec.model.table import LayerTable
    from shardscope.spec.model.transformer import Transformer


class Model(Spec):
    """A model described, not built: `Model.of`, `Model.transformer` and their siblings make one."""

    name: str = "model"
    """What tables and figures call it."""
    source: str = ""
    """Where its sizes come from; empty for one of the user's own."""

    @classmethod
    def of(cls, name: str) -> Transformer | LayerTable:
        """A published model; `Model.names` lists them. Or what a ``config.json`` describes, given by its path.

        A name with a slash or the ending ``.json`` is a path.

        Raises:
            SpecError: The catalogue has none of this name, or the file cannot be described.

        Example:
            >>> Model.of("gpt2-xl").num_params
            1557611200
        """
        from shardscope.spec.model.presets import preset

        return cls.from_hf(name) if "/" in name or name.endswith(".json") else preset(name)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names in the catalogue."""
        from shardscope.spec.catalogue import table

        return tuple(table("models"))

    @classmethod
    def transformer(cls, **sizes: Any) -> Transformer:
        """A transformer by its sizes; fields as in `Transformer`.

        Example:
            >>> Model.transformer(layers=2, hidden=64, heads=4, vocab=256, seq=128).num_params
            124672
        """
        from shardscope.spec.model.transformer import Transformer

        return Transformer(**sizes)

    @classmethod
    def from_module(
        cls, module: Any, example: Any, *, name: str | None = None, memory: bool = False
    ) -> LayerTable:
        """The table of layers of a `torch.nn.Module`, traced on shapes alone.

        Args:
            module: Left as it is; no data of it is copied.
            example: What it is called with: a tensor, or a tuple of arguments. The first dimension counts samples.
            name: What tables and figures call it; None for the module's class.
            memory: Also trace what is alive in a training step, which `analytic.memory.module_memory` needs for
                recomputation and shards; takes the backward pass to run on shapes too.

        Raises:
            SpecError: The module needs real data to run.
        """
        tracing = import_module(
            "shardscope.training.describe"
        )  # by name: descriptions themselves need no torch
        table: LayerTable = tracing.describe(module, example, name=name, memory=memory)
        return table

    @classmethod
    def from_hf(cls, path: str | Path) -> Transformer:
        """The transformer that a Hugging Face ``config.json`` describes; nothing is downloaded.

        Args:
            path: The file, or the folder that holds it.

        Raises:
            SpecError: There is no such file, or it cannot be described exactly; says which key is in the way.
        """
        from shardscope.spec.model.huggingface import from_hf

        return from_hf(path)
