"""The check of derivatives against differences: what it must catch, and what it must leave alone."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F

import bilevel as bl
from asking import data, refused, ridge
from bilevel.hypergradients import value_of
from bilevel.testing import central_differences, relative_error

TASK = bl.Task(data(), data(4))
SECOND_ORDER = [
    *(bl.Unrolled(), bl.Reverse(), bl.Forward(), bl.Truncated(2), bl.Implicit(), bl.Implicit(condition="fixed-point")),
    "auto",
]


class Once(torch.autograd.Function):
    """x² whose derivative 2x is a constant for autograd."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, slope):
        return slope * 2 * ctx.saved_tensors[0]


class Square(torch.autograd.Function):
    """x² with derivatives of all orders."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, slope):
        return slope * 2 * ctx.saved_tensors[0]


class Reversal(torch.autograd.Function):
    """The gradient reversal of adversarial training: no gradient of anything, but one that has a derivative."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, slope):
        return -slope


def with_square(square, **changes):
    return ridge(
        inner=lambda w, lam, b: square(b[0] @ w - b[1]).mean() + (lam.exp() * w**2).sum(),
        **changes,
    )


def call(problem, lam=None, task=TASK, method=None, steps=4, dynamics=None, **settings):
    lam = torch.zeros(3) if lam is None else lam
    dynamics = bl.GradientDescent(0.05) if dynamics is None else dynamics
    return bl.hypergradient(problem, lam, task, dynamics=dynamics, steps=steps, method=method, **settings)


def right(problem, lam, task=TASK, tolerance=1e-6, **settings):
    """Not refused, and right."""
    expected = central_differences(lambda lam: value_of(problem, lam, task, **settings), lam)
    found = bl.hypergradient(problem, lam, task, method=bl.Reverse(), **settings)
    assert relative_error(found.grad, expected) < tolerance


class TestRefused:
    @pytest.mark.parametrize("method", SECOND_ORDER, ids=str)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
    def test_once_differentiable(self, method, dtype):
        task = bl.Task(data(dtype=dtype), data(4, dtype=dtype))
        problem = with_square(Once.apply, init=lambda lam: torch.zeros(3, dtype=dtype))
        with refused("inner", "gradient", "with respect to w", "autograd", "differences", "check_derivatives=False"):
            call(problem, torch.zeros(3, dtype=dtype), task, method)
        good = with_square(Square.apply, init=lambda lam: torch.zeros(3, dtype=dtype))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about residuals in low precision
            assert call(good, torch.zeros(3, dtype=dtype), task, method).grad.dtype == dtype

    def test_at_the_border_of_the_domain_of_lam(self):
        """The comparison fails at one of its points, where λ is negative, and is made at the others."""

        def inner(w, lam, b):
            if bool((lam < 0).any()):
                raise ValueError("λ must not be negative")
            return Once.apply(b[0] @ w - b[1]).mean() + (lam * w**2).sum()

        with refused("inner", "with respect to w", "autograd", "differences"):
            call(ridge(inner=inner), torch.zeros(3))

    def test_an_operation_that_torch_differentiates_once(self):
        bag = torch.nn.functional.embedding_bag
        rows = torch.tensor([[0, 1], [2, 0]])
        problem = bl.Problem(
            inner=lambda w, lam, b: ((bag(rows, w, mode="sum") - 1) ** 2).sum() + lam.exp() * (w**2).sum(),
            outer=lambda w, lam, b: (w**2).sum(),
            init=lambda lam: torch.ones(3, 2),
        )
        with refused("inner has no second derivative", "embedding_bag"):
            call(problem, torch.zeros(()), bl.Task(None, None))

    def test_the_mixed_derivative_alone(self):
        """Here the Hessian is right, and λ['b'] matters a thousandth of λ['a']."""

        def inner(w, lam, b):
            return (
                ((w - lam["a"]) ** 2).sum()
                + 1e-3 * (w * Once.apply(lam["b"]).detach()).sum()
                + (w * lam["b"]).sum() * 1e-3
            )

        problem = ridge(inner=inner)
        with refused("inner", r"λ\['b'\]"):
            call(problem, {"a": torch.ones(3), "b": torch.ones(3)})

    def test_a_stopped_gradient(self):
        with refused("inner", "detach"):
            call(ridge(inner=lambda w, lam, b: ((b[0] @ w - (b[0] @ w).detach() ** 2) ** 2).mean() + (lam * w).sum()))

    def test_a_part_of_a_deep_function(self):
        network = torch.nn.Sequential(
            torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
        )
        w, apply = bl.functional(network)

        class Hidden(torch.nn.Module):
            def forward(self, x):
                return Once.apply(x)

        network[1] = Hidden()
        problem = bl.Problem(
            inner=lambda w, lam, b: ((apply(w, b[0])[:, 0] - b[1]) ** 2).mean() + lam.exp() * (w["0.bias"] ** 2).sum(),
            outer=lambda w, lam, b: ((apply(w, b[0])[:, 0] - b[1]) ** 2).mean(),
            init=lambda lam: w,
        )
        with refused("inner", "derivative"):
            call(problem, torch.zeros(()))

    def test_what_encode_made(self):
        problem = bl.Problem(
            inner=lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean() + (w * b[0].detach().exp().mean(0)).sum(),
            outer=lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean(),
            init=lambda lam: torch.zeros(3),
            encode=lambda lam, task: bl.Task((task.train[0] * lam, task.train[1]), task.val),
        )
        with refused("inner", "the encoded data"):
            call(problem, torch.ones(3))

    def test_a_reversed_gradient(self):
        """Autograd takes the wrong sign a second time, where the derivative of the function itself is asked for."""

        def inner(w, lam, b):
            hidden = torch.tanh(b[0] @ w["a"])
            adversary = torch.sin(Reversal.apply(hidden) * w["b"]).mean()
            return ((hidden - b[1]) ** 2).mean() + adversary + lam.exp() * (w["b"] ** 2 + (w["a"] ** 2).sum())

        start = {"a": torch.ones(3), "b": torch.tensor(0.5)}
        problem = bl.Problem(inner, lambda w, lam, b: ((b[0] @ w["a"]) ** 2).mean(), lambda lam: start)
        with refused("inner", "derivative"):
            call(problem, torch.tensor(-1.0))

    @pytest.mark.parametrize("where", ["w", "λ"])
    def test_the_outer_objective(self, where):
        outers = {
            "w": lambda w, lam, b: (b[0] @ w - b[1]).pow(2).mean() + (w.detach() ** 2).sum(),
            "λ": lambda w, lam, b: (b[0] @ w - b[1]).pow(2).mean() + (lam.detach() * lam).sum(),
        }
        for method in (bl.Reverse(), bl.FirstOrder()):
            if where == "w" and isinstance(method, bl.FirstOrder):
                continue
            with refused("outer", f"with respect to {where}", "values"):
                call(ridge(outer=outers[where]), torch.ones(3), method=method)


class TestForward:
    """Forward mode differentiates its way back in the cotangent, which takes two derivatives where reverse mode takes
    one."""

    @pytest.mark.parametrize("part", ["init", "dynamics", "encode"])
    def test_once_differentiable(self, part):
        def step(loss, w, state, t):
            return w - 0.05 * bl.gradient(loss, w) + 1e-3 * Once.apply(w), state

        changes = {
            "init": {"init": Once.apply},
            "dynamics": {},
            "encode": {"encode": lambda lam, task: bl.Task((task.train[0] * Once.apply(lam), task.train[1]), task.val)},
        }
        problem = ridge(**changes[part])
        settings = {"dynamics": step if part == "dynamics" else bl.GradientDescent(0.05), "steps": 3}
        right(problem, torch.ones(3), **settings)
        with refused("Forward", part, "Reverse"):
            bl.hypergradient(problem, torch.ones(3), TASK, method=bl.Forward(), **settings)


class TestSwitchedOff:
    def test_by_the_problem(self):
        found = call(with_square(Once.apply, check_derivatives=False))
        assert bool(torch.isfinite(found.grad).all())

    def test_a_straight_through_estimator(self):
        def rounded(w):
            return w + (torch.round(w * 4) / 4 - w).detach()

        parts = {"inner": lambda w, lam, b: ((b[0] @ rounded(w) - b[1]) ** 2).mean() + (lam.exp() * w**2).sum()}
        with refused("straight-through"):
            call(ridge(**parts))
        call(ridge(**parts, check_derivatives=False))

    def test_by_tune(self):
        """Quantised weights, as they are trained: rounded on the way forward, not on the way back."""

        class Rounded(torch.nn.Linear):
            def forward(self, x):
                return F.linear(x, self.weight + (torch.round(self.weight * 4) / 4 - self.weight).detach())

        arguments = (Rounded(3, 1, bias=False), F.mse_loss, bl.tuning.WeightDecay(0.1))
        sets = [(x, y[:, None]) for x, y in (data(), data(4))]
        with refused("tune"):
            bl.tune(*arguments, *sets, steps=3, iterations=1, progress=False)
        bl.tune(*arguments, *sets, steps=3, iterations=1, progress=False, check_derivatives=False)

    def test_by_folds(self):
        tasks = bl.CrossValidation(data(12), folds=3)
        stacked, _ = tasks.batched(ridge(check_derivatives=False))
        assert not stacked.check_derivatives

    def test_copies_remember_it(self):
        assert copy.copy(ridge(check_derivatives=False)).check_derivatives is False

    def test_first_order_needs_no_second_derivative(self):
        problem = with_square(Once.apply, outer=lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean() + (lam**2).sum())
        assert relative_error(call(problem, torch.ones(3), method=bl.FirstOrder()).grad, 2 * torch.ones(3)) < 1e-12

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
    def test_values_and_first_order_of_a_compiled_inner_objective(self):
        plain = ridge(outer=lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean() + (lam**2).sum())
        problem = bl.Problem(torch.compile(plain.inner, dynamic=False), plain.outer, plain.init)
        settings = {"dynamics": bl.GradientDescent(0.05), "steps": 4}
        found, expected = (value_of(p, torch.ones(3), TASK, **settings) for p in (problem, plain))
        assert relative_error(found, expected) < 1e-12
        assert relative_error(call(problem, torch.ones(3), method=bl.FirstOrder()).grad, 2 * torch.ones(3)) < 1e-12


def relu_network(dtype, inputs, hidden=16, depth=2):
    layers = [torch.nn.Linear(inputs, hidden), torch.nn.ReLU()]
    for _ in range(depth - 1):
        layers += [torch.nn.Linear(hidden, hidden), torch.nn.ReLU()]
    network = torch.nn.Sequential(*layers, torch.nn.Linear(hidden, 1)).to(dtype)
    for layer in network:
        if isinstance(layer, torch.nn.Linear):
            torch.nn.init.zeros_(layer.bias)
    return bl.functional(network)


class TestAllowed:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("samples", [5, 2000])
    def test_a_relu_network(self, dtype, samples):
        """Thousands of kinks; some inputs are zero, so that units sit exactly on one."""
        w, apply = relu_network(dtype, 4)
        x = torch.randn(samples, 4, dtype=dtype) * (torch.rand(samples, 4) < 0.5)
        x[0] = 0
        y = torch.randn(samples, dtype=dtype)
        problem = bl.Problem(
            inner=lambda w, lam, b: (
                ((apply(w, x)[:, 0] - y) ** 2).mean() + lam.exp() * sum((v**2).sum() for v in w.values())
            ),
            outer=lambda w, lam, b: ((apply(w, x)[:, 0] - y) ** 2).mean(),
            init=lambda lam: w,
        )
        call(problem, torch.zeros((), dtype=dtype), bl.Task(None, None))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    @pytest.mark.parametrize("scale", [1e-8, 1e-3, 1.0, 1e4, 1e9])
    @pytest.mark.parametrize(
        "loss",
        [
            lambda r: r.abs().mean(),
            lambda r: F.huber_loss(r, torch.zeros_like(r), delta=0.1),
            lambda r: torch.relu(1 - r).mean(),
            lambda r: torch.relu(1 - r).pow(2).mean(),
            lambda r: r.max(),
            lambda r: torch.logsumexp(r, 0),
            lambda r: r.clamp(-1, 1).sum(),
        ],
        ids=["abs", "huber", "hinge", "squared-hinge", "max", "logsumexp", "clamp"],
    )
    def test_kinks_and_scales(self, loss, scale, dtype):
        """The data are in other units, so w is tiny or huge; w_0 = 0 is a kink of the penalty."""
        x, y = torch.randn(500, 3, dtype=dtype), torch.randn(500, dtype=dtype)
        problem = bl.Problem(
            inner=lambda w, lam, b: loss(x @ w / scale - y) + lam.exp() * (w / scale).abs().sum(),
            outer=lambda w, lam, b: ((x @ w / scale - y) ** 2).mean(),
            init=lambda lam: torch.zeros(3, dtype=dtype),
        )
        call(problem, torch.zeros((), dtype=dtype), bl.Task(None, None), dynamics=bl.GradientDescent(0.1 * scale**2))

    @pytest.mark.parametrize("value", [0.0, 1.0])
    def test_lam_on_the_border_of_its_domain(self, value):
        lam = torch.full((3,), value)
        for use in (torch.relu, torch.abs, lambda x: x.clamp(0, 1), lambda x: (x + 1e-300).sqrt()):
            call(ridge(inner=lambda w, lam, b, use=use: ((b[0] @ w - b[1]) ** 2).mean() + (use(lam) * w**2).sum()), lam)

    def test_probabilities_that_torch_validates(self):
        """A moved λ is no distribution, so that no difference can be taken and nothing is refused."""

        def inner(w, lam, b):
            chances = torch.distributions.Categorical(probs=lam, validate_args=True).probs
            return ((w - 1) ** 2 * lam).sum() + chances.log().sum() * (w**2).sum()

        call(ridge(inner=inner), torch.ones(3) / 3)

    def test_weights_that_must_be_positive(self):
        problem = ridge(
            inner=lambda w, lam, b: (w.log() * lam.softmax(0)).sum() ** 2 + (w**2).sum(),
            init=lambda lam: torch.tensor([1e-3, 0.5, 2.0]),
        )
        right(problem, torch.zeros(3), dynamics=bl.GradientDescent(1e-7), steps=3)

    def test_symmetric_matrices(self):
        """The derivatives of a Cholesky factor hold for symmetric moves only."""
        x = torch.randn(20, 3)

        def inner(w, lam, b):
            return (
                -2 * torch.linalg.cholesky(w).diagonal().log().sum()
                + (w * (x.T @ x / 20)).sum()
                + lam.exp() * (w**2).sum()
            )

        problem = bl.Problem(inner, lambda w, lam, b: (w**2).sum(), lambda lam: torch.eye(3))
        right(problem, torch.zeros(()), bl.Task(None, None), dynamics=bl.GradientDescent(0.02), steps=3)

    def test_max_pooling_dropout_and_batch_norm(self):
        network = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3, padding=1),
            torch.nn.BatchNorm2d(4),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(36, 3),
        )
        w, apply = bl.functional(network)
        images, labels = torch.randn(8, 1, 6, 6).clamp(min=0), torch.arange(8) % 3

        def inner(w, lam, t):
            generator = torch.Generator().manual_seed(t)
            kept = (torch.rand(images.shape, generator=generator) < 0.8).double()
            return F.cross_entropy(apply(w, images * kept), labels) + lam.exp() * sum((v**2).sum() for v in w.values())

        problem = bl.Problem(inner, lambda w, lam, b: F.cross_entropy(apply(w, images), labels), lambda lam: w)
        right(problem, torch.tensor(-3.0), bl.Task(lambda t: t, None), dynamics=bl.GradientDescent(0.1), steps=3)

    def test_a_start_where_everything_vanishes(self):
        """w_0 = 0 and ∇L(w_0) = 0: a saddle of a product of weights."""
        problem = bl.Problem(
            inner=lambda w, lam, b: ((b[0] @ (w["u"] * w["v"]) - b[1]) ** 2).mean() * lam.exp(),
            outer=lambda w, lam, b: ((b[0] @ (w["u"] * w["v"]) - b[1]) ** 2).mean(),
            init=lambda lam: {"u": torch.zeros(3), "v": torch.zeros(3)},
        )
        assert float(call(problem, torch.zeros(())).grad) == 0

    def test_half_of_the_work_in_lower_precision(self):
        x, y = torch.randn(50, 3), torch.randn(50)

        def fit(w):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return F.linear(x.float(), w.float()[None])[:, 0].float().sub(y.float()).pow(2).mean()

        problem = bl.Problem(
            lambda w, lam, b: fit(w) + lam.exp() * (w**2).sum(),
            lambda w, lam, b: fit(w),
            lambda lam: torch.zeros(3).float(),
        )
        call(problem, torch.zeros(()).float(), bl.Task(None, None))


def test_it_is_made_once():
    calls = []

    def inner(w, lam, b):
        calls.append(1)
        return ridge().inner(w, lam, b)

    def count(problem, **settings):
        calls.clear()
        call(problem, **settings)
        return len(calls)

    on, off = ridge(inner=inner), ridge(inner=inner, check_derivatives=False)
    first, plain = count(on), count(off)
    assert first - plain <= 6
    assert count(on) == count(off)
    assert count(on, dynamics=bl.HeavyBall(0.1, 0.9), method=bl.Unrolled()) == count(
        off, dynamics=bl.HeavyBall(0.1, 0.9), method=bl.Unrolled()
    )
