"""Spectral is right or refuses: objectives that are quadratic in pieces, by coincidence or in disguise."""

import pytest
import torch
from torch.nn import functional as F

import bilevel as bl
from bilevel.methods.spectral.proof import why_not_quadratic
from bilevel.testing import relative_error

X, Y, LAM = torch.linspace(-1, 2, 30).reshape(6, 5).cos(), torch.linspace(-1, 1, 6), torch.linspace(0, 1, 5)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, cotangent):
        return (cotangent * 2 * ctx.saved_tensors[0]).clamp(-1, 1)


def clipped(w):
    same = w * 1
    same.register_hook(lambda slope: slope.clamp(-1, 1))
    return (same**2).sum()


def written_in_place(w, power):
    buffer = torch.zeros(5)
    buffer[1:3] += w[1:3] ** power
    return buffer.sum()


QUADRATIC = {
    "ridge": lambda w: ((X @ w - Y) ** 2).mean() + (LAM.exp() * w**2).sum(),
    "mse_loss": lambda w: F.mse_loss(X @ w, Y) + w @ w,
    "einsum": lambda w: torch.einsum("i,ij,j", w, X.T @ X, w),
    "linear": lambda w: F.linear(X, w[None], w[:1]).square().sum(),
    "convolution": lambda w: F.conv1d(Y[None, None], w[None, None, :2], w[:1]).square().sum(),
    "chosen rows": lambda w: ((X @ w)[Y > 0] ** 2).sum(),
    "total variation": lambda w: torch.diff(w).square().sum() + w.var(),
    "constants of λ": lambda w: (w**2 / LAM.exp().sqrt()).sum() + torch.relu(LAM).sum(),
    "vmap": lambda w: torch.vmap(lambda x: (x @ w) ** 2)(X).sum(),
    "in place": lambda w: written_in_place(w, 2),
    "sparse": lambda w: (torch.sparse.mm(X.to_sparse(), w[:, None])[:, 0] - Y).square().sum(),
    "linear in w": lambda w: (LAM * w).sum(),
}
OTHERS = {
    "squared hinge": lambda w: (torch.relu(w - 1) ** 2).sum(),
    "bounds": lambda w: (w.clamp(max=1) ** 2).sum(),
    "where": lambda w: torch.where(w > 1, w**2, w).sum(),
    "chosen by w": lambda w: (w[w > 0] ** 2).sum(),
    "Huber": lambda w: F.huber_loss(X @ w, Y),
    "quartic": lambda w: (w**4).sum(),
    "three factors": lambda w: (w * w[0] * w[1]).sum(),
    "absent at this λ": lambda w: (LAM[0] * w**4).sum(),
    "logistic": lambda w: F.softplus(X @ w).sum(),
    "a branch": lambda w: (w**2).sum() * (2 if w.sum() > 0 else 1),
    "rounded": lambda w: (torch.div(w, 2, rounding_mode="floor") * w).sum(),
    "detached": lambda w: (w.detach() * w**2).sum(),
    "custom function": lambda w: Squared.apply(w).sum(),
    "hook": clipped,
    "cubic in place": lambda w: written_in_place(w, 3),
    "norm": lambda w: torch.linalg.norm(X @ w - Y) ** 2,
}


@pytest.mark.parametrize("name", QUADRATIC)
def test_quadratics_are_recognised(name):
    assert why_not_quadratic(QUADRATIC[name], torch.linspace(-1, 1, 5)) is None


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_one_is_refused_wherever_one_looks(name):
    for w in (torch.linspace(-1, 1, 5), torch.zeros(5), torch.full((5,), 3.0)):
        assert why_not_quadratic(OTHERS[name], w) is not None


def soft_bound(strength=20.0):
    return bl.Problem(
        inner=lambda w, lam, _: (w - lam) ** 2 / 2 + strength * torch.relu(w - 1) ** 2,
        outer=lambda w, lam, _: (w - 1.5) ** 2,
        init=lambda lam: torch.zeros(()),
    )


@pytest.mark.parametrize("ask", [bl.hypergradient, bl.compile], ids=["eager", "compiled"])
def test_an_objective_that_is_quadratic_at_both_ends_and_not_on_the_way(ask):
    """Momentum carries w over the kink at 1 and back."""
    settings = {"dynamics": bl.HeavyBall(0.05, 0.9), "steps": 25}
    call = (soft_bound(), torch.tensor(0.8), bl.Task(None, None))
    expected = bl.hypergradient(*call, **settings)
    iterates = [bl.hypergradient(*call, dynamics=settings["dynamics"], steps=t).inner for t in range(1, 26)]
    assert max(iterates) > 1 > iterates[-1]
    with pytest.raises(bl.BilevelError, match="quadratic in w, but `relu`"):
        ask(*call, method=bl.Spectral(), **settings)
    auto = bl.hypergradient(*call, method="auto", **settings)
    assert auto.stats.method != "Spectral"
    assert relative_error([auto.value, auto.grad], [expected.value, expected.grad]) < 1e-12


def test_a_term_that_is_absent_at_this_lam():
    """At λ = 0 the objective is quadratic, its derivative in λ is not."""
    problem = bl.Problem(
        lambda w, lam, _: (w - 1) ** 2 + lam * w**4, lambda w, lam, _: (w - 2) ** 2, lambda lam: torch.zeros(())
    )
    call, settings = (problem, torch.zeros(()), bl.Task(None, None)), {"dynamics": bl.GradientDescent(0.1), "steps": 30}
    with pytest.raises(bl.BilevelError, match="degree 3"):
        bl.hypergradient(*call, method=bl.Spectral(), **settings)
    expected = bl.hypergradient(*call, **settings).grad
    assert abs(expected) > 0.1
    assert relative_error(bl.hypergradient(*call, method="auto", **settings).grad, expected) < 1e-12


def test_a_branch_that_lam_takes_later():
    """What was proved at one λ is asked again at the next."""
    problem = bl.Problem(
        lambda w, lam, _: (w - 1) ** 2 + lam**2 * (w**4 if lam > 0 else w**2),
        lambda w, lam, _: (w - 2) ** 2,
        lambda lam: torch.zeros(()),
    )
    settings = {"dynamics": bl.GradientDescent(0.05), "steps": 30}
    for lam in (torch.tensor(-0.5), torch.tensor(0.5)):
        expected = bl.hypergradient(problem, lam, bl.Task(None, None), **settings).grad
        found = bl.hypergradient(problem, lam, bl.Task(None, None), method="auto", **settings)
        assert (found.stats.method == "Spectral") == bool(lam < 0)
        assert relative_error(found.grad, expected) < 1e-10


def test_the_proof_does_not_depend_on_the_number_of_steps():
    calls = 0

    def inner(w, lam, _):
        nonlocal calls
        calls += 1
        return ((X @ w - Y) ** 2).mean() + (lam.exp() * w**2).sum()

    problem = bl.Problem(inner, lambda w, lam, _: (w**2).sum(), lambda lam: torch.zeros(5))
    counts = []
    for steps in (10, 1000, 10_000):  # the first call also pays for what is checked once
        calls = 0
        bl.hypergradient(
            problem, LAM, bl.Task(None, None), dynamics=bl.HeavyBall(0.1), steps=steps, method=bl.Spectral()
        )
        counts.append(calls)
    assert counts[1] == counts[2] <= 19


LINEAR = [
    lambda x: x.flip(0),
    lambda x: x.cumsum(0),
    lambda x: X[:, : len(x)] @ x if len(x) <= 5 else X.T @ x[:6],
    lambda x: x[::2].repeat(2),
    lambda x: torch.cat([x, -x])[: len(x)],
    lambda x: x - x.mean(),
    lambda x: x.roll(1) * 3 + 1,
    lambda x: torch.where(torch.arange(len(x)) > 1, x, 2 * x),
    lambda x: x.clone().index_fill(0, torch.tensor([0]), 2.0),
    lambda x: F.pad(x, (1, 0))[: len(x)],
]
CURVED = [
    torch.relu,
    torch.abs,
    torch.sin,
    torch.sigmoid,
    lambda x: x.clamp(-0.5, 0.5),
    lambda x: x.sort().values,
    lambda x: x / (1 + x * x),
    lambda x: torch.maximum(x, x.flip(0)),
    lambda x: x * (x > 0),
    lambda x: x.round() * x,
    lambda x: x**3,
    lambda x: x.norm() * x,
    lambda x: F.elu(x),
    lambda x: x * x.detach().sum(),
]


def random_objective(generator):
    """Up to six operations on w, some of which are no polynomials, then a sum of products."""

    def draw(items):
        return items[int(torch.randint(len(items), (), generator=generator))]

    chains = []
    for _ in range(2):
        kinds = [draw([LINEAR, LINEAR, LINEAR, LINEAR, LINEAR, CURVED]) for _ in range(3)]
        chains.append([draw(kind) for kind in kinds])
    end = draw(
        [lambda a, b: (a[:3] * b[:3]).sum(), lambda a, b: a.square().mean() + b.sum(), lambda a, b: a[:3] @ b[:3]]
    )

    def loss(w):
        ends = []
        for chain in chains:
            x = w
            for operation in chain:
                x = operation(x)
            ends.append(x)
        return end(*ends)

    return loss


def is_affine(loss, generator):
    """Whether ∇L((a + b)/2) is the mean of ∇L(a) and ∇L(b), at many a and b of all sizes."""

    def slope(w):
        w = w.detach().requires_grad_()
        (part,) = torch.autograd.grad(loss(w), w, allow_unused=True)
        return torch.zeros_like(w) if part is None else part

    for size in (0.1, 1.0, 10.0):
        for _ in range(5):
            a, b = size * torch.randn(2, 5, generator=generator)
            error = slope((a + b) / 2) - (slope(a) + slope(b)) / 2
            if float(error.abs().max()) > 1e-9 * (1 + float(slope(a).abs().max() + slope(b).abs().max())):
                return False
    return True


def test_no_random_objective_is_taken_for_a_quadratic():
    generator = torch.Generator().manual_seed(11)
    verdicts = {(True, True): 0, (True, False): 0, (False, True): 0, (False, False): 0}
    for _ in range(150):
        loss = random_objective(generator)
        proved = why_not_quadratic(loss, torch.randn(5, generator=generator)) is None
        verdicts[proved, is_affine(loss, generator)] += 1
    assert verdicts[True, False] == 0
    assert verdicts[True, True] > 20 and verdicts[False, False] > 20
