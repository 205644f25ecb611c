"""λ, w and batches may have any structure: properties over random trees."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bilevel as bl
from bilevel import trees
from bilevel.testing import relative_error

shapes = st.lists(st.integers(1, 3), max_size=2).map(tuple)
leaf = shapes.map(lambda shape: torch.zeros(shape, dtype=torch.float64))
tree = st.recursive(
    leaf,
    lambda children: st.one_of(
        st.lists(children, min_size=1, max_size=3),
        st.lists(children, min_size=1, max_size=3).map(tuple),
        st.dictionaries(st.text("abc", min_size=1, max_size=2), children, min_size=1, max_size=3),
    ),
    max_leaves=6,
)


def filled(like, seed):
    generator = torch.Generator().manual_seed(seed)
    return trees.map(lambda x: torch.randn(x.shape, generator=generator, dtype=torch.float64) * 0.5, like)


def flat(t):
    return torch.cat([x.reshape(-1) for x in trees.leaves(t)])


@settings(max_examples=40, deadline=None)
@given(tree, tree, st.integers(0, 1000))
def test_every_exact_method_agrees_on_any_structure(lam_like, w_like, seed):
    lam, w0, batch = filled(lam_like, seed), filled(w_like, seed + 1), filled(w_like, seed + 2)

    def inner(w, lam, batch):
        scale = 1 + torch.sigmoid(flat(lam).sum())
        pull = torch.sin(flat(lam)).sum()
        return (
            0.5
            * scale
            * sum(((x - b - pull) ** 2).sum() for x, b in zip(trees.leaves(w), trees.leaves(batch), strict=True))
        )

    problem = bl.Problem(inner, lambda w, lam, batch: torch.cos(flat(w)).sum() + (flat(lam) ** 2).sum(), lambda lam: w0)
    task = bl.Task(batch, batch)
    results = {
        method: bl.hypergradient(problem, lam, task, dynamics=bl.HeavyBall(0.2, 0.5), steps=5, method=method)
        for method in (bl.Unrolled(), bl.Reverse(), bl.Reverse(2), bl.Forward(), bl.Spectral(), bl.Reversible())
    }
    expected = results[bl.Unrolled()]
    for result in results.values():
        assert trees.flatten(result.grad)[1] == trees.flatten(lam)[1]
        assert trees.flatten(result.inner)[1] == trees.flatten(w0)[1]
        assert relative_error(result.grad, expected.grad) < 1e-10


@settings(max_examples=60, deadline=None)
@given(tree, st.integers(0, 1000))
def test_vectors_and_trees_are_the_same_thing(like, seed):
    t = filled(like, seed)
    parts = trees.leaves(t)
    vector = trees.to_vector(parts)
    assert vector.numel() == trees.size(t)
    back = trees.from_vector(vector, parts)
    assert all(torch.equal(a, b) for a, b in zip(back, parts, strict=True))
    assert torch.allclose(trees.norm(t), vector.norm())
    assert torch.allclose(trees.dot(t, t), vector @ vector)
    assert len(trees.paths(t)) == len(parts)


@settings(max_examples=40, deadline=None)
@given(tree, st.floats(-2, 0), st.floats(0, 2), st.integers(0, 1000))
def test_projections_on_any_structure(like, low, high, seed):
    t = filled(like, seed)
    inside = bl.Box(low, high).project(t)
    assert all(bool(((x >= low) & (x <= high)).all()) for x in trees.leaves(inside))
    assert float(trees.norm(bl.Ball(0.3).project(t))) <= 0.3 + 1e-9


def test_a_node_of_ours_travels_with_its_settings():
    batches = bl.Minibatches((torch.arange(6.0),), size=2, seed=5)
    doubled = trees.map(lambda x: 2 * x, batches)
    assert isinstance(doubled, bl.Minibatches) and doubled.size == 2 and doubled.seed == 5
    assert torch.equal(doubled(3)[0], 2 * batches(3)[0])


def test_modules_on_either_level():
    """A network's weights as w, and another's as λ."""
    torch.manual_seed(0)
    encoder, head = torch.nn.Linear(4, 3), torch.nn.Linear(3, 1)
    lam, encode = bl.functional(encoder)
    w0, predict = bl.functional(head)
    x, y = torch.randn(8, 4), torch.randn(8, 1)

    def loss(w, lam, b):
        return ((predict(w, torch.tanh(encode(lam, b[0]))) - b[1]) ** 2).mean()

    problem = bl.Problem(loss, loss, lambda lam: w0)
    settings = {"dynamics": bl.GradientDescent(0.1), "steps": 4}
    found = bl.hypergradient(problem, lam, bl.Task((x, y), (x, y)), **settings)
    assert set(found.grad) == {"weight", "bias"} and set(found.inner) == {"weight", "bias"}
    report = bl.testing.check_problem(problem, lam, bl.Task((x, y), (x, y)), **settings)
    assert report.differences < 1e-6 and "sound" in str(report)
