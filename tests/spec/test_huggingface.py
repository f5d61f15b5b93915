"""A config.json describes exactly the module that transformers builds from it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shardscope.errors import SpecError
from shardscope.spec.model import Model
from shardscope.spec.model.huggingface import READERS
from shardscope.spec.model.huggingface.composite import OUTER


def without(keys: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key not in names}


LLAMA_LIKE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 130, "max_position_embeddings": 50,
}  # fmt: skip
SPARSE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 101, "n_positions": 33},
    "gpt2-124m": {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257},
    "opt": {**LLAMA_LIKE, "ffn_dim": 100},
    "gpt_neox": LLAMA_LIKE,
    "gpt_neox-unbiased": {**LLAMA_LIKE, "model_type": "gpt_neox", "attention_bias": False},
    "llama": LLAMA_LIKE,
    "llama-3-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "llama-tied": {**LLAMA_LIKE, "model_type": "llama", "tie_word_embeddings": True, "head_dim": 24},
    "llama-biased": {**LLAMA_LIKE, "model_type": "llama", "attention_bias": True},
    "llama-no-groups": {**without(LLAMA_LIKE, "num_key_value_heads"), "model_type": "llama"},
    "mistral": LLAMA_LIKE,
    "gemma": {**LLAMA_LIKE, "head_dim": 32},
    "qwen2": LLAMA_LIKE,
    "qwen3": {**LLAMA_LIKE, "head_dim": 24},
    "qwen3-biased": {**LLAMA_LIKE, "model_type": "qwen3", "attention_bias": True},
    "mixtral": {**LLAMA_LIKE, "num_local_experts": 4},
    "mixtral-8x7b": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
    },
    "qwen2_moe": {**LLAMA_LIKE, **SPARSE, "shared_expert_intermediate_size": 56},
    "qwen3_moe": {**LLAMA_LIKE, **SPARSE, "head_dim": 16},
    "deepseek_v2": {**LLAMA_LIKE, **LATENT, "num_key_value_heads": 8},
    "deepseek_v2-lite": {**LLAMA_LIKE, **LATENT, "model_type": "deepseek_v2", "q_lora_rank": None},
    "deepseek_v3": {**LLAMA_LIKE, **LATENT, "num_key_value_heads": 8},
    "deepseek_v2-defaults": {
        **LLAMA_LIKE, **without(LATENT, "n_shared_experts", "first_k_dense_replace", "q_lora_rank"),
        "model_type": "deepseek_v2",
    },
    "deepseek_v3-671b": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    },
    "deepseek_v3-defaults": {
        **LLAMA_LIKE, **without(LATENT, "n_shared_experts"), "model_type": "deepseek_v3", "num_hidden_layers": 4,
        "num_key_value_heads": 8, "first_k_dense_replace": 7,
    },
    "gemma2": {**LLAMA_LIKE, "head_dim": 24},
    "gemma3_text": {**without(LLAMA_LIKE, "num_attention_heads", "num_key_value_heads"), "num_hidden_layers": 7},
    "glm": {**LLAMA_LIKE, "head_dim": 16},
    "glm4": {**LLAMA_LIKE, "head_dim": 16, "attention_bias": False},
    "gpt_oss": {**LLAMA_LIKE, "num_local_experts": 6, "head_dim": 24},
    "gpt_oss-20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 201088, "num_local_experts": 32,
    },
    "granite": {**LLAMA_LIKE, "mlp_bias": True},
    "olmo": LLAMA_LIKE,
    "olmo2": LLAMA_LIKE,
    "olmo3": without(LLAMA_LIKE, "num_key_value_heads"),
    "olmoe": {**LLAMA_LIKE, **without(SPARSE, "moe_intermediate_size")},
    "phi3": LLAMA_LIKE,
    "phimoe": {**LLAMA_LIKE, "num_local_experts": 4, "lm_head_bias": True, "attention_bias": True},
    "seed_oss": {**LLAMA_LIKE, "head_dim": 8},
    "smollm3": {**LLAMA_LIKE, "attention_bias": True, "mlp_bias": True},
    "bloom": {"n_embed": 48, "n_layer": 2, "n_head": 4, "vocab_size": 101},
    "codegen": {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 101, "rotary_dim": 4},
    "cohere": LLAMA_LIKE,
    "cohere-normed": {**LLAMA_LIKE, "model_type": "cohere", "use_qk_norm": True, "attention_bias": True},
    "cohere2": {**LLAMA_LIKE, "head_dim": 24},
    "falcon": {**without(LLAMA_LIKE, "intermediate_size"), "ffn_hidden_size": 100},
    "falcon-new": {**LLAMA_LIKE, "model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon-new-one-norm": {
        **LLAMA_LIKE, "model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1, "tie_word_embeddings": False,
    },
    "falcon-rw": {
        **LLAMA_LIKE, "model_type": "falcon", "multi_query": False, "parallel_attn": False, "bias": True, "alibi": True,
    },
    "gpt_neo": {
        "hidden_size": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 101,
        "attention_types": [[["global", "local"], 1]],
    },
    "gptj": {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 101, "n_positions": 33, "rotary_dim": 4},
    "phi": {**LLAMA_LIKE, "qk_layernorm": True},
    "phi-2": {
        "model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32,
        "num_attention_heads": 32, "vocab_size": 51200,
    },
    "starcoder2": LLAMA_LIKE,
    "starcoder2-unbiased": {**LLAMA_LIKE, "model_type": "starcoder2", "use_bias": False},
    "cohere-wide-heads": {**LLAMA_LIKE, "model_type": "cohere", "head_dim": 24},
    "phi-wide-heads": {**LLAMA_LIKE, "model_type": "phi", "head_dim": 24},
    "starcoder2-wide-heads": {**LLAMA_LIKE, "model_type": "starcoder2", "head_dim": 24},
    "cohere2-normed": {**LLAMA_LIKE, "model_type": "cohere2", "use_qk_norm": True},  # a key of Cohere alone
    "seed_oss-null": {**LLAMA_LIKE, "model_type": "seed_oss", "head_dim": None},
    "gptj-inner": {
        "model_type": "gptj", "n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 101, "rotary_dim": 4,
        "n_inner": 100, "intermediate_size": 8,
    },
    "bert": LLAMA_LIKE,
    "bert-mlm": {**LLAMA_LIKE, "model_type": "bert", "architectures": ["BertForMaskedLM"]},
}  # fmt: skip


def write(folder: Path, keys: object) -> Path:
    (folder / "config.json").write_text(json.dumps(keys))
    return folder


def transformers() -> ModuleType:
    return pytest.importorskip("transformers", reason="transformers builds the module to compare with")


def count_of_the_module(keys: dict[str, Any]) -> int:
    import torch

    kind = {key: value for key, value in keys.items() if key != "model_type"}
    # the padding of some types is a token beyond the vocabularies of these tests
    config = transformers().AutoConfig.for_model(keys["model_type"], **{"pad_token_id": 0, **kind})
    build = transformers().AutoModelForCausalLM
    if keys["model_type"] == "bert":
        build = transformers().AutoModelForMaskedLM if "architectures" in keys else transformers().AutoModel
    with torch.device("meta"):
        module = build.from_config(config)
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.sampled
@pytest.mark.parametrize("name", CONFIGS)
def test_the_count_is_that_of_the_module_built_from_it(tmp_path: Path, name: str) -> None:
    keys = {"model_type": name, **CONFIGS[name]}
    assert Model.from_hf(write(tmp_path, keys)).num_params == count_of_the_module(keys)


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "deepseek_v3", "gpt2", "mixtral", "gemma3_text", "gpt_oss", "bloom", "gpt_neo"]
)
def test_a_config_that_transformers_saved_counts_the_same(tmp_path: Path, name: str) -> None:
    transformers().AutoConfig.for_model(name, **CONFIGS[name]).save_pretrained(tmp_path)
    assert Model.from_hf(tmp_path).num_params == count_of_the_module({"model_type": name, **CONFIGS[name]})


NO_SIZES = [None, -1, "x", [1], {}, 1.5, True]


@pytest.mark.parametrize(
    "name", ["gpt2", "opt", "bert", "falcon", "gemma2", "gpt_neo", "qwen2_moe", "deepseek_v3"]
)
def test_whatever_a_key_holds_it_is_read_or_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    keys = {"model_type": name, **CONFIGS[name]}
    for key, value in itertools.product(
        [*keys, "architectures", "tie_word_embeddings", "layer_types", "sliding_window"], NO_SIZES
    ):
        try:
            Model.from_hf(write(tmp_path, {**keys, key: value}))
        except SpecError as error:
            assert "\n" not in str(error)


def test_every_known_type_is_held_against_its_module() -> None:
    composite = {outer.text for outer in OUTER.values()}  # in test_composite.py
    assert {keys.get("model_type", name) for name, keys in CONFIGS.items()} | composite == set(READERS)


def test_a_file_or_its_folder_may_be_given(tmp_path: Path) -> None:
    folder = write(tmp_path, {"model_type": "llama", "_name_or_path": "org/tiny", **LLAMA_LIKE})
    assert Model.from_hf(folder) == Model.from_hf(str(folder / "config.json"))
    assert Model.from_hf(folder).name == "tiny"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "ctrl"}, "model_type='ctrl' is not known; the nearest .* ss.Model.transformer"),
        ({"model_type": "rwkv"}, "model_type='rwkv' has recurrent layers, .* ss.Model.transformer"),
        ({"hidden_size": 3}, "has no 'model_type', such as 'llama'; add it, or .* ss.Model.transformer"),
        (
            {"model_type": "llama", "hidden_size": 4},
            "has no 'num_hidden_layers', which model_type='llama' needs; add it",
        ),
        ([1], "contains a list; give the config.json of a model"),
        ({"model_type": ["llama"]}, "config.json: model_type=.'llama'. is not known"),
        (
            {"model_type": "deepseek_v3", **LLAMA_LIKE, **LATENT, "attention_bias": True},
            "has attention_bias=True, which is not supported; only False is",
        ),
        (
            {"model_type": "deepseek_v2", **LLAMA_LIKE, **LATENT, "mlp_bias": True},
            "has mlp_bias=True, which is not supported; only False is",
        ),
        (
            {"model_type": "gpt2", **CONFIGS["gpt2"], "add_cross_attention": True},
            "has add_cross_attention=True, which is not supported; only False is",
        ),
        (
            {"model_type": "mistral", **without(LLAMA_LIKE, "num_key_value_heads")},
            "has no 'num_key_value_heads', which model_type='mistral' needs; add it",
        ),
        (
            {"model_type": "llama", **LLAMA_LIKE, "num_key_value_heads": 3},
            "kv_heads=3 does not divide heads=8",
        ),
        (
            {"model_type": "qwen3_moe", **LLAMA_LIKE, **SPARSE, "decoder_sparse_step": 2},
            "decoder_sparse_step=2, which is not supported; only 1 is",
        ),
    ],
)
def test_a_config_that_cannot_be_described_is_refused(tmp_path: Path, keys: object, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Model.from_hf(write(tmp_path, keys))


def test_what_is_no_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"cannot be read \(No such file or directory\); give a config.json"):
        Model.from_hf(tmp_path / "nothing.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SpecError, match="is not JSON"):
        Model.from_hf(tmp_path)


def test_of_a_model_for_images_the_language_model_is_described(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", **CONFIGS["gemma3_text"]}
    keys = {
        "model_type": "gemma3",
        "_name_or_path": "org/gemma-3-4b",
        "vision_config": {},
        "text_config": text,
    }
    model = Model.from_hf(write(tmp_path, keys))
    assert model.num_params == count_of_the_module(text)
    assert model.name == "gemma-3-4b-text"
    untied = Model.from_hf(write(tmp_path, {**keys, "tie_word_embeddings": False}))
    assert untied.num_params - model.num_params == model.vocab * model.hidden


WINDOWS = [
    ("mistral", {}, 4096, 0),
    ("mistral", {"sliding_window": None}, 0, 0),
    ("gemma2", {"sliding_window": 20}, 20, 2),
    ("gemma3_text", {"sliding_window_pattern": 3}, 4096, 3),
    ("gpt_oss", {"num_hidden_layers": 4}, 128, 2),
    ("olmo3", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, 4096, 2),
    ("cohere2", {"layer_types": ["full_attention"] * 3}, 0, 0),
    ("gpt_neo", {"attention_types": [[["global"], 2]]}, 0, 2),
]


@pytest.mark.parametrize(("name", "keys", "window", "every"), WINDOWS, ids=str)
def test_windows_are_those_of_the_modules_layers(
    tmp_path: Path, name: str, keys: dict[str, Any], window: int, every: int
) -> None:
    keys = {"model_type": name, **CONFIGS[name], **keys}
    model = Model.from_hf(write(tmp_path, keys))
    assert (model.window, model.full_attention_every) == (window, every)
    if name not in ("mistral", "gpt_neo"):
        built = transformers().AutoConfig.for_model(name, **without(keys, "model_type"))
        kinds = built.layer_types
        assert model.replace(seq=10**6).num_windowed_layers == kinds.count("sliding_attention")
        assert not model.window or built.sliding_window == model.window


def test_layers_in_another_order_are_refused(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    with pytest.raises(SpecError, match="has layer_types=.* every n-th layer"):
        Model.from_hf(write(tmp_path, {"model_type": "olmo3", **CONFIGS["olmo3"], "layer_types": kinds}))
