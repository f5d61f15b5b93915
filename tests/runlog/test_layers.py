"""What real runs tell of their layers, and the alarms that real runs raise and do not raise."""

from __future__ import annotations

import pytest

import shardscope as ss
from conformance.runs import small_job
from shardscope.errors import RunFailed, SpecError
from shardscope.runlog.layers import Layers, reports_layers
from shardscope.tuning.measured import TrialReader, with_layer_statistics
from shardscope.tuning.records import measured_from, measured_to
from shardscope_widgets import Trace, figures
from shardscope_widgets.figures import _layers

OFTEN = ss.Record(layers_every=1)


def layers_of(**changes) -> Layers:
    return ss.launch(small_job(record=OFTEN, **changes)).wait(60).layers()


def kinds(layers: Layers) -> list[str]:
    return [alarm.kind for alarm in layers.alarms]


def test_a_healthy_run_tells_of_every_layer_and_raises_no_alarm():
    run = ss.launch(small_job(optimizer="lamb", steps=20)).wait(60)
    layers = ss.Run.attach(run.path).layers()
    assert layers.alarms == ()
    frame = layers.frame
    assert list(frame.columns) == ["layer", "step", "lr", "ratio", "weight_norm", "update_norm", "bound"]
    assert sorted(set(frame.step)) == [1, 10, 20]
    assert len(frame) == 3 * len(layers.ratios) == 3 * 14
    assert layers.residual_frame.empty
    row = frame[(frame.layer == "head.weight") & (frame.step == 20)].iloc[0]
    assert row.ratio == pytest.approx(row.weight_norm / row.update_norm)
    assert repr(layers) == "<Layers: 14 with trust ratios; no alarms>"
    # the same from a trace, as the lab draws it, and nothing in a study's record
    info = _layers.layers_info_of(Trace.read(run))
    assert info == _layers.layers_info(layers, label=run.name)
    assert len(figures.layers(run).data) == 2
    assert TrialReader(run).poll().alarms == ()


@pytest.mark.slow
def test_a_tight_clamp_pins_ratios_and_a_study_keeps_the_alarm():
    run = ss.launch(small_job(optimizer=ss.Optimizer("lamb", clamp=0.5), record=OFTEN)).wait(60)
    [alarm] = run.layers().alarms
    assert (alarm.kind, alarm.value) == ("pinned", 1.0)
    assert "head.weight" in alarm.layers
    assert "blocks.0.1.bias" not in alarm.layers  # starts from zeros
    assert "is limited by clamp in 100% of the sampled steps" in alarm.text
    assert alarm.text.endswith("raise optimizer.clamp, or set it to 'off'")
    measured = TrialReader(run).poll()
    assert measured.alarms == (alarm.text,)
    assert measured_from(measured_to(measured)) == measured
    assert alarm.text in _layers.layers_text(_layers.layers_info_of(Trace.read(run)))


@pytest.mark.slow
def test_one_thousandth_piles_up_and_one_tenth_does_not():
    sgd = ss.Optimizer("sgd", lr=1e-3, momentum=0.0)
    little = layers_of(optimizer=sgd, steps=24, batch=256, compression=ss.Compression("topk", ratio=0.001))
    assert "piling up" in kinds(little)
    alarm = little.alarms[-1]
    assert alarm.layers[0] in alarm.text
    assert alarm.value > 2
    enough = layers_of(optimizer=sgd, steps=24, batch=256, compression=ss.Compression("topk", ratio=0.1))
    assert enough.alarms == ()
    assert {series.kind for series in enough.residuals} == {"residual"}
    for series in enough.residuals:
        assert series.relative == pytest.approx(
            [norm / gradient for norm, gradient in zip(series.norm, series.gradient, strict=True)]
        )


@pytest.mark.slow
def test_zeros_take_a_bare_step_where_nothing_warms_up():
    fast = ss.Optimizer("lamb", lr=0.02)
    bare = layers_of(optimizer=fast, steps=4)
    [alarm] = bare.alarms
    assert (alarm.kind, alarm.value) == ("bare step", pytest.approx(20))
    assert set(alarm.layers) == {f"blocks.{i}.1.bias" for i in range(3)}
    assert (
        layers_of(optimizer=fast, steps=4, lr_schedule=ss.LRSchedule("constant", warmup_steps=4)).alarms == ()
    )


def test_a_layer_that_blows_up_is_named_although_the_run_has_failed():
    run = ss.launch(small_job(optimizer=ss.Optimizer("lamb", lr=1e38), record=ss.Record(layers_every=50)))
    with pytest.raises(RunFailed, match="the loss became nan"):
        run.wait(60)
    alarm = run.layers().alarms[0]
    assert alarm.kind == "not finite"
    assert alarm.layers[0] in alarm.text
    assert _layers.draw_layers(_layers.layers_info(run.layers())).data


def test_without_decay_a_variant_may_adapt_nothing():
    plain = ss.Optimizer("lamb", variant="apex", weight_decay=0.0)
    [alarm] = layers_of(optimizer=plain, steps=2).alarms
    assert alarm.kind == "not adapted"
    assert "none of the 14 layers (for example blocks.0.0.weight) has a trust ratio" in alarm.text


def test_runs_with_nothing_to_tell_say_so():
    run = ss.launch(small_job(steps=2)).wait(60)
    with pytest.raises(SpecError, match="has no trust ratios with optimizer='adamw' and no residuals"):
        run.layers()
    assert run.events("layers") == []
    blind = ss.launch(small_job(steps=2, optimizer="lars", record=ss.Record(layers_every=0))).wait(60)
    with pytest.raises(
        SpecError, match=r"does not record layer statistics; launch it with record=Record\(layers_every"
    ):
        blind.layers()
    assert repr(Layers("lamb", (), ())) == "<Layers: no step has been sampled yet>"


def test_studies_look_often_enough_and_only_where_there_is_something():
    lamb = small_job(optimizer="lamb", steps=60)
    assert with_layer_statistics(lamb).record.layers_every == 3
    assert with_layer_statistics(lamb.replace(steps=10)).record.layers_every == 1
    assert with_layer_statistics(lamb.replace(steps=400)).record.layers_every == 10
    assert with_layer_statistics(lamb.replace(record=ss.Record(layers_every=0))).record.layers_every == 0
    assert with_layer_statistics(small_job(steps=60)).record.layers_every == 10
    for compression, told in (
        ("topk", True),
        ("dgc", True),
        ("onebit-adam", True),
        ("int8", False),
        ("none", False),
    ):
        optimizer = "sgd" if compression == "dgc" else "adamw"
        assert reports_layers(small_job(steps=60, optimizer=optimizer, compression=compression)) is told
