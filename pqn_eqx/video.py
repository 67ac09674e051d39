"""An episode as an animated picture (GIF)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from PIL import Image, ImageDraw

from pqn_eqx.envs.base import Simulator
from pqn_eqx.errors import UserError
from pqn_eqx.policy import Policy, load_policy

Frame = np.ndarray
"""A picture: uint8 [height, width, 3]."""

MAX_FRAMES = 2000
MILLISECONDS = 60

PALETTE = np.asarray(
    [
        *((228, 26, 28), (55, 126, 184), (77, 175, 74), (255, 200, 0), (152, 78, 163)),
        *((255, 127, 0), (166, 86, 40), (247, 129, 191), (153, 153, 153), (0, 206, 209)),
    ],
    np.uint8,
)


def draw_episode(run_directory: Path, step: str, epsilon: float) -> Path:
    """Play an episode of the run's first member and draw it. Raises `UserError` where it cannot be written."""
    policy = load_policy(run_directory, step, epsilon=epsilon)
    frames, total, ended = play(policy, policy.config.env.simulator(), seed=0)
    path = run_directory / f"episode-{step}.gif"
    try:
        save_gif(frames, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error}.") from error
    state = "whole episode" if ended else f"its first {MAX_FRAMES} steps"
    print(f"Return {total:g} after {len(frames) - 1} steps ({state}).")
    return path


def play(policy: Policy, simulator: Simulator, seed: int) -> tuple[list[Frame], float, bool]:
    """The frames of an episode, its return, and whether it ended within `MAX_FRAMES`."""
    draw = renderer(simulator)
    reset, step = jax.jit(simulator.reset), jax.jit(simulator.step)
    key, reset_key = jax.random.split(jax.random.key(seed))
    world, obs = reset(reset_key)
    memory, reward, total = None, 0.0, 0.0
    frames = [draw(world, obs)]
    for _ in range(MAX_FRAMES):
        key, action_key, step_key = jax.random.split(key, 3)
        action, memory = policy(obs, memory, action_key, reward)
        world, obs, reward, terminated, truncated, _ = step(step_key, world, action)
        total += float(reward)
        frames.append(draw(world, obs))
        if terminated or truncated:
            return frames, total, True
    return frames, total, False


def save_gif(frames: list[Frame], path: Path) -> None:
    """Write frames as a picture that repeats for ever."""
    first, *others = (Image.fromarray(frame).quantize(64) for frame in frames)
    first.save(path, save_all=True, append_images=others, duration=MILLISECONDS, loop=0)


def renderer(simulator: Simulator) -> Callable[[Any, Any], Frame]:
    """What draws a world of this simulator: the game's own pixels, planes as colours, known bodies, or bars."""
    if simulator.name.startswith("Craftax"):
        return craftax_renderer("Classic" in simulator.name)
    if simulator.name in BODIES:
        body = BODIES[simulator.name]
        return lambda world, obs: body(world)
    if len(simulator.obs_shape) == 3:
        return lambda world, obs: planes(np.asarray(obs))
    return lambda world, obs: bars(np.ravel(np.asarray(obs)))


def craftax_renderer(classic: bool) -> Callable[[Any, Any], Frame]:
    """Craftax's own view."""
    if classic:
        from craftax.craftax_classic import renderer
    else:
        from craftax.craftax import renderer
    pixels = jax.jit(renderer.make_craftax_pixel_renderer(16))
    return lambda world, obs: np.asarray(pixels(world)).clip(0, 255).astype(np.uint8)


def planes(obs: np.ndarray) -> Frame:
    """An image [H, W, C]: one of three channels as it is, one of binary planes with a colour for each plane."""
    if obs.shape[-1] == 3 and obs.max() > 0 and not np.isin(obs, (0, 1)).all():
        picture = (obs * (255 if obs.max() <= 1 else 1)).astype(np.uint8)
    else:
        picture = np.full((*obs.shape[:2], 3), 24, np.uint8)
        for plane in range(obs.shape[-1]):
            picture[obs[..., plane] > 0] = PALETTE[plane % len(PALETTE)]
    scale = max(1, 240 // max(picture.shape[:2]))
    return picture.repeat(scale, axis=0).repeat(scale, axis=1)


def bars(values: np.ndarray) -> Frame:
    """Numbers as bars about a middle line: what is left where nothing better is known."""
    image, draw = _canvas()
    width = max(2, 380 // len(values))
    draw.line([(10, 120), (390, 120)], fill="grey")
    for place, value in enumerate(np.tanh(values)):
        left, top = 10 + place * width, 120 - float(value) * 100
        draw.rectangle([left, min(120, top), left + width - 2, max(120, top)], fill=tuple(PALETTE[1].tolist()))
    return np.asarray(image)


def cartpole(world: Any) -> Frame:
    """A cart [-2.4, 2.4] and its pole."""
    image, draw = _canvas()
    x, theta = 200 + float(world.x) * 75, float(world.theta)
    draw.line([(0, 180), (400, 180)], fill="black", width=2)
    draw.rectangle([x - 25, 165, x + 25, 180], fill=tuple(PALETTE[1].tolist()))
    draw.line(
        [(x, 165), (x + 100 * np.sin(theta), 165 - 100 * np.cos(theta))], fill=tuple(PALETTE[0].tolist()), width=6
    )
    return np.asarray(image)


def acrobot(world: Any) -> Frame:
    """Two links that hang from the middle; the free end is to rise above the line."""
    image, draw = _canvas()
    first, second = float(world.joint_angle1), float(world.joint_angle1 + world.joint_angle2)
    x, y = 200 + 50 * np.sin(first), 120 + 50 * np.cos(first)
    draw.line([(0, 70), (400, 70)], fill="grey")
    draw.line([(200, 120), (x, y)], fill=tuple(PALETTE[1].tolist()), width=6)
    draw.line([(x, y), (x + 50 * np.sin(second), y + 50 * np.cos(second))], fill=tuple(PALETTE[0].tolist()), width=6)
    return np.asarray(image)


BODIES: dict[str, Callable[[Any], Frame]] = {"CartPole-v1": cartpole, "Acrobot-v1": acrobot}


def _canvas() -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("RGB", (400, 240), "white")
    return image, ImageDraw.Draw(image)
