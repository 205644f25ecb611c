"""Broken constraints: the public battery rejects each and says what is wrong.

Every mutant is a part that passes its battery (`test_batteries.py`) with one thing changed.
"""

from dataclasses import dataclass

import pytest
import torch

from bilevel import trees
from bilevel.constraints.base import Constraint
from bilevel.testing import check_constraint
from testing.mutants import rejected

VECTOR = torch.zeros(5)


@dataclass(frozen=True)
class Halves(Constraint):
    def project(self, lam):
        return trees.scale(lam, 0.5)


@dataclass(frozen=True)
class ShrinksIntoTheBox(Constraint):
    """In the box and idempotent, but along the ray to the origin."""

    def project(self, lam):
        return lam / lam.abs().max().clamp_min(1.0)


@dataclass(frozen=True)
class OntoTheSphere(Constraint):
    """The nearest point of a set that is not convex."""

    def project(self, lam):
        return lam / lam.norm()


@dataclass(frozen=True)
class Oblique(Constraint):
    """A linear projection that is not orthogonal."""

    def project(self, lam):
        return torch.cat([lam[:1] + lam[1:2], 0 * lam[1:2], lam[2:]])


@dataclass(frozen=True)
class OntoTheGrid(Constraint):
    """Idempotent and nearest, but the set is made of points."""

    def project(self, lam):
        return lam.round()


@dataclass(frozen=True)
class Softmax(Constraint):
    """Weights that add up to 1, which is no projection."""

    def project(self, lam):
        return torch.softmax(lam, 0)


@dataclass(frozen=True)
class InPlace(Constraint):
    def project(self, lam):
        return lam.clamp_(-1, 1)


@dataclass(frozen=True)
class Restless(Constraint):
    def project(self, lam):
        return lam + 1e-6 * torch.randn_like(lam)


@dataclass(frozen=True)
class InSingle(Constraint):
    def project(self, lam):
        return lam.clamp(-1, 1).double()


@dataclass(frozen=True)
class Flattens(Constraint):
    def project(self, lam):
        return lam.clamp(-1, 1)[None]


CONSTRAINTS = [
    (Halves(), "not idempotent"),
    (ShrinksIntoTheBox(), "nearest point"),
    (OntoTheSphere(), "firmly nonexpansive|nearest"),
    (Oblique(), "nearest point"),
    (OntoTheGrid(), "firmly nonexpansive|nearest"),
    (Softmax(), "not idempotent"),
    (InPlace(), "changed its argument"),
    (Restless(), "two points"),
    (InSingle(), "dtype: torch.float32 to torch.float64"),
    (Flattens(), "changed a shape"),
]


@pytest.mark.parametrize(("mutant", "match"), CONSTRAINTS, ids=lambda value: type(value).__name__)
def test_a_broken_constraint(mutant, match):
    rejected(check_constraint, mutant, match, VECTOR)
