"""Configs of models that combine a language model with an encoder of images or sound.

All values are from the classes in transformers 5; `tests/spec/test_composite.py` compares the two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from shardscope.errors import SpecError
from shardscope.spec.model.huggingface.config import Config, Fields


class Outer(NamedTuple):
    """The place of the language model in the config of a composite model."""

    text: str
    """The type of the language model, unless ``text_config`` has another one."""
    tied: bool | Literal["either", "text", "never"]
    """Which ``tie_word_embeddings`` is used: that of the outer config, with this default; that of either config; that
    of the text config; or none, because the embeddings are never tied."""
    is_fixed: bool = False
    """Whether the ``model_type`` in ``text_config`` is ignored."""
    is_flat: bool = False
    """Whether the outer config has the keys of the language model if there is no ``text_config``."""
    defaults: Fields | None = None
    """Defaults of the text config, if they differ from the defaults of its type."""


OUTER: dict[str, Outer] = {
    "aya_vision": Outer("cohere2", tied=True),
    "cohere2_vision": Outer("cohere2", tied=True),
    "deepseek_vl": Outer("llama", tied=True),
    "deepseek_vl_hybrid": Outer("llama", tied=True),
    "fast_vlm": Outer("qwen2", tied=False),
    "fun_asr_nano": Outer("qwen3", tied=True),
    "gemma3": Outer("gemma3_text", tied=True, is_fixed=True),
    "glm46v": Outer("glm4v_text", tied=False),
    "glm4v": Outer("glm4v_text", "either", is_fixed=True),
    "glmasr": Outer("llama", tied=True, defaults={
        "vocab_size": 59264, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 8192,
    }),
    "glmga": Outer("glm4v_text", tied=False),
    "got_ocr2": Outer("qwen2", tied=True),
    "granite_speech": Outer("granite", tied=True),
    "granite_speech_plus": Outer("granite", tied=True),
    "idefics2": Outer("mistral", tied=False),
    "idefics3": Outer("llama", tied=False),
    "instructblip": Outer("opt", "text"),
    "instructblipvideo": Outer("opt", "text"),
    "internvl": Outer("qwen2", tied=True),
    "janus": Outer("llama", tied=True),
    "kimi_k25": Outer("deepseek_v3", tied=True),
    "lighton_ocr": Outer("qwen3", tied=True),
    "llava": Outer("llama", "either"),
    "llava_next": Outer("llama", tied=False),
    "llava_next_video": Outer("llama", "either"),
    "llava_onevision": Outer("qwen2", "either"),
    "mistral3": Outer("mistral", tied=True),
    "moss_transcribe_diarize": Outer("qwen3", tied=True),
    "ovis2": Outer("qwen2", tied=True),
    "paligemma": Outer("gemma", tied=True),
    "pp_chart2table": Outer("qwen2", tied=True),
    "qianfan_ocr": Outer("qwen3", tied=False),
    "qwen2_5_omni_thinker": Outer("qwen2_5_omni_text", tied=False, is_fixed=True),
    "qwen2_5_vl": Outer("qwen2_5_vl_text", "either", is_fixed=True, is_flat=True),
    "qwen2_audio": Outer("qwen2", "never"),
    "qwen2_vl": Outer("qwen2_vl_text", "either", is_fixed=True, is_flat=True),
    "qwen3_asr": Outer("qwen3", tied=True),
    "qwen3_vl": Outer("qwen3_vl_text", tied=False, is_fixed=True),
    "qwen3_vl_moe": Outer("qwen3_vl_moe_text", tied=False, is_fixed=True),
    "smolvlm": Outer("llama", tied=False),
    "vibevoice": Outer("qwen2", "text"),
    "vibevoice_asr": Outer("qwen2", "never"),
    "video_llama_3": Outer("qwen2", "either"),
    "video_llava": Outer("llama", tied=False),
    "vipllava": Outer("llama", tied=False),
    "voxtral": Outer("llama", "never", defaults={
        "vocab_size": 131072, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 30,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
    }),
}  # fmt: skip
"""Types whose language model has a reader. A ``text_config`` with a known ``model_type`` is read in any outer type."""

SIZES = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
)  # fmt: skip
DEFAULTS: dict[str, tuple[int | None, int | None, int | None, int | None, int | None, int | None, Fields]] = {
    "bloom": (2, 64, 8, None, None, 250880, {}),
    "codegen": (28, 4096, 16, None, None, 50400, {}),
    "cohere": (40, 8192, 64, None, 22528, 256000, {}),
    "cohere2": (40, 8192, 64, None, 22528, 256000, {}),
    "deepseek_v2": (32, 4096, 32, None, 11008, 102400,
        {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "moe_intermediate_size": 1407, "n_routed_experts": 64}),
    "deepseek_v3": (61, 7168, 128, None, 18432, 129280,
        {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8}),
    "falcon": (32, 4544, 71, None, None, 65024, {}),
    "gemma": (28, 3072, 16, 16, 24576, 256000, {}),
    "gemma2": (26, 2304, 8, 4, 9216, 256000, {}),
    "glm": (40, 4096, 32, 2, 13696, 151552, {}),
    "glm4": (40, 4096, 32, 2, 13696, 151552, {}),
    "glm4v_text": (40, 4096, 32, 2, 13696, 151552, {}),
    "gpt2": (12, 768, 12, None, None, 50257, {}),
    "gpt_neo": (24, 2048, 16, None, None, 50257, {}),
    "gpt_neox": (44, 6144, 64, None, 24576, 50432, {}),
    "gpt_oss": (36, 2880, 64, 8, 2880, 201088, {"num_local_experts": 128}),
    "gptj": (28, 4096, 16, None, None, 50400, {}),
    "granite": (32, 4096, 32, None, 11008, 32000, {}),
    "llama": (32, 4096, 32, None, 11008, 32000, {}),
    "mistral": (32, 4096, 32, 8, 14336, 32000, {}),
    "mixtral": (32, 4096, 32, 8, 14336, 32000, {"num_local_experts": 8}),
    "olmo": (32, 4096, 32, None, 11008, 50304, {}),
    "olmo2": (32, 4096, 32, None, 11008, 50304, {}),
    "olmo3": (32, 4096, 32, None, 11008, 50304, {}),
    "olmoe": (16, 2048, 16, None, 2048, 50304, {"num_experts": 64}),
    "opt": (12, 768, 12, None, None, 50272, {"ffn_dim": 3072}),
    "phi": (24, 2048, 32, None, 8192, 51200, {}),
    "phi3": (32, 3072, 32, None, 8192, 32064, {}),
    "phimoe": (32, 4096, 32, 8, 6400, 32064, {"num_local_experts": 16}),
    "qwen2": (32, 4096, 32, 32, 22016, 151936, {}),
    "qwen2_5_omni_text": (28, 3584, 28, 4, 18944, 152064, {}),
    "qwen2_5_vl_text": (80, 8192, 64, 8, 29568, 152064, {}),
    "qwen2_moe": (24, 2048, 16, 16, 5632, 151936,
        {"shared_expert_intermediate_size": 5632, "num_experts": 60, "moe_intermediate_size": 1408}),
    "qwen2_vl_text": (80, 8192, 64, 8, 29568, 152064, {}),
    "qwen3": (32, 4096, 32, 32, 22016, 151936, {}),
    "qwen3_moe": (24, 2048, 32, 4, 6144, 151936, {"num_local_experts": 128, "moe_intermediate_size": 768}),
    "qwen3_vl_moe_text": (24, 2048, 16, 16, 5632, 151936, {"num_local_experts": 60, "moe_intermediate_size": 1408}),
    "qwen3_vl_text": (32, 4096, 32, 32, 22016, 151936, {}),
    "seed_oss": (64, 4096, 80, 8, 27648, 155136, {}),
    "smollm3": (36, 2048, 16, 4, 11008, 128256, {}),
    "starcoder2": (30, 3072, 24, None, 12288, 49152, {}),
}  # fmt: skip
"""Defaults of the keys in `SIZES`, and of further keys, by type: a ``text_config`` may leave out any key."""

_TIED = "tie_word_embeddings"


def text_keys(keys: Fields, file: Path) -> Fields | None:
    """Return all keys of the language model in the config of a composite model; None if it is not composite.

    Raises:
        SpecError: The config does not describe its language model.
    """
    kind, text = keys.get("model_type"), keys.get("text_config")
    outer = OUTER.get(kind) if isinstance(kind, str) else None
    if not isinstance(text, dict):
        if outer is None:
            return None
        if not outer.is_flat:
            raise SpecError(
                f"{file}: model_type={kind!r} has no 'text_config', which describes its language model; add it, or "
                f"give the config of the language model itself, such as one with model_type={outer.text!r}"
            )
        text = {key: value for key, value in keys.items() if key not in ("vision_config", "model_type")}
    if outer is None:
        tied = {_TIED: keys[_TIED]} if keys.get(_TIED) is not None else {}
        return with_defaults({**text, **tied})
    own = None if outer.is_fixed else text.get("model_type")
    defaults: Fields = {} if outer.defaults is None else outer.defaults
    return with_defaults(
        {**defaults, **text, "model_type": own or outer.text, **_tied(outer, Config(keys, file))}
    )


def _tied(outer: Outer, config: Config) -> Fields:
    """Return the value of ``tie_word_embeddings`` that replaces the text config's value, if any."""
    match outer.tied:
        case bool():
            return {_TIED: config.flag(_TIED, default=outer.tied)}
        case "either":
            return {_TIED: True} if config.flag(_TIED, default=False) else {}
        case "never":
            return {_TIED: False}
        case _:
            return {}


def with_defaults(text: Fields) -> Fields:
    """Return the keys of a text config, with defaults for the keys that it may leave out."""
    kind = text.get("model_type")
    row = DEFAULTS.get(kind) if isinstance(kind, str) else None
    known: Fields = {} if row is None else {**dict(zip(SIZES, row[:6], strict=True)), **row[6]}
    given = Config(text, Path())
    return {
        **{
            key: value
            for key, value in known.items()
            if value is not None and key not in text and given.get(key) is None
        },
        **text,
    }
