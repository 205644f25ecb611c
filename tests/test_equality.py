"""Settings that differ in any field compare as different: methods, dynamics, linear solvers and constraints."""

import copy
from dataclasses import fields

import pytest

import bilevel as bl
from bilevel import constraints, dynamics, linear_solvers, methods

EXAMPLES = [
    example[0] if isinstance(example, tuple) else example
    for room in (methods, dynamics, linear_solvers, constraints)
    for kind in room.find().values()
    for example in kind.examples()
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_every_field_counts(example):
    same = copy.copy(example)
    assert same == example and hash(same) == hash(example)
    for field in fields(example):
        other = copy.copy(example)
        object.__setattr__(other, field.name, object())
        assert other != example, f"{type(example).__name__}.{field.name} may differ between equal objects"


def test_tolerances_and_solvers():
    assert bl.CG(tol=1e-3) != bl.CG(tol=1e-12)
    assert bl.CG(max_iter=3) != bl.CG()
    assert bl.Implicit() != bl.Implicit(newton=1e-9)
    assert bl.Implicit(bl.CG(1e-3)) != bl.Implicit(bl.CG(1e-4))
    assert bl.Implicit(bl.CG(1e-3)) == bl.Implicit(bl.CG(1e-3))
