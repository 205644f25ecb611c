"""Projections are nearest points of convex sets: by the variational inequality, by brute force, and by autograd."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bilevel as bl
from asking import data, refused, ridge
from bilevel import constraints, testing, trees

numbers = st.lists(st.floats(-20, 20), min_size=1, max_size=6)
SETS = [
    bl.Box(-1.0, 2.0),
    bl.Box(-float("inf"), 0.5),
    bl.NonNegative(),
    bl.Simplex(),
    bl.Simplex(3.5),
    bl.Ball(1.5),
    bl.Ball(0.0),
]


def inside(constraint, x):
    """Membership from the definition of the set, not from its projection."""
    if isinstance(constraint, bl.Box):
        return bool(((x >= constraint.low) & (x <= constraint.high)).all())
    if isinstance(constraint, bl.Simplex):
        return bool((x >= 0).all()) and abs(float(x.sum()) - constraint.total) < 1e-10
    if isinstance(constraint, bl.Ball):
        return float(x.norm()) <= constraint.radius + 1e-12
    return bool((x >= 0).all())


def random_members(constraint, size, seed, count=20):
    """Points of the set, drawn without its projection."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(count, size, generator=generator)
    if isinstance(constraint, bl.Box):
        low, high = max(constraint.low, -30.0), min(constraint.high, 30.0)
        return low + (high - low) * draws
    if isinstance(constraint, bl.Simplex):
        return constraint.total * torch.softmax(8 * draws - 4, 1)
    if isinstance(constraint, bl.Ball):
        directions = torch.randn(count, size, generator=generator)
        return constraint.radius * draws[:, :1] * directions / directions.norm(dim=1, keepdim=True)
    return 30 * draws**3


@pytest.mark.parametrize("constraint", SETS, ids=str)
@settings(max_examples=60, deadline=None)
@given(numbers=numbers, seed=st.integers(0, 1000))
def test_the_variational_inequality(constraint, numbers, seed):
    """Px is the nearest point of Λ exactly when it lies in Λ and ⟨x − Px, z − Px⟩ ≤ 0 for every z in Λ."""
    x = torch.tensor(numbers)
    projected = constraint.project(x)
    assert inside(constraint, projected)
    members = random_members(constraint, len(numbers), seed)
    assert all(inside(constraint, z) for z in members)
    assert bool(((members - projected) @ (x - projected) <= 1e-9 * (1 + x.norm() ** 2)).all())


@pytest.mark.parametrize("constraint", SETS, ids=str)
@settings(max_examples=60, deadline=None)
@given(numbers=numbers, seed=st.integers(0, 1000))
def test_points_of_the_set_stay_and_projecting_twice_is_projecting_once(constraint, numbers, seed):
    projected = constraint.project(torch.tensor(numbers))
    torch.testing.assert_close(constraint.project(projected), projected, rtol=1e-12, atol=1e-12)
    for member in random_members(constraint, 4, seed, count=3):
        torch.testing.assert_close(constraint.project(member), member, rtol=1e-12, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(numbers=st.lists(st.floats(-5, 5), min_size=2, max_size=2))
def test_the_simplex_of_two_weights_is_a_segment(numbers):
    """Its projection has a closed form: half of 1 + x − y, cut off at 0 and 1."""
    x, y = numbers
    first = min(max((1 + x - y) / 2, 0.0), 1.0)
    expected = torch.tensor([first, 1 - first])
    torch.testing.assert_close(bl.Simplex().project(torch.tensor(numbers)), expected, rtol=0, atol=1e-12)


def test_the_simplex_takes_every_row_for_itself():
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    rows = torch.stack([bl.Simplex(2.0).project(row) for row in x.reshape(12, 5)]).reshape(3, 4, 5)
    torch.testing.assert_close(bl.Simplex(2.0).project(x), rows)
    with pytest.raises(bl.BilevelError, match="scalar"):
        bl.Simplex().project(torch.tensor(1.0))


def test_bounds_may_be_trees_and_the_ball_is_that_of_all_leaves_together():
    lam = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor(4.0)}
    box = bl.Box({"a": torch.tensor([0.0, 1.0]), "b": -1.0}, 2.0)
    assert trees.map(torch.Tensor.tolist, box.project(lam)) == {"a": [2.0, 1.0], "b": 2.0}
    ball = bl.Ball(1.0).project(lam)
    torch.testing.assert_close(ball, {"a": torch.tensor([0.6, 0.0]), "b": torch.tensor(0.8)})
    centred = bl.Ball(5.0, center=trees.scale(lam, 3.0)).project(lam)
    torch.testing.assert_close(centred, trees.scale(lam, 2.0))


def test_parts_of_lam_have_constraints_of_their_own():
    lam = {"free": torch.tensor(9.0), "mix": torch.tensor([0.9, 0.7]), "net": [torch.tensor(-1.0), torch.tensor(5.0)]}
    parts = {"mix": bl.Simplex(), "net": [bl.NonNegative(), None]}
    found = bl.PerLeaf(parts).project(lam)
    expected = {"free": lam["free"], "mix": bl.Simplex().project(lam["mix"]), "net": [torch.tensor(0.0), lam["net"][1]]}
    torch.testing.assert_close(found, expected)
    assert constraints.as_constraint(parts) == bl.PerLeaf(parts) and constraints.as_constraint(None) is None
    for wrong, says in ((0.5, "not a constraint"), ({"mix": {"x": bl.Box(0, 1)}}, "does not fit")):
        with pytest.raises(bl.BilevelError, match=says):
            constraints.as_constraint(wrong).project(lam)


@pytest.mark.parametrize("constraint", SETS[:6], ids=str)
def test_projections_are_differentiable_where_they_are_smooth(constraint):
    x = torch.tensor([1.9, -0.3, 0.8, 4.0], requires_grad=True)
    assert torch.autograd.gradcheck(constraint.project, x)


class TestEmptySets:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: bl.Box(1, -1),
            lambda: bl.Box(torch.tensor([0.0, 2.0]), 1),
            lambda: bl.Ball(-1),
            lambda: bl.Simplex(-1),
        ],
    )
    def test_are_refused(self, make):
        with refused("empty set"):
            make()

    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda: bl.Box(torch.zeros(2), 1), (r"Box", r"\[2\]", r"\[3\]")),
            (lambda: bl.Box(torch.zeros(1, 3), 1), (r"Box", r"\[1, 3\]", r"\[3\]")),
            (lambda: bl.Ball(1.0, center=torch.ones(2)), (r"Ball", r"\[2\]", r"\[3\]")),
            (lambda: bl.Ball(1.0, center=torch.ones(2, 3)), (r"Ball", r"\[2, 3\]", r"\[3\]")),
            (lambda: bl.Box(None, 1), ("Box", "None", "inf")),
            (lambda: bl.Box(0, {"a": "large"}), ("Box", "large", "inf")),
            (lambda: bl.Polyhedron([[1.0, 1.0, 1.0]], [1.0]), ("Polyhedron", "list", "matrix")),
        ],
    )
    def test_bounds_that_do_not_fit_are_refused(self, make, words):
        with refused(*words):
            make().project(torch.full((3,), 2.0))

    def test_a_constraint_for_a_leaf_that_is_not_there(self):
        with refused(r"λ\['b'\]"):
            bl.solve(
                ridge(),
                {"a": torch.zeros(3)},
                bl.Task(data(), data(4)),
                dynamics=bl.GradientDescent(0.1),
                steps=1,
                constraint={"b": bl.Box(0, 1)},
            )


@pytest.mark.parametrize(
    ("constraint", "like"),
    [pair for cls in constraints.find().values() for pair in cls.examples()],
    ids=lambda part: type(part).__name__,
)
def test_battery(constraint, like):
    testing.check_constraint(constraint, like)
