"""What a person chooses in the Memory Calculator, as traits; and the layout that comes of it. No widget here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import traitlets as t

from shardscope.analytic.memory import FRAMEWORKS
from shardscope.errors import unknown_name
from shardscope.spec.layout import (
    OFFLOAD_NAMES,
    RECOMPUTE_NAMES,
    Layout,
    Precision,
    searched_schedules,
)
from shardscope.spec.layout_optimizer import optimizer_names
from shardscope.spec.model import Transformer
from shardscope.spec.pipeline_schedule import PipelineSchedule
from shardscope.spec.precision import full_name
from shardscope_widgets.memory_calculator import _catalogue

NAMES: dict[str, tuple[str, ...]] = {
    "framework": tuple(FRAMEWORKS),
    "schedule": searched_schedules(),
    "recompute": RECOMPUTE_NAMES,
    "precision": get_args(Precision),
    "optimizer": optimizer_names(),
    "offload": OFFLOAD_NAMES,
}
"""The names that each choice knows."""
LAYOUT_FIELDS = (
    "data", "tensor", "pipeline", "context", "expert", "zero", "shard", "micro_batch", "global_batch", "schedule",
    "virtual_stages", "recompute", "flash_attention", "sequence_parallel", "precision", "optimizer", "offload",
)  # fmt: skip


class Choices(t.HasTraits):
    """One trait a control. Setting a trait moves the control, and moving the control sets the trait."""

    model = t.Any("gpt3-175b", help="A name from the catalogue, the path of a config.json, or a Transformer.")
    device = t.Unicode("a100-80gb", help="A name from the catalogue of devices.")
    framework = t.Unicode("megatron-core", help="Whose habits hold: what is kept besides the states.")
    seq = t.Int(0, min=0, help="Tokens of one sequence; 0 takes the model's own.")
    data = t.Int(8, min=1, help="Replicas that each take a part of the batch.")
    tensor = t.Int(8, min=1, help="Devices that share every matrix of a layer.")
    pipeline = t.Int(16, min=1, help="Devices, one behind the other, that each hold some of the layers.")
    context = t.Int(1, min=1, help="Devices that each take a part of every sequence.")
    expert = t.Int(1, min=1, help="Devices over which the experts of a layer are spread.")
    zero = t.Int(
        1, min=0, max=3, help="0 partitions nothing, 1 optimizer state, 2 also gradients, 3 also parameters."
    )
    shard = t.Int(0, min=0, help="Ranks over which ZeRO partitions (hybrid sharding); 0 for all that it can.")
    micro_batch = t.Int(1, min=1, help="Sequences in one forward pass of one replica.")
    global_batch = t.Int(1536, min=1, help="Sequences in one optimizer step, over all replicas.")
    schedule = t.Unicode("1f1b", help="Order of the pipeline's passes.")
    virtual_stages = t.Int(
        1, min=1, help="Stages that each pipeline rank holds; for the interleaved schedules."
    )
    recompute = t.Unicode("none", help="Activations that are computed again in the backward pass.")
    flash_attention = t.Bool(True, help="Attention that never stores its scores.")
    sequence_parallel = t.Bool(True, help="Split along the sequence what tensor parallelism leaves whole.")
    precision = t.Unicode("bf16-mixed", help="Number formats of weights, gradients and states.")
    optimizer = t.Unicode("adamw", help="Optimizer, by what it keeps of each parameter.")
    offload = t.Unicode("none", help="What lives in the host's memory.")

    @t.validate(*NAMES)
    def _known(self, proposal: Mapping[str, Any]) -> str:
        field, value = proposal["trait"].name, proposal["value"]
        value = full_name(value) if field == "precision" else value
        if value not in NAMES[field]:
            raise unknown_name(field, value, NAMES[field])
        return str(value)

    @t.validate("device")
    def _known_device(self, proposal: Mapping[str, Any]) -> str:
        return _catalogue.find_device(proposal["value"]).name

    def chosen_model(self) -> Transformer:
        """The model that is chosen, with the chosen length of sequences.

        Raises:
            SpecError: No such model, or a file that describes none.
        """
        found = self.model if isinstance(self.model, Transformer) else _catalogue.find_model(self.model)
        return found.replace(seq=self.seq) if self.seq else found

    def chosen_layout(self) -> Layout:
        """The layout that the choices describe; what would have no effect is left out.

        Raises:
            SpecError: It cannot be, alone or on the model; the sentence says what to change.
        """
        model = self.chosen_model()
        layout = Layout(
            **{field: getattr(self, field) for field in LAYOUT_FIELDS} | self._without_effect(model)
        )
        layout.check(model)
        return layout

    def _without_effect(self, model: Transformer) -> dict[str, Any]:
        """Choices that stay as they are on the screen, and mean nothing as others stand."""
        schedule = PipelineSchedule(self.schedule)
        held = min(
            max(self.virtual_stages, schedule.least_stages), schedule.most_stages or self.virtual_stages
        )
        return {
            "sequence_parallel": self.sequence_parallel and self.tensor > 1,
            "shard": self.shard if self.zero else 0,
            "expert": self.expert if model.mixture else 1,
            "virtual_stages": held if self.pipeline > 1 else 1,
        }
