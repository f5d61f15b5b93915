"""The catalogue of data, and which model reads what."""

from __future__ import annotations

import pytest

from shardscope.errors import SpecError
from shardscope.spec.data import DATA, check_compatible, gives, is_path
from shardscope.spec.models import MODELS


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("data", DATA)
def test_a_model_reads_exactly_the_data_of_its_modality(model, data):
    if MODELS[model].reads == DATA[data].gives:
        check_compatible(model, data)
    else:
        with pytest.raises(SpecError, match=f"data='{data}' provides .* but model='{model}' reads"):
            check_compatible(model, data)


def test_the_message_says_what_to_change():
    with pytest.raises(SpecError, match=r"; use model='gpt-nano' or data='digits'$"):
        check_compatible("mlp", "python-source")


@pytest.mark.parametrize(
    ("data", "expected"),
    [("digits", "images"), ("a/b.txt", "tokens"), ("a.BIN", "tokens"), ("rows.npz", None), ("~/rows", None)],
)
def test_what_a_name_or_path_gives(data, expected):
    assert gives(data) == expected


def test_a_text_is_nothing_for_an_image_model():
    with pytest.raises(SpecError, match=r"data='book.txt' provides tokens"):
        check_compatible("cnn", "book.txt")


def test_arrays_may_hold_anything():
    check_compatible("cnn", "rows.npz")
    check_compatible("gpt-nano", "rows.npz")


def test_a_misspelt_name_is_not_taken_for_a_path():
    assert not is_path("digitz")
    with pytest.raises(SpecError, match=r"data='digitz' is not known; did you mean 'digits'\?"):
        check_compatible("mlp", "digitz")
