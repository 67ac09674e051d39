"""The loop: intervals, chunks, determinism, stopping and divergence, on a small run that is compiled once."""

import dataclasses

import numpy as np
import pytest

from pqn_eqx import trainer as trainer_module
from pqn_eqx.callbacks import Callback
from pqn_eqx.config import TrainConfig
from pqn_eqx.episodes import EvaluationConfig
from pqn_eqx.errors import DivergenceError
from pqn_eqx.networks.encoders import MLPConfig
from pqn_eqx.networks.q_network import QNetworkConfig
from pqn_eqx.pqn import PQNConfig

CONFIG = TrainConfig(
    total_timesteps=320,
    algorithm=PQNConfig(num_envs=4, num_steps=8, num_minibatches=2, num_epochs=1),
    network=QNetworkConfig(MLPConfig(hidden_size=16)),
    eval=EvaluationConfig(num_envs=4, interval=128, max_steps=20),
    log_interval=64,
)
"""Ten updates of 32 steps, logged every second and evaluated every fourth."""


class Recorder(Callback):
    def __init__(self):
        self.events, self.intervals, self.evaluations, self.progress = [], [], [], []

    def on_start(self, plan):
        self.events.append("start")

    def on_compiled(self, seconds):
        self.events.append("compiled")

    def on_progress(self, interval):
        self.progress.append(interval)

    def on_interval(self, interval):
        self.events.append("interval")
        self.intervals.append(interval)

    def on_evaluation(self, evaluated):
        self.events.append("evaluation")
        self.evaluations.append(evaluated)

    def on_end(self, outcome):
        self.events.append("end")
        self.outcome = outcome


class FixedPace:
    """Chunks of a given size, whatever the clock says."""

    def __init__(self, turns):
        self.turns = turns

    def observe(self, turns, seconds):
        pass


def run(config=CONFIG, pace=100, should_stop=lambda recorder: False):
    recorder = Recorder()
    trainer = config.build([recorder], lambda: should_stop(recorder))
    trainer.update_pace = FixedPace(pace)
    outcome = trainer.run()
    assert outcome == recorder.outcome
    return recorder


@pytest.fixture(scope="module")
def whole():
    return run()


def assert_same_intervals(a, b):
    assert [i.update for i in a] == [i.update for i in b]
    for x, y in zip(a, b, strict=True):
        for name, values in x.metrics.items():
            np.testing.assert_array_equal(values, y.metrics[name], err_msg=name)


def test_events_fall_where_the_plan_says(whole):
    assert whole.events == [
        *("start", "compiled"),
        *("interval", "interval", "evaluation", "interval", "interval", "evaluation", "interval", "evaluation"),
        "end",
    ]
    assert [i.update for i in whole.intervals] == [2, 4, 6, 8, 10]
    assert [i.env_steps for i in whole.intervals] == [64, 128, 192, 256, 320]
    assert [e.env_steps for e in whole.evaluations] == [128, 256, 320]
    assert whole.outcome.status == "finished"
    assert whole.outcome.env_steps == 320


def test_the_same_seed_gives_the_same_numbers(whole):
    again = run()
    assert_same_intervals(whole.intervals, again.intervals)
    for a, b in zip(whole.evaluations, again.evaluations, strict=True):
        np.testing.assert_array_equal(a.evaluation.episode_return, b.evaluation.episode_return)


def test_another_seed_gives_others(whole):
    other = run(dataclasses.replace(CONFIG, seed=1))
    assert whole.intervals[0].metrics["loss"] != other.intervals[0].metrics["loss"]


def test_how_intervals_are_cut_into_chunks_changes_nothing(whole):
    """Red if metrics were averaged per chunk, or started anew inside an interval."""
    cut = run(pace=1)
    assert [p.update for p in cut.progress] == list(range(1, 11))
    assert_same_intervals(whole.intervals, cut.intervals)


def test_a_stop_keeps_what_was_trained(whole):
    """Red if the last, shorter interval were lost, or counted as finished."""
    stopped = run(pace=1, should_stop=lambda recorder: len(recorder.progress) >= 6)
    assert stopped.outcome.status == "interrupted"
    # One chunk was under way when the sixth was read.
    assert stopped.outcome.update == 7
    assert [i.update for i in stopped.intervals] == [2, 4, 6, 7]
    assert_same_intervals(whole.intervals[:3], stopped.intervals[:3])
    assert stopped.events[-1] == "end"


def test_divergence_is_told_with_its_update():
    """A step so large that the first update leaves parameters that are not finite: later losses cannot be finite."""
    algorithm = dataclasses.replace(CONFIG.algorithm, learning_rate=1e30)
    recorder = Recorder()
    trainer = dataclasses.replace(CONFIG, algorithm=algorithm).build([recorder])
    trainer.update_pace = FixedPace(1)
    with pytest.raises(DivergenceError, match=r"First not finite at update (\d+) \(by member\) of 10") as raised:
        trainer.run()
    first = int(str(raised.value).split("at update ")[1].split()[0])
    assert recorder.outcome.status == "diverged"
    assert recorder.events[-1] == "end"
    # Every loss before that update was finite, and at most the chunk under way was trained beyond it.
    losses = {p.update: p.metrics["loss"] for p in recorder.progress}
    assert all(np.isfinite(loss) == (update < first) for update, loss in losses.items())
    assert recorder.outcome.update <= first + 1


def test_pace_grows_by_steps_and_never_stops():
    pace = trainer_module.Pace()
    pace.observe(1, 1e-6)
    assert pace.turns == 4
    pace.observe(4, 4.0)
    assert pace.turns == 2
    pace.observe(1, 100.0)
    assert pace.turns == 1
