r"""
Every method on one problem
===========================

How a hypergradient is computed is an argument, so all methods can be compared: what they cost in time and memory,
and how far they are from :math:`\nabla f_T`, the gradient of what T steps compute, and from :math:`\nabla f`, that of
their limit. Only the argument changes from row to row.
"""

import os

import matplotlib.pyplot as plt
import torch

import bilevel as bl

QUICK = bool(os.environ.get("BILEVEL_QUICK"))
STEPS, REPEATS = (60, 1) if QUICK else (200, 5)
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
plt.style.use("tableau-colorblind10")

# %%
# The problem
# -----------
# Ridge with a penalty for each of forty features, solved by gradient descent with momentum. It is small, quadratic and
# has constant step sizes, so that every method applies.

FEATURES = 40
generator = torch.Generator().manual_seed(0)
x = torch.randn(200, FEATURES, generator=generator)
y = x[:, :8].sum(1) + torch.randn(200, generator=generator)
task = bl.Task(train=(x[:100], y[:100]), val=(x[100:], y[100:]))
lam = torch.full((FEATURES,), -3.0)


def mse(w, data):
    return ((data[0] @ w - data[1]) ** 2).mean()


problem = bl.Problem(
    inner=lambda w, lam, data: mse(w, data) + (lam.exp() * w**2).sum(),
    outer=lambda w, lam, data: mse(w, data),
    init=lambda lam: torch.zeros(FEATURES),
)
dynamics = bl.HeavyBall(lr=0.02, momentum=0.8)

# %%
# Two references
# --------------
# :math:`\nabla f_T` from autograd through all steps, and :math:`\nabla f` from the closed form of the minimiser.

through_steps = bl.hypergradient(problem, lam, task, dynamics=dynamics, steps=STEPS, method=bl.Unrolled()).grad
leaf = lam.clone().requires_grad_()
gram = task.train[0].T @ task.train[0] / 100 + torch.diag(leaf.exp())
mse(torch.linalg.solve(gram, task.train[0].T @ task.train[1] / 100), task.val).backward()
at_the_limit = leaf.grad

# %%
# The table
# ---------
# ``Reverse()`` records steps as small as these in groups, because autograd's calls cost more than the steps do. With
# ``group_bytes=0`` it keeps the iterates and the graph of a single step, with ``"sqrt"`` a few of the iterates.

methods = {
    "Unrolled()": bl.Unrolled(),
    "Reverse()": bl.Reverse(),
    "Reverse(group_bytes=0)": bl.Reverse(group_bytes=0),
    'Reverse("sqrt", group_bytes=0)': bl.Reverse("sqrt", group_bytes=0),
    "Reversible()": bl.Reversible(),
    "Forward()": bl.Forward(),
    "Spectral()": bl.Spectral(),
    "Truncated(5)": bl.Truncated(5),
    "Truncated(20)": bl.Truncated(20),
    "Implicit(CG())": bl.Implicit(bl.CG()),
    "Implicit(Neumann(20))": bl.Implicit(bl.Neumann(20)),
}


def distance(gradient, reference):
    return float((gradient - reference).norm() / reference.norm())


rows = {}
print(f"{'T = ' + str(STEPS):30}  exact       ms   kept in kB   from ∇f_T    from ∇f")
for name, method in methods.items():
    runs = [
        bl.hypergradient(problem, lam, task, dynamics=dynamics, steps=STEPS, method=method) for _ in range(1 + REPEATS)
    ]
    milliseconds = 1e3 * min(run.stats.seconds for run in runs[1:])  # the first one also checks the arguments
    kept, grad = runs[0].stats.peak_memory / 1e3, runs[0].grad
    errors = distance(grad, through_steps), distance(grad, at_the_limit)
    rows[name] = milliseconds, kept, *errors
    print(f"{name:30}  {method.exact!s:5}  {milliseconds:7.1f}  {kept:11.1f}  {errors[0]:10.1e} {errors[1]:10.1e}")

exact = [name for name, method in methods.items() if method.exact]
worst_exact_error = max(rows[name][2] for name in exact)
truncated_error = rows["Truncated(20)"][2]

# %%
# And one that does not apply: ``FirstOrder`` differentiates only the outer objective, where this λ does not occur. It
# raises an error instead of returning zeros.

try:
    bl.hypergradient(problem, lam, task, dynamics=dynamics, steps=STEPS, method=bl.FirstOrder())
except bl.BilevelError as error:
    print("BilevelError:", error)

# %%
# The exact methods agree and differ in their costs. ``Spectral`` is the cheapest where the inner objective is
# quadratic. ``Unrolled`` and ``Reverse`` work for every dynamics, and their memory grows with T. ``Reversible`` keeps
# almost nothing and needs momentum. ``Forward`` keeps a matrix, whatever T is, and slows down with the number of
# hyperparameters. ``Implicit`` approximates the gradient of the limit; the closer :math:`w_T` is to the limit, the
# better. ``Truncated`` drops the early steps. Here they still matter after twenty steps, so much of the gradient is
# lost.

figure, panels = plt.subplots(1, 3, figsize=(12, 4.4), sharey=True, layout="constrained")
places, colours = range(len(rows)), ["C0" if name in exact else "C1" for name in rows]
for panel, column, title in ((panels[0], 0, "Milliseconds"), (panels[1], 1, "kB kept from step to step")):
    panel.barh(places, [row[column] for row in rows.values()], color=colours, log=True)
    panel.set_title(title)
panels[1].bar(0, 0, color="C0", label="exact")
panels[1].bar(0, 0, color="C1", label="approximate")
panels[1].legend(frameon=False, loc="lower right")
for column, marker, colour, label in ((2, "o", "C0", r"$\nabla f_T$"), (3, "D", "C5", r"$\nabla f$")):
    # An error of exactly 0 has no logarithm.
    panels[2].semilogx(
        [max(row[column], 1e-16) for row in rows.values()], places, marker, color=colour, label=f"from {label}"
    )
panels[2].set(title="Relative distance", xlim=(3e-17, 10))
panels[2].legend(frameon=False, loc="lower left")
panels[0].set_yticks(places, list(rows))
panels[0].invert_yaxis()
for panel in panels:
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="x", color="#E4E4E4")
    panel.set_axisbelow(True)
plt.show()
