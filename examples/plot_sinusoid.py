r"""
A learned start for sinusoids
=============================

Draw an amplitude from [0.1, 5] and a phase from [0, π], show a network ten points of the sine wave, and let it take
five gradient steps. From a random start, five steps are not enough. From a start λ that was learned over many such
waves (the idea of MAML) they are enough: λ is the minimiser of the error *after* the five steps.

We write the network's weights as :math:`\lambda + w` with :math:`w_0 = 0`. That is the same as starting at λ, because
only the sum matters, and it makes λ visible in the outer objective too,

.. math:: f_T(\lambda) = \mathbb E_j\, E^j(\lambda + w^j_T), \qquad
          \nabla f_T = \nabla_\lambda E + \Big(\frac{\partial w_T}{\partial \lambda}\Big)^{\!\top} \nabla_w E.

``FirstOrder()`` keeps the first term only, which is what is known as first-order MAML; ``Reverse()`` has both.
"""

import itertools
import math
import os

import matplotlib.pyplot as plt
import torch

import bilevel as bl

QUICK = bool(os.environ.get("BILEVEL_QUICK"))
ITERATIONS, UNSEEN = (120, 50) if QUICK else (2000, 200)
POINTS, STEPS, BATCH = 10, 5, 25
dynamics = bl.GradientDescent(lr=0.01)
torch.manual_seed(0)
plt.style.use("tableau-colorblind10")

# %%
# Waves
# -----
# A batch of waves is one ``Task`` whose tensors have a leading axis of waves; ten points to learn from, and others to
# evaluate on.


def draw(waves, seed, judged_by=POINTS):
    generator = torch.Generator().manual_seed(seed)

    def uniform(low, high, *shape):
        return torch.empty(shape).uniform_(low, high, generator=generator)

    amplitude, phase = uniform(0.1, 5, waves, 1, 1), uniform(0, math.pi, waves, 1, 1)
    inputs = uniform(-5, 5, waves, POINTS, 1), uniform(-5, 5, waves, judged_by, 1)
    train, val = ((x, amplitude * torch.sin(x - phase)) for x in inputs)
    return bl.Task(train=train, val=val)


# %%
# One network per wave
# --------------------
# Forty, forty and one units. Each wave has its own deviation from λ, held in tensors with the same leading axis, so all
# waves of a batch take their steps together.

SIZES = [1, 40, 40, 1]
random_start = {}
for layer, (before, after) in enumerate(itertools.pairwise(SIZES)):
    bound = before**-0.5  # as torch.nn.Linear begins
    random_start[f"weight{layer}"] = torch.empty(before, after).uniform_(-bound, bound)
    random_start[f"bias{layer}"] = torch.empty(1, after).uniform_(-bound, bound)


def predict(w, lam, x):
    for layer in range(3):
        x = x @ (lam[f"weight{layer}"] + w[f"weight{layer}"]) + lam[f"bias{layer}"] + w[f"bias{layer}"]
        x = x.relu() if layer < 2 else x
    return x


def errors(w, lam, data):
    return ((predict(w, lam, data[0]) - data[1]) ** 2).mean((1, 2))


def problem(waves):
    return bl.Problem(
        inner=lambda w, lam, data: errors(w, lam, data).sum(),
        outer=lambda w, lam, data: errors(w, lam, data).mean(),
        init=lambda lam: {key: value.new_zeros(waves, *value.shape) for key, value in lam.items()},
    )


# %%
# Three ways to find a start
# --------------------------
# With no steps at all, T = 0, the same code is ordinary training on all waves at once; their mean is nearly flat, so
# there is not much to learn that way.


def learn(steps, method):
    return bl.solve(
        problem(BATCH),
        random_start,
        lambda k: draw(BATCH, seed=k),  # new waves in every hyperiteration
        dynamics=dynamics,
        steps=steps,
        method=method,
        optimizer=lambda params: torch.optim.Adam(params, lr=3e-3),
        iterations=ITERATIONS,
        progress=False,
    )


solutions = {
    "trained on all waves (T = 0)": learn(0, bl.Reverse()),
    "FirstOrder()": learn(STEPS, bl.FirstOrder()),
    "Reverse()": learn(STEPS, bl.Reverse()),
}
starts = {"random start": random_start, **{name: solution.outer for name, solution in solutions.items()}}

# %%
# Adapting to waves that were never seen
# --------------------------------------
# The same 200 new waves for every start, up to ten steps: twice as many as λ was learned for.

unseen = draw(UNSEEN, seed=10**6, judged_by=100)
with torch.no_grad():
    adaptation = {
        name: [float(bl.objective(problem(UNSEEN), lam, unseen, dynamics=dynamics, steps=t)) for t in range(11)]
        for name, lam in starts.items()
    }
print(f"Mean squared error on {UNSEEN} unseen waves, {ITERATIONS} hyperiterations")
for name, curve in adaptation.items():
    print(f"  {name:28}  {curve[0]:.2f} at once, {curve[STEPS]:.2f} after {STEPS} steps, {curve[10]:.2f} after 10")

random_error, first_order_error, reverse_error = (
    adaptation[name][STEPS] for name in ("random start", "FirstOrder()", "Reverse()")
)

# %%
# A random start learns nothing in ten steps of this size; training on all waves halves the error. A start that was
# learned through the steps is adapted in five, and improves further after the five that it was learned for. The
# first-order gradient costs less per hyperiteration and gains most of this; the term that it drops is worth a factor of
# two here.

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
styles = {"random start": ("C2", ":"), "trained on all waves (T = 0)": ("C3", "--")}
for name, curve in adaptation.items():
    colour, line = styles.get(name, ("C1" if name == "FirstOrder()" else "C0", "-"))
    left.semilogy(curve, color=colour, ls=line, marker="o", markersize=4, label=name)
left.axvline(STEPS, color="grey", lw=0.8)
left.set(xlabel="gradient steps on a new wave", ylabel="mean squared error", title=f"{UNSEEN} unseen waves")

x = torch.linspace(-5, 5, 200)[None, :, None]
amplitude, phase = 3.5, 0.8
points = torch.empty(1, POINTS, 1).uniform_(-5, 5, generator=torch.Generator().manual_seed(1))
wave = bl.Task(train=(points, amplitude * torch.sin(points - phase)), val=(x, amplitude * torch.sin(x - phase)))
lam = starts["Reverse()"]
right.plot(x[0, :, 0], wave.val[1][0, :, 0], color="C3", ls="--", label="the wave")
right.plot(*(part[0, :, 0] for part in wave.train), "o", color="black", label="the ten points")
for t, shade in ((0, 0.3), (1, 0.6), (STEPS, 1.0)):
    w = bl.hypergradient(problem(1), lam, wave, dynamics=dynamics, steps=t).inner
    right.plot(x[0, :, 0], predict(w, lam, x)[0, :, 0], color="C0", alpha=shade, label=f"after {t} steps")
right.set(xlabel="x", title="A new wave, from the start learned with Reverse()")
for panel in (left, right):
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=9)
plt.show()
