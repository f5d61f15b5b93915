"""The inputs of the Memory Calculator as traits, and the layout that they describe. This module contains no widgets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import traitlets as t

from shardscope.analytic.memory import FRAMEWORKS
from shardscope.calibration.software import assumed_software, memory_model
from shardscope.spec.cluster import Device
from shardscope.spec.layout import Layout, searched_schedules
from shardscope.spec.layout_optimizer import optimizer_names
from shardscope.spec.model import Transformer
from shardscope.spec.numbers import LARGEST_COUNT
from shardscope.spec.pipeline_schedule import PipelineSchedule
from shardscope_widgets.kit.form import form_of, named, own_trait, trait_of, traits_for
from shardscope_widgets.memory_calculator import _catalogue


@form_of(Layout, without=["compression"])  # these formulas do not include the memory of compression
class MemoryChoices(t.HasTraits):
    """One trait per control. Setting a trait updates its control, and using the control sets the trait."""

    model = t.Any("gpt3-175b", help="Name from the model catalogue, path of a config.json, or a Transformer.")
    device = own_trait("a100-80gb", "Device", "Name from the device catalogue.", values=named(Device.names()))
    framework = own_trait(
        "",
        "Framework",
        "Training framework whose memory use is modelled; by default the one that `ss.predict` assumes for the layout.",
        kind="choice",
        values=(("set by the layout", ""), *named(FRAMEWORKS)),
    )
    seq = own_trait(
        0,
        "Sequence, tokens",
        "Tokens per sequence; 0 uses the model's own length.",
        least=0,
        most=LARGEST_COUNT,
        blank="the model's own",
    )
    data = trait_of(Layout, "data", "Data ranks", default=8)
    tensor = trait_of(Layout, "tensor", "Tensor ranks", default=8)
    pipeline = trait_of(Layout, "pipeline", "Pipeline stages", default=16)
    context = trait_of(Layout, "context", "Context ranks")
    expert = trait_of(Layout, "expert", "Expert ranks")
    zero = trait_of(Layout, "zero", "ZeRO stage")
    shard = trait_of(Layout, "shard", "Shard over", blank="all data ranks")
    micro_batch = trait_of(Layout, "micro_batch", "Micro-batch")
    global_batch = trait_of(Layout, "global_batch", default=1536)
    schedule = trait_of(Layout, "schedule", kind="choice", values=named(searched_schedules()))
    virtual_stages = trait_of(Layout, "virtual_stages", "Stages per rank")
    recompute = trait_of(Layout, "recompute")
    recompute_layers = trait_of(Layout, "recompute_layers", "Layers to recompute", blank="all of a stage")
    flash_attention = trait_of(Layout, "flash_attention")
    sequence_parallel = trait_of(Layout, "sequence_parallel")
    precision = trait_of(Layout, "precision")
    optimizer = trait_of(Layout, "optimizer", kind="choice", values=named(optimizer_names()))
    offload = trait_of(Layout, "offload")

    @t.validate("device")
    def _known_device(self, proposal: Mapping[str, Any]) -> str:
        return Device.of(proposal["value"]).name

    def chosen_model(self) -> Transformer:
        """Return the chosen model with the chosen sequence length.

        Raises:
            SpecError: The model does not exist, or the file does not describe a model.
        """
        found = self.model if isinstance(self.model, Transformer) else _catalogue.find_model(self.model)
        return found.replace(seq=self.seq) if self.seq else found

    def _framework_of(self, layout: Layout) -> str:
        """Return the chosen framework; by default, that of the software that predictions assume for the layout."""
        return self.framework or memory_model(assumed_software(layout).software.name)

    def chosen_layout(self) -> Layout:
        """Return the layout that the choices describe, ignoring choices that have no effect.

        Raises:
            SpecError: The layout is invalid in itself or for the model; the message states what to change.
        """
        model = self.chosen_model()
        layout = Layout(
            **{field: getattr(self, field) for field in LAYOUT_FIELDS} | self._without_effect(model)
        )
        layout.check(model)
        return layout

    def _without_effect(self, model: Transformer) -> dict[str, Any]:
        """Return the values to use for choices that, given the other choices, have no effect or are out of range."""
        schedule = PipelineSchedule(self.schedule)
        held = min(
            max(self.virtual_stages, schedule.least_stages), schedule.most_stages or self.virtual_stages
        )
        return {
            "sequence_parallel": self.sequence_parallel and self.tensor > 1,
            "shard": self.shard if self.zero else 0,
            "recompute_layers": self.recompute_layers if self.recompute == "full" else 0,
            "expert": self.expert if model.mixture else 1,
            "virtual_stages": held if self.pipeline > 1 else 1,
        }


LAYOUT_FIELDS = traits_for(MemoryChoices, Layout)
