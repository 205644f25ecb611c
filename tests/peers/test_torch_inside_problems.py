"""Sparse data, torch.func, fused attention and compiled functions inside a problem.

Each is compared with the same mathematics in plain torch: dense data, gradients by hand, attention written out.
"""

import pytest
import torch
from comparing import NO_DATA, agree, along, draw, regression, slope, squares, unrolled, zeros
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import bilevel as bl

TASK = regression(12, 4)
LAM = torch.tensor([-1.0, 0.0, -2.0, 0.5], dtype=torch.float64)
RUN = {"dynamics": bl.GradientDescent(0.2), "steps": 6}


def ridge(w, lam, data):
    return squares(w, lam, data) + 0.5 * (lam.exp() * w**2).sum()


def expected():
    def plain(lam):
        return squares(unrolled(lambda w, t: ridge(w, lam, TASK.train), torch.zeros(4), 6, 0.2), None, TASK.val)

    return slope(plain, LAM)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("place", ["in the task", "in a closure"])
def test_a_sparse_table(layout, place):
    convert = torch.Tensor.to_sparse if layout == "coo" else torch.Tensor.to_sparse_csr
    tables = {"train": convert(TASK.train[0]), "val": convert(TASK.val[0])}

    def error(w, table, y):
        return 0.5 * (((table @ w[:, None])[:, 0] - y) ** 2).mean()

    if place == "in the task":
        task = bl.Task((tables["train"], TASK.train[1]), (tables["val"], TASK.val[1]))
        pick = lambda data, name: data  # noqa: E731
    else:
        task = bl.Task(TASK.train[1], TASK.val[1])
        pick = lambda data, name: (tables[name], data)  # noqa: E731
    problem = bl.Problem(
        lambda w, lam, data: error(w, *pick(data, "train")) + 0.5 * (lam.exp() * w**2).sum(),
        lambda w, lam, data: error(w, *pick(data, "val")),
        zeros(4),
    )
    agree(expected(), problem, LAM, task, tolerance=1e-10, **RUN)


def test_a_newton_step_by_torch_func():
    """torch.func.grad and hessian inside the step."""

    def newton(loss, w, state, t):
        return w - 0.5 * torch.linalg.solve(torch.func.hessian(loss)(w), torch.func.grad(loss)(w)), state

    inner = lambda w, lam, data: torch.cosh(w - data).sum() + (lam.exp() * w**2).sum()  # noqa: E731
    target = torch.tensor([0.5, -1.0, 0.3, 1.2])

    def plain(lam):
        w = torch.zeros(4)
        for _ in range(4):  # the Hessian is diagonal
            w = w - 0.5 * (torch.sinh(w - target) + 2 * lam.exp() * w) / (torch.cosh(w - target) + 2 * lam.exp())
        return (w**3).sum()

    agree(
        slope(plain, LAM),
        bl.Problem(inner, lambda w, lam, data: (w**3).sum(), zeros(4)),
        LAM,
        bl.Task(target, None),
        dynamics=newton,
        steps=4,
        tolerance=1e-10,
    )


def test_a_differential_equation_in_the_inner_objective():
    """A network u with u′ = −e^λ u: its derivative in the input is taken by torch.func inside the loss."""
    torch.manual_seed(0)
    start, apply = bl.functional(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double())
    points, lam = torch.linspace(0, 1, 5), torch.tensor(0.3)
    u = lambda w, x: apply(w, x.reshape(1, 1)).squeeze()  # noqa: E731

    def inner(w, lam, data):
        slopes = torch.vmap(torch.func.grad(lambda x: u(w, x)))(points)
        values = torch.vmap(lambda x: u(w, x))(points)
        return ((slopes + lam.exp() * values) ** 2).mean() + (u(w, torch.zeros(())) - 1) ** 2

    outer = lambda w, lam, data: (u(w, torch.ones(())) - 0.5) ** 2  # noqa: E731

    def by_hand(w, lam, t=None):  # the network and its derivative written out
        hidden = torch.tanh(points[:, None] @ w["0.weight"].T + w["0.bias"])
        values = (hidden @ w["2.weight"].T + w["2.bias"])[:, 0]
        slopes = (((1 - hidden**2) * w["0.weight"][:, 0]) @ w["2.weight"].T)[:, 0]
        return ((slopes + lam.exp() * values) ** 2).mean() + (values[0] - 1) ** 2

    def plain(lam):
        return outer(unrolled(lambda w, t: by_hand(w, lam), start, 4, 0.1), lam, None)

    agree(
        slope(plain, lam),
        bl.Problem(inner, outer, lambda lam: start),
        lam,
        dynamics=bl.GradientDescent(0.1),
        steps=4,
        tolerance=1e-10,
    )


def test_fused_attention():
    """scaled_dot_product_attention has kernels without a second derivative; the answer is that of attention by hand."""
    x, y = draw(2, 5, 4), draw(2, 5, 4, seed=1)
    lam = {"q": 0.5 * draw(4, 4, seed=2), "k": 0.5 * draw(4, 4, seed=3)}

    def fused(w, lam, data):
        attended = scaled_dot_product_attention(x @ (w["q"] + lam["q"]), x @ (w["k"] + lam["k"]), x @ w["v"])
        return ((attended - y) ** 2).mean()

    def written_out(w, lam):
        q, k = x @ (w["q"] + lam["q"]), x @ (w["k"] + lam["k"])
        return ((torch.softmax(q @ k.transpose(1, 2) / 2, -1) @ (x @ w["v"]) - y) ** 2).mean()

    start = {"q": 0.3 * draw(4, 4, seed=4), "k": 0.3 * draw(4, 4, seed=5), "v": 0.3 * draw(4, 4, seed=6)}

    def plain(lam):
        return written_out(unrolled(lambda w, t: written_out(w, lam), start, 3, 0.3), lam)

    reference = slope(plain, lam)
    agree(
        reference,
        bl.Problem(fused, fused, lambda lam: start),
        lam,
        dynamics=bl.GradientDescent(0.3),
        steps=3,
        methods=(bl.Unrolled(), bl.Reverse(), bl.Reverse(2, group_bytes=0)),
        tolerance=1e-9,
    )
    along(plain, lam, reference.grad)


def test_a_transformer_layer_as_torch_builds_it():
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double()
    lam, apply = bl.functional(nn.Sequential(layer, nn.Flatten(), nn.Linear(20, 1).double()))
    x, y = draw(3, 5, 4), draw(3, 1, seed=1)
    error = lambda w, lam, data: ((apply(w, x) - y) ** 2).mean()  # noqa: E731

    def plain(lam):
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            return error(unrolled(lambda w, t: error(w, lam, None), lam, 2, 0.1), lam, None)

    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        reference = slope(plain, lam)
    agree(
        reference,
        bl.Problem(error, error, lambda lam: lam),
        lam,
        dynamics=bl.GradientDescent(0.1),
        steps=2,
        methods=(bl.Unrolled(), bl.Reverse()),
        tolerance=1e-8,
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by the compiler
def test_a_compiled_outer_objective():
    problem = bl.Problem(ridge, torch.compile(squares, backend="aot_eager"), zeros(4))
    agree(expected(), problem, LAM, TASK, tolerance=1e-10, **RUN)


def test_words_whose_embedding_has_sparse_gradients():
    torch.manual_seed(2)
    table = nn.Embedding(6, 3, sparse=True).double()
    start, words = {"table": table.weight.detach().clone()}, torch.tensor([0, 2, 2, 5])
    lam = torch.tensor(0.3)

    def look_up(w):
        return nn.functional.embedding(words, w["table"], sparse=True)

    inner = lambda w, lam, data: ((look_up(w) - 1) ** 2).mean() * lam.exp()  # noqa: E731
    outer = lambda w, lam, data: (w["table"] ** 3).sum()  # noqa: E731

    def plain(lam):
        dense = lambda w, t: ((w["table"][words] - 1) ** 2).mean() * lam.exp()  # noqa: E731
        return outer(unrolled(dense, start, 3, 0.5), None, None)

    agree(
        slope(plain, lam),
        bl.Problem(inner, outer, lambda lam: start),
        lam,
        NO_DATA,
        dynamics=bl.GradientDescent(0.5),
        steps=3,
        methods=(bl.Unrolled(), bl.Reverse()),
        tolerance=1e-10,
    )
