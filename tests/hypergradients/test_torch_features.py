"""Parts of torch that a user's functions may use, and that hypergradients must get right: sparse tensors, torch.func,
fused attention, weight normalisation, compiled objectives."""

import threading
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import bilevel as bl
from asking import ask, data, refused, ridge
from bilevel.hypergradients import value_of
from bilevel.testing import central_differences, relative_error

EXACT = [bl.Unrolled(), bl.Reverse(), bl.Reverse(2, group_bytes=0), bl.Forward(), bl.Truncated(100), "auto"]
LAM = torch.tensor([0.1], dtype=torch.float64)


def right(problem, task, *methods, dynamics=None, steps=6):
    """Every method agrees with central differences."""
    settings = {"dynamics": bl.GradientDescent(0.05) if dynamics is None else dynamics, "steps": steps}
    expected = central_differences(lambda lam: value_of(problem, lam, task, **settings), LAM)
    for method in methods or EXACT:
        found = bl.hypergradient(problem, LAM, task, method=method, **settings)
        assert relative_error(found.grad, expected) < 1e-7, method


def squares(w):
    return sum((leaf**2).sum() for leaf in w.values())


def of_module(module, inputs):
    w, apply = bl.functional(module)
    return bl.Problem(
        inner=lambda w, lam, b: (apply(w, b) - 1).pow(2).mean() + lam.exp().sum() * squares(w),
        outer=lambda w, lam, b: (apply(w, b) - 2).pow(2).mean(),
        init=lambda lam: w,
    ), bl.Task(inputs, inputs)


def sparse_data(layout):
    dense = torch.randn(20, 5) * (torch.rand(20, 5) < 0.4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls compressed rows a beta feature
        return dense.to_sparse(layout=layout), dense, torch.randn(20)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.parametrize("where", ["task", "closure"])
def test_a_sparse_design_matrix(layout, where):
    matrix, dense, y = sparse_data(layout)

    def mean_square(w, lam, b):
        return ((matrix if b is None else b[0]) @ w - y).pow(2).mean()

    problem = bl.Problem(
        inner=lambda w, lam, b: mean_square(w, lam, b) + lam.exp().sum() * (w**2).sum(),
        outer=mean_square,
        init=lambda lam: torch.zeros(5),
    )
    task = bl.Task((matrix,), (matrix,)) if where == "task" else bl.Task(None, None)
    right(problem, task, *EXACT, bl.Spectral())
    settings = {"dynamics": bl.GradientDescent(0.05), "steps": 300}
    for method in (bl.Implicit(), bl.Implicit(bl.Direct())):
        found = [
            bl.hypergradient(problem, LAM, data, method=method, **settings).grad
            for data in (task, bl.Task((dense,), (dense,)))
        ]
        assert relative_error(*found) < 1e-9


def test_an_embedding_with_sparse_gradients():
    problem, task = of_module(torch.nn.Embedding(7, 2, sparse=True), torch.randint(0, 7, (4, 3)))
    right(problem, task, *EXACT, bl.Spectral())
    right(problem, task, dynamics=bl.HeavyBall(0.05, 0.9))
    settings = {"dynamics": bl.GradientDescent(0.2), "steps": 400}
    found = [bl.hypergradient(problem, LAM, task, method=m, **settings).grad for m in (bl.Implicit(), bl.Reverse())]
    assert relative_error(*found) < 1e-8


def test_torch_func_in_the_inner_objective():
    def physics(w, lam, x):
        slope = torch.func.vmap(torch.func.grad(lambda x: torch.tanh(x * w[:3]).sum() * w[3] + w[4]))(x)
        return ((slope - x) ** 2).mean() + lam.exp().sum() * (w**2).sum()

    problem = bl.Problem(physics, lambda w, lam, x: (w**2).sum() - w.sum(), lambda lam: torch.linspace(0.1, 0.5, 5))
    right(problem, bl.Task(torch.linspace(0, 1, 8), None))


def test_torch_func_in_a_step():
    def newton(loss, w, state, t):
        return w - 0.5 * torch.linalg.solve(torch.func.hessian(loss)(w), torch.func.grad(loss)(w)), state

    problem = bl.Problem(
        inner=lambda w, lam, x: (w**4).sum() + (x * w - 1).pow(2).sum() + lam.exp().sum() * (w**2).sum(),
        outer=lambda w, lam, x: (w**2).sum() - w.sum(),
        init=lambda lam: torch.linspace(0.1, 0.5, 5),
    )
    right(problem, bl.Task(torch.linspace(0.5, 1, 5), None), dynamics=newton)


def test_attention():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    right(*of_module(layer, torch.randn(2, 4, 8)))


@pytest.mark.parametrize("where", ["before its checks", "during its checks"])
def test_weight_norm_in_first_calls_of_two_threads(where):
    """A call that has begun uses what another one then finds out about the operations of the problem."""
    module = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 1))
    problem, task = of_module(module, torch.randn(5, 3))
    w, answers, call = problem.init(LAM), [], {"dynamics": bl.GradientDescent(0.05), "steps": 6}
    expected = central_differences(lambda lam: value_of(problem, lam, task, **call), LAM)

    def waiting(result, here):
        def function(lam):
            if where == here and threading.current_thread() is threading.main_thread() and not answers:
                thread = threading.Thread(target=ask_for_it)
                thread.start()
                thread.join()
            return result

        return function

    def ask_for_it():
        answers.append(bl.hypergradient(problem, LAM, task, **call).grad)

    problem = replace(problem, init=waiting(w, "during its checks"))
    call["dynamics"] = waiting(call["dynamics"], "before its checks")
    ask_for_it()
    assert len(answers) == 2
    assert max(relative_error(found, expected) for found in answers) < 1e-7


def test_attention_in_the_start_and_in_a_step():
    """Fused attention has a first derivative only, and forward mode takes two of the start."""
    x = torch.randn(1, 2, 4, 8)

    def attend(a):
        return F.scaled_dot_product_attention(x * a, x, x).mean((0, 1, 2))

    def step(loss, w, state, t):
        return w - 0.1 * bl.gradient(loss, w) + 0.1 * attend(w.sum()), state

    problem = bl.Problem(
        inner=lambda w, lam, b: ((w - 1) ** 2).sum() * lam.exp().sum(),
        outer=lambda w, lam, b: (w**3).sum(),
        init=lambda lam: attend(lam),
    )
    right(problem, bl.Task(None, None), dynamics=step)


def test_weight_norm():
    """torch 2.13 has a wrong second derivative of it on CPUs, and is off by tenths."""
    parametrize = torch.nn.utils.parametrizations.weight_norm
    network = torch.nn.Sequential(
        parametrize(torch.nn.Linear(5, 4)), torch.nn.Tanh(), parametrize(torch.nn.Linear(4, 1), dim=1)
    )
    right(*of_module(network, torch.randn(9, 5)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile looks at it
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_a_compiled_outer_objective(backend):
    x, y = torch.randn(20, 5), torch.randn(20)
    problem = bl.Problem(
        inner=lambda w, lam, b: (x @ w - y).pow(2).mean() + lam.exp().sum() * (w**2).sum(),
        outer=torch.compile(
            lambda w, lam, b: (x @ w - y - 1).pow(2).mean() + 0.1 * lam.exp().sum(), backend=backend, dynamic=False
        ),
        init=lambda lam: torch.zeros(5),
    )
    task = bl.Task(None, None)
    right(problem, task, *EXACT, bl.Spectral(), bl.Reverse(1))
    # Learned settings have a graph that all steps share.
    right(problem, task, dynamics=lambda lam: bl.GradientDescent(0.05 * lam.exp()))
    settings = {"dynamics": bl.GradientDescent(0.1), "steps": 300}
    found = [bl.hypergradient(problem, LAM, task, method=m, **settings).grad for m in (bl.Implicit(), bl.Reverse())]
    assert relative_error(*found) < 1e-8


class TestTexts:
    def test_an_exact_method_does_not_advise_another(self):
        problem = bl.Problem(
            inner=lambda w, lam, b: (w["a"] ** 2).sum() + ((w["b"] - lam) ** 2).sum(),
            outer=lambda w, lam, b: w["a"].sum(),
            init=lambda lam: {"a": torch.zeros(3), "b": torch.zeros(3)},
        )
        with refused("Reverse found no path from λ", "does not use", "allow_unused") as said:
            ask(problem)
        assert "Reverse()" not in str(said.value)

    def test_complex_weights(self):
        with refused("complex128", "must be real", "view_as_real"):
            ask(ridge(init=lambda lam: torch.zeros(3, dtype=torch.complex128)))

    def test_complex_numbers_inside_work(self):
        right(
            bl.Problem(
                inner=lambda w, lam, b: (
                    (torch.view_as_complex(w) - 1j).abs().pow(2).sum() + lam.exp().sum() * (w**2).sum()
                ),
                outer=lambda w, lam, b: (torch.view_as_complex(w) - 2).abs().pow(2).sum(),
                init=lambda lam: torch.zeros(3, 2),
            ),
            bl.Task(None, None),
        )

    def test_only_errors_about_shapes_speak_of_shapes(self):
        with refused("inner", "failed", "KeyError") as said:
            ask(ridge(inner=lambda w, lam, b: {}["missing"]))
        assert "must fit" not in str(said.value)
        with refused("inner", "failed", "must fit each other"):
            ask(task=bl.Task((torch.randn(6, 4), torch.randn(6)), None))

    def test_overflow_is_not_called_indefinite(self):
        half = torch.float16
        problem = bl.Problem(
            inner=lambda w, lam, b: 2e4 * (w**2).sum() + (w * lam.exp()).sum(),
            outer=lambda w, lam, b: 500 * w.sum(),
            init=lambda lam: torch.zeros(3, dtype=half),
        )
        with refused("float16", "float32") as said:
            ask(problem, torch.zeros(3, dtype=half), method=bl.Implicit(), dynamics=bl.GradientDescent(1e-6))
        assert "definite" not in str(said.value)


class TestGradientsInW:
    """Objectives that contain a gradient in w, by torch.autograd.grad: gradient matching, gradient penalties."""

    @staticmethod
    def problem(slope, where):
        def loss(w, b):
            return (b[0] @ w - b[1]).square().mean()

        def with_slope(w, b):
            return loss(w, b) + 0.01 * slope(lambda w: loss(w, b), w).square().sum()

        parts = {"inner": loss, "outer": loss, where: with_slope}
        return ridge(
            inner=lambda w, lam, b: parts["inner"](w, b) + (lam.exp() * w**2).sum(),
            outer=lambda w, lam, b: parts["outer"](w, b),
        )

    @staticmethod
    def by_autograd(loss, w):
        return torch.autograd.grad(loss(w), w, create_graph=True)[0]

    @staticmethod
    def by_func(loss, w):
        return torch.func.grad(loss)(w)

    @pytest.mark.parametrize("where", ["inner", "outer"])
    @pytest.mark.parametrize(
        "method", [*EXACT, bl.Implicit(), bl.F2SA(), bl.FiniteDifference(), bl.ZeroOrder()], ids=str
    )
    def test_every_method(self, where, method):
        found, expected = (
            ask(self.problem(slope, where), method=method, steps=40) for slope in (self.by_autograd, self.by_func)
        )
        assert relative_error(found.grad, expected.grad) < 1e-8 and found.value == pytest.approx(float(expected.value))

    @pytest.mark.parametrize("where", ["inner", "outer"])
    def test_other_calls(self, where):
        one, two = (self.problem(slope, where) for slope in (self.by_autograd, self.by_func))
        lam, task, run = torch.zeros(3), bl.Task(data(), data(4)), {"dynamics": bl.GradientDescent(0.1), "steps": 5}
        assert torch.allclose(bl.objective(one, lam, task, **run), bl.objective(two, lam, task, **run))
        found, expected = (
            torch.autograd.functional.hessian(lambda lam, p=p: bl.objective(p, lam, task, **run), lam)
            for p in (one, two)
        )
        assert relative_error(found, expected) < 1e-10
        assert bl.certify(one, lam, task, **run).value_gap == pytest.approx(bl.certify(two, lam, task, **run).value_gap)
        with refused("diverged", error=bl.DivergenceError):
            ask(one, dynamics=bl.GradientDescent(1e30), steps=50)
        for algorithm in (bl.SOBA(), bl.BOME()):
            found, expected = (bl.solve(p, lam, task, algorithm=algorithm, iterations=3).outer for p in (one, two))
            assert relative_error(found, expected) < 1e-8
