"""Conversion of a Hugging Face ``config.json`` on disk to a `Transformer` description.

Each reader handles one ``model_type``, and describes the model that transformers 5 builds from the config
(`AutoModelForCausalLM.from_config`; for BERT, the class in ``architectures``). Optional keys have the defaults of
transformers. Caps on logits and multipliers are left out, because they neither have parameters nor multiply matrices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path

from shardscope.errors import SpecError, quoted
from shardscope.foreign_file import parsed_json
from shardscope.spec.model.huggingface import gpt_like, llama_like
from shardscope.spec.model.huggingface.composite import OUTER, text_keys
from shardscope.spec.model.huggingface.config import Config, Fields
from shardscope.spec.model.transformer import Transformer

READERS: dict[str, Callable[[Config], Fields]] = {**gpt_like.READERS, **llama_like.READERS}
"""The reader for each supported ``model_type``."""

_ENCODER = "an encoder beside the decoder"
BEYOND = {
    "linear attention": ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "minimax", "kimi_linear"),
    "state-space layers": ("mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "zamba2", "nemotron_h", "falcon_h1"),
    "recurrent layers": ("rwkv", "recurrent_gemma"),
    _ENCODER: ("t5", "mt5", "bart", "mbart", "pegasus", "marian", "whisper", "t5gemma"),
    "cross-attention layers": ("mllama_text_model",),
    "an embedding in every layer": ("gemma3n_text", "gemma4_text"),
    "layers with experts mixed with layers without experts": ("llama4_text", "ernie4_5_moe"),
}  # fmt: skip
"""Unsupported types, by the part of the model that a `Transformer` cannot describe."""
_SPARSE = ("deepseek_v2", "deepseek_v3", "gpt_oss", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe")
"""Model types with experts."""
_UNLIKE = re.compile("_vl|omni|glm4v")
"""Parts of composite models, for which no similar type is suggested."""


def from_hf(path: str | Path) -> Transformer:
    """Return the transformer that a ``config.json`` describes.

    For a model of text and images (``text_config``), this is the language model alone; its name ends in ``-text``.

    Args:
        path: The file, or the folder that contains it.

    Raises:
        SpecError: The file does not exist or is not a JSON object, its ``model_type`` is unknown, a key is missing, or
            the model has a feature that a `Transformer` cannot describe.
    """
    file, keys = _read(Path(path))
    named = str(keys.get("_name_or_path") or keys.get("model_type")).rstrip("/").rpartition("/")[2]
    if not _is_in(READERS, keys.get("model_type")) and (text := text_keys(keys, file)) is not None:
        keys, named = text, f"{named}-text"
    config = Config(keys, file)
    fields = _reader(file, keys)(config)
    base = config.rotary_base() if fields.get("positions") == "rotary" else None
    return Transformer(name=named, rotary_base=base, **fields)


def _reader(file: Path, keys: Fields) -> Callable[[Config], Fields]:
    kind = keys.get("model_type")
    if _is_in(READERS, kind):
        return READERS[str(kind)]
    if kind is None:
        raise SpecError(
            f"{file} has no 'model_type', such as 'llama'; add it, or describe the model with ss.Model.transformer(...)"
        )
    parts = (f"has {part}, which cannot be described" for part, kinds in BEYOND.items() if kind in kinds)
    raise SpecError(
        f"{file}: model_type={quoted(kind)} {next(parts, 'is not known')}; {_advice(str(kind), keys)}describe an "
        "approximation with ss.Model.transformer(...), or trace the module with ss.Model.from_module(...)"
    )


def _is_in(kinds: Container[str], kind: object) -> bool:
    return isinstance(kind, str) and kind in kinds


def _advice(kind: str, keys: Fields) -> str:
    """Return advice on the part of the config that can be read, or else on the most similar type; empty for
    encoder-decoders.
    """
    for key, value in keys.items():
        inner = value.get("model_type") if isinstance(value, dict) else None
        if _is_in(READERS, inner) or _is_in(OUTER, inner):
            return f"give the object under {key!r} as a config.json of its own, "
    if kind in BEYOND[_ENCODER] or keys.get("is_encoder_decoder") is True:
        return ""
    return f"the nearest type that can be read is {_nearest(kind, keys)!r}; "


def _nearest(kind: str, keys: Fields) -> str:
    """Return the most similar type that has a reader: first by its parts, then by its name."""
    has_latent = "kv_lora_rank" in keys
    has_experts = "moe" in kind or any("expert" in key for key in keys if keys[key])
    known = [name for name in READERS if not _UNLIKE.search(name)]
    alike = [name for name in known if (name in _SPARSE) == has_experts]
    family = [name for name in (alike if has_experts else known) if _family(name) == _family(kind)]
    if close := get_close_matches(kind, [name for name in family if name in alike] or family, n=1, cutoff=0):
        return close[0]
    if has_latent or has_experts:
        return "deepseek_v3" if has_latent else "mixtral"
    if "bert" in kind or "type_vocab_size" in keys:
        return "bert"
    by_parts = "gpt2" if "layer_norm_epsilon" in keys or "n_embd" in keys else "llama"
    return next(iter(get_close_matches(kind, alike, n=1, cutoff=0.7)), by_parts)


def _family(kind: str) -> str:
    return "".join(takewhile(str.isalpha, kind))


def _read(file: Path) -> tuple[Path, Fields]:
    try:
        file = file / "config.json" if file.is_dir() else file
        keys = parsed_json(file.read_text(encoding="utf-8"))
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
    return file, keys
