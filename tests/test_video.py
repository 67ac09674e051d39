"""Pictures of worlds: what stands where."""

import types

import numpy as np
import pytest
from PIL import Image

from pqn_eqx.envs.gymnax import GymnaxConfig
from pqn_eqx.video import PALETTE, acrobot, bars, cartpole, craftax_renderer, planes, renderer, save_gif


def where(frame, colour):
    """The places [y, x] of a colour."""
    return np.argwhere((frame == colour).all(axis=-1))


def test_the_pole_falls_the_way_it_leans():
    left, right = (cartpole(types.SimpleNamespace(x=0.0, theta=theta)) for theta in (-0.5, 0.5))
    tip = [where(frame, PALETTE[0])[0][1] for frame in (left, right)]
    assert tip[0] < 200 < tip[1]
    moved = cartpole(types.SimpleNamespace(x=1.0, theta=0.0))
    assert where(moved, PALETTE[1])[:, 1].mean() == pytest.approx(275, abs=2)


def test_acrobot_hangs_down_and_stands_up():
    hanging = acrobot(types.SimpleNamespace(joint_angle1=0.0, joint_angle2=0.0))
    standing = acrobot(types.SimpleNamespace(joint_angle1=np.pi, joint_angle2=0.0))
    assert where(hanging, PALETTE[0])[:, 0].max() > 210
    assert where(standing, PALETTE[0])[:, 0].min() < 30


def test_planes_have_colours_of_their_own():
    obs = np.zeros((10, 10, 4))
    obs[2, 3, 0], obs[7, 1, 2] = 1, 1
    frame = planes(obs)
    assert frame.shape == (240, 240, 3)
    np.testing.assert_array_equal(frame[2 * 24 + 5, 3 * 24 + 5], PALETTE[0])
    np.testing.assert_array_equal(frame[7 * 24 + 5, 1 * 24 + 5], PALETTE[2])
    pixels = np.random.default_rng(0).uniform(size=(120, 120, 3))
    np.testing.assert_array_equal(planes(pixels)[::2, ::2], (pixels * 255).astype(np.uint8))


def test_bars_point_up_for_positive_numbers():
    frame = bars(np.asarray([2.0, -2.0]))
    rows = where(frame, PALETTE[1])
    assert rows[rows[:, 1] < 190][:, 0].max() <= 121
    assert rows[rows[:, 1] > 210][:, 0].min() >= 119


@pytest.mark.parametrize("name", ["CartPole-v1", "Acrobot-v1", "Breakout-MinAtar", "Catch-bsuite", "MountainCar-v0"])
def test_every_kind_of_environment_can_be_drawn(name):
    import jax

    simulator = GymnaxConfig(name).simulator()
    frame = renderer(simulator)(*simulator.reset(jax.random.key(0)))
    assert (frame.dtype, frame.ndim, frame.shape[2]) == (np.uint8, 3, 3)
    assert frame.std() > 0


def test_craftax_is_drawn_with_its_own_pixels(craftax_classic):
    import jax

    world, obs = jax.jit(craftax_classic.reset)(jax.random.key(0))
    frame = renderer(craftax_classic)(world, obs)
    assert frame.shape[:2] == (144, 144)
    assert len(np.unique(frame.reshape(-1, 3), axis=0)) > 20
    np.testing.assert_array_equal(frame, craftax_renderer(classic=True)(world, obs))


def test_gif_holds_the_frames_in_order(tmp_path):
    frames = [np.full((20, 30, 3), shade, np.uint8) for shade in (0, 120, 250)]
    save_gif(frames, tmp_path / "a.gif")
    with Image.open(tmp_path / "a.gif") as image:
        assert image.n_frames == 3
        for number, frame in enumerate(frames):
            image.seek(number)
            np.testing.assert_allclose(np.asarray(image.convert("RGB"), int), frame.astype(int), atol=8)
