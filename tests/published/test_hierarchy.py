"""Effects of software and devices: what tables have in common is found, and predicts a table that was left out."""

from __future__ import annotations

import numpy as np
import pytest

from published import hierarchy, more, small
from published.effects_fit import (
    KINDS,
    NAMES,
    NOISES,
    Effects,
    Found,
    Seen,
    Spreads,
    estimated,
    noise_index,
    usual_spreads,
)
from published.hierarchy import Loss, mixed
from published.left_out import Trial, best_widths, constant_scores, is_rejected, rejected_by_chance
from published.one_step import Ends
from shardscope.calibration.effects import composed, effects_of, fitted_effects, row_noise, usual
from shardscope.calibration.software import SOFTWARE
from shardscope.calibration.spread import covariance_of, moved
from shardscope.spec.cluster import Device

MADE = ("megatron-core", "megatron-deepspeed", "fsdp2", "torchtitan", "deepspeed")
PAIRS = [(software, device) for software in MADE for device in ("a100-80gb", "h100-80gb")]
ROWS, TABLE = 50, list(KINDS).index("table")


def made(spreads: Spreads, *, seed: int = 5) -> tuple[Seen, dict[str, np.ndarray]]:
    """Rows of one table for each pair, made by effects with these standard deviations, and the effects."""
    random = np.random.default_rng(seed)
    shared = [effects_of(SOFTWARE[software], Device.of(device)) for software, device in PAIRS]
    tables: list[Effects] = [{**each, f"table {place}": 1.0} for place, each in enumerate(shared)]
    truth = {
        e: random.normal(size=len(NAMES)) * spreads.effects[list(KINDS).index(e.split()[0])]
        for each in tables
        for e in each
    }
    at = [np.zeros(len(NAMES))] * len(tables)
    linear = []
    for each in tables:
        slope = random.normal(size=(ROWS, len(NAMES)))
        off = slope @ factors(truth, each) + spreads.noise[noise_index(each)] * random.normal(size=ROWS)
        linear.append((off, slope))
    return Seen.of(tables, linear, at, noise=np.full(len(NOISES), 10.0)), truth


def factors(truth: dict[str, np.ndarray], effects: Effects) -> np.ndarray:
    return sum((factor * truth[e] for e, factor in effects.items()), np.zeros(len(NAMES)))


@pytest.mark.slow
def test_effects_that_made_the_tables_predict_a_table_that_was_left_out() -> None:
    spreads = Spreads.of(usual_spreads())
    seen, _ = made(spreads)
    covered, ratios = [], []
    for place, effects in enumerate(seen.effects):
        found, mine = Found.of(seen.without(place), spreads), seen.table == place
        new = {**{e: f for e, f in effects.items() if not e.startswith("table")}, "table new": 1.0}
        off, slope = seen.target[mine], seen.slope[mine]
        left = off - slope @ found.mean(new)
        between = np.einsum("ri,ij,rj->r", slope, found.covariance(new), slope)
        expected = np.sqrt(between + spreads.noise[noise_index(new)] ** 2)
        covered.append(np.mean(np.abs(left) < 1.645 * expected))
        ratios.append(np.std(left) / np.std(off))
    assert np.median(ratios) < 0.8
    assert np.mean(covered) > 0.8


class Curved:
    """A table whose logarithms of times bend with the factors."""

    def __init__(self, effects: Effects, target: np.ndarray, slope: np.ndarray) -> None:
        self.effects, self.target, self.slope = effects, target, slope

    def off(self, at: np.ndarray) -> np.ndarray:
        return self.target - (self.slope @ at + 0.2 * np.sin(self.slope @ at))

    def linear(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.off(at), (1 + 0.2 * np.cos(self.slope @ at))[:, None] * self.slope


@pytest.mark.slow
def test_a_fit_with_given_standard_deviations_finds_the_same_effects_from_any_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hierarchy, "estimated", lambda _, x: x)
    seen, _ = made(Spreads.of(usual_spreads()))
    tables = [
        Curved(effects, seen.target[seen.table == place], seen.slope[seen.table == place])
        for place, effects in enumerate(seen.effects[:4])
    ]
    random = np.random.default_rng(0)
    starts = [None, [random.normal(size=len(NAMES)) for _ in tables]]
    fits = [hierarchy.solve(tables, start) for start in starts]  # type: ignore[arg-type]
    for effects in tables[0].effects, {"all": 1.0}:
        one, other = (found.mean(effects) for found, _ in fits)
        assert one == pytest.approx(other, abs=1e-3)


def test_factors_are_mixed_from_those_that_suit_each_table() -> None:
    """Of three tables without common effects, each takes the factors with which its own loss is least."""
    first = Loss(np.zeros((3, 1)), np.ones(3), np.eye(3)[None], np.array([5.0, 1.0, 2.0]))
    second = first._replace(u=np.ones((3, 1)), fits=np.array([1.0, 0.5, 2.0]))
    assert mixed([first, second]).tolist() == [1, 0, 0]
    coupled = first._replace(precisions=100 * (np.eye(3) - 1 / 3)[None] + 0.01 * np.eye(3))
    assert len(set(mixed([coupled, coupled._replace(u=second.u, fits=second.fits)]))) == 1


def test_intervals_that_contain_nine_tenths_are_rejected_as_often_as_chance_says() -> None:
    assert rejected_by_chance(20) == pytest.approx(0.0432, abs=1e-4)  # 15 of 20 or fewer
    assert rejected_by_chance(10) == pytest.approx(0.0128, abs=1e-4)  # 6 of 10 or fewer
    assert not is_rejected(20, 20), "intervals that are too wide"


def test_widths_are_those_with_the_best_score_of_those_rejected_no_more_than_by_chance() -> None:
    narrow, wide = (1.0, 1.0), (2.0, 2.0)
    tried = {narrow: [Trial(1.0, -0.1), Trial(1.0, 0.9)], wide: [Trial(2.0, -0.1), Trial(1.5, -0.1)]}
    assert best_widths(tried) == wide
    assert best_widths(tried, 1) == narrow, "the second table has no part in its own widths"


def test_neither_a_tables_own_rows_nor_tables_that_are_not_fitted_choose_its_constant_width() -> None:
    tables = [[Ends(np.full(3, off), np.zeros(3), np.zeros(3))] for off in (0.1, 1.0, 9.0)]
    found = constant_scores(tables, [True, True, False])
    assert found == pytest.approx([200.0, 20.0 + 20 * 90.0, 200.0 + 20 * 800.0])


def test_a_table_that_was_seen_is_predicted_by_its_own_effect_too() -> None:
    spreads = Spreads.of(usual_spreads())
    seen, truth = made(spreads)
    found = Found.of(seen, spreads)
    assert found.mean(seen.effects[0]) == pytest.approx(factors(truth, seen.effects[0]), abs=0.2)
    assert np.trace(found.covariance(seen.effects[0])) < 0.05 * np.trace(
        found.covariance({**seen.effects[0], "table new": 1.0})
    )


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_the_spread_of_tables_is_found_from_their_rows(factor: float) -> None:
    usual_at = Spreads.of(usual_spreads())
    true = usual_at.effects.copy()
    true[TABLE] *= factor
    seen, _ = made(Spreads(true, usual_at.noise))
    found = Spreads.of(estimated(seen, usual_spreads()))
    ratio = np.exp(np.mean(np.log(found.effects[TABLE] / usual_at.effects[TABLE])))
    assert abs(np.log(ratio / factor)) < abs(np.log(factor)) / 2
    assert found.noise == pytest.approx(usual_at.noise, rel=0.2)


@pytest.mark.slow
def test_the_deviation_of_rows_is_found_for_each_software() -> None:
    usual_at = Spreads.of(usual_spreads())
    noise = usual_at.noise * np.where(np.array(NOISES) == "megatron-deepspeed", 2.0, 1.0)
    seen, _ = made(Spreads(usual_at.effects, noise))
    found = Spreads.of(estimated(seen, usual_spreads()))
    assert found.noise == pytest.approx(noise, rel=0.25)


def test_a_pair_of_software_and_device_has_an_effect_on_the_scale_alone() -> None:
    sd = Spreads.of(usual_spreads()).effects[list(KINDS).index("pair")]
    assert sd[0] > 0
    assert not sd[1:].any()
    effects = fitted_effects()["pair nemo h100"]
    assert effects["scale"] < 0, (
        "NVIDIA's recipes on H100 are faster than their software and device alone suggest"
    )
    assert not any(value for name, value in effects.items() if name != "scale")


def test_predictions_use_the_effects_as_they_were_fitted() -> None:
    software, device = SOFTWARE["megatron-core"], Device.of("h100-80gb")
    effects = {e: np.array(list(values.values())) for e, values in fitted_effects().items()}
    expected = moved(usual(software, device), factors(effects, effects_of(software, device)))
    found = composed(software, device)
    assert effects["all"].any()
    for name in NAMES[1:]:
        assert getattr(found, name) == pytest.approx(getattr(expected, name)), name


def test_an_unknown_pair_is_less_certain_than_a_known_one_for_every_constant() -> None:
    device = Device.of("a100-80gb")
    known, other = (
        composed(SOFTWARE["megatron-core"], device),
        composed(SOFTWARE["deepspeed"], Device.of("mi300x")),
    )
    assert np.trace(other.covariance) > np.trace(known.covariance)


def test_covariances_are_those_of_some_distribution_and_wider_than_a_row() -> None:
    for name in ("a100-80gb", "h200", "b200", "l4", "mi300x", "v100-32gb"):
        for software in SOFTWARE.values():
            covariance = covariance_of(composed(software, Device.of(name)))
            assert np.linalg.eigvalsh(covariance).min() > 0
    assert all(0.02 < row_noise(name) < 0.2 for name in SOFTWARE)


def test_rows_in_our_own_words_are_read_once() -> None:
    cells = {
        "group": "NeMo 24.12", "label": "one", "device": "h100-80gb", "nodes": 1, "per_node": 8, "seconds": 2.0,
        "model": {"name": "small", "layers": 2, "hidden": 64, "heads": 2, "vocab": 100, "seq": 32},
        "layout": {"data": 8, "global_batch": 16},
    }  # fmt: skip
    ((name, (row,)),) = more.rows([cells, cells]).items()
    assert (name, row.software, row.seconds) == ("NeMo 24.12", "nemo", 2.0)
    assert row.layout.data == row.cluster.num_devices == 8


def test_runs_of_mist_that_recompute_are_left_out() -> None:
    cells = {
        "case": "a", "model": "llama", "h": 64, "ffn": 128, "L": 4, "heads": 2, "flash": True, "mlp": "gated_mlp",
        "V": 100, "seq": 32, "global_batch": 8, "gpus_per_node": 4, "layers_per_stage": [2, 2],
        "ckpt_layers_per_stage": [0, 0], "stage_strategies": [[1, 2, 1, 0, 0, 1]], "measured_s": 3.0,
    }  # fmt: skip
    rows = small.mist({"rows": [cells, {**cells, "ckpt_layers_per_stage": [1, 0]}]}, "Mist, L4")
    ((layout, seconds),) = [(row.layout, row.seconds) for row in rows]
    assert (layout.data, layout.pipeline, layout.num_micro_batches, seconds) == (2, 2, 4, pytest.approx(3.0))
