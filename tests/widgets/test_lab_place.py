"""The Training Lab's choice of where a job runs, and the control that resizes an elastic run."""

from __future__ import annotations

import pytest

import shardscope as ss
from shardscope_widgets.fault_lab._resizer import Resizer
from shardscope_widgets.job_form.place import EMULATED, HERE, PlaceChoices
from widgets.fake_runs import FakeRun


@pytest.fixture
def emulated(lab):
    """A lab that has chosen four emulated nodes."""
    lab.world_size = 4
    lab.place.choices.place = EMULATED
    return lab


class TestPlace:
    def test_this_machine_is_the_first_choice_and_has_no_further_controls(self, lab):
        shown = [name for name, box in lab.place._fields.items() if box.layout.display is None]
        assert shown == ["place"]
        assert lab.screen.topics.titles[0] == "Where it runs"
        lab.start()
        assert lab.run.cluster is None

    def test_a_run_starts_on_the_cluster_and_the_texts_name_it(self, emulated):
        cluster = ss.Cluster.emulated(4, "1 Gbit/s")
        assert emulated.screen.topics.titles[0] == f"Where it runs: {cluster.name}"
        assert f"Runs on {cluster.name}." in emulated.screen.plan.value
        emulated.start()
        assert emulated.run.cluster == cluster
        assert f"on {cluster.name}" in emulated.status

    def test_nodes_and_ranks_follow_each_other(self, emulated):
        choices = emulated.place.choices
        choices.nodes = 3
        assert emulated.world_size == 3
        choices.per_node = 2
        assert emulated.world_size == 6
        emulated.world_size = 8
        assert (choices.nodes, choices.per_node) == (4, 2)
        emulated.world_size = 5
        assert (choices.nodes, choices.per_node) == (5, 1)
        choices.place = HERE
        emulated.world_size = 2
        assert choices.nodes == 5

    @pytest.mark.parametrize(
        ("place", "job", "told"),
        [
            ({"racks": 3}, {}, "racks=3 does not divide nodes=4"),
            ({"nodes": 100, "per_node": 64}, {}, "100 nodes with 64 ranks each are 6,400 ranks, but"),
            ({"node_bandwidth": "0 Mbit/s"}, {}, "Node link=&#x27;0 Mbit/s&#x27; is not valid"),
            ({"node_latency": "5 parsecs"}, {}, "Node latency=&#x27;5 parsecs&#x27;"),
            ({}, {"bandwidth": "100 Mbit/s"}, "cannot be combined with an emulated cluster"),
            ({}, {"elastic": "2:4"}, "has a fixed number of devices"),
            ({}, {"strategy": "single"}, "world_size=1 does not match the 4 ranks"),
        ],
    )
    def test_what_cannot_start_is_said_instead(self, emulated, place, job, told):
        for name, value in place.items():
            setattr(emulated.place.choices, name, value)
        for name, value in job.items():
            setattr(emulated, name, value)
        assert told in emulated.screen.plan.value
        assert emulated.screen.start.disabled

    def test_the_forecast_is_that_of_the_cluster(self, emulated):
        emulated.model, emulated.data, emulated.strategy = "mlp", "digits", "ring"
        emulated.place.choices.node_bandwidth = "10 Mbit/s"
        forecast = emulated.screen.forecast
        forecast.begin()
        forecast.wait(60)
        assert forecast.found.prediction.emulated == emulated.place.choices.cluster()

    def test_a_machine_that_cannot_emulate_says_why(self, emulated, monkeypatch):
        why = "clusters cannot be emulated here: network namespaces need Linux"
        monkeypatch.setattr("shardscope.runtime.emulated.why_not_emulated", lambda: why)
        emulated.place.begin()
        emulated.place.wait(10)
        assert emulated.place.choices.place == HERE
        assert emulated.place.controls["place"].disabled
        assert "Clusters cannot be emulated here" in emulated.place._fields["place"].children[1].value

    def test_a_preset_stays_marked_and_runs_on_this_machine_if_it_cannot_emulate(self, emulated):
        button = emulated.screen.presets.buttons[0]
        button.click()
        assert emulated.place.choices.place == HERE
        assert button.button_style == "info"

    def test_a_form_filled_from_a_run_describes_it(self, emulated):
        """A run on an emulated cluster records its device, which no control sets."""
        run = emulated.start()
        assert run.job.device == "cpu"
        emulated.fill(run.job, run.cluster)
        assert emulated.problem == ""
        assert emulated._describes(run.job, run.cluster)

    def test_a_form_filled_from_a_run_has_its_cluster_also_where_no_controls_describe_it(self, emulated):
        cluster = ss.Cluster.emulated(
            4, "250 Mbit/s", "1 ms", flops="5 GFLOP/s", racks=2, rack_bandwidth="50 Mbit/s"
        )
        job = emulated.job()
        emulated.fill(job, cluster)
        assert emulated.place.choices.cluster() == cluster
        assert emulated.problem == ""
        uneven = ss.Cluster.emulated(4, slowdown={1: 2.0})
        emulated.fill(job, uneven)
        assert (emulated.place.choices.cluster(), emulated.problem) == (uneven, "")
        control = emulated.place.controls["place"]
        assert control.value == uneven.name
        assert emulated.screen.topics.titles[0] == f"Where it runs: {uneven.name}"
        assert emulated.start().cluster == uneven
        control.value = HERE
        assert emulated.place.choices.cluster() is None
        control.value = uneven.name
        assert emulated.place.choices.cluster() == uneven

    def test_every_choice_describes_a_cluster(self):
        for name, values in (("node_bandwidth", "5 Mbit/s"), ("processor", "3 GFLOP/s"), ("per_node", 2)):
            choices = PlaceChoices(place=EMULATED)
            setattr(choices, name, values)
            assert choices.cluster() != PlaceChoices(place=EMULATED).cluster()


class TestResizer:
    def test_it_offers_the_numbers_of_ranks_that_the_job_can_have(self):
        job = ss.Job(model="mlp", data="digits", strategy="gossip", world_size=2, batch=64, elastic="2:6")
        run, asked = FakeRun("a", job, [], state="running"), []
        run.resize = asked.append
        resizer = Resizer()
        resizer.show(run, 2)
        assert resizer.ranks.options == (2, 4)
        assert resizer.button.disabled
        resizer.ranks.value = 4
        assert "4 ranks load this state and continue" in resizer.sentence.value
        resizer.press()
        assert asked == [4]
        assert "Requested: 4 ranks" in resizer.sentence.value
        resizer.show(run, 4)
        assert "The run already has 4 ranks" in resizer.sentence.value

    @pytest.mark.parametrize(
        ("elastic", "state", "told"),
        [
            (
                None,
                "running",
                "The number of ranks of this run is fixed (2). To be able to resize a run, set Elastic",
            ),
            ("2:4", "completed", "This run has ended"),
        ],
    )
    def test_it_is_disabled_with_a_reason(self, elastic, state, told):
        job = ss.Job(model="mlp", data="digits", world_size=2, batch=64, elastic=elastic)
        resizer = Resizer()
        assert resizer.box.layout.display == "none"
        resizer.show(FakeRun("a", job, [], state=state), 2)
        assert resizer.box.layout.display is None
        assert resizer.ranks.disabled
        assert resizer.button.disabled
        assert told in resizer.sentence.value

    def test_the_form_starts_elastic_jobs(self, lab):
        lab.global_batch, lab.elastic = 48, "2:4"
        assert lab.job().elastic == ss.Elastic(least=2, most=4)
        assert "Checkpoints and recovery: elastic 2:4" in lab.screen.topics.titles
        lab.elastic = "four"
        assert "is not a range of ranks" in lab.screen.plan.value
