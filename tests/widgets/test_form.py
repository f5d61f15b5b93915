"""Forms: what a control made from a field takes over from it, and how it goes with its trait."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import traitlets as t
from pydantic import Field

from shardscope.errors import SpecError
from shardscope.spec import Batch, Compression, Job, LRSchedule, Optimizer, Record, Strategy, registry
from shardscope.spec._base import Spec
from shardscope.spec.fields import bounds_of, summary_of
from shardscope.spec.layout import Layout
from shardscope.spec.numbers import Count
from shardscope_widgets.job_form.families import settings_of_method
from shardscope_widgets.kit.controls import MOST, Open, bind, control_of, controls_for, typed
from shardscope_widgets.kit.form import form_of, in_groups, own_trait, setting_in, setting_of, trait_of
from shardscope_widgets.memory_calculator import MemoryChoices
from shardscope_widgets.training_lab import JobChoices

METHODS = [(kind, name) for kind in (Strategy, Compression, LRSchedule) for name in registry.names(kind)]


class Settings(Spec):
    """A spec to make controls of."""

    share: float = Field(default=0.02, gt=0, le=1)
    """Share of ``it`` that is sent. It has a second sentence."""
    every: Count | None = None
    """Steps between two looks; None never looks."""
    clip: float | None = Field(default=None, gt=0)
    mode: Literal["soft", "hard"] = "soft"
    is_on: bool = True
    name: str = "x"


def settings() -> list[Any]:
    own = [setting_of(Settings, field) for field in Settings.model_fields]
    layout = [setting_in(MemoryChoices, name) for name in MemoryChoices.class_traits(field=bool)]
    job = [setting_in(JobChoices, name) for name in JobChoices.class_traits(field=bool)]
    return own + layout + job + [each for method in METHODS for each in settings_of_method(*method)]


def test_every_control_has_its_fields_default_bounds_and_help() -> None:
    for setting in settings():
        field, control = setting.spec.model_fields[setting.field], control_of(setting)
        assert typed(control) == setting.default, setting
        assert control.description == setting.label
        if field.description:
            about = summary_of(field, nothing="“default”")
            assert control.tooltip == f"{about}."
        if hasattr(control, "min"):
            least, most = bounds_of(field)
            most = 64 if setting.field == "world_size" else most  # which the lab holds its ranks to
            assert (control.min, control.max) == (least, min(most or MOST, MOST)), setting
        if field.default_factory is None and setting == setting_of(
            setting.spec, setting.field, setting.label
        ):
            assert setting.default == field.default


def test_forms_begin_with_the_defaults_of_the_specs_but_where_they_say_otherwise() -> None:
    def otherwise(choices: type[t.HasTraits], *specs: type[Spec]) -> set[str]:
        usual = {
            field: setting_of(spec, field, values=()).default for spec in specs for field in spec.model_fields
        }
        traits = choices.class_traits(field=bool)
        return {name for name, trait in traits.items() if trait.default_value != usual[name]}

    assert otherwise(JobChoices, Optimizer, Record, Batch, Job) == {
        "model", "data", "global_batch", "micro_batch", "steps",
    }  # fmt: skip
    assert otherwise(MemoryChoices, Layout) == {"data", "tensor", "pipeline", "global_batch"}


def test_what_a_control_looks_like_follows_from_the_type() -> None:
    kinds = {field: type(control_of(setting_of(Settings, field))).__name__ for field in Settings.model_fields}
    assert kinds == {
        "share": "BoundedFloatText", "every": "Open", "clip": "Open", "mode": "Dropdown", "is_on": "Checkbox",
        "name": "Text",
    }  # fmt: skip
    every = setting_of(Settings, "every", "Look every")
    assert (every.label, every.help) == ("Look every", "Steps between two looks; “default” never looks.")
    assert setting_of(Settings, "share").help == "Share of it that is sent."
    assert control_of(setting_of(Settings, "share")).step == pytest.approx(0.001)


class Form(t.HasTraits):
    """A trait of each field."""

    share = trait_of(Settings, "share")
    every = trait_of(Settings, "every")
    clip = trait_of(Settings, "clip")
    mode = trait_of(Settings, "mode")
    precision = trait_of(Job, "precision")
    seed = trait_of(Job, "seed")


class TestTraits:
    @pytest.mark.parametrize(
        ("field", "value"), [("share", 2.0), ("every", 0), ("every", "x"), ("clip", -1.0)]
    )
    def test_they_keep_within_the_bounds(self, field: str, value: Any) -> None:
        with pytest.raises(t.TraitError):
            Form(**{field: value})

    def test_they_know_the_names_and_their_aliases(self) -> None:
        assert Form(precision="bf16").precision == "bf16-mixed"
        with pytest.raises(SpecError, match="mode='hrad' is not known; did you mean 'hard'"):
            Form(mode="hrad")

    def test_a_control_and_its_trait_move_together_and_what_is_refused_is_taken_back(self) -> None:
        form = Form()
        controls = {name: control_of(setting_in(Form, name)) for name in ("every", "clip", "mode", "seed")}
        bind(form, controls)
        every, clip = controls["every"], controls["clip"]
        assert isinstance(every, Open)
        every.value, clip.value, controls["mode"].value = "5", "0.5", "hard"
        assert (form.every, form.clip, form.mode) == (5, 0.5, "hard")
        every.value = "often"
        assert (form.every, every.value) == (5, "5")
        form.seed = 2**60
        assert (form.seed, controls["seed"].value) == (2**60, MOST)
        every.value, form.clip = "", 2.0
        assert (form.every, clip.value) == (None, "2.0")


@form_of(Settings, without=["name"])
class Shown(t.HasTraits):
    """A form that mentions one field and has two choices of its own."""

    mode = trait_of(Settings, "mode", "How")
    count = own_trait(4, "Count", "How many.", least=1, most=9, slider="d")
    unit = own_trait("ms", "Unit", "Of what.", kind="choice", values=lambda: (("ms", "ms"), ("s", "s")))


def test_a_field_that_a_form_does_not_mention_gets_its_control_by_itself() -> None:
    form = Shown()
    controls = controls_for(form)
    assert list(controls) == ["mode", "count", "unit", "share", "every", "clip", "is_on"]
    assert in_groups(Shown, [["count"], ["mode"]]) == [
        ["count"],
        ["mode", "unit", "share", "every", "clip", "is_on"],
    ]
    controls["share"].value, form.clip = 0.5, 2.0
    assert (form.share, controls["clip"].value) == (0.5, "2.0")


def test_a_choice_of_the_forms_own_has_the_label_help_and_bounds_that_it_says() -> None:
    form = Shown(count=9)
    controls = controls_for(form, ["count", "unit"])
    count = controls["count"]
    assert (type(count).__name__, count.min, count.max, count.value) == ("IntSlider", 1, 9, 9)
    assert (count.description, count.tooltip) == ("Count", "How many.")
    assert controls["unit"].options == (("ms", "ms"), ("s", "s"))
    with pytest.raises(SpecError, match="count=10 is out of range; give a value from 1 to 9"):
        form.count = 10
    with pytest.raises(SpecError, match="unit='sec' is not known"):
        form.unit = "sec"
    count.max = 20
    count.value = 20
    assert (form.count, count.value, form.unit) == (9, 9, "ms")


def test_a_control_whose_first_range_is_narrow_is_widened_by_code() -> None:
    class Narrow(t.HasTraits):
        wait = own_trait(1.0, "Wait", "How long.", least=0, reach=3, step=0.5, slider=".1f")
        ranks = own_trait(2, "Ranks", "How many.", least=1, reach=8)

    form = Narrow(ranks=9)
    controls = controls_for(form)
    wait, ranks = controls.values()
    assert [(each.min, each.max, each.value) for each in (wait, ranks)] == [(0, 3, 1), (1, 9, 9)]
    form.wait = 4.5
    assert (wait.max, wait.value, form.wait) == (4.5, 4.5, 4.5)
    wait.value = 2.0
    assert form.wait == 2
