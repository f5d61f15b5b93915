"""The keys of a Hugging Face config, checked as they are read, and the fields that many model types share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardscope.errors import SpecError, quoted

Fields = dict[str, Any]

OTHER_NAMES = {
    "hidden_size": ("n_embd", "n_embed"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head", "num_heads"),
    "max_position_embeddings": ("n_positions",),
}
"""Older names of sizes; transformers reads both the old and the new name."""


class Config:
    """The keys and values of a config, and its path for messages. A key whose value is null counts as missing."""

    def __init__(self, keys: Fields, path: Path) -> None:
        self.keys, self.path = keys, path

    def get(self, key: str) -> Any:
        """Return the value of a key, or of an older name of the key; None if both are missing."""
        names = (key, *OTHER_NAMES.get(key, ()))
        return next((value for name in names if (value := self.keys.get(name)) is not None), None)

    def size(self, key: str, default: int | None = None) -> int:
        """Return the value of a key, an integer of at least 0; the key is required if there is no default."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise SpecError(
                f"{self.path} has no {key!r}, which model_type={quoted(self.keys['model_type'])} needs; add it"
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.refuse(key, value, "an integer of 0 or more")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """Return the value of a key that is true or false."""
        value = self.keys.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(key, value, "true or false")
        return default if value is None else value

    def rotary_base(self) -> float | None:
        """Return the base of rotary positions: ``rope_theta``, which transformers 5 keeps in ``rope_parameters``, there
        possibly for each type of layer; None if the config does not say.
        """
        found = self.keys.get("rope_parameters")
        inner: Fields = found if isinstance(found, dict) else {}
        full = inner.get("full_attention")
        known = {**(full if isinstance(full, dict) else {}), **inner, **self.keys}
        key = "rope_theta" if known.get("rope_theta") is not None else "rotary_emb_base"
        value = known.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.refuse(key, value, "a number above 0")
        return float(value)

    def nothing_but(self, key: str, allowed: Any) -> None:
        """Reject any value of `key` except `allowed`, the only value that a `Transformer` can describe."""
        if self.keys.get(key) not in (None, allowed):
            raise self.refuse(key, self.keys[key], repr(allowed))

    def refuse(self, key: str, value: Any, allowed: str) -> SpecError:
        """Return the error for a value that is not supported."""
        return SpecError(f"{self.path} has {key}={quoted(value)}, which is not supported; only {allowed} is")


def sizes(config: Config, *, seq: int = 2048) -> Fields:
    """Return the sizes that all types have; `seq` is the type's default."""
    return {
        "layers": config.size("num_hidden_layers"),
        "hidden": config.size("hidden_size"),
        "heads": config.size("num_attention_heads"),
        "vocab": config.size("vocab_size"),
        "seq": config.size("max_position_embeddings", seq),
    }


def wide(config: Config, key: str = "intermediate_size") -> Fields:
    """Return the inner width of the feed-forward layer: the value of `key`, or four times the hidden size."""
    return {"ffn": config.size(key, 4 * config.size("hidden_size"))}


def attention_bias(config: Config, *, default: bool = False) -> Fields:
    """Return the fields for the biases of all four attention projections."""
    biased = config.flag("attention_bias", default=default)
    return {"qkv_bias": biased, "out_bias": biased}


def sliding_window(config: Config, *, default: int = 0, every: int = 0) -> Fields:
    """Return the fields of sliding-window attention.

    Args:
        config: The config.
        default: Default of ``sliding_window``; a null means that there is no window.
        every: Every n-th layer attends to all tokens, unless ``layer_types`` or ``sliding_window_pattern`` says
            otherwise; 0 if all layers have the window.
    """
    window = 0 if config.keys.get("sliding_window", 0) is None else config.size("sliding_window", default)
    types = config.keys.get("layer_types")
    every = config.size("sliding_window_pattern", every) if types is None else _period(config, types)
    return (
        {"window": 0, "full_attention_every": 0}
        if every == 1
        else {"window": window, "full_attention_every": every}
    )


def _period(config: Config, types: Any) -> int:
    """Return the distance between the layers with full attention in a list of layer types; 0 if there are none."""
    full, windowed = "full_attention", "sliding_attention"
    every = types.index(full) + 1 if isinstance(types, list) and full in types else 0
    expected = [
        full if every and place % every == 0 else windowed
        for place in range(1, config.size("num_hidden_layers") + 1)
    ]
    if types != expected:
        raise config.refuse(
            "layer_types", types, f"a list with {full} in every n-th layer and {windowed} in the others"
        )
    return every
