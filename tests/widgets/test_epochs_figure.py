"""The figure of epochs: its data compared by value, its words, what is drawn."""

from __future__ import annotations

import pytest

from shardscope.runlog.epochs import Epoch, Epochs
from shardscope_widgets import figures
from shardscope_widgets.figures import _epochs


def two_epochs(opened=4):
    return Epochs({
        0: Epoch([0.4, 0.5, 0.6], opened, 0, 4_000_000), 1: Epoch([0.1], opened, opened, 0), 2: Epoch([], opened, 1)
    })  # fmt: skip


def test_an_epoch_counts_once_a_step_has_finished():
    assert _epochs.epochs_info(two_epochs()) == _epochs.EpochsInfo((
        _epochs.EpochRow(1, pytest.approx(0.5), 0.0, 4_000_000), _epochs.EpochRow(2, pytest.approx(0.1), 1.0, 0),
    ))  # fmt: skip


def test_words_compare_the_first_epoch_with_the_last():
    assert _epochs.epochs_text(_epochs.epochs_info(two_epochs())) == (
        "In epoch 1, a step takes 500 ms (0% of the shards in the cache, 4 MB fetched); in epoch 2, 100 ms "
        "(100% of the shards in the cache, 0 B fetched), 5.0 times as fast."
    )
    assert _epochs.epochs_text(_epochs.epochs_info(Epochs())) == "No step on shards has finished yet."
    assert "no cache" in figures.epochs(two_epochs(opened=0)).data[1].text


def test_both_plots_have_a_bar_for_each_epoch():
    times, rates = figures.epochs(two_epochs()).data
    assert (list(times.x), list(rates.x)) == ([1, 2], [1, 2])
    assert list(rates.y) == [0.0, 1.0]
