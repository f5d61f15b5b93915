"""A sketch's squared norm is that of what it sketches, on average, and sketches add up."""

from __future__ import annotations

import pytest
import torch

from shardscope.training.sketch import SIZE, Sketch, add_elements_, add_runs_

COUNT = 20_000


def sketch(values, seed):
    made = Sketch(torch.device("cpu"))
    made.add(values, seed)
    return made.buckets


def vector(kind):
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(COUNT, generator=generator)
    return {
        "noise": noise,
        "constant": torch.ones(COUNT),  # every pair of elements pulls the same way
        "one column": (torch.arange(COUNT) % 64 == 0).float(),  # at a stride that divides the buckets
        "a few large": torch.cat([torch.full((5,), 60.0), noise[5:]]),
    }[kind]


@pytest.mark.parametrize("kind", ["noise", "constant", "one column", "a few large"])
def test_its_norm_is_right_on_average_and_as_often_off_as_it_may_be(kind):
    values = vector(kind)
    true = values.double().square().sum()
    found = torch.stack([sketch(values, seed).double().square().sum() / true for seed in range(300)])
    assert found.mean() == pytest.approx(1, abs=4 * (2 / SIZE / 300) ** 0.5)
    assert found.std() < 1.15 * (2 / SIZE) ** 0.5  # of 300 draws it is known within 4 %


def test_the_sketch_of_a_sum_is_the_sum_of_sketches():
    first, second = vector("noise"), vector("a few large").flip(0)
    assert torch.allclose(sketch(first, 7) + sketch(second, 7), sketch(first + second, 7), atol=1e-3)


def test_several_tensors_are_sketched_as_one_if_their_seeds_differ():
    parts = vector("constant").split([12_000, 5_000, 3_000])

    def ratio(draw, step):
        made = Sketch(torch.device("cpu"))
        for i, part in enumerate(parts):
            made.add(part, draw + i * step)
        return made.buckets.double().square().sum() / COUNT

    apart = torch.stack([ratio(draw, 1000) for draw in range(200)])
    assert apart.mean() == pytest.approx(1, abs=4 * (2 / SIZE / 200) ** 0.5)
    alike = torch.stack([ratio(draw, 0) for draw in range(20)])
    assert alike.mean() > 1.3  # the same signs twice: what differing seeds are for


def test_adding_run_by_run_and_element_by_element_come_to_the_same():
    signed, places = vector("noise"), torch.randint(SIZE, (-(-COUNT // SIZE),)).tolist()
    by_runs, by_elements = torch.zeros(2, 2 * SIZE)
    add_runs_(by_runs, signed, places)
    add_elements_(by_elements, signed, places)
    assert torch.allclose(by_runs, by_elements, atol=1e-4)
    assert by_runs.abs().sum() > 0


def test_shapes_do_not_matter_and_seeds_do():
    values = vector("noise")
    assert torch.equal(sketch(values.view(100, 200), 7), sketch(values, 7))
    assert not torch.equal(sketch(values, 8), sketch(values, 7))
