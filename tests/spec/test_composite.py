"""The language model of a composite config is the one in the module that transformers builds from it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from shardscope.errors import SpecError
from shardscope.spec.model import Model
from shardscope.spec.model.huggingface import READERS
from shardscope.spec.model.huggingface.composite import DEFAULTS, OUTER, with_defaults

ENCODERS: dict[str, dict[str, Any]] = {
    "aya_vision": {
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 64, "num_attention_heads": 4}
    },
    "ovis2": {"hidden_size": 4096, "vocab_size": 151936},  # the head takes its sizes from the outer config
}
"""Keys without which the outer config does not build, or not the same language model."""
NOT_BUILT = {"fast_vlm", "fun_asr_nano"}
"""Types whose modules need packages or files that are not installed."""
FLAT = ("qwen2_vl", "qwen2_5_vl")
UNSET = object()


def read(folder: Path, keys: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(keys))
    return Model.from_hf(folder)


def in_the_module(keys: dict[str, Any]) -> int:
    """Number of parameters of the language model, with its head, in the whole module on the meta device."""
    import torch
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto as auto

    rest = {key: value for key, value in keys.items() if key != "model_type"}
    config = AutoConfig.for_model(keys["model_type"], **json.loads(json.dumps(rest)))
    kinds = (
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, auto.MODEL_FOR_MULTIMODAL_LM_MAPPING,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    )  # fmt: skip
    build = next(kind[type(config)] for kind in kinds if type(config) in kind)
    with torch.device("meta"):
        module = build._from_config(config)
    parts = (module.get_decoder(), module.get_output_embeddings())
    return sum({id(p): p.numel() for part in parts for p in part.parameters()}.values())


def skip_without_transformers() -> None:
    pytest.importorskip("transformers", reason="transformers builds the module to compare with")


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(OUTER.keys() - NOT_BUILT))
def test_a_partial_text_config_is_completed_and_tied_as_transformers_does(name: str, tmp_path: Path) -> None:
    skip_without_transformers()
    for outer, inner in itertools.product((UNSET, True, False), repeat=2):
        text = {"num_hidden_layers": 2} | ({} if inner is UNSET else {"tie_word_embeddings": inner})
        tied = {} if outer is UNSET else {"tie_word_embeddings": outer}
        keys = {"model_type": name, "text_config": text, **tied, **ENCODERS.get(name, {})}
        assert read(tmp_path, keys).num_params == in_the_module(keys), (outer, inner)


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.filterwarnings("ignore")
def test_a_flat_config_is_read_like_a_nested_one(name: str, tmp_path: Path) -> None:
    skip_without_transformers()
    text = {"hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 2, "vocab_size": 500}
    for tied in (True, False):
        keys = {
            "model_type": name, **text, "tie_word_embeddings": tied, "vision_config": {"hidden_size": 1280},
            "max_position_embeddings": 700,
        }  # fmt: skip
        found = read(tmp_path, keys)
        assert (found.num_params, found.seq, found.tied) == (in_the_module(keys), 700, tied)
        nested = {"model_type": name, "text_config": {**text, "max_position_embeddings": 700}}
        assert read(tmp_path, {**nested, "tie_word_embeddings": tied}) == found


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_the_defaults_are_those_of_the_config_classes(name: str) -> None:
    skip_without_transformers()
    from transformers import AutoConfig

    try:
        built = AutoConfig.for_model(name)
    except ValueError:
        built = AutoConfig.for_model(name.removesuffix("_text")).text_config
    filled = with_defaults({"model_type": name})
    for key, value in filled.items():
        assert getattr(built, key) == value, key


POSITIONS = sorted(READERS.keys() - {"bloom"})  # BLOOM has no positions, and seq is that of its training


@pytest.mark.parametrize("name", POSITIONS)
def test_the_default_sequence_length_is_that_of_the_config_class(name: str, tmp_path: Path) -> None:
    skip_without_transformers()
    from transformers import AutoConfig

    try:
        built = AutoConfig.for_model(name)
    except ValueError:
        built = AutoConfig.for_model(name.removesuffix("_text").replace("omni", "omni_thinker")).text_config
    keys = {"num_experts_per_tok": 2, **with_defaults({"model_type": name})}
    if name == "bert":
        keys |= {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
        keys |= {"intermediate_size": 128}
    assert read(tmp_path, keys).seq == built.max_position_embeddings


def test_the_type_within_a_text_config_counts_unless_the_class_is_fixed(tmp_path: Path) -> None:
    mistral = {"model_type": "mistral", "num_hidden_layers": 2}
    assert read(tmp_path, {"model_type": "llava", "text_config": mistral}).kv_heads == 8
    other = {"model_type": "qwen2_5_vl", "num_hidden_layers": 2}  # as some published configs have it
    assert read(tmp_path, {"model_type": "qwen2_5_vl", "text_config": other}).hidden == 8192


def test_older_names_of_sizes_are_not_overridden_by_defaults(tmp_path: Path) -> None:
    text = {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4}
    found = read(tmp_path, {"model_type": "someone-s-own", "text_config": text})
    assert (found.hidden, found.layers, found.heads, found.vocab) == (48, 2, 4, 50257)


def test_a_composite_config_without_its_text_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match="model_type='llava' has no 'text_config', which describes its language"
    ):
        read(tmp_path, {"model_type": "llava", "hidden_size": 4096, "num_hidden_layers": 32})


@pytest.mark.parametrize(
    ("keys", "nearest"),
    [
        ({"model_type": "qwen3_5_text"}, "has linear attention, .* nearest .* 'qwen3'"),
        ({"model_type": "olmo_hybrid"}, "nearest type that can be read is 'olmo'"),
        ({"model_type": "qwen3_next", "num_experts": 8}, "nearest type that can be read is 'qwen3_moe'"),
        ({"model_type": "gemma4_text"}, "nearest type that can be read is 'gemma3_text'"),
        ({"model_type": "ministral"}, "nearest type that can be read is 'mistral'"),
        ({"model_type": "deepseek_v4"}, "nearest type that can be read is 'deepseek_v3'"),
        ({"model_type": "exaone4", "rms_norm_eps": 1e-6}, "nearest type that can be read is 'llama'"),
        ({"model_type": "someone-s", "kv_lora_rank": 512}, "nearest type that can be read is 'deepseek_v3'"),
        ({"model_type": "phi4mm"}, "nearest type that can be read is 'phi'"),
        ({"model_type": "dbrx", "moe_num_experts": 16}, "nearest type that can be read is 'mixtral'"),
        ({"model_type": "glm4_moe", "n_routed_experts": 128}, "nearest type that can be read is 'mixtral'"),
        ({"model_type": "mistral4", "kv_lora_rank": 256, "n_routed_experts": 8}, "is 'deepseek_v3'"),
        ({"model_type": "gpt_bigcode", "n_embd": 768}, "nearest type that can be read is 'gpt_neo'"),
        (
            {"model_type": "gemma4_text", "num_experts": None},
            "nearest type that can be read is 'gemma3_text'",
        ),
        ({"model_type": "xlm-roberta", "type_vocab_size": 1}, "nearest type that can be read is 'bert'"),
        ({"model_type": "modernbert"}, "nearest type that can be read is 'bert'"),
        ({"model_type": "internvl", "text_config": {"model_type": "internlm3"}}, "'internlm3' .* nearest"),
    ],
    ids=str,
)
def test_a_type_that_is_not_read_is_refused_with_the_nearest(
    keys: dict[str, Any], nearest: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=nearest) as refused:
        read(tmp_path, keys)
    assert "\n" not in str(refused.value)


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 8, "vocab_size": 130,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(name for name in OUTER if OUTER[name].tied not in ("text", "never")))
@pytest.mark.parametrize("value", ["true", 1])
def test_a_flag_of_the_outer_config_is_true_or_false(name: str, value: object, tmp_path: Path) -> None:
    keys = {"model_type": name, "tie_word_embeddings": value, "text_config": {}}
    with pytest.raises(SpecError, match="tie_word_embeddings=.* only true or false is"):
        read(tmp_path, keys)


@pytest.mark.parametrize("text", [{}, {"model_type": "llama", "num_hidden_layers": 9}, "x", None])
def test_a_type_that_is_read_itself_has_no_text_config(text: object, tmp_path: Path) -> None:
    assert read(tmp_path, {**LLAMA, "text_config": text}) == read(tmp_path, LLAMA)


@pytest.mark.parametrize(
    "keys", [{"model_type": "whisper"}, {"model_type": "led", "is_encoder_decoder": True}]
)
def test_no_decoder_is_said_to_be_near_to_an_encoder_and_decoder(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match="describe an approximation") as refused:
        read(tmp_path, keys)
    assert "nearest" not in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "key", "inner"),
    [
        ("qwen2_5_omni", "thinker_config", {"model_type": "qwen2_5_omni_thinker", "text_config": {}}),
        ("internvl_chat", "llm_config", {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 8}),
        ("deepseek_vl_v2", "language_config", LLAMA),
    ],
)
def test_a_part_that_can_be_read_is_named(kind: str, key: str, inner: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=f"give the object under '{key}' as a config.json of its own"):
        read(tmp_path, {"model_type": kind, "vision_config": {"model_type": "clip"}, key: inner})
    assert read(tmp_path, inner).layers


@pytest.mark.parametrize("value", ["relative_key", "relative_key_query"])
def test_positions_of_bert_that_are_not_absolute_are_refused(value: str, tmp_path: Path) -> None:
    bert = {**LLAMA, "model_type": "bert"}
    assert read(tmp_path, {**bert, "position_embedding_type": "absolute"}) == read(tmp_path, bert)
    with pytest.raises(SpecError, match=f"position_embedding_type='{value}', which is not supported"):
        read(tmp_path, {**bert, "position_embedding_type": value})
