r"""
Many tasks, one shared start or one common model
================================================

Forty regression tasks with ten examples each for twenty unknowns: none of them can be solved alone. But they are
related. The true weights of task :math:`j` lie around an unknown centre. Section 2.2 of the paper names two
ways to make use of that, both with a λ that all tasks share:

* a **shared start**: :math:`w^j_0 = \lambda`, and each task takes a few steps of gradient descent from there;
* a **common model**: predictions are :math:`\langle w^j + \lambda, x \rangle`, with a penalty on :math:`w^j`, so that
  :math:`w^j` is what differs from the other tasks.

Either λ is learned by minimising the error on each task's validation examples after training on its ten,

.. math:: f(\lambda) = \frac1N \sum_{j=1}^N E^j(w^j_T, \lambda),

and judged on forty *new* tasks.
"""

import os

import matplotlib.pyplot as plt
import torch

import bilevel as bl

QUICK = bool(os.environ.get("BILEVEL_QUICK"))
SPREADS = [0.3, 1.0] if QUICK else [0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5]
ITERATIONS = 30 if QUICK else 100
TASKS, UNKNOWNS, EXAMPLES, NOISE = 40, 20, 10, 0.5
torch.set_default_dtype(torch.float64)
plt.style.use("tableau-colorblind10")

# %%
# The tasks
# ---------
# All tasks are held in one batch: the weights are a matrix with a row per task, and the sum over rows in the inner
# objective lets every task take exactly the steps that it would take alone.

generator = torch.Generator().manual_seed(0)
centre = torch.randn(UNKNOWNS, generator=generator)


def sample(weights, examples):
    x = torch.randn(TASKS, examples, UNKNOWNS, generator=generator)
    y = (x @ weights[:, :, None])[..., 0]
    return x, y + NOISE * torch.randn(y.shape, generator=generator)


def errors(weights, data):
    """The mean squared error of every task."""
    return (((data[0] @ weights[:, :, None])[..., 0] - data[1]) ** 2).mean(1)


def draw(spread):
    """Tasks to learn λ from, new tasks to use it on, and the new tasks' test data."""
    seen, new = (centre + spread * torch.randn(TASKS, UNKNOWNS, generator=generator) for _ in range(2))
    tasks = [bl.Task(train=sample(weights, EXAMPLES), val=sample(weights, EXAMPLES)) for weights in (seen, new)]
    return *tasks, sample(new, 500)


# %%
# Three problems
# --------------
# The start is learned together with the step size, the common model together with its penalty; learning alone gets a
# penalty that is tuned in the same way. So each has one number that controls how far a task may move.

rows = torch.zeros(TASKS, UNKNOWNS)
shared_start = bl.Problem(
    inner=lambda w, lam, data: errors(w, data).sum(),
    outer=lambda w, lam, data: errors(w, data).mean(),
    init=lambda lam: lam["start"] + rows,
)
common_model = bl.Problem(
    inner=lambda w, lam, data: errors(w + lam["common"], data).sum() + lam["penalty"].exp() * (w**2).sum(),
    outer=lambda w, lam, data: errors(w + lam["common"], data).mean(),
    init=lambda lam: rows,
)
alone = bl.Problem(
    inner=lambda w, lam, data: errors(w, data).sum() + lam["penalty"].exp() * (w**2).sum(),
    outer=lambda w, lam, data: errors(w, data).mean(),
    init=lambda lam: rows,
)


vector, number = torch.zeros(UNKNOWNS), torch.tensor(0.0)
learners = {  # the problem, where λ begins, the dynamics, T
    "each alone": (alone, {"penalty": number}, bl.GradientDescent(0.08), 25),
    "shared start": (
        shared_start,
        {"start": vector, "lr": number - 3},
        lambda lam: bl.GradientDescent(lam["lr"].exp()),
        5,
    ),
    "common model": (common_model, {"common": vector, "penalty": number}, bl.GradientDescent(0.08), 25),
}
# Step sizes above 2/ν diverge, so Λ bounds them, and the penalties, which add to ν.
boxes = {"start": bl.Box(-9, 9), "common": bl.Box(-9, 9), "lr": bl.Box(-8, -1.8), "penalty": bl.Box(-8, 1)}


def learn(name, task):
    problem, lam, dynamics, steps = learners[name]
    return bl.solve(
        problem,
        lam,
        task,
        dynamics=dynamics,
        steps=steps,
        constraint={key: boxes[key] for key in lam},
        optimizer=lambda params: torch.optim.Adam(params, lr=0.1),
        iterations=ITERATIONS,
        progress=False,
    ).outer


def use(name, lam, task, steps=None):
    """f_T(λ) on test data: train on the examples of each task as before, and return the error on its test data."""
    problem, _, dynamics, usual = learners[name]
    with torch.no_grad():
        return float(bl.objective(problem, lam, task, dynamics=dynamics, steps=usual if steps is None else steps))


def pooled(task):
    """One least-squares fit to the examples of all tasks."""
    x, y = (torch.cat([part.flatten(0, 1) for part in parts]) for parts in zip(task.train, task.val, strict=True))
    return torch.linalg.lstsq(x, y).solution


# %%
# From nearly the same task to tasks with little in common
# --------------------------------------------------------

curves = {"pooled": [], **{name: [] for name in learners}}
print("spread  " + "  ".join(f"{name:>12}" for name in curves))
for spread in SPREADS:
    seen, new, test = draw(spread)
    judged = bl.Task(train=new.train, val=test)
    found = {name: learn(name, seen) for name in learners}
    curves["pooled"].append(float(errors(pooled(seen) + rows, test).mean()))
    for name, lam in found.items():
        curves[name].append(use(name, lam, judged))
    print(f"{spread:6}  " + "  ".join(f"{curve[-1]:12.3f}" for curve in curves.values()))
    if spread == 0.3:
        lam, at = found["shared start"], len(curves["pooled"]) - 1
        adaptation = [use("shared start", lam, judged, t) for t in range(16)]
        from_zero = [use("shared start", {**lam, "start": vector}, judged, t) for t in range(16)]

start_error, common_error = curves["shared start"][at], curves["common model"][at]
alone_error, pooled_error = curves["each alone"][at], curves["pooled"][at]

# %%
# Where tasks are almost equal, one pooled model is best; where they have little in common it is worse than learning
# alone. The two shared λ adapt to both cases: the learned step size, or the learned penalty, controls how far a task
# moves from the shared part, and they are at or near the best for every spread. The right panel shows new tasks at a
# spread of 0.3, step by step: the learned start is good for a few steps, which is what it was learned for.

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
styles = {"pooled": ("C3", ":"), "each alone": ("C2", "--"), "shared start": ("C0", "-"), "common model": ("C5", "-")}
for name, curve in curves.items():
    left.loglog(SPREADS, curve, "o", color=styles[name][0], ls=styles[name][1], markersize=4, label=name)
left.axhline(NOISE**2, color="black", lw=0.8)
left.annotate("noise", (SPREADS[-1], NOISE**2), ha="right", va="bottom")
left.set(
    xlabel="spread of the tasks around their centre", ylabel="test error on new tasks", title="Ten examples a task"
)
right.semilogy(from_zero, color="C2", ls="--", label="from zero")
right.semilogy(adaptation, color="C0", label="from the learned start")
right.axvline(5, color="grey", lw=0.8)
right.annotate(" T in learning", (5, max(from_zero)), va="top")
right.set(xlabel="gradient steps on a new task", ylabel="test error", title="Adapting to new tasks, spread 0.3")
for panel in (left, right):
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
plt.show()
