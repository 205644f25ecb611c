r"""
K-fold cross-validation as the outer objective
==============================================

Cross-validation is a bilevel problem with one inner problem per fold: :math:`w^j_\lambda` is fitted to all folds but
the :math:`j`-th, and

.. math:: f(\lambda) = \frac1K \sum_{j=1}^K E^j(w^j_\lambda), \qquad
          L^j_\lambda(w) = \mathrm{mse}^j(w) + \sum_i e^{\lambda_{g(i)}} w_i^2,

is the error on the folds that were left out. A grid is the usual way to minimise it, which is why it usually has a
single :math:`\lambda`. With :math:`\nabla f` a penalty for every feature, or for every group :math:`g` of features, is
no harder to *find*. Whether it is *better* on held-out data is another question, which this page answers for
scikit-learn's diabetes data.
"""

import os

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_diabetes
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import bilevel as bl

QUICK = bool(os.environ.get("BILEVEL_QUICK"))
SPLITS, ITERATIONS = (2, 6) if QUICK else (10, 20)
torch.set_default_dtype(torch.float64)
plt.style.use("tableau-colorblind10")
COLOURS = {"one penalty": "C0", "two groups": "C5", "one each": "C1"}

# %%
# The problem
# -----------
# The objectives are written for one fold. ``group`` holds for each feature the entry of λ that is its penalty: all
# zeros is plain ridge, ``arange`` gives each feature its own penalty.


def mse(w, data):
    return ((data[0] @ w - data[1]) ** 2).mean()


def ridge(group):
    return bl.Problem(
        inner=lambda w, lam, data: mse(w, data) + (lam[group].exp() * w**2).sum(),
        outer=lambda w, lam, data: mse(w, data),
        init=lambda lam: torch.zeros(len(group)),
    )


def tune(data, group, seed, callbacks=()):
    """Log-penalties that minimise the five-fold error.

    `Spectral` takes 5,000 steps for the price of a few, and as nothing is random in f, Rprop may rely on its signs.
    """
    return bl.solve(
        ridge(group),
        torch.zeros(int(group.max()) + 1),
        bl.CrossValidation(data, folds=5, seed=seed).tasks,
        dynamics=bl.GradientDescent(lr=0.04),
        steps=5000,
        method=bl.Spectral(),
        constraint=bl.Box(-8, 3),
        optimizer=lambda params: torch.optim.Rprop(params, lr=0.5, step_sizes=(1e-4, 1.0)),
        iterations=ITERATIONS,
        callbacks=callbacks,
        progress=False,
    )


# %%
# The data: 220 patients to learn and cross-validate on, 222 to test on. The second version has 30 more columns of pure
# noise.


def split(seed, noise):
    x, y = load_diabetes(return_X_y=True)
    x = np.hstack([x, np.random.default_rng(seed).standard_normal((len(x), noise))])
    x, x_test, y, y_test = train_test_split(x, y, train_size=220, random_state=seed)
    scale, mean, deviation = StandardScaler().fit(x), y.mean(), y.std()
    pairs = (scale.transform(x), (y - mean) / deviation), (scale.transform(x_test), (y_test - mean) / deviation)
    return [tuple(map(torch.as_tensor, pair)) for pair in pairs]


def refit(data, penalties):
    """Ridge on all the training data, in closed form."""
    x, y = data
    return torch.linalg.solve(x.T @ x / len(y) + torch.diag(penalties), x.T @ y / len(y))


# %%
# One penalty: a gradient instead of a grid
# -----------------------------------------
# With a single λ the objective can be plotted, and the descent ends where a grid of 45 values has its minimum.

data, _ = split(seed=0, noise=0)
trail = []
solution = tune(data, torch.zeros(10, dtype=torch.long), 0, callbacks=[lambda step: trail.append(float(step.lam))])
grid = torch.linspace(-8, 1, 45)
folds = bl.CrossValidation(data, folds=5, seed=0).tasks
curve = [np.mean([float(mse(refit(fold.train, lam.exp().expand(10)), fold.val)) for fold in folds]) for lam in grid]
grid_minimum, descent_minimum = min(curve), solution.value
print(f"Least five-fold error: {grid_minimum:.5f} on the grid, {descent_minimum:.5f} by descent.")

# %%
# Many penalties: several splits, judged on test data
# ---------------------------------------------------
# ``RidgeCV`` scans 60 penalties by leave-one-out. *Two groups* has one penalty for the measured columns and one for the
# added ones.

tables = {}
for name, noise in (("diabetes", 0), ("with 30 columns of noise", 30)):
    index = torch.arange(10 + noise)
    groups = {"one penalty": index * 0, "two groups": (index >= 10).long(), "one each": index}
    if not noise:
        del groups["two groups"]
    tables[name] = {label: [] for label in ["RidgeCV", *groups]}
    reached = {label: [] for label in groups}
    for seed in range(SPLITS):
        train, test = split(seed, noise)
        reference = RidgeCV(alphas=np.logspace(-3, 4, 60)).fit(*train)
        tables[name]["RidgeCV"].append(float(mse(torch.as_tensor(reference.coef_), test)))
        for label, group in groups.items():
            tuned = tune(train, group, seed)
            reached[label].append(tuned.value)
            tables[name][label].append(float(mse(refit(train, tuned.outer.exp()[group]), test)))
    print(f"Test error, {name}, mean of {SPLITS} splits (difference from RidgeCV ± its standard error)")
    for label, column in tables[name].items():
        gain = np.subtract(column, tables[name]["RidgeCV"])
        promised = f"  five-fold error {np.mean(reached[label]):.4f}" if label in reached else ""
        print(
            f"  {label:12} {np.mean(column):.4f}  ({gain.mean():+.4f} ± {gain.std(ddof=1) / SPLITS**0.5:.4f}){promised}"
        )

noisy = tables["with 30 columns of noise"]
groups_gain = float(np.mean(noisy["RidgeCV"]) - np.mean(noisy["two groups"]))

# %%
# On the plain data one penalty is best: 220 patients are too few for more. Ten penalties fit the five folds better and
# the test data slightly worse, so cross-validation can be overfitted too. With the noise columns this is clearer still.
# A penalty per feature has by far the least error on the folds, and gains little, if anything, on the test data. Two
# penalties that use what is known about the columns are clearly the best there. The gradient lets you tune *any*
# number of hyperparameters; how many to use still depends on the data.

figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained", width_ratios=[1.2, 0.9, 1.1])
axes[0].plot(grid, curve, color="C0", label="five-fold error on a grid")
axes[0].plot(trail, solution.history["value"], "o", color="C1", markersize=5, label="the descent from λ = 0")
axes[0].plot(solution.outer, descent_minimum, "*", color="C5", markersize=14, label="where it ended")
axes[0].set(xlabel="λ, the logarithm of the penalty", ylabel="f(λ)", title="One penalty")
axes[0].legend(frameon=False)
for panel, (name, table) in zip(axes[1:], tables.items(), strict=True):
    for x, (label, column) in enumerate(list(table.items())[1:]):
        gain = np.subtract(column, table["RidgeCV"])
        panel.scatter(x + np.linspace(-0.15, 0.15, SPLITS), gain, s=20, color=COLOURS[label], alpha=0.8)
        panel.hlines(gain.mean(), x - 0.3, x + 0.3, color="black", lw=2)
    panel.axhline(0, color="grey", lw=1, ls="--")
    panel.set_xticks(range(len(table) - 1), list(table)[1:])
    panel.set_title(name)
axes[1].set_ylabel("test error minus RidgeCV's")
for panel in axes:
    panel.spines[["top", "right"]].set_visible(False)
plt.show()
