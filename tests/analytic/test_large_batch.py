"""Scaling rules against the LAMB paper's tables, the noise scale against gradients whose noise is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardscope.analytic import large_batch as lb
from shardscope.errors import SpecError

BATCHES = np.array([512, 1024, 2048, 4096, 8192, 16384, 32768])
# You et al. 2020 (arXiv 1904.00962), untuned LAMB: BERT-Large's first phase, and ResNet-50 in 90 epochs
BERT_LR = [5 / (2**k * 1e3) for k in (3, 2.5, 2, 1.5, 1, 0.5, 0)]
BERT_WARMUP = [1 / 320, 1 / 160, 1 / 80, 1 / 40, 1 / 20, 1 / 10, 1 / 5]
RESNET_LR = [0.005, 0.00707, 0.01, 0.01414, 0.02, 0.02828, 0.04]
RESNET_WARMUP_EPOCHS = [0.3125, 0.625, 1.25, 2.5, 5, 10, 20]
SIZES = st.floats(1, 1e6)


class TestScalingRules:
    def test_the_lamb_papers_line_for_bert(self):
        assert lb.LAMB_BERT.lr_at(BATCHES) == pytest.approx(BERT_LR)
        assert lb.LAMB_BERT.warmup_ratio_at(BATCHES) == pytest.approx(BERT_WARMUP)

    def test_the_lamb_papers_line_for_resnet(self):
        assert lb.LAMB_RESNET50.lr_at(BATCHES) == pytest.approx(RESNET_LR, rel=1e-3)
        assert 90 * lb.LAMB_RESNET50.warmup_ratio_at(BATCHES) == pytest.approx(RESNET_WARMUP_EPOCHS)

    def test_goyals_rule_is_a_tenth_for_256_images(self):
        rates = lb.scaled_lr([[256], [8192]], lr=[0.1, 0.2], base_batch=256, rule="linear")
        assert rates == pytest.approx(np.array([[0.1, 0.2], [3.2, 6.4]]))

    @given(batch=SIZES, noise=SIZES)
    def test_a_noisy_rate_is_linear_far_below_the_noise_scale_and_flat_far_above(self, batch, noise):
        assert lb.lr_for_noise(batch, max_lr=2.0, noise_scale=batch) == pytest.approx(1.0)
        assert lb.lr_for_noise(batch, max_lr=2.0, noise_scale=1e9 * batch) == pytest.approx(2e-9)
        assert lb.lr_for_noise(1e9 * noise, max_lr=2.0, noise_scale=noise) == pytest.approx(2.0)

    def test_refusals_say_the_way_out(self):
        with pytest.raises(SpecError, match="rule='cubic'"):
            lb.scaled_lr(1, lr=1, base_batch=1, rule="cubic")
        with pytest.raises(SpecError, match=r"batch=\[64, 0\] must be above 0"):
            lb.scaled_lr([64, 0], lr=1, base_batch=1, rule="sqrt")
        with pytest.raises(SpecError, match="warm-up takes all steps at a batch of 163840"):
            lb.LAMB_BERT.warmup_ratio_at(2**18)


class TestStepsAndExamples:
    @given(batch=SIZES, steps=st.floats(10, 1e6), critical=SIZES)
    def test_every_batch_lies_on_the_hyperbola(self, batch, steps, critical):
        examples = steps * critical
        s = lb.steps_to_target(batch, min_steps=steps, critical_batch=critical)
        e = lb.examples_to_target(batch, min_examples=examples, critical_batch=critical)
        assert e == pytest.approx(batch * s)
        # far above the critical batch steps are almost their least, and the difference to it loses digits
        assert (s / steps - 1) * (e / examples - 1) == pytest.approx(1, rel=1e-6)
        if batch < 1e3 * critical:
            assert lb.examples_at(s, min_steps=steps, min_examples=examples) == pytest.approx(e, rel=1e-6)

    def test_at_the_critical_batch_both_cost_twice_their_least(self):
        assert lb.steps_to_target(300, min_steps=10, critical_batch=300) == 20
        assert lb.examples_to_target(300, min_examples=3000, critical_batch=300) == 6000

    def test_no_batch_takes_the_least_steps(self):
        with pytest.raises(SpecError, match="steps=10 must be above min_steps=10"):
            lb.examples_at(10, min_steps=10, min_examples=1)


def norms(rng, steps, *, small, large, square=2.0, trace=300.0, size=80):
    """Squared norms of a small and of a large batch's gradient, drawn with a known |G|^2 and tr(Sigma)."""
    mean = np.full(size, (square / size) ** 0.5)
    parts = mean + rng.normal(size=(steps, large // small, size)) * (trace / size / small) ** 0.5
    return (parts**2).sum(-1).mean(-1), (parts.mean(1) ** 2).sum(-1)


class TestNoiseScale:
    def test_two_exact_norms_give_both_back(self):
        square, trace, small, large = 3.0, 500.0, np.array([1, 8]), np.array([64, 32])
        at = {"small_batch": small, "large_batch": large}
        norm = {"small_square": square + trace / small, "large_square": square + trace / large}
        assert lb.gradient_square(**norm, **at) == pytest.approx(square)
        assert lb.gradient_trace(**norm, **at) == pytest.approx(trace)

    @pytest.mark.parametrize(("small", "large"), [(32, 64), (8, 64)])
    def test_the_interval_covers_what_is_true_19_times_out_of_20(self, small, large):
        rng = np.random.default_rng(small)
        runs = [norms(rng, 200, small=small, large=large) for _ in range(200)]
        s, b = (np.array(values) for values in zip(*runs, strict=True))
        found = lb.estimate(s, b, small_batch=small, large_batch=large)
        covered = (found.low <= 150) & (found.high >= 150)
        assert 0.90 <= covered.mean() <= 0.99
        assert np.median(found.critical_batch) == pytest.approx(150, rel=0.05)
        moving = lb.track(s, b, small_batch=small, large_batch=large, smoothing=0.98)
        covered = (moving.low[:, -1] <= 150) & (moving.high[:, -1] >= 150)
        assert 0.90 <= covered.mean() <= 0.99
        assert moving.critical_batch.shape == (200, 200)

    def test_moving_averages_are_the_weighted_means_of_the_steps_so_far(self):
        s, b = norms(np.random.default_rng(0), 30, small=8, large=64)
        at = {"small_batch": 8, "large_batch": 64}
        moving = lb.track(s, b, smoothing=0.9, **at)
        weights = 0.9 ** np.arange(30)[::-1]
        square = np.average(lb.gradient_square(s, b, **at), weights=weights)
        assert moving.gradient_square[-1] == pytest.approx(square)
        assert moving.critical_batch[-1] == pytest.approx(
            np.average(lb.gradient_trace(s, b, **at), weights=weights) / square
        )

    def test_moving_intervals_without_forgetting_are_those_of_plain_means(self):
        s, b = norms(np.random.default_rng(1), 40, small=8, large=64)
        plain = lb.estimate(s, b, small_batch=8, large_batch=64, blocks=40)
        moving = lb.track(s, b, small_batch=8, large_batch=64, smoothing=1 - 1e-12)
        assert moving.low[-1] == pytest.approx(plain.low)
        assert moving.high[-1] == pytest.approx(plain.high)

    def test_a_gradient_lost_in_noise_has_no_upper_end(self):
        s, b = norms(np.random.default_rng(2), 50, small=32, large=64, square=1e-6)
        found = lb.estimate(s, b, small_batch=32, large_batch=64)
        assert found.high == np.inf
        assert found.low > 100

    def test_one_step_tells_a_ratio_and_no_interval(self):
        found = lb.track([7.0], [2.0], small_batch=16, large_batch=64)
        assert found.critical_batch == pytest.approx([(5 / (1 / 16 - 1 / 64)) / ((128 - 112) / 48)])
        assert (found.low[0], found.high[0]) == (0, np.inf)
        assert lb.track([], [], small_batch=16, large_batch=64).critical_batch.size == 0

    def test_refusals_say_the_way_out(self):
        with pytest.raises(SpecError, match="small_batch=64 must be below large_batch=64"):
            lb.gradient_square(1, 1, small_batch=64, large_batch=64)
        with pytest.raises(SpecError, match="blocks=20 is out of range for 3 steps; use 2 to 3"):
            lb.estimate([1, 2, 3], [1, 2, 3], small_batch=1, large_batch=2)
        with pytest.raises(SpecError, match="smoothing=1 must be"):
            lb.track([1], [1], small_batch=1, large_batch=2, smoothing=1)


class TestRangeTest:
    RATES = np.geomspace(1e-5, 1e2, 141)

    def curve(self):
        """Falls fastest at 1e-2, is lowest at 1e-1, then explodes."""
        x = np.log10(self.RATES)
        falls = 2 - np.tanh((x + 2) * 1.5)
        return np.where(x < -1, falls, falls + 3 * (x + 1) ** 2)

    def test_rates_are_read_off_where_they_are(self):
        found = lb.suggest_rates(self.RATES, self.curve())
        assert found.steepest == pytest.approx(1e-2, rel=0.15)
        assert found.lowest == pytest.approx(0.12, rel=0.3)
        assert found.tenth_of_lowest == found.lowest / 10

    def test_smoothing_removes_noise_and_does_not_lag(self):
        noisy = self.curve() + np.random.default_rng(3).normal(scale=0.05, size=141)
        found = lb.suggest_rates(self.RATES, lb.smoothed_loss(noisy))
        assert found.steepest == pytest.approx(1e-2, rel=0.6)
        assert lb.smoothed_loss(np.full(20, 3.0)) == pytest.approx(np.full(20, 3.0))
        line = lb.smoothed_loss(np.arange(50.0))
        assert line[10:40] == pytest.approx(np.arange(10.0, 40.0))

    def test_a_loss_that_never_fell_suggests_nothing(self):
        with pytest.raises(SpecError, match="never fell; use a lower `low`"):
            lb.suggest_rates([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6])
        with pytest.raises(SpecError, match="3 finite losses, but needs 5"):
            lb.suggest_rates([1, 2, 3], [3, 2, 1])
