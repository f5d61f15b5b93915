"""The base class of model descriptions, and the constructors that make them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.spec._base import Spec

if TYPE_CHECKING:
    from shardscope.spec.model.table import LayerTable
    from shardscope.spec.model.transformer import Transformer


class Model(Spec):
    """A model's description, without the model itself. `Model.of`, `Model.transformer` and others create one."""

    name: str = "model"
    """Name of the model in tables and plots."""
    source: str = ""
    """Source of its sizes; empty for a user's own model."""

    @classmethod
    def of(cls, name: str) -> Transformer | LayerTable:
        """Return a published model by name (`Model.names` lists them), or the model of a ``config.json`` by path.

        A name that contains a slash or ends in ``.json`` is treated as a path.

        Raises:
            SpecError: The catalogue has no model of this name, or the file's model is not supported.

        Example:
            >>> Model.of("gpt2-xl").num_params
            1557611200
        """
        from shardscope.spec.model.presets import preset

        return cls.from_hf(name) if "/" in name or name.endswith(".json") else preset(name)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the models in the catalogue."""
        from shardscope.spec.catalogue import table

        return tuple(table("models"))

    @classmethod
    def transformer(cls, **sizes: Any) -> Transformer:
        """Return a transformer with the given sizes; the fields are those of `Transformer`.

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
        """Trace a `torch.nn.Module` with shapes only, and return its table of layers.

        Args:
            module: The module; it is not changed, and none of its data is copied.
            example: Its input: a tensor, or a tuple of arguments. The first dimension counts samples.
            name: Name in tables and plots; None for the name of the module's class.
            memory: Also trace the live tensors of a training step, which `analytic.memory.module_memory` needs for
                recomputation and shards. The backward pass must then run on shapes too.

        Raises:
            SpecError: The module needs real data to run.
        """
        tracing = import_module(
            "shardscope.training.describe"
        )  # imported by name, since descriptions themselves need no torch
        table: LayerTable = tracing.describe(module, example, name=name, memory=memory)
        return table

    @classmethod
    def from_hf(cls, path: str | Path) -> Transformer:
        """Return the transformer that a Hugging Face ``config.json`` describes; nothing is downloaded.

        Args:
            path: The file, or the folder that holds it.

        Raises:
            SpecError: There is no such file, or it cannot be described exactly; the message names the key.
        """
        from shardscope.spec.model.huggingface import from_hf

        return from_hf(path)
