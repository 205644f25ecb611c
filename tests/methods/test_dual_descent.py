"""Linear classifiers in the span of their examples: against autograd through the steps, and what is refused."""

import pytest
import torch
import torch.nn.functional as F

import bilevel as bl
from bilevel.testing.problems import classifiers


@pytest.mark.parametrize(("ways", "shots", "features"), [(5, 1, 20), (3, 4, 30), (2, 3, 4)])
@pytest.mark.parametrize("l2", [0.0, 0.3])
@pytest.mark.parametrize("steps", [0, 1, 7])
def test_the_steps_and_their_adjoint_are_autograds(ways, shots, features, l2, steps):
    generator = torch.Generator().manual_seed(7)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    lam = {"map": draw(6, features), "scale": draw()}
    labels = torch.arange(ways).repeat(shots).expand(4, -1)
    task = bl.Task(
        (draw(4, ways * shots, 6), labels), (draw(4, 9, 6), torch.randint(ways, (4, 9), generator=generator))
    )

    def encode(lam, task):
        (x, y), (x_val, y_val) = task.train, task.val
        return bl.Task((x @ lam["map"], y), (x_val @ lam["map"], y_val))

    def outer(w, lam, batch):
        loss = F.cross_entropy((batch[0] @ w).flatten(0, 1), batch[1].flatten())
        return lam["scale"].exp() * loss + (w**3).sum()

    def init(lam):
        return torch.zeros(4, features, ways)

    def plain(w, lam, batch):
        each = [F.cross_entropy(phi @ v, y) for phi, v, y in zip(batch[0], w, batch[1], strict=True)]
        return sum(each) + l2 / 2 * (w**2).sum()

    settings = {"dynamics": bl.GradientDescent(lambda t: 0.3 / t), "steps": steps, "allow_unused": steps == 0}
    ours = bl.hypergradient(
        bl.Problem(bl.LinearClassifiers(l2), outer, init, encode), lam, task, method=bl.DualDescent(), **settings
    )
    theirs = bl.hypergradient(bl.Problem(plain, outer, init, encode), lam, task, method=bl.Unrolled(), **settings)
    assert torch.allclose(ours.value, theirs.value, rtol=1e-13) and torch.allclose(ours.inner, theirs.inner, rtol=1e-10)
    for name, gradient in theirs.grad.items():
        assert (ours.grad[name] - gradient).norm() <= 1e-11 * gradient.norm(), name


def test_what_it_does_not_know_is_refused():
    example = classifiers()
    problem, lam, task = example.problem, example.lam, example.task
    good = {"dynamics": bl.GradientDescent(0.3), "steps": 3, "method": bl.DualDescent()}

    def refused(match, problem=problem, task=task, **changes):
        with pytest.raises(bl.BilevelError, match=match):
            bl.hypergradient(problem, lam, task, **{**good, **changes})

    refused("write inner=LinearClassifiers", problem=example.without_encode)
    refused("supports gradient descent with numbers", dynamics=bl.HeavyBall(0.3, 0.9))
    refused("supports gradient descent with numbers", dynamics=bl.Adam(0.1))
    refused("supports gradient descent with numbers", dynamics=bl.GradientDescent(torch.tensor(0.1)))
    refused("begins at w_0 = 0", start=torch.ones(2, 7, 3))
    moved = bl.Problem(
        problem.inner, problem.outer, lambda lam: 0 * lam["map"][:2, :, None].expand(2, 7, 3), problem.encode
    )
    refused("begins at w_0 = 0", problem=moved)
    sampler = bl.Problem(problem.inner, problem.outer, problem.init, None)
    encoded = problem.encode(lam, task)
    refused("one batch for all steps", problem=sampler, task=bl.Task(lambda t: encoded.train, encoded.val))
    for label in (-100, 3):
        labels = encoded.train[1].clone()
        labels[0, 0] = label
        wrong = bl.Task((encoded.train[0], labels), encoded.val)
        refused("labels from 0 to 2, and some are others. Use Reverse", problem=sampler, task=wrong)
