"""Streams: ranks share them without loss or duplication, a resumed run skips what it has used, and rows are refused."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import IterableDataset

from shardscope.errors import DataError
from shardscope.training.data import GlobalSampler, Loader, load_data


class Stream(IterableDataset):
    def __init__(self, count=30):
        self.count, self.epochs = count, []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        for number in range(self.count):
            yield torch.tensor([float(number)]), number % 3


class Plain:
    """A stream of no library, such as a Hugging Face `IterableDataset`."""

    def __iter__(self):
        return iter([(torch.tensor([float(number)]), 0) for number in range(30)])


TEST = (torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64))


def read(stream, world_size, steps, *, batch=12, first=0, state=None):
    """The numbers of the items that ranks read, in the order of the global batches."""
    source = load_data(lambda: (stream, TEST)).train
    numbers = {}
    for rank in range(world_size):
        sampler = GlobalSampler.of(source, batch, seed=0)
        if state is not None:
            sampler.resume(first, state)
        with Loader(source, sampler, rank=rank, world_size=world_size) as loader:
            for step in range(first, steps):
                numbers[step, rank] = loader.batch(step)[0][:, 0].int().tolist()
    return [number for _, part in sorted(numbers.items()) for number in part]


@pytest.mark.parametrize("stream", [Stream(), Plain()], ids=["IterableDataset", "any iterable"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_share_a_stream_and_each_epoch_has_each_item_once(stream, world_size):
    assert read(stream, world_size, steps=10) == [number % 30 for number in range(120)]


@pytest.mark.parametrize(("before", "after", "batch"), [(3, 2, 12), (2, 4, 12), (2, 3, 6)])
def test_a_resume_on_another_world_size_goes_on_with_the_next_item(before, after, batch):
    seen = read(Stream(), before, steps=4)
    state = GlobalSampler.of(load_data(lambda: (Stream(), TEST)).train, 12, 0).state_dict()
    rest = read(Stream(), after, first=4, steps=9, batch=batch, state=state)
    assert seen + rest == [number % 30 for number in range(48 + 5 * batch)]


def test_a_stream_is_told_its_epoch():
    stream = Stream(count=5)
    read(stream, 1, steps=1, batch=11)
    assert stream.epochs[:3] == [0, 1, 2]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            Stream(),
            r"returned a stream \(IterableDataset\) to test on, .*; return \(train, test\), where only train",
        ),
        ((TEST, Stream()), "to test on, which has no length"),
        ((Stream(), Stream(), TEST), "to test on, which has no length"),
    ],
)
def test_a_stream_is_refused_where_rows_have_numbers(made, message):
    with pytest.raises(DataError, match=message):
        load_data(lambda: made)


def test_an_empty_stream_and_a_generator_are_refused():
    with pytest.raises(
        DataError, match=r"a stream \(Stream\) without items in epoch 0; yield the same items"
    ):
        read(Stream(count=0), 1, steps=1)
    with pytest.raises(DataError, match="returned generator; return tensors"):
        load_data(lambda: ((number for number in range(9)), TEST))


class Saved:
    """Map-style data that reads many items at once, as a Hugging Face `Dataset` does."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        raise AssertionError("one at a time")

    def batch(self, batch_size):
        raise AssertionError("not the method of that name of a data source")

    def __getitems__(self, indices):
        return [{"input_ids": torch.full((4,), index), "labels": torch.tensor(index)} for index in indices]


def test_items_are_read_together_where_the_data_can():
    inputs, targets = load_data(lambda: (Saved(), Saved())).train.batch(torch.tensor([3, 5]))
    assert inputs["input_ids"].tolist() == [[3] * 4, [5] * 4]
    assert targets.tolist() == [3, 5]
