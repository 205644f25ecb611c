"""K-fold cross-validation as a bilevel problem: one after another, batched, stochastic."""

import pytest
import torch

import bilevel as bl
from bilevel.testing import relative_error

PROBLEM = bl.Problem(
    inner=lambda w, lam, b: ((b[0] @ w["a"] + w["b"] - b[1]) ** 2).mean() + (lam.exp() * w["a"] ** 2).sum(),
    outer=lambda w, lam, b: ((b[0] @ w["a"] + w["b"] - b[1]) ** 2).mean(),
    init=lambda lam: {"a": torch.zeros(4), "b": torch.zeros(())},
)
LAM = torch.tensor([-1.0, 0.0, -0.5, 0.3])


def data(n):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, 4, generator=generator)
    return x, x @ torch.tensor([1.0, -2.0, 0.0, 0.0]) + 0.3 * torch.randn(n, generator=generator)


@pytest.mark.parametrize(("n", "folds"), [(20, 5), (22, 5), (11, None)], ids=["even", "uneven", "leave-one-out"])
@pytest.mark.parametrize("dynamics", [bl.GradientDescent(0.1), bl.Adam(0.1)], ids=lambda d: type(d).__name__)
def test_batched_equals_one_after_another_to_rounding(n, folds, dynamics):
    cv = bl.CrossValidation(data(n), folds)
    settings = {"dynamics": dynamics, "steps": 12}
    sequential = bl.hypergradient(PROBLEM, LAM, cv.tasks, **settings)
    problem, task = cv.batched(PROBLEM)
    batched = bl.hypergradient(problem, LAM, task, **settings)
    assert torch.allclose(batched.value, sequential.value, rtol=1e-12)
    assert relative_error(batched.grad, sequential.grad) < 1e-12
    assert batched.inner["a"].shape == (folds or n, 4)


def test_sampled_folds_agree_in_expectation():
    cv = bl.CrossValidation(data(20), 5)
    settings = {"dynamics": bl.GradientDescent(0.1), "steps": 12}
    full = bl.hypergradient(PROBLEM, LAM, cv.tasks, **settings)
    draw = cv.sample(2, seed=1)
    # Every pair of folds is equally likely: the mean over all pairs is the mean over folds, exactly.
    counts = torch.zeros(5)
    for k in range(1000):
        for task in draw(k):
            counts[next(j for j, fold in enumerate(cv.tasks) if fold is task)] += 1
    assert float((counts / 400 - 1).abs().max()) < 0.15
    stochastic = torch.stack([bl.hypergradient(PROBLEM, LAM, draw(k), **settings).grad for k in range(60)])
    spread = stochastic.std(0) / 60**0.5
    assert bool(((stochastic.mean(0) - full.grad).abs() < 4 * spread + 1e-12).all())
    assert [id(t) for t in draw(7)] == [id(t) for t in draw(7)], "a pure function of k"


def test_folds_partition_the_data():
    x, y = data(22)
    cv = bl.CrossValidation((x, y), 5)
    held = torch.cat([task.val[1] for task in cv.tasks])
    assert torch.equal(held.sort().values, y.sort().values)
    for task in cv.tasks:
        assert len(task.train[1]) + len(task.val[1]) == 22
        assert not set(task.train[1].tolist()) & set(task.val[1].tolist())


def test_the_three_ways_tune_to_the_same_place():
    cv = bl.CrossValidation(data(20), 5)
    settings = {"dynamics": bl.GradientDescent(0.2), "steps": 30, "iterations": 25}
    optimizer = lambda p: torch.optim.Adam(p, lr=0.15)  # noqa: E731
    one = bl.solve(PROBLEM, LAM, cv.tasks, optimizer=optimizer, **settings)
    problem, task = cv.batched(PROBLEM)
    together = bl.solve(problem, LAM, task, optimizer=optimizer, **settings)
    assert relative_error(together.outer, one.outer) < 1e-8
    sampled = bl.solve(PROBLEM, LAM, cv.sample(2), optimizer=optimizer, **settings)
    reached = float(
        bl.hypergradient(PROBLEM, sampled.outer, cv.tasks, dynamics=bl.GradientDescent(0.2), steps=30).value
    )
    assert reached < one.history["value"][0] and reached < 1.1 * one.value


def test_what_cannot_be_split_is_refused():
    with pytest.raises(bl.BilevelError, match="2 ≤ folds ≤ 6"):
        _ = bl.CrossValidation(data(6), 7).tasks
    with pytest.raises(bl.BilevelError, match="first axis"):
        _ = bl.CrossValidation((torch.zeros(6, 2), torch.zeros(5))).tasks
    with pytest.raises(bl.BilevelError, match="folds"):
        bl.CrossValidation(data(6), 3).sample(4)
    with pytest.raises(bl.BilevelError, match="both need one"):
        bl.holdout(data(6), fraction=0.01)


def test_a_group_penalty_does_not_fit_stacked_weights():
    problem = bl.Problem(
        lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean() + lam * (w**2).sum(),
        lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean(),
        lambda lam: torch.zeros(4),
    )
    stacked, task = bl.CrossValidation(data(20), 5).batched(problem)
    with pytest.raises(bl.BilevelError, match="GroupL2"):
        bl.hypergradient(
            stacked, torch.tensor(0.1), task, dynamics=bl.ISTA(0.1, bl.GroupL2(0.1, (0, 0, 1, 1))), steps=2
        )


def test_holdout_and_minibatches_are_functions_of_their_seed():
    task = bl.holdout(data(10), 0.3, seed=4)
    again = bl.holdout(data(10), 0.3, seed=4)
    assert torch.equal(task.val[0], again.val[0]) and len(task.val[1]) == 3
    batches = bl.Minibatches(data(10), size=4, seed=2)
    epoch = torch.cat([batches(t)[1] for t in range(1, 6)])
    assert torch.equal(batches(3)[0], batches(3)[0])
    assert len(epoch[:10].unique()) == 10 and len(epoch[10:].unique()) == 10, (
        "every example once an epoch, also across uneven batches"
    )
    with pytest.raises(bl.BilevelError, match="size"):
        bl.Minibatches(data(10), size=11)(1)


def test_encoded_minibatches_are_encoded_once():
    x, y = data(20)
    calls = []

    def encode(lam, task):
        calls.append(1)
        features = lambda batch: (torch.tanh(batch[0] @ lam), batch[1])  # noqa: E731
        train = bl.Minibatches(features(task.train.data), task.train.size, task.train.seed)
        return bl.Task(train, features(task.val))

    objective = lambda w, b: ((b[0] @ w - b[1]) ** 2).mean() + 0.1 * (w**2).sum()  # noqa: E731
    start = lambda lam: torch.zeros(3)  # noqa: E731
    # The comparison of derivatives with differences, at the first call with a problem, calls encode too.
    plain = lambda w, lam, b: objective(w, b)  # noqa: E731
    encoded = bl.Problem(plain, plain, start, encode, check_derivatives=False)
    written = bl.Problem(
        lambda w, lam, b: objective(w, (torch.tanh(b[0] @ lam), b[1])),
        lambda w, lam, b: objective(w, (torch.tanh(b[0] @ lam), b[1])),
        start,
    )
    lam = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    task = bl.Task(bl.Minibatches((x[:14], y[:14]), 5), (x[14:], y[14:]))
    for method in (bl.Unrolled(), bl.Reverse(), bl.Forward()):
        expected = bl.hypergradient(written, lam, task, dynamics=bl.GradientDescent(0.1), steps=8, method=method).grad
        calls.clear()
        found = bl.hypergradient(encoded, lam, task, dynamics=bl.GradientDescent(0.1), steps=8, method=method).grad
        assert len(calls) == 1 and relative_error(found, expected) < 1e-12


def test_an_encode_that_hides_its_tensors_in_a_function_is_refused():
    x, y = data(20)

    def encode(lam, task):
        features = x @ lam
        return bl.Task(lambda t: (features[t : t + 5], y[t : t + 5]), (x @ lam, y))

    problem = bl.Problem(
        lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean(),
        lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean(),
        lambda lam: torch.zeros(3),
        encode,
    )
    with pytest.raises(bl.BilevelError, match="Minibatches"):
        bl.hypergradient(problem, torch.randn(4, 3), bl.Task((x, y), (x, y)), dynamics=bl.GradientDescent(0.1), steps=3)


@pytest.mark.parametrize("rows", [19, 21])
def test_minibatches_of_data_of_different_lengths_are_refused(rows):
    x, y = data(20)[0], data(rows)[1]
    with pytest.raises(bl.BilevelError, match="one entry per example along its first axis"):
        bl.Minibatches((x, y), size=4)(1)


def test_what_is_no_number_of_examples_or_folds_is_refused():
    rows = torch.arange(9.0)
    for size in (2.5, "2", 0, 10):
        with pytest.raises(bl.BilevelError, match=r"Minibatches\(size=.*pass an int"):
            bl.Minibatches(rows, size)(1)
    for folds in (2.5, "3", 1, 10):
        with pytest.raises(bl.BilevelError, match="pass an int, 2 ≤ folds ≤ 9"):
            bl.CrossValidation((rows,), folds).tasks  # noqa: B018
