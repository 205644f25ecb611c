"""Runs that are resumed from a checkpoint with other settings."""

import pytest
import torch

import bilevel as bl


def ridge():
    torch.manual_seed(0)
    X, y = torch.randn(40, 3, dtype=torch.float64), torch.randn(40, dtype=torch.float64)
    problem = bl.Problem(
        inner=lambda w, lam, d: ((d[0] @ w - d[1]) ** 2).mean() + (lam.exp() * w**2).sum(),
        outer=lambda w, lam, d: ((d[0] @ w - d[1]) ** 2).mean(),
        init=lambda lam: torch.zeros_like(lam),
    )
    return problem, torch.zeros(3, dtype=torch.float64), bl.Task((X[:20], y[:20]), (X[20:], y[20:]))


@pytest.mark.parametrize(
    "call", [{"dynamics": bl.GradientDescent(0.1), "steps": 5}, {"algorithm": bl.SOBA()}], ids=["Descent", "SOBA"]
)
def test_another_constraint_is_refused(call, tmp_path):
    call = {**call, "iterations": 4, "checkpoint": tmp_path}
    bl.solve(*ridge(), constraint=bl.Box(-3, 3), **call)
    # λ of the checkpoint may lie outside of the other set, and would be returned.
    for other in (bl.Box(-1e-3, 1e-3), None):
        with pytest.raises(bl.BilevelError, match="constraint: Box"):
            bl.solve(*ridge(), constraint=other, **call)
    assert len(bl.solve(*ridge(), constraint=bl.Box(-3, 3), **{**call, "iterations": 6}).history["value"]) == 6


def test_other_step_sizes_are_refused(tmp_path):
    call = {"checkpoint": tmp_path, "iterations": 4}
    bl.solve(*ridge(), algorithm=bl.SOBA(inner_lr=0.1, outer_lr=0.1), **call)
    # The saved state has no step sizes for a run that leaves them out: it went on with steps of zero.
    for later in (bl.SOBA(), bl.SOBA(inner_lr=0.1, outer_lr=0.2)):
        with pytest.raises(bl.BilevelError, match=r"algorithm: SOBA\(inner_lr=0.1, outer_lr=0.1"):
            bl.solve(*ridge(), algorithm=later, **{**call, "iterations": 8})
