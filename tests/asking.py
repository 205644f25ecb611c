"""A small ridge problem to ask wrong questions of."""

import pytest
import torch

import bilevel as bl


def ridge(**changes):
    parts = {
        "inner": lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean() + (lam.exp() * w**2).sum(),
        "outer": lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean(),
        "init": lambda lam: torch.zeros(3),
    }
    return bl.Problem(**{**parts, **changes})


def data(n=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, 3, generator=generator).to(dtype), torch.randn(n, generator=generator).to(dtype)


def ask(problem=None, lam=None, task=None, **settings):
    settings = {"dynamics": bl.GradientDescent(0.1), "steps": 5, **settings}
    return bl.hypergradient(
        ridge() if problem is None else problem,
        torch.zeros(3) if lam is None else lam,
        bl.Task(data(), data(4)) if task is None else task,
        **settings,
    )


def refused(*words, error=bl.BilevelError):
    return pytest.raises(error, match="(?s)" + ".*".join(words))


def learned_start():
    """A problem that λ enters through the start alone."""
    return bl.Problem(
        lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean(),
        lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean(),
        lambda lam: lam,
    )
