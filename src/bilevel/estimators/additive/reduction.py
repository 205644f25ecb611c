"""A smaller set of features for slopes that share a penalty, if there are more columns than rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from bilevel.estimators.additive.design import Piece
from bilevel.estimators.folds import Array


class Reduction:
    """Centres all features, and rotates those of slopes with one shared penalty to their principal directions.

    A ridge penalty does not change under a rotation, and the minimiser lies in the span of the rows. So the model is
    the same with at most as many of these features as rows.

    Args:
        X: the features of the training rows.
        pieces: the terms and penalties of the features.
        weight: the weight of every row.
    """

    def __init__(self, X: Array, pieces: list[Piece], weight: Array) -> None:
        self.mean = weight @ X / weight.sum()
        slopes = [piece for piece in pieces if piece.kind == "linear"]
        shared = len(slopes) > 1 and len({piece.penalty for piece in slopes}) == 1
        self.rotation: Array | None = None
        self.pieces, self.size = pieces, X.shape[1]
        if not shared or len(slopes) <= len(X):
            return
        self.columns = np.array([piece.where.start for piece in slopes])
        self.others = np.setdiff1d(np.arange(X.shape[1]), self.columns)
        _, size, rotation = np.linalg.svd(X[:, self.columns] - self.mean[self.columns], full_matrices=False)
        kept = size > 1e-10 * size[0]
        self.rotation = rotation[kept].T
        # The rotated slopes come first, as one piece.
        count, at = int(kept.sum()), int(kept.sum())
        self.pieces = [Piece(slopes[0].term, "linear", slice(0, count), slopes[0].penalty)]
        for piece in pieces:
            if piece.kind != "linear":
                length = piece.where.stop - piece.where.start
                self.pieces.append(replace(piece, where=slice(at, at + length)))
                at += length
        self.size = at

    def features(self, X: Array) -> Array:
        """The centred and reduced features that are fitted, from those of the design."""
        return self.rotated(X - self.mean)

    def rotated(self, X: Array) -> Array:
        """The reduced features, from centred ones."""
        if self.rotation is None:
            return X
        return np.hstack([X[:, self.columns] @ self.rotation, X[:, self.others]])

    def expand(self, w: Tensor, size: int) -> Array:
        """Coefficients of all features, outputs × size, from those of the reduced features."""
        reduced = w.numpy()
        if self.rotation is None:
            return reduced[:, :size].copy()
        full, count = np.zeros((len(reduced), size)), self.rotation.shape[1]
        full[:, self.columns] = reduced[:, :count] @ self.rotation.T
        full[:, self.others] = reduced[:, count : count + len(self.others)]
        return full

    def rows(self, where: slice) -> Array:
        """The matrix from these centred features to the reduced ones, of shape features × reduced features."""
        if self.rotation is None:
            return np.eye(len(self.mean))[where]
        count, wanted = self.rotation.shape[1], np.arange(where.start, where.stop)
        matrix = np.zeros((len(wanted), count + len(self.others)))
        for i, column in enumerate(wanted):
            at = np.searchsorted(self.columns, column)
            if at < len(self.columns) and self.columns[at] == column:
                matrix[i, :count] = self.rotation[at]
            else:
                matrix[i, count + np.searchsorted(self.others, column)] = 1
        return matrix
