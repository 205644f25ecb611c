"""Functions of the user's that torch.compile has compiled: torch differentiates them once, hypergradients twice."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import bilevel as bl
from bilevel.testing import relative_error

# torch.compile looks at the .grad of tensors that are no leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

X, Y = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)), torch.linspace(-1, 1, 20)
TASK = bl.Task((X[:10], Y[:10]), (X[10:], Y[10:]))
LAM = {"penalty": torch.tensor(-1.0), "scale": torch.tensor(0.8)}
SETTINGS = {"dynamics": bl.GradientDescent(0.3), "steps": 6}


def fit(w, scale, batch):
    return torch.log(torch.cosh(scale * (batch[0] @ w) - batch[1])).mean()


def inner(w, lam, batch):
    return fit(w, lam["scale"], batch) + lam["penalty"].exp() * (w**2).sum()


def outer(w, lam, batch):
    return fit(w, 1.0, batch) + 0.1 * lam["scale"] ** 2


def init(lam):
    return torch.zeros(3)


def start(lam):
    return 0.1 * lam["scale"].sin() * torch.ones(3)


def encode(lam, task):
    return bl.Task((torch.tanh(lam["scale"] * task.train[0]), task.train[1]), task.val)


def compiled(function, backend):
    torch._dynamo.reset()
    return torch.compile(function, backend=backend)


ALL = [bl.Unrolled(), bl.Reverse(2, group_bytes=0), bl.Forward(), bl.Truncated(3), bl.Implicit(bl.Direct()), "auto"]
# What is compiled is the same for every method, and what is refused or run eagerly is the same for every backend.
# Inductor, which starts a C++ compiler, has this objective here, and an outer one in `test_torch_features.py`.
CASES = [(bl.Reverse(), "inductor"), (bl.Reverse(), "eager"), *((method, "aot_eager") for method in ALL)]


@pytest.mark.parametrize("method, backend", CASES, ids=repr)
def test_a_compiled_inner_objective(method, backend):
    expected = bl.hypergradient(bl.Problem(inner, outer, init), LAM, TASK, method=method, **SETTINGS)
    whole = compiled(inner, backend)
    part = compiled(fit, backend)
    for each in (
        whole,
        # A compiled part whose second derivative would be missing from the sum without a word.
        lambda w, lam, batch: part(w, lam["scale"], batch) + lam["penalty"].exp() * (w**2).sum(),
    ):
        found = bl.hypergradient(bl.Problem(each, outer, init), LAM, TASK, method=method, **SETTINGS)
        assert relative_error(found.value, expected.value) < 1e-10
        assert relative_error(found.grad, expected.grad) < 1e-10


@pytest.mark.parametrize("method", [bl.Reverse(), bl.Unrolled(), bl.Forward(), bl.Implicit(bl.Direct())], ids=repr)
def test_a_compiled_outer_objective_start_and_encoder(method):
    begin = init if isinstance(method, bl.Implicit) else start
    functions = (outer, begin) if isinstance(method, bl.Forward) else (outer, begin, encode)
    expected = bl.hypergradient(bl.Problem(inner, *functions), LAM, TASK, method=method, **SETTINGS)
    torch._dynamo.reset()
    parts = [torch.compile(each, backend="aot_eager") for each in functions]
    found = bl.hypergradient(bl.Problem(inner, *parts), LAM, TASK, method=method, **SETTINGS)
    assert relative_error(found.value, expected.value) < 1e-10
    assert relative_error(found.grad, expected.grad) < 1e-10


def test_a_compiled_module_and_second_derivatives():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    w, apply = bl.functional(model)
    fast = compiled(model, "aot_eager")

    def loss(predict):
        return lambda w, lam, b: (
            ((predict(w, b[0])[:, 0] - b[1]) ** 2).mean() + lam.exp() * w["0.weight"].square().sum()
        )

    def hessian(predict):
        problem = bl.Problem(loss(predict), loss(predict), lambda lam: w)
        lam = torch.tensor(-2.0)
        return torch.autograd.functional.hessian(lambda lam: bl.objective(problem, lam, TASK, **SETTINGS), lam)

    def call(values, x):
        return torch.func.functional_call(fast, {f"_orig_mod.{k}": v for k, v in values.items()}, (x,))

    assert relative_error(hessian(call), hessian(apply)) < 1e-9


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_tuning_with_a_compiled_loss_or_model(backend):
    """The loss of a classifier keeps buffers that compiled code gives back after one pass."""

    def network():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))

    labels = (X + 0.3 * Y[:, None]).argmax(1)
    train, val = (DataLoader(TensorDataset(X[part], labels[part]), batch_size=5) for part in (slice(10), slice(10, 20)))

    def tuned(model, loss):
        settings = {"steps": 6, "iterations": 3, "lr": 0.3, "progress": False}
        return bl.tune(model, loss, [bl.tuning.WeightDecay(0.01)], train, val, **settings).values["weight_decay"]

    expected = tuned(network(), torch.nn.functional.cross_entropy)
    assert tuned(network(), compiled(torch.nn.functional.cross_entropy, backend)) == pytest.approx(expected, rel=1e-10)
    assert tuned(compiled(network(), backend), torch.nn.functional.cross_entropy) == pytest.approx(expected, rel=1e-10)


def test_a_second_derivative_of_what_is_compiled_in_the_outer_objective():
    problems = [bl.Problem(inner, each, init) for each in (outer, compiled(outer, "aot_eager"))]
    lam = {name: leaf.clone().requires_grad_() for name, leaf in LAM.items()}

    def product(problem):
        value = bl.objective(problem, lam, TASK, **SETTINGS)
        slopes = torch.autograd.grad(value, list(lam.values()), create_graph=True)
        return torch.autograd.grad(sum(slope**2 for slope in slopes), list(lam.values()))

    assert relative_error(product(problems[1]), product(problems[0])) < 1e-10


def test_what_compiled_functions_exclude():
    problem = bl.Problem(compiled(inner, "aot_eager"), outer, init)
    with pytest.raises(bl.BilevelError, match=r"could not be compiled.*hypergradient\(\.\.\.\) runs the same method"):
        bl.compile(problem, LAM, TASK, method=bl.Reverse(), **SETTINGS)
    problem = bl.Problem(inner, outer, init, compiled(encode, "aot_eager"))
    with pytest.raises(bl.BilevelError, match=r"encode was compiled by torch\.compile.*Use Reverse\(\)"):
        bl.hypergradient(problem, LAM, TASK, method=bl.Forward(), **SETTINGS)
