"""The base of rotary positions, as Hugging Face's configs write it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from shardscope.spec.model import Model, Transformer

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 101,
    "intermediate_size": 128,
}  # fmt: skip
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 101}


def read(folder: Path, keys: dict[str, Any]) -> Transformer:
    (folder / "config.json").write_text(json.dumps(keys))
    found = Model.from_hf(folder)
    assert isinstance(found, Transformer)
    return found


@pytest.mark.parametrize(
    ("keys", "base"),
    [
        ({"rope_theta": 500000.0}, 500_000),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 1e6),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}}, 1e6),
        ({}, None),
        ({"rope_theta": None}, None),
    ],
)  # fmt: skip
def test_it_is_read_from_both_forms_of_a_config(
    tmp_path: Path, keys: dict[str, Any], base: float | None
) -> None:
    assert read(tmp_path, LLAMA | keys).rotary_base == base
    assert read(tmp_path, GPT2 | keys).rotary_base is None


def test_what_is_no_base_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ss.SpecError, match="rope_theta='high', which is not supported; only a number above 0 is"
    ):
        read(tmp_path, LLAMA | {"rope_theta": "high"})


def test_the_catalogue_has_that_of_llama_3_and_predictions_do_not_depend_on_it() -> None:
    llama = ss.Model.of("llama-3-8b")
    assert isinstance(llama, Transformer)
    assert llama.rotary_base == 500_000
    assert llama.replace(rotary_base=None).num_params == llama.num_params
