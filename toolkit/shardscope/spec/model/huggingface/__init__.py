"""Conversion of a Hugging Face ``config.json`` on disk to a `Transformer` description.

Each reader handles one ``model_type``, and describes the model that transformers 5 builds from the config
(`AutoModelForCausalLM.from_config`; for BERT, the class in ``architectures``). Optional keys have the defaults of
transformers. Caps on logits and multipliers are left out, because they neither have parameters nor multiply matrices.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from shardscope.errors import SpecError, quoted, unknown_name
from shardscope.spec.model.huggingface import gpt_like, llama_like
from shardscope.spec.model.huggingface.config import Config, Fields
from shardscope.spec.model.transformer import Transformer

READERS: dict[str, Callable[[Config], Fields]] = {**gpt_like.READERS, **llama_like.READERS}
"""The reader for each supported ``model_type``."""

BEYOND = {
    "linear attention": ("qwen3_next", "qwen3_5_text", "minimax", "kimi_linear"),
    "state-space layers": ("mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "zamba2", "nemotron_h", "falcon_h1"),
    "recurrent layers": ("rwkv", "recurrent_gemma"),
    "an encoder beside the decoder": ("t5", "mt5", "bart", "mbart", "pegasus", "marian", "whisper", "t5gemma"),
    "cross-attention layers": ("mllama_text_model",),
    "an embedding in every layer": ("gemma3n_text",),
    "layers with experts between layers without": ("llama4_text", "ernie4_5_moe"),
}  # fmt: skip
"""Types by the part that a `Transformer` has no fields for."""


def from_hf(path: str | Path) -> Transformer:
    """Return the transformer that a ``config.json`` describes.

    Of a model for text and images (``text_config``), this is the language model alone; its name ends in ``-text``.

    Args:
        path: The file, or the folder that contains it.

    Raises:
        SpecError: There is no such file, it is not a JSON object, its ``model_type`` is unknown, a key is missing, or
            the model has a feature that a `Transformer` cannot describe.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    keys = _read(file)
    named = str(keys.get("_name_or_path") or keys.get("model_type")).rstrip("/").rpartition("/")[2]
    text = keys.get("text_config")
    if isinstance(text, dict):
        tied = {name: keys[name] for name in ("tie_word_embeddings",) if name in keys}
        keys, named = {**tied, **text}, f"{named}-text"
    return Transformer(name=named, **_reader(file, keys)(Config(keys, file)))


def _reader(file: Path, keys: Fields) -> Callable[[Config], Fields]:
    kind = keys.get("model_type")
    if isinstance(kind, str) and kind in READERS:
        return READERS[kind]
    for part, kinds in BEYOND.items():
        if kind in kinds:
            raise SpecError(
                f"{file}: model_type={quoted(kind)} has {part}, which a config cannot be read with; describe an "
                "approximation with ss.Model.transformer(...), or trace the module with ss.Model.from_module(...)"
            )
    if kind is None:
        raise SpecError(
            f"{file} has no 'model_type', such as 'llama'; add it, or describe the model with ss.Model.transformer(...)"
        )
    unknown = unknown_name(f"{file}: model_type", kind, READERS)
    raise SpecError(f"{unknown}; describe any other model with ss.Model.transformer(...)")


def _read(file: Path) -> Fields:
    try:
        keys = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(
            f"{file} cannot be read ({error.strerror}); give a config.json or its folder"
        ) from error
    except ValueError as error:
        raise SpecError(f"{file} is not JSON ({error}); give the config.json of a model") from error
    if not isinstance(keys, dict):
        raise SpecError(
            f"{file} contains a {type(keys).__name__}; give the config.json of a model, which contains a JSON object"
        )
    return keys
