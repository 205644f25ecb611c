r"""
A layer of infinite depth
=========================

A deep equilibrium network has one layer, applied until nothing changes any more: for a picture :math:`x` its features
are the solution of

.. math:: z = \Phi(z, \lambda) = \tanh(W z + U x + b).

The solution is a function of the weights :math:`\lambda = (W, U, b)`, and ``bl.inner_solution`` makes it a layer of an
ordinary torch network. Its derivative needs no intermediate iterates, only a linear system with
:math:`I - \partial\Phi/\partial z`, which is not symmetric; and in training :math:`\Phi` may cease to be a contraction.
The data are scikit-learn's handwritten digits.
"""

import os

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

import bilevel as bl

QUICK = bool(os.environ.get("BILEVEL_QUICK"))
plt.style.use("tableau-colorblind10")
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

images, digits = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
images = images / 16
order = torch.randperm(len(digits))
train, test = order[:1200], order[1200:]
units = 20

# %%
# The problem
# -----------
# A fixed point takes the place of the inner objective. The batch is the data of the task, and the equations of all its
# pictures are solved at once. Only the solution is used, so there is no outer objective.


def layer(z, lam, x):
    return torch.tanh(z @ lam["W"].T + x @ lam["U"].T + lam["b"])


def equilibrium(count):
    return bl.Problem(fixed_point=layer, init=lambda lam: torch.zeros(count, units))


lam = {
    "W": (0.5 * torch.randn(units, units) / units**0.5).requires_grad_(),
    "U": (torch.randn(units, 64) / 8).requires_grad_(),
    "b": torch.zeros(units, requires_grad=True),
}
readout = torch.nn.Linear(units, 10)

# %%
# Anderson's acceleration stops at a tolerance; the linear system of the backward pass is solved by GMRES. Both are
# arguments: ``bl.Picard()`` and ``bl.BiCGSTAB()`` give the same numbers.

solver = {
    "dynamics": bl.Until(bl.Anderson(memory=4), tol=1e-4, every=2),
    "steps": 200,
    "method": bl.Implicit(bl.GMRES(tol=1e-6)),
}


def features(problem, x):
    return bl.inner_solution(problem, lam, bl.Task(x, None), **solver)


# %%
# Training
# --------
# An ordinary loop: the equilibrium and the readout are trained together by Adam.

size, epochs = 200, 1 if QUICK else 15
problem = equilibrium(size)
optimizer = torch.optim.Adam([*lam.values(), *readout.parameters()], lr=2e-2)
losses = []
for epoch in range(epochs):
    shuffled = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))]
    for batch in shuffled.split(size):
        optimizer.zero_grad()
        loss = F.cross_entropy(readout(features(problem, images[batch])), digits[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


@torch.no_grad()
def accuracy(rows):
    z = features(equilibrium(len(rows)), images[rows])
    return 100 * (readout(z).argmax(1) == digits[rows]).double().mean().item()


print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
test_accuracy = accuracy(test)
print(
    f"accuracy on {len(train)} training pictures {accuracy(train):.1f} %, on {len(test)} others {test_accuracy:.1f} %"
)

# %%
# Iterations and gradients
# ------------------------
# How fast the two iterations reach the same equilibrium after training, and what the spectral radius of the layer's
# derivative is. Where it exceeds 1, Picard's iteration need not converge.

x = images[test[:50]]
task, small = bl.Task(x, x), equilibrium(50)
frozen = {name: leaf.detach() for name, leaf in lam.items()}
z = bl.inner_solution(small, frozen, task, dynamics=bl.Anderson(memory=4), steps=200)
slope = torch.diag_embed(1 - z**2) @ frozen["W"]
print(f"largest spectral radius of the derivative: {torch.linalg.eigvals(slope).abs().max():.2f}")

figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
panels[0].plot(losses)
panels[0].set(xlabel="training step", ylabel="cross-entropy", title="Training")
for dynamics in (bl.Picard(), bl.Anderson(memory=4)):
    gaps = []
    for steps in range(1, 31):
        w = bl.inner_solution(small, frozen, task, dynamics=dynamics, steps=steps)
        gaps.append((layer(w, frozen, x) - w).norm().item())
    panels[1].semilogy(range(1, 31), gaps, label=type(dynamics).__name__)
panels[1].set(xlabel="evaluations of the layer", ylabel=r"$\|\Phi(z) - z\|$", title="Equilibrium")
panels[1].legend()

# %%
# The gradient by the linear system is that of 60 recorded steps.

wanted = bl.Problem(
    fixed_point=layer,
    outer=lambda z, lam, x: F.cross_entropy(z[:, :10], digits[test[:50]]),
    init=lambda lam: torch.zeros(50, units),
)
run = {"dynamics": bl.Anderson(memory=4, ridge=1e-8), "steps": 60}
worst_error = 0.0
recorded = bl.hypergradient(wanted, frozen, task, method=bl.Reverse(), **run)
for linear in (bl.GMRES(), bl.BiCGSTAB(), bl.NormalCG()):
    found = bl.hypergradient(wanted, frozen, task, method=bl.Implicit(linear), **run)
    off = bl.testing.relative_error(found.grad, recorded.grad)
    worst_error = max(worst_error, off)
    print(f"{type(linear).__name__:8} {found.stats.products:3} products, {off:.0e} from recorded steps")
plt.show()
