"""Simulated people who draw: how the path of a character becomes a drawing.

A drawer has a slant, proportions, a pen and a steadiness in all their drawings, and every drawing has random
differences. All randomness is the raw stream of a Philox generator, which is the same on every machine.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from bilevel.data import _skeletons
from bilevel.data._scripts import PenPath

SIDE = 28
WAVES = 5
# Pixels on each side of a point that its ink can reach: a pen is at most 1.93 pixels wide, and half a pixel is soft.
REACH = 2
# Random numbers are drawn in blocks, because a call takes longer than a number.
BLOCK = 4096
# Rounds of smoothing a drawer's corners get: from angular to sloppy.
ROUNDS = (2, 5, 9, 14)


class RandomNumbers:
    """Random numbers from the raw stream of Philox, keyed by two numbers."""

    def __init__(self, seed: int, stream: int) -> None:
        self._bits = np.random.Philox(key=np.array([seed, stream], np.uint64))
        self._ready = np.empty(0)  # numbers from 0 to 1 that were drawn and not used yet

    def uniform(self, low: float, high: float, *shape: int) -> NDArray[np.float64]:
        count = math.prod(shape)
        if count > len(self._ready):
            raw = np.asarray(self._bits.random_raw(max(BLOCK, count)), np.uint64)
            self._ready = np.concatenate([self._ready, (raw >> np.uint64(11)) * 2.0**-53])
        taken, self._ready = self._ready[:count], self._ready[count:]
        return low + (high - low) * taken.reshape(shape)

    def nearly_normal(self, deviation: float, *shape: int) -> NDArray[np.float64]:
        """Sums of four uniform numbers, which are nearly normal and never beyond 3.5 deviations."""
        one, two, three, four = self.uniform(-1.0, 1.0, 4, *shape)
        return (one + two + three + four) * (deviation * (3.0 / 4.0) ** 0.5)


Drawer = dict[str, float]


def drawers(seed: int, count: int) -> list[Drawer]:
    """The habits of `count` drawers."""
    random = RandomNumbers(seed, 0)
    habits = {
        "turn": random.nearly_normal(0.05, count),
        "slant": random.nearly_normal(0.14, count) + 0.06,
        "stretch": random.nearly_normal(0.10, count),
        "size": random.uniform(17.5, 22.0, count),
        "bend": random.uniform(0.020, 0.045, count),
        "tremor": random.uniform(0.003, 0.011, count),
        "looseness": random.uniform(0.004, 0.022, count),
        "pen": random.uniform(0.55, 1.10, count),
        "pressure": random.uniform(0.05, 0.30, count),
        "rounding": random.uniform(0, len(ROUNDS), count),
        "face": random.uniform(0, 1000, count),
    }
    return [{name: float(values[d]) for name, values in habits.items()} for d in range(count)]


def draw(shapes: list[PenPath], hands: list[Drawer], random: RandomNumbers) -> NDArray[np.uint8]:
    """One drawing by each drawer, 28×28, ink = 255."""
    images = np.empty((len(hands), SIDE, SIDE), np.uint8)
    smoothed: dict[tuple[int, int], NDArray[np.float64]] = {}
    strokes = [_strokes(shape) for shape in shapes]
    # A dot is what thinning leaves of a blob. It is drawn a little wider than a line.
    dots = [np.bincount(shape.pairs.ravel(), minlength=len(shape.points)) == 0 for shape in shapes]
    for image, drawer in zip(images, hands, strict=True):
        # The first shape is the plainest one and gets a larger share.
        choice = int(drawer["face"]) % (len(shapes) + 1) % len(shapes)
        at = (choice, int(drawer["rounding"]))
        if at not in smoothed:
            smoothed[at] = _skeletons.smooth(shapes[choice].points, shapes[choice].pairs, ROUNDS[at[1]])
        points = _hand(smoothed[at], strokes[choice], drawer, random)
        image[:] = _ink(points, np.where(dots[choice], 1.35, 1.0) * drawer["pen"], drawer["pressure"], random)
    return images


def _strokes(shape: PenPath) -> NDArray[np.int64]:
    """The number of the stroke each point belongs to: strokes end where more than two links meet."""
    count = len(shape.points)
    degree = np.bincount(shape.pairs.ravel(), minlength=count)
    plain = shape.pairs[(degree[shape.pairs] <= 2).all(axis=1)]
    label = np.arange(count)
    while True:
        lower = label.copy()
        np.minimum.at(lower, plain[:, 0], label[plain[:, 1]])
        np.minimum.at(lower, plain[:, 1], label[plain[:, 0]])
        lower = lower[lower]
        if (lower == label).all():
            return np.unique(label, return_inverse=True)[1].reshape(-1)
        label = lower


def _hand(
    points: NDArray[np.float64], strokes: NDArray[np.int64], drawer: Drawer, random: RandomNumbers
) -> NDArray[np.float64]:
    """The path of a drawer's pen, in pixels."""
    # Strokes are displaced a little, and are a little too long or too short.
    count = int(strokes.max()) + 1
    sizes = np.bincount(strokes, minlength=count)
    middle = np.stack([np.bincount(strokes, points[:, axis], count) for axis in (0, 1)], 1) / sizes[:, None]
    loose = drawer["looseness"]
    offset, length = random.nearly_normal(loose, count, 2), 1 + random.nearly_normal(2 * loose, count, 1)
    whole = (sizes > 6)[:, None]
    offset, length = np.where(whole, offset, 0.3 * offset), np.where(whole, length, 1.0)
    points = middle[strokes] + (points - middle[strokes]) * length[strokes] + offset[strokes]
    points = points + _waves(points, drawer["bend"], 0.25, 0.75, random)
    points = points + _waves(points, drawer["tremor"], 1.5, 3.0, random)
    turn = drawer["turn"] + float(random.nearly_normal(0.06, 1)[0])
    slant = drawer["slant"] + float(random.nearly_normal(0.05, 1)[0])
    wide = float(np.exp(drawer["stretch"] + random.nearly_normal(0.06, 1)[0]))
    size = drawer["size"] * (1 + float(random.nearly_normal(0.05, 1)[0]))
    x, y = points[:, 0] * wide - slant * points[:, 1], points[:, 1] / wide
    x, y = np.cos(turn) * x - np.sin(turn) * y, np.sin(turn) * x + np.cos(turn) * y
    drawn = np.stack([x, y], axis=1)
    low, high = drawn.min(0), drawn.max(0)
    # The drawing is scaled to fit on the paper, and no more than needed.
    scale = min(size, (SIDE - 4) / float((high - low).max()))
    room = np.maximum((SIDE - 3) - scale * (high - low), 0) / 2
    shift = np.clip(random.nearly_normal(1.0, 2), -room, room)
    return (drawn - (low + high) / 2) * scale + SIDE / 2 + shift


def _waves(
    points: NDArray[np.float64], amplitude: float, slowest: float, fastest: float, random: RandomNumbers
) -> NDArray[np.float64]:
    """A smooth random displacement: a few plane waves of random direction, length and phase."""
    angle = random.uniform(0, 2 * np.pi, WAVES)
    speed = random.uniform(2 * np.pi * slowest, 2 * np.pi * fastest, WAVES)
    phase = random.uniform(0, 2 * np.pi, WAVES)
    reach = random.nearly_normal(amplitude * (2 / WAVES) ** 0.5, WAVES, 2)
    along = points[:, :1] * (speed * np.cos(angle)) + points[:, 1:] * (speed * np.sin(angle)) + phase
    # A sum over an axis of five takes far longer than five sums.
    sines = np.sin(along)
    moved = sines[:, :1] * reach[0]
    for wave in range(1, WAVES):
        moved += sines[:, wave, None] * reach[wave]
    return moved


def _ink(
    points: NDArray[np.float64], pen: NDArray[np.float64], pressure: float, random: RandomNumbers
) -> NDArray[np.uint8]:
    """The ink of the pen: a pixel is darker the nearer it is to the path."""
    phase = float(random.uniform(0, 2 * np.pi, 1)[0])
    wave = random.uniform(-0.25, 0.25, 2)
    radius = pen * (1 + pressure * np.sin(points[:, 0] * wave[0] + points[:, 1] * wave[1] + phase))
    # Each point of the path is met by the pixels around it alone: others are further than any pen is wide.
    around = np.arange(-REACH, REACH + 1)
    columns, rows = (np.floor(points[:, axis, None]).astype(np.int64) + around for axis in (0, 1))
    dx2 = ((columns + 0.5 - points[:, :1]) ** 2).astype(np.float32)
    dy2 = ((rows + 0.5 - points[:, 1:]) ** 2).astype(np.float32)
    depth = radius.astype(np.float32)[:, None, None] - np.sqrt(dy2[:, :, None] + dx2[:, None, :])
    side = SIDE + 2 * REACH
    deepest = np.full(side * side, -0.5, np.float32)
    at = (rows[:, :, None] + REACH) * side + columns[:, None, :] + REACH
    np.maximum.at(deepest, at.reshape(-1), depth.reshape(-1))
    paper = deepest.reshape(side, side)[REACH:-REACH, REACH:-REACH]
    return np.rint(255 * np.clip(paper + 0.5, 0, 1)).astype(np.uint8)
