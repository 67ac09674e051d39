"""Figures from run directories."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from matplotlib import pyplot as plt
from PIL import Image

from pqn_eqx import plot
from pqn_eqx.plot import curves, learning_curve, mean_and_interval

NAN = float("nan")


def test_curves_put_every_row_into_its_place():
    """Red where members or steps are mixed up, or a missing value becomes zero."""
    rows = [
        {"member": 1, "env_steps": 20, "loss": 5.0},
        {"member": 0, "env_steps": 10, "loss": 1.0},
        {"member": 1, "env_steps": 10, "loss": None},
        {"member": 0, "env_steps": 30},
    ]
    steps, values = curves(rows, "loss")
    np.testing.assert_array_equal(steps, [10, 20, 30])
    np.testing.assert_array_equal(values, [[1.0, NAN, NAN], [NAN, 5.0, NAN]])


def test_curves_keep_a_zero_and_a_field_of_its_own():
    """Red where 0 counts as missing, or another field is read."""
    _, values = curves([{"member": 0, "env_steps": 10, "loss": 0.0, "q_mean": 3.0}], "loss")
    np.testing.assert_array_equal(values, [[0.0]])


def test_curves_of_no_rows_are_empty():
    """Red where a run that logged nothing cannot be drawn."""
    steps, values = curves([], "loss")
    assert steps.shape == (0,)
    assert values.shape == (0, 0)


def test_interval_of_a_single_member_is_its_value():
    """Red where one run is given an uncertainty that it cannot have."""
    values = np.asarray([[3.0, -1.0, 7.5]])
    for found in mean_and_interval(values):
        np.testing.assert_array_equal(found, values[0])


def test_interval_of_equal_members_has_no_width():
    """Red where the interval is anything but that of the mean over members."""
    for found in mean_and_interval(np.full((5, 2), 4.0)):
        np.testing.assert_allclose(found, [4.0, 4.0], rtol=1e-12)


def test_interval_is_the_percentile_bootstrap_of_the_mean():
    """Red where it has another level (90 %: off by 0.3 standard errors), draws without replacement or per value."""
    values = np.random.default_rng(3).exponential(size=(12, 3))
    mean, low, high = mean_and_interval(values, resamples=20_000)
    np.testing.assert_allclose(mean, values.mean(axis=0), rtol=1e-12)
    reference = scipy.stats.bootstrap(
        (values,),
        np.mean,
        axis=0,
        confidence_level=0.95,
        n_resamples=20_000,
        method="percentile",
        rng=np.random.default_rng(7),
    ).confidence_interval
    tolerance = 0.1 * values.std(axis=0) / np.sqrt(12)
    assert (np.abs(low - reference.low) < tolerance).all()
    assert (np.abs(high - reference.high) < tolerance).all()


def test_interval_is_the_same_every_time():
    """Red where the same run directory gives another figure on every drawing."""
    values = np.random.default_rng(0).normal(size=(4, 3))
    for first, second in zip(mean_and_interval(values), mean_and_interval(values), strict=True):
        np.testing.assert_array_equal(first, second)


def test_members_without_a_value_are_left_out():
    """Red where a missing value spreads to the mean of the others, or to the interval."""
    mean, low, high = mean_and_interval(np.asarray([[1.0, NAN], [3.0, 2.0], [NAN, NAN]]))
    np.testing.assert_allclose(mean, [2.0, 2.0])
    np.testing.assert_allclose(low, [1.0, 2.0])
    np.testing.assert_allclose(high, [3.0, 2.0])


def test_a_time_without_any_value_has_none():
    """Red where a column that no member has warns, or gets a number. Warnings are errors in these tests."""
    mean, low, high = mean_and_interval(np.asarray([[1.0, NAN], [1.0, NAN]]))
    for found in (mean, low, high):
        np.testing.assert_array_equal(found, [1.0, NAN])


def write_run(path, training, evaluations=()):
    """A run directory from lists of (member, env_steps, episode_return)."""
    for file, rows in (("metrics.jsonl", training), ("eval.jsonl", evaluations)):
        lines = [{"member": m, "env_steps": steps, "episode_return": value} for m, steps, value in rows]
        (path / file).write_text("".join(json.dumps(line) + "\n" for line in lines))


ONE = [(0, 100 * t, float(t)) for t in range(10)]
SEVERAL = [(m, 100 * t, float(t + 3 * m)) for t in range(10) for m in range(3)]
GAPS = [(m, steps, None if steps < 300 or steps == 500 else value) for m, steps, value in SEVERAL]


@pytest.mark.parametrize(
    ("training", "evaluations"),
    [(ONE, ONE[::3]), (SEVERAL, SEVERAL[:6]), (GAPS, GAPS), (ONE, []), ([], ONE), (ONE[3:4], [])],
    ids=["one member", "several members", "null returns", "no evaluation", "only evaluation", "a single point"],
)
def test_learning_curve_is_a_picture(tmp_path, training, evaluations):
    """Red where some kind of run cannot be drawn, draws nothing, or leaves its figure in memory."""
    write_run(tmp_path, training, evaluations)
    open_figures = plt.get_fignums()
    path = learning_curve(tmp_path)
    assert path == tmp_path / "learning_curve.png"
    with Image.open(path) as image:
        image.load()
        assert image.format == "PNG"
        assert image.size == (960, 600)
        pixels = np.asarray(image.convert("RGB")).astype(int)
    # Blue or orange ink: axes and text are grey.
    assert ((pixels.max(axis=-1) - pixels.min(axis=-1)) > 60).sum() > 50
    assert plt.get_fignums() == open_figures


@pytest.mark.parametrize("training", [None, [], [(0, 100, None), (0, 200, None)]])
def test_learning_curve_of_nothing_is_none(tmp_path, training):
    """Red where a run that finished no episode gets an empty picture, or an exception at its end."""
    if training is not None:
        write_run(tmp_path, training)
    open_figures = plt.get_fignums()
    assert learning_curve(tmp_path) is None
    assert not (tmp_path / "learning_curve.png").exists()
    assert plt.get_fignums() == open_figures


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draws a run and gives its axes."""
    figures = []
    monkeypatch.setattr(plt, "close", figures.append)

    def draw(training, evaluations=()):
        write_run(tmp_path, training, evaluations)
        learning_curve(tmp_path)
        return figures[-1].axes[0]

    yield draw
    monkeypatch.undo()
    for figure in figures:
        plt.close(figure)


def test_learning_curve_of_one_member_is_its_returns(drawn):
    """Red where a curve is shifted or cut, or one member is called a mean."""
    axes = drawn(ONE, [(0, 300, 5.0), (0, 900, 8.0)])
    training, evaluation = axes.get_lines()
    np.testing.assert_array_equal(training.get_xydata(), [(100 * t, t) for t in range(10)])
    np.testing.assert_array_equal(evaluation.get_xydata(), [(300, 5), (900, 8)])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "training (exploring)",
        "evaluation (whole episodes)",
    ]
    assert len(axes.collections) == 0


def test_learning_curve_of_several_members_has_mean_and_interval(drawn):
    """Red where the mean is not over members, or the band's meaning stands nowhere."""
    axes = drawn(GAPS)
    *members, mean = axes.get_lines()
    times = [t for t in range(3, 10) if t != 5]
    assert len(members) == 3
    np.testing.assert_array_equal(mean.get_xydata(), [(100 * t, t + 3) for t in times])
    np.testing.assert_array_equal(members[2].get_xydata(), [(100 * t, t + 6) for t in times])
    (band,) = axes.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert heights.min() == pytest.approx(3)
    assert heights.max() == pytest.approx(9 + 6)
    (label,) = (text.get_text() for text in axes.get_legend().get_texts())
    assert "mean of 3 members, 95 % interval" in label


def test_reading_a_run_never_starts_jax():
    """Red where a figure or a table drags JAX in: it takes seconds, and the accelerator's memory."""
    code = (
        "import sys, pqn_eqx.plot, pqn_eqx.run_directory; "
        "print(sorted({'jax', 'jaxlib', 'equinox'} & set(sys.modules)))"
    )
    root = Path(plot.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
