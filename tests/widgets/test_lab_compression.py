"""The lab's part for compression and links: settings with their method, refusals in place, a link's two figures."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest
import traitlets

from shardscope import Compression, Job, Link
from shardscope.errors import SpecError
from shardscope.measure.compression import codecs
from shardscope.spec.registry import having
from shardscope.spec.units import duration_text, faster_text
from shardscope_widgets import figures
from shardscope_widgets.job_form.choices import AS_IT_IS, JobChoices
from shardscope_widgets.kit.controls import typed
from shardscope_widgets.training_lab import _payoff
from shardscope_widgets.training_lab._payoff import PayoffPanel
from widgets.fake_runs import step_events

HAVE_BITS = " or ".join(having(Compression, "bits"))


def boxes(widget):
    """Every widget inside a widget."""
    for child in getattr(widget, "children", ()):
        yield child
        yield from boxes(child)


class TestSettings:
    @pytest.mark.parametrize("kind", [JobChoices, "lab"])
    def test_a_method_and_its_settings_can_be_given_at_once(self, make_lab, kind):
        make = make_lab if kind == "lab" else kind
        made = make(compression="topk", compression_options={"ratio": 0.1, "selection": "exact"})
        assert made.job().compression.label == "topk ratio=0.1 selection=exact"

    def test_going_back_to_a_method_finds_it_as_it_was(self, lab):
        lab.compression = "topk"
        lab.compression_options = {"ratio": 0.1}
        lab.compression = "int8"
        assert lab.compression_options == {}
        lab.compression_options = {"feedback": True}
        lab.compression = "topk"
        assert lab.compression_options == {"ratio": 0.1}
        assert lab.screen.options["compression"].controls["ratio"].value == 0.1
        lab.compression = "int8"
        assert lab.compression_options == {"feedback": True}

    def test_an_unknown_method_is_refused_with_the_nearest(self, lab):
        with pytest.raises(SpecError, match="did you mean 'topk'"):
            lab.compression = "topkk"
        assert (lab.compression, lab.compression_options) == ("none", {})

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"ratio": "x"}, "ratio='x' is not valid"),
            ({"ratio": 2}, "ratio=2 is not valid: it should be less than or equal to 1"),
            (
                {"bits": 3},
                f"compression.bits=3 has no effect on topk; leave it out, or use {HAVE_BITS}",
            ),
            ({"raito": 0.1}, "did you mean 'ratio'"),
            ({"name": "int8"}, "name='int8' is not an option"),
            ({7: 0.1}, "compression_options"),
        ],
    )
    def test_settings_that_the_method_does_not_take_are_refused_and_harm_nothing(self, lab, options, words):
        lab.compression = "topk"
        with pytest.raises(traitlets.TraitError, match=words.replace(".", r"\.")):
            lab.compression_options = options
        assert lab.compression_options == {}
        lab.screen.options["compression"].controls["ratio"].value = 0.05
        assert lab.job().compression.label == "topk ratio=0.05"

    def test_a_setting_left_at_none_takes_the_methods_default(self, lab):
        lab.compression = "topk"
        lab.compression_options = {"ratio": None, "selection": "exact"}
        assert lab.compression_options == {"selection": "exact"}
        assert lab.screen.options["compression"].controls["ratio"].value == 0.01

    def test_numbers_written_as_text_become_numbers(self, lab):
        lab.compression = "topk"
        lab.compression_options = {"ratio": "0.05"}
        assert lab.compression_options == {"ratio": 0.05}

    def test_what_is_refused_in_a_control_is_taken_back_and_said_beside_it(self, lab):
        lab.compression = "topk"
        options = lab.screen.options["compression"]
        options.controls["ratio"].value = 3
        assert options.controls["ratio"].value == 0.01
        assert options.children[-1] is options.refusal
        assert "ratio=3.0 is not valid: it should be less than or equal to 1" in options.refusal.value
        assert 'role="alert"' in options.refusal.value
        options.controls["ratio"].value = 0.5
        assert lab.compression_options == {"ratio": 0.5}
        assert options.refusal not in options.children

    @pytest.mark.parametrize(
        ("compression", "field", "value"),
        [("local-sgd", "every", 10_000), ("onebit-adam", "warmup_steps", 10**9), ("topk", "ratio", 1e-6)],
    )
    def test_no_setting_is_changed_by_being_shown(self, lab, compression, field, value):
        lab.compression = compression
        lab.compression_options = {field: value}
        assert lab.compression_options == {field: value}
        assert typed(lab.screen.options["compression"].controls[field]) in (value, str(value))


class TestLink:
    @pytest.mark.parametrize(
        ("latency", "seconds"), [("0", 0), ("0.0", 0), ("0 ms", 0), ("1 ms", 1e-3), ("250us", 250e-6)]
    )
    def test_any_time_is_a_latency(self, lab, latency, seconds):
        lab.bandwidth, lab.latency = "100 Mbit/s", latency
        assert lab.job().link.latency_s == pytest.approx(seconds)

    @pytest.mark.parametrize("bandwidth", [AS_IT_IS, "100 Mbit/s"])
    @pytest.mark.parametrize(
        ("latency", "words"),
        [("5", "latency='5' has no unit"), ("x", "latency='x' is not a quantity"), ("", "latency='' is not")],
    )
    def test_what_is_no_time_is_refused_with_a_bandwidth_or_without(self, lab, bandwidth, latency, words):
        lab.bandwidth, lab.latency = bandwidth, latency
        with pytest.raises(SpecError, match=words):
            lab.job()

    @pytest.mark.parametrize("latency", ["0", "0 ms"])
    def test_no_latency_is_fine_on_the_machines_own_link(self, lab, latency):
        lab.latency = latency
        assert lab.job().link is None

    def test_a_latency_without_a_bandwidth_is_said_beside_the_button_and_stays_in_sight(self, make_lab):
        lab = make_lab(latency="5 ms")
        assert lab.screen.start.disabled
        assert "needs a bandwidth, because" in lab.screen.plan.value
        box = next(
            box for box in boxes(lab) if lab.screen.controls["latency"] in getattr(box, "children", ())
        )
        assert box.layout.display is None
        lab.latency = "0"
        assert not lab.screen.start.disabled
        assert box.layout.display == "none"

    def test_a_latency_goes_with_its_bandwidth_and_comes_back_with_it(self, lab):
        lab.bandwidth, lab.latency = "100 Mbit/s", "5 ms"
        lab.bandwidth = AS_IT_IS
        assert (lab.latency, lab.job().link) == ("0", None)
        lab.bandwidth = "1 Gbit/s"
        assert lab.job().link.label == "1 Gbit/s, 5 ms"

    def test_a_link_given_at_once_is_as_it_was_given(self):
        assert JobChoices(bandwidth="1 Gbit/s", latency="0").job().link.label == "1 Gbit/s, 0 s"
        assert JobChoices(bandwidth="1 Gbit/s", latency="2 ms").job().link.label == "1 Gbit/s, 2 ms"


def test_the_latency_stands_below_its_link_and_the_panels_figure_has_a_name(lab):
    order = [control.description for control in boxes(lab) if getattr(control, "description", "")]
    assert [name for name in order if name in {"Link", "Compression", "Latency"}] == [
        "Link",
        "Latency",
        "Compression",
    ]
    assert lab.screen.panels.compression.figure.label == "Compression"


class TestPayoff:
    """After a compressed run: whether it paid off, its price, and the curve."""

    @pytest.fixture(autouse=True)
    def packing_takes_a_millisecond(self, monkeypatch):
        monkeypatch.setattr(
            codecs, "packing_seconds", lambda jobs, _buckets: [0.001 * job.compression.is_on for job in jobs]
        )

    @staticmethod
    def ran(compression="int8", step_s=0.2, loss=2.0, last_step=60, state="completed", **changes):
        link = Link(bandwidth="10 Mbit/s", latency="1 ms")
        fields = {
            "model": "mlp",
            "data": "digits",
            "strategy": "ring",
            "world_size": 2,
            "link": link,
        } | changes
        return SimpleNamespace(
            id=f"run-{compression}", job=Job(compression=compression, **fields), cluster=None, state=state,
            stored_summary=SimpleNamespace(step_time_s=step_s, loss_mean=loss, last_step=last_step),
        )  # fmt: skip

    def panel(self, run, runs=(), **state):
        panel = PayoffPanel()
        panel.begin()
        panel.want(run, runs, **state)
        panel.wait(60)
        return panel

    def test_with_an_uncompressed_run_beside_it_both_are_measured(self):
        run, plain = self.ran(loss=1.902), self.ran("none", 0.3, 1.9)
        panel = self.panel(run, [run, plain])
        assert (
            "<b>Compression paid off:</b> a step took 200 ms with int8, 50% faster than the 300 ms without "
            "compression (both measured; predicted: " in panel.said.value
        )
        assert panel.said.value.endswith(
            "Its mean loss ended at 1.902 instead of 1.9: 0.1% higher; in one run each, differences up to 5% may be "
            "noise.</div>"
        )
        assert "measured" in [trace.get("name") for trace in panel.figure.traces]
        assert panel.found.limit in panel.words.value
        assert "other predictions of the job estimate it" in panel.words.value
        assert panel.figure.layout.display is None

    def test_the_loss_of_a_run_that_was_stopped_early_is_no_price(self):
        run, plain = self.ran(), self.ran("none", 0.3, 4.9, last_step=4)
        said = self.panel(run, [run, plain]).said.value
        assert said.endswith("3 seeds): loss unchanged with AdamW (up to 0.5% higher is tolerated).</div>")

    @pytest.mark.parametrize("change", [{"lr_schedule": "cosine"}, {"steps": 70}, {"state": "stopped"}])
    def test_the_loss_of_a_run_that_differs_in_more_than_compression_is_no_price(self, change):
        run, plain = self.ran(loss=2.3), self.ran("none", 0.3, 1.9, **change)
        said = self.panel(run, [run, plain]).said.value
        assert "instead of 1.9" not in said
        assert said.endswith("3 seeds): loss unchanged with AdamW (up to 0.5% higher is tolerated).</div>")
        slower = self.ran("none", 0.4, 2.3, link=Link(bandwidth="1 Mbit/s", latency="1 ms"), name="again")
        said = self.panel(run, [run, plain, slower]).said.value
        assert "Its mean loss is unchanged, 2.3." in said, "the link does not change the loss"

    @pytest.mark.parametrize("beside", [True, False])
    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"loss": 88.0, "last_step": 7, "state": "failed"}, "but the run did not complete:"),
            ({"loss": None, "last_step": 7, "state": "failed"}, "but the run did not complete:"),
            ({"loss": math.nan}, "but the run diverged:"),
        ],
    )
    def test_a_run_that_failed_or_diverged_does_not_pay_off(self, fields, words, beside):
        run, plain = self.ran(**fields), self.ran("none", 0.3, 1.9)
        said = self.panel(run, [run, plain] if beside else [run]).said.value
        made = "<b>Compression made" if beside else "<b>By prediction, compression makes"
        assert f"{made} steps faster, {words}</b> a step t" in said
        assert "mean loss" not in said

    @pytest.mark.parametrize(
        ("method", "loss", "plain_loss", "paid", "change"),
        [
            ("int8", 2.0, 1.9, False, "5.3% higher"),
            ("int4", 1.99, 1.9, True, "4.7% higher"),
            ("topk", 1.7, 1.9, True, "10.5% lower"),
            ("topk", 2.0, 1.9, False, "5.3% higher"),
            ("int8", -1.0, -2.0, False, "50.0% higher"),
            ("int8", -2.2, -2.0, True, "10.0% lower"),
            (Compression("topk", ratio=0.3), 1.9, 2.0, True, "5.0% lower"),
        ],
    )
    def test_two_measured_losses_decide_and_shipped_results_are_named_as_those_of_other_runs(
        self, method, loss, plain_loss, paid, change
    ):
        run, plain = self.ran(method, loss=loss), self.ran("none", 0.3, plain_loss)
        said = self.panel(run, [run, plain]).said.value
        told = "paid off" if paid else "made steps faster, but its loss is too high"
        assert f"<b>Compression {told}:</b> a step took 200 ms with {run.job.compression.label}, " in said
        assert (
            f" instead of {plain_loss:g}: {change}; in one run each, differences up to 5% may be noise."
            in said
        )
        other = (
            "In other runs (gpt-nano on python-source, 2 ranks, 200 steps, 3 seeds): loss 19% higher than "
        )
        assert (other in said) == (method == "topk")
        assert ("In other runs" in said) == (method == "topk")

    def test_without_a_loss_beside_it_a_method_that_was_harmful_elsewhere_does_not_pay_off(self):
        run, plain = self.ran("topk"), self.ran("none", 0.3, None)
        said = self.panel(run, [run, plain]).said.value
        assert "Compression made steps faster, but its loss was too high in other runs:</b>" in said
        assert (
            "3 seeds): loss 19% higher than uncompressed with AdamW (up to 3% higher is tolerated)." in said
        )

    def test_a_slower_step_is_said_to_be_slower(self):
        run, plain = self.ran(step_s=0.34), self.ran("none", 0.3)
        said = self.panel(run, [run, plain]).said.value
        assert (
            "Compression did not pay off:</b> a step took 340 ms with int8, 13% slower than the 300 ms without"
            in said
        )

    @pytest.mark.parametrize("plain_s", [0.0999, 0.1, 0.1001, 0.1029])
    def test_noise_is_no_gain_and_the_same_loss_is_unchanged(self, plain_s):
        run, plain = self.ran(step_s=0.1, loss=1.0), self.ran("none", plain_s, 1.0)
        said = self.panel(run, [run, plain]).said.value
        assert "Compression made no difference:</b> a step took 100 ms with int8, " in said
        assert "(both measured; differences below 3% do not count; predicted: " in said
        assert said.endswith("Its mean loss is unchanged, 1.</div>")

    @pytest.mark.parametrize("measured_s", [1e-3, 10.0])
    def test_without_one_predicted_steps_are_compared_whatever_a_busy_machine_measured(self, measured_s):
        panel = self.panel(self.ran("int4", measured_s))
        found, said = panel.found, panel.said.value
        step = found.step_with(Compression("int4"))
        assert found.link.bandwidth < found.pays_below(step)
        assert (
            f"<b>By prediction, compression pays off:</b> a step takes {duration_text(step.step_s)} with int4 instead "
            f"of {duration_text(found.plain.step_s)}, {faster_text(found.speedup(step))}. The step measured with int4, "
            f"{duration_text(measured_s)}, can be compared once the job has also run without compression."
            in said
        )
        assert (
            "3 seeds): loss 2.9% lower than uncompressed with AdamW (up to 1% higher is tolerated)." in said
        )

    def test_the_predicted_verdict_has_the_margin_and_the_tolerance_of_the_curve(self):
        said = self.panel(self.ran("topk")).said.value
        assert (
            "By prediction, compression makes steps faster, but its loss was too high in other runs:</b>"
            in said
        )
        assert "loss 19% higher than uncompressed with AdamW" in said
        said = self.panel(self.ran(Compression("topk", ratio=0.3))).said.value
        assert "<b>By prediction, compression makes steps faster:</b>" in said
        assert "The effect on the loss is not known: loss not measured with AdamW" in said
        slow = self.ran("bf16", link=Link(bandwidth="10 Gbit/s", latency="1 ms"))
        said = self.panel(slow).said.value
        assert re.search("By prediction, (too close to tell|compression does not pay off):</b>", said)

    def test_what_cannot_be_predicted_is_said_and_draws_nothing(self):
        panel = self.panel(self.ran(strategy="zero-3"))
        assert (
            "Whether compression paid off is not known:</b> the effect of compression cannot be"
            in panel.said.value
        )
        assert panel.figure.layout.display == "none"

    def test_it_waits_until_the_lab_is_seen_and_no_run_is_in_progress(self):
        run, panel = self.ran(), PayoffPanel()
        panel.want(run)
        assert panel._thread is None
        panel.begin()
        panel.want(run, is_idle=False)
        assert panel._thread is None
        panel.want(run)
        panel.wait(60)
        shown = panel.said.value
        panel.want(run, is_idle=False)
        assert panel.said.value == shown
        panel.want(self.ran("none"))
        assert (panel.said.value, panel.figure.layout.display) == ("", "none")
        assert "once a selected run with compression has ended" in panel.words.value

    def test_another_focus_while_the_curve_is_drawn_shows_nothing_of_the_last_run(self, monkeypatch):
        panel, drawn = PayoffPanel(), figures.compression_speedup

        def draw(found):
            panel.want(None)
            return drawn(found)

        monkeypatch.setattr(_payoff, "compression_speedup", draw)
        panel.begin()
        panel.want(self.ran())
        panel.wait(60)
        assert (panel.said.value, panel.figure.layout.display, panel.found) == ("", "none", None)
        assert not panel.figure.traces
        assert "once a selected run with compression has ended" in panel.words.value

    def test_the_lab_asks_when_a_run_has_ended_and_none_is_in_progress(self, make_lab, monkeypatch):
        lab, asked = make_lab(), []
        monkeypatch.setattr(
            lab.screen.payoff, "want", lambda run, runs, is_idle: asked.append((run and run.id, is_idle))
        )
        run = lab.start()
        run.write(step_events("ring", 2, 1))
        lab.refresh()
        assert asked[-1] == (None, False)
        run.stop()
        lab.refresh()
        assert asked[-1] == (run.id, True)
        assert lab.screen.payoff.said in lab.screen.children[-1].children[1].children
