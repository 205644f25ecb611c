"""From a filled character to the path of a pen: thinning, pruning, smoothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# The eight neighbours, clockwise from the one above.
AROUND = ((-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1))


def _gone(phase: int) -> NDArray[np.bool_]:
    """Whether a pixel is taken away, for each of the 256 patterns of its neighbours; the first is the lowest bit."""
    p = [(np.arange(256) >> k & 1).astype(bool) for k in range(8)]
    count = np.sum(p, axis=0)
    steps = np.sum([~p[k] & p[(k + 1) % 8] for k in range(8)], axis=0)
    top, right, bottom, left = p[0], p[2], p[4], p[6]
    if phase == 0:
        keep = (top & right & bottom) | (right & bottom & left)
    else:
        keep = (top & right & left) | (top & bottom & left)
    return (count >= 2) & (count <= 6) & (steps == 1) & ~keep


def thin(bitmaps: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Lines one pixel wide through the middle of the strokes of N bitmaps (Zhang and Suen, 1984)."""
    images = bitmaps.copy()
    images[:, [0, -1], :] = False
    images[:, :, [0, -1]] = False
    flat, tables = images.reshape(-1).view(np.uint8), [_gone(0), _gone(1)]
    steps = [dy * images.shape[2] + dx for dy, dx in AROUND]
    # The pixels with ink, of the bitmaps that still change; the frame without ink keeps bitmaps apart.
    ink = np.flatnonzero(flat)
    while len(ink):
        changed = np.zeros(len(images), bool)
        for table in tables:
            pattern = np.zeros(len(ink), np.uint8)
            for k, step in enumerate(steps):
                pattern |= flat[ink + step] << k
            gone = table[pattern]
            flat[ink[gone]] = 0
            changed[ink[gone] // images[0].size] = True
            ink = ink[~gone]
        ink = ink[changed[ink // images[0].size]]
    return images


def links(skeleton: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The pixels of a skeleton (row, column), and the pairs that touch. Diagonal neighbours are a pair only if there is
    no straight neighbour of both."""
    rows, columns = np.nonzero(skeleton)
    number = np.full((skeleton.shape[0] + 2, skeleton.shape[1] + 2), -1)
    number[rows + 1, columns + 1] = np.arange(len(rows))
    pairs = []
    for dy, dx in ((0, 1), (1, 0), (1, 1), (1, -1)):
        other = number[rows + 1 + dy, columns + 1 + dx]
        joined = other >= 0
        if dy and dx:
            joined &= (number[rows + 1 + dy, columns + 1] < 0) & (number[rows + 1, columns + 1 + dx] < 0)
        pairs.append(np.stack([np.flatnonzero(joined), other[joined]], axis=1))
    return np.stack([rows, columns], axis=1), np.concatenate(pairs)


def prune(count: int, pairs: NDArray[np.int64], shortest: int) -> NDArray[np.bool_]:
    """Which pixels to keep: all but spurs, which leave a junction and end after fewer than `shortest` pixels.
    Thinning turns serifs and corners into spurs."""
    keep = np.ones(count, bool)
    neighbours: list[list[int]] = [[] for _ in range(count)]
    for a, b in pairs.tolist():
        neighbours[a].append(b)
        neighbours[b].append(a)
    for end in [pixel for pixel in range(count) if len(neighbours[pixel]) == 1]:
        path, before, here = [end], -1, end
        while len(path) < shortest:
            onward = [pixel for pixel in neighbours[here] if pixel != before]
            if len(onward) != 1:
                break
            before, here = here, onward[0]
            path.append(here)
        if len(neighbours[here]) > 2 and len(path) <= shortest:
            keep[path[:-1]] = False
    return keep


def smooth(points: NDArray[np.float64], pairs: NDArray[np.int64], rounds: int) -> NDArray[np.float64]:
    """Points moved towards their neighbours: this removes the pixel grid's steps and rounds corners; ends stay."""
    degree = np.bincount(pairs.ravel(), minlength=len(points))
    moving = (degree >= 2)[:, None]
    share = np.maximum(degree, 1)[:, None]
    for _ in range(rounds):
        total = np.zeros_like(points)
        np.add.at(total, pairs[:, 0], points[pairs[:, 1]])
        np.add.at(total, pairs[:, 1], points[pairs[:, 0]])
        points = np.where(moving, 0.5 * points + 0.5 * total / share, points)
    return points
