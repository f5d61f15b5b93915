"""Settings with which a trainer runs a layout: Megatron-LM's flags, torchtitan's flags, or DeepSpeed's JSON.

Each trainer has a module with one function that returns a `TrainerConfig`, and rejects what the trainer cannot run.
Names of settings are from Megatron-LM (d98e8a6) and torchtitan (b5bcd76) of August 2026, and from DeepSpeed's
documentation. Settings that a prediction relies on are written even if they are the trainer's default; if the trainer
has no setting for something that is predicted, a remark names the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shardscope.calibration.software import assumed_software, software_of
from shardscope.errors import SpecError
from shardscope.planner.trainer_config.config import TrainerConfig
from shardscope.planner.trainer_config.deepspeed import deepspeed_config
from shardscope.planner.trainer_config.megatron import launch_command, megatron_config
from shardscope.planner.trainer_config.torchtitan import torchtitan_config
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer
from shardscope.spec.units import work_text

__all__ = ["TrainerConfig", "trainer_config"]

_WRITERS: dict[str, Callable[[Transformer, Layout], TrainerConfig]] = {
    "megatron-core": megatron_config,
    "fsdp2": torchtitan_config,
    # torchtitan's memory is predicted for compiled runs, whose loss needs fewer bytes; FSDP2's memory is not.
    "torchtitan": partial(torchtitan_config, is_compiled=True),
    "deepspeed": deepspeed_config,
}


def trainer_config(
    model: Transformer, layout: Layout, software: str | None = None, *, per_node: int | None = None
) -> TrainerConfig:
    """Return the settings for a trainer to run this layout of a model.

    Args:
        model: The model, whose sizes Megatron-LM takes as flags.
        layout: The layout.
        software: ``megatron-core``, ``torchtitan`` (also for ``fsdp2``) or ``deepspeed``; None for the software that
            the layout suggests, as in `predict`.
        per_node: Number of devices in a node, for the command that starts Megatron-LM; None writes its flags alone.

    Raises:
        SpecError: The trainer cannot run the layout, or no settings can be written for it.

    Example:
        >>> model = Transformer(name="small", layers=4, hidden=64, heads=4, vocab=256, seq=128)
        >>> trainer_config(model, Layout(data=2, tensor=2, global_batch=8)).text.split()[:2]
        ['--tensor-model-parallel-size', '2']
    """
    layout.check(model)
    known = assumed_software(layout).software if software is None else software_of(software)
    if known.name not in _WRITERS:
        raise SpecError(
            f"settings for software={known.name!r} cannot be written yet; use one of {', '.join(_WRITERS)}"
        )
    if layout.compression.name != "none":
        raise SpecError(
            f"compression={layout.compression.name!r} is not a setting of {known.label}; use a layout without it"
        )
    if lacking := known.shipped.lacks(layout, model):
        raise SpecError(
            f"{known.label} does not support {' or '.join(lacking)}; to search only what it supports, plan with "
            f"software={known.name!r} and leave these axes out of fix"
        )
    config = _WRITERS[known.name](model, layout)
    work = f"The plan is for {work_text(layout.global_batch, model.seq)}."
    is_started = config.trainer.startswith("Megatron")
    launch = launch_command(layout, per_node) if is_started and per_node is not None else ""
    return config._replace(remarks=(work, *config.remarks), launch=launch)
