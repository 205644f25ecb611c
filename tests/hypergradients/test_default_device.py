"""Data on another device than torch's default one, on which the library then must not make tensors of its own. The meta
device stands for a GPU."""

import pytest
import torch

import bilevel as bl
from asking import data, ridge
from bilevel.testing import relative_error
from bilevel.tuning import ExampleWeights, LearningRate, WeightDecay

RUN = {"dynamics": bl.GradientDescent(0.1), "steps": 6}
TASK = bl.Task(data(12), data(4))
LAM = torch.tensor([0.1, -0.3, 0.2])


def problem():
    """Its checks are not remembered from another call."""
    return ridge(init=torch.zeros_like)


def gradient(task=TASK, **changes):
    return bl.hypergradient(problem(), LAM, task, **{**RUN, **changes}).grad


def on_tasks(tasks):
    return lambda: gradient(tasks())


def solved(**settings):
    run = {} if settings.get("algorithm", bl.Descent()).moves_w else RUN
    return bl.solve(problem(), LAM, TASK, iterations=3, **run, **settings).outer


def hessian():
    return torch.autograd.functional.hessian(lambda lam: bl.objective(problem(), lam, TASK, **RUN), LAM)


def certified():
    certificate = bl.certify(problem(), LAM, TASK, **RUN)
    return LAM * certificate.inner_distance


def tuned():
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = torch.nn.Linear(3, 1)
    pairs = [(x, y[:, None]) for x, y in (TASK.train, TASK.val)]
    roles = [WeightDecay(), LearningRate(), ExampleWeights()]
    result = bl.tune(model, torch.nn.functional.mse_loss, roles, *pairs, steps=4, iterations=2)
    return torch.as_tensor(result.values["weight_decay"], device="cpu")


def fitted():
    estimators = pytest.importorskip("bilevel.estimators")
    x, y = (values.numpy() for values in TASK.train)
    model = estimators.BilevelElasticNet(cv=3).fit(x, y)
    return LAM * model.certificate_.inner_distance + torch.as_tensor(model.coef_, device="cpu")


CALLS = {
    "Reverse": gradient,
    "Forward": lambda: gradient(method=bl.Forward()),
    "Spectral": lambda: gradient(method=bl.Spectral()),
    "Reversible": lambda: gradient(method=bl.Reversible(), dynamics=bl.HeavyBall(0.05, 0.5)),
    "Implicit": lambda: gradient(method=bl.Implicit(newton=1e-10)),
    "Implicit by a preconditioned solver": lambda: gradient(method=bl.Implicit(bl.CG(preconditioner=bl.Nystrom(2)))),
    "ZeroOrder": lambda: gradient(method=bl.ZeroOrder()),
    "F2SA": lambda: gradient(method=bl.F2SA()),
    "a penalty": lambda: gradient(dynamics=bl.Until(bl.FISTA(0.1, bl.L1(0.05)), gap=1e-9)),
    "a learned step size": lambda: gradient(dynamics=lambda lam: bl.HeavyBall(0.1 * lam[0].exp(), 0.5)),
    "minibatches": on_tasks(lambda: bl.Task(bl.Minibatches(TASK.train, 5), TASK.val)),
    "fixed batches": on_tasks(lambda: bl.Task(bl.FixedBatches(TASK.train, 4), TASK.val)),
    "folds": on_tasks(lambda: bl.CrossValidation(TASK.train, folds=3).tasks),
    "a hessian": hessian,
    "a certificate": certified,
    "Descent": lambda: solved(constraint=bl.Box(torch.full((3,), -0.2, device="cpu"), 0.1)),
    "SPG": lambda: solved(algorithm=bl.SPG(), constraint=bl.Ball(0.3)),
    "SOBA": lambda: solved(algorithm=bl.SOBA()),
    "SABA": lambda: solved(algorithm=bl.SABA()),
    "BOME": lambda: solved(algorithm=bl.BOME()),
    "tune": tuned,
    "an estimator": fitted,
}


@pytest.mark.parametrize("name", CALLS)
def test_data_on_another_device_than_the_default_one(name):
    expected = CALLS[name]()
    with torch.device("meta"):
        found = CALLS[name]()
    assert relative_error(found, expected) < 1e-12


def test_divergence_and_checkpoints(tmp_path):
    with torch.device("meta"):
        with pytest.raises(bl.DivergenceError, match="lies above the limit"):
            gradient(dynamics=bl.GradientDescent(1e30), steps=50)
        solved(checkpoint=tmp_path, checkpoint_every=1)
        again = solved(checkpoint=tmp_path, checkpoint_every=1)
    assert torch.equal(again, solved())
