"""A problem with a network, a learned step size and two penalties, small enough for a test of another library."""

import torch

import bilevel as bl


def problem_of(width=4):
    """Regression by a network with one hidden layer; λ has the logarithms of its step size and its two penalties."""
    dice = torch.Generator().manual_seed(0)
    X = torch.randn(24, 3, generator=dice)
    y = torch.sin(X[:, :1]) + 0.3 * torch.randn(24, 1, generator=dice)
    w0 = {"first": torch.randn(3, width, generator=dice) / 2, "second": torch.randn(width, 1, generator=dice) / 2}

    def outer(w, lam, batch):
        return (torch.tanh(batch[0] @ w["first"]) @ w["second"] - batch[1]).square().mean()

    def inner(w, lam, batch):
        decay = lam["decay"].exp()
        return outer(w, lam, batch) + decay[0] * w["first"].square().sum() + decay[1] * w["second"].square().sum()

    problem = bl.Problem(inner, outer, init=lambda lam: w0)
    return problem, bl.Task(train=(X[:12], y[:12]), val=(X[12:], y[12:]))


def start():
    return {"rate": torch.tensor(-3.0), "decay": torch.tensor([-4.0, -4.0])}


SETTINGS = {"dynamics": lambda lam: bl.HeavyBall(lam["rate"].exp(), 0.8), "steps": 12}
