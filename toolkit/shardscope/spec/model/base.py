"""The base class of model descriptions, with constructors for the derived classes."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.spec import catalogue
from shardscope.spec._base import Spec
from shardscope.spec.models import MODELS, GPTConfig

if TYPE_CHECKING:
    from shardscope.spec.model.table import LayerTable
    from shardscope.spec.model.transformer import Transformer


class Model(Spec):
    """Description of a model, without its weights. Create one with `Model.of`, `Model.transformer` or another
    constructor.
    """

    name: str = "model"
    """Name of the model in tables and plots."""
    source: str = ""
    """Publication that states the model's sizes; empty for a user-defined model."""

    @classmethod
    def of(cls, name: str) -> Transformer | LayerTable:
        """Return a model by name, or the model that a ``config.json`` describes, by path.

        Names are those of published models (see `Model.names`), and of a job's transformers, such as ``gpt-mini``. A
        name that contains a slash or ends in ``.json`` is treated as a path.

        Raises:
            SpecError: There is no model of this name, or the file's model is not supported.

        Example:
            >>> Model.of("gpt2-xl").num_params
            1557611200
        """
        return cls.from_hf(name) if "/" in name or name.endswith(".json") else _by_name(name)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the models in the catalogue."""
        return tuple(catalogue.table("models"))

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
        """Trace a `torch.nn.Module` with tensors that have shapes but no data, and return its table of layers.

        Args:
            module: The module to describe; tracing neither changes it nor copies its data.
            example: The module's input: a tensor, or a tuple of arguments. The first dimension is the batch.
            name: Name in tables and plots; None for the name of the module's class.
            memory: Also trace the live tensors of a training step, from which `analytic.memory.module_memory` computes
                the memory with recomputation and sharding. The backward pass must then also run without data.

        Raises:
            SpecError: The module cannot run without real data.
        """
        tracing = import_module(
            "shardscope.training.describe"
        )  # imported here, since other descriptions need no torch
        table: LayerTable = tracing.describe(module, example, name=name, memory=memory)
        return table

    @classmethod
    def from_hf(cls, path: str | Path) -> Transformer:
        """Return the transformer that a Hugging Face ``config.json`` describes; nothing is downloaded.

        Args:
            path: The file, or the folder that contains it.

        Raises:
            SpecError: There is no such file, or a `Transformer` cannot describe the model; the message names the key.
        """
        from shardscope.spec.model.huggingface import from_hf

        return from_hf(path)


@cache
def _by_name(name: str) -> Transformer | LayerTable:
    """Return the published model with this name or alias, in any spelling, or the transformer that a job can name."""
    from shardscope.spec.model.table import LayerTable
    from shardscope.spec.model.transformer import Transformer

    own = name.lower().replace("_", "-")
    if isinstance(config := MODELS.get(own), GPTConfig):
        return config.transformer(own)
    proper, entry = catalogue.lookup("models", name, field="model")
    if proper != name:
        return _by_name(proper)
    fields = {key: value for key, value in entry.items() if key != "recalled"}
    if "rows" not in fields:
        return Transformer(name=name, **fields)
    layers = tuple(dict(zip(fields["columns"], row, strict=True)) for row in fields["rows"])
    return LayerTable(name=name, layers=layers, source=fields["source"])
