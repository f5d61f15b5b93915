"""The calibrations that ship with Shardscope: the rows and priors of each fit, and its scores.

    cd tests; python -m published.calibrate ROWS.json ../toolkit/shardscope/calibration/catalogue/calibrations

fits them again. Eight tenths of the rows, chosen by a hash of their inputs, are fitted; the others never are. The
errors and the interval of a calibration are cross-validated over all rows. The form of the formulas, the priors and the
weights of the data sets were chosen with all these rows in view, so errors on unseen rows may be somewhat larger.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from published.datasets import load
from published.fit import Prior, Priors, fit
from published.formulas import constant_mfu_seconds, kind_of, plain_seconds
from shardscope.calibration.calibration import Calibration
from shardscope.measure.calibrate.rows import Row, Score, calibration_of_row, predicted_seconds
from shardscope.measure.calibrate.shapes import learnt, with_factors

Floats = npt.NDArray[np.float64]

FITTED_FOLDS = range(8)
"""Of ten, by the hash of a row's inputs: a reproducible split."""
CROSS_FOLDS = 5
LEVELS = (5, 50, 95)

SHARED: Priors = {
    "matmul_efficiency": Prior(0.8, 0.05),
    "half_size": Prior(200, 0.3),
    "memory_efficiency": Prior(0.8, 0.08),
    "intra_efficiency": Prior(0.7, 0.15),
    "optimizer_efficiency": Prior(0.7, 0.2),
    "step_s": Prior(1e-3, 1.0),
}
"""Priors from what large matrix products, streaming kernels and NCCL usually reach on NVIDIA devices."""

FUSED: Priors = {"attention_efficiency": Prior(0.4, 0.5), "attention_half_seq": Prior(100, 1.0)}
SHARDED: Priors = {"inter_efficiency": Prior(0.6, 0.5), "shard_overlap": Prior(0.8, 0.2)}


@dataclass(frozen=True)
class Recipe:
    """The fit of one machine and its software: its rows and its constants."""

    name: str
    device: str
    datasets: tuple[str, ...]
    priors: Priors
    measured_on: str
    source: str
    gpus: tuple[str, ...] = ()
    """Devices whose rows are used, if a data set has several devices; empty for all."""
    weights: Mapping[str, float] = field(default_factory=dict)
    start: Mapping[str, float] = field(default_factory=dict)
    """Constants from other sources, which the rows cannot determine."""
    note: str = ""
    is_only: bool = False
    """Whether no other cluster was measured with this device and software."""
    has_shapes: bool = False
    """Whether there are factors of per-layer shapes, which lower cross-validated errors if shapes have many rows."""

    def rows(self, everything: Mapping[str, Sequence[Row]]) -> list[Row]:
        """All rows of the machine, fitted or not."""
        every = [row for name in self.datasets for row in everything.get(name, ())]
        return [row for row in every if not self.gpus or row.cluster.device.name in self.gpus]


RECIPES = (
    Recipe(
        name="a100-megatron",
        device="a100-80gb",
        datasets=("vtrain_ground_truth_multi", "vtrain_ground_truth_single"),
        priors={
            **SHARED,
            "half_size": Prior(200, 0.3),
            "unfused_efficiency": Prior(0.4, 0.4),
            "head_efficiency": Prior(0.35, 0.2),
            "launch_s": Prior(1e-5, 1.0),
            "launch_jitter": Prior(0.1, 1.0),
            "exposed_launch": Prior(0.3, 1.0),
            "intra_efficiency": Prior(0.45, 0.15),
            "inter_efficiency": Prior(0.85, 0.05),
            "collective_s": Prior(5e-5, 0.15),
            "pipeline_efficiency": Prior(0.3, 0.3),
        },
        weights={"vtrain_ground_truth_multi": 25.0},
        measured_on="A100, 8 per node, 800 Gbit/s per node; Megatron-DeepSpeed, fp16, unfused attention",
        source="VIA-Research/vTrain@f8dda84 data/ground_truth_multi.csv and ground_truth_single.csv",
        start={"attention_efficiency": 0.32, "attention_half_seq": 100.0},
        has_shapes=True,
        note="fused attention has the constant of a100-fsdp; ZeRO 2 and 3, offload and context parallelism were not "
        "measured; ZeRO 3 in DeepSpeed of 2021 took 1.5 to 4.3 times as long as predicted on hundreds of devices",
    ),
    Recipe(
        name="a100-fsdp",
        device="a100-80gb",
        datasets=("llm_foundry_benchmarks",),
        gpus=("a100-80gb", "a100-40gb"),
        is_only=True,
        priors={**SHARED, **FUSED, **SHARDED, "matmul_efficiency": Prior(0.75, 0.15)},
        measured_on="A100 of 40 and 80 GB, up to 128; LLM Foundry with FSDP, bf16, fused attention",
        source="mosaicml/llm-foundry@8c8dd48 scripts/train/benchmarking/README.md",
        note="tensor, context, expert and pipeline parallelism were not measured: their constants are priors",
    ),
    Recipe(
        name="h100-fsdp",
        device="h100-80gb",
        datasets=("llm_foundry_benchmarks",),
        gpus=("h100-80gb",),
        is_only=True,
        priors={
            **SHARED,
            **FUSED,
            **SHARDED,
            "matmul_efficiency": Prior(0.75, 0.15),
            "half_size": Prior(300, 0.5),
            "fp8_efficiency": Prior(0.5, 0.3),
        },
        measured_on="H100 SXM 80 GB, up to 512; LLM Foundry with FSDP, bf16 and fp8, fused attention",
        source="mosaicml/llm-foundry@8c8dd48 scripts/train/benchmarking/README.md",
        note="tensor, context, expert and pipeline parallelism were not measured: their constants are priors; "
        "Llama 3 with 131,072 tokens took half the predicted time, because its attention was faster",
    ),
    Recipe(
        name="b200-megatron",
        device="b200",
        datasets=("simumax_b200",),
        priors={
            **SHARED,
            **FUSED,
            "matmul_efficiency": Prior(0.7, 0.1),
            "half_size": Prior(350, 0.3),
            "attention_efficiency": Prior(0.5, 0.3),
            "attention_half_seq": Prior(500, 0.7),
            "memory_efficiency": Prior(0.8, 0.15),
            "gradient_overlap": Prior(0.5, 0.4),
            "collective_s": Prior(2e-5, 0.5),
            "pipeline_efficiency": Prior(0.5, 0.5),
            "step_s": Prior(5e-3, 0.8),
        },
        weights={"simumax_b200": 20.0},
        measured_on="8 B200 of 180 GB in one node; Megatron-LM 23e00ed0 with TransformerEngine 2.11, bf16",
        source="MooreThreads/SimuMax@4dcaae5 docs/b200/b200_release_v1.2_summary.json",
        note="only one node was measured, without 8-bit products and without recomputation",
    ),
)


def own_calibration(row: Row) -> Calibration:
    """The calibration of the cluster that a row was measured on, or the one that a user gets if it has none."""
    device = row.cluster.device.name
    for recipe in RECIPES:
        if row.dataset in recipe.datasets and (not recipe.gpus or device in recipe.gpus):
            return Calibration.of(recipe.name)
    return calibration_of_row(row)


def calibrate(recipe: Recipe, everything: Mapping[str, Sequence[Row]]) -> Calibration:
    """Fit the recipe's constants; add their scores on rows that were not fitted, and the interval from these."""
    rows = recipe.rows(everything)
    fitted = [row for row in rows if _fold(row) in FITTED_FOLDS]
    device = rows[0].cluster.device
    start = Calibration(
        name=recipe.name, device=recipe.device, software=rows[0].software, measured_on=recipe.measured_on,
        source=recipe.source, note=recipe.note, is_only=recipe.is_only,
        ridge=device.peak_flops["bf16"] / device.memory_bandwidth, **recipe.start,
    )  # fmt: skip
    found = shaped(fit(fitted, recipe.priors, start, weights=recipe.weights), fitted, recipe)
    unseen = [row for row in rows if _fold(row) not in FITTED_FOLDS]
    crossed = _cross_validated(rows, recipe, start)
    seconds = {row.key: value for row, value in zip(unseen, predicted_seconds(unseen, found), strict=True)}
    mfu, rate = _constants(fitted, constant_mfu_seconds), _constants(fitted, plain_seconds)
    return found.model_copy(
        update={
            "quantiles": _quantiles(rows, crossed),
            "constant_mfu": mfu,
            "constant_rate": rate,
            "scores": _scores(rows, crossed, "cross-validated") | _scores(unseen, seconds, "held out"),
            "fitted": tuple(sorted({row.key for row in fitted})),
        }
    )


def shaped(known: Calibration, rows: Sequence[Row], recipe: Recipe) -> Calibration:
    """The calibration with factors of the rows' per-layer shapes, if the recipe has them."""
    if not recipe.has_shapes:
        return known
    off = np.log([row.seconds for row in rows]) - np.log(predicted_seconds(rows, known))
    found = learnt(rows, known, off, off, np.ones(len(rows)))
    return with_factors(known, {name: round(factor, 4) for name, factor in found.factors.items()})


def _configuration(row: Row) -> int:
    return int(hashlib.sha256(row.configuration.encode()).hexdigest()[:6], 16)


def _fold(row: Row) -> int:
    return int(row.key, 16) % 10


def _constants(rows: Sequence[Row], formula: Callable[..., Floats]) -> dict[str, float]:
    """The constant of a formula by data set and precision: the median over the given rows."""
    ratios = formula(rows, {"": 1.0}) / np.array([row.seconds for row in rows])
    kinds = [kind_of(row) for row in rows]
    return {
        kind: float(np.median([ratio for ratio, mine in zip(ratios, kinds, strict=True) if mine == kind]))
        for kind in dict.fromkeys(kinds)
    }


def _cross_validated(rows: Sequence[Row], recipe: Recipe, start: Calibration) -> dict[str, float]:
    """Predicted seconds of each row, by constants fitted to the other folds.

    All rows of a model and layout that differ only in the batch are in one fold.
    """
    predicted: dict[str, float] = {}
    for fold in range(CROSS_FOLDS):
        out = [row for row in rows if _configuration(row) % CROSS_FOLDS == fold]
        kept = [row for row in rows if _configuration(row) % CROSS_FOLDS != fold]
        if out and kept:
            found = shaped(fit(kept, recipe.priors, start, weights=recipe.weights), kept, recipe)
            values = predicted_seconds(out, found)
            predicted |= {row.key: float(value) for row, value in zip(out, values, strict=True)}
    return predicted


def _quantiles(rows: Sequence[Row], predicted: Mapping[str, float]) -> dict[str, float]:
    """Quantiles of measured / predicted time, with equal total weight for every data set."""
    sizes = {name: sum(row.dataset == name for row in rows) for name in {row.dataset for row in rows}}
    ratios = np.array([row.seconds / predicted[row.key] for row in rows])
    weight = np.array([1.0 / sizes[row.dataset] for row in rows])
    order = np.argsort(ratios)
    reached = 100 * (np.cumsum(weight[order]) - weight[order] / 2) / weight.sum()
    return {str(level): round(float(np.interp(level, reached, ratios[order])), 4) for level in LEVELS}


def _scores(rows: Sequence[Row], predicted: Mapping[str, float], how: str) -> dict[str, dict[str, float]]:
    scores = {}
    for name in dict.fromkeys(row.dataset for row in rows):
        mine = [row for row in rows if row.dataset == name]
        score = Score.of(np.array([predicted[r.key] for r in mine]), np.array([r.seconds for r in mine]))
        figures = {"mape": score.mape, "max": score.worst, "rank": score.rank, "rows": float(score.rows)}
        scores[f"{name}, {how}"] = {key: round(value, 4) for key, value in figures.items()}
    return scores


def main(arguments: Sequence[str]) -> None:
    """Fit every recipe whose rows are in the file, and write a JSON file for each."""
    everything, folder = load(Path(arguments[0])), Path(arguments[1])
    chosen = [
        recipe
        for recipe in RECIPES
        if recipe.rows(everything) and recipe.name in (arguments[2:] or [recipe.name])
    ]
    for recipe in chosen:
        found = calibrate(recipe, everything)
        (folder / f"{recipe.name}.json").write_text(found.to_json() + "\n", "utf-8")
        print(recipe.name, found.quantiles, *found.scores.items(), sep="\n  ")


if __name__ == "__main__":
    main(sys.argv[1:])
