r"""
A learned learning-rate schedule
================================

A training of :math:`T` steps has :math:`T` learning rates. Instead of choosing a family of schedules by hand, tune
every one of them:

.. math:: \min_{\eta_1 \dots \eta_T} E(w_T), \qquad w_t = w_{t-1} + v_t,\quad
          v_t = \mu v_{t-1} - \eta_t \nabla L_t(w_{t-1}),

by the gradient of the validation loss through the whole training. The baseline is the best constant rate of a grid.
A schedule that is tuned on one sequence of batches can overfit that sequence; with ``batches="new"`` every
hyperiteration has new batches. All are compared on new batches and new starts.
"""

import os

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import bilevel as bl
from bilevel.data import load
from bilevel.tuning import LearningRate

QUICK = bool(os.environ.get("BILEVEL_QUICK"))
STEPS, ITERATIONS, SEEDS = (20, 6, 1) if QUICK else (100, 80, 3)
plt.style.use("tableau-colorblind10")


def pictures():
    """MNIST, or scikit-learn's digits if MNIST is missing: images in [0, 1], labels, and where to cut them."""
    try:
        mnist = load("mnist", progress=False)
    except bl.BilevelError:
        print("MNIST is not in the data root (BILEVEL_DATA); these are scikit-learn's 8×8 digits instead.")
        x, y = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(x))
        return torch.tensor(x[order] / 16).float(), torch.tensor(y[order]), (600, 1200)
    rows = np.concatenate([mnist.parts["train"][:4000], mnist.parts["test"]])
    return torch.tensor(mnist.images[rows]).flatten(1) / 255, torch.tensor(mnist.labels[rows]), (2000, 4000)


x, y, (first, second) = pictures()
train = DataLoader(TensorDataset(x[:first], y[:first]), batch_size=50, shuffle=True)
val, test = (x[first:second], y[first:second]), (x[second:], y[second:])


def network(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(x.shape[1], 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))


def train_with(rates, seed=0, iterations=0, per="step", batches="same"):
    """Tune for some hyperiterations, beginning with these rates. With 0 hyperiterations it only trains with them."""
    return bl.tune(
        network(seed),
        F.cross_entropy,
        LearningRate(rates, per=per, range=(1e-4, 10)),
        train,
        val,
        momentum=0.9,
        steps=STEPS,
        iterations=iterations,
        batches=batches,
        outer_lr=0.05,
        seed=seed,
    )


# %%
# The best constant
# -----------------
# A grid of rates, each evaluated by the mean over several seeds of the batches and of the network's start.

grid = np.geomspace(0.02, 0.5, 4 if QUICK else 8)
losses = [np.mean([train_with(rate, seed, per="run").value for seed in range(SEEDS)]) for rate in grid]
constant, constant_value = float(grid[np.argmin(losses)]), float(min(losses))
print("constant rates:", ", ".join(f"{rate:.3f} gives {loss:.3f}" for rate, loss in zip(grid, losses, strict=True)))

# %%
# One rate per step
# -----------------
# Both schedules begin at the best constant: one is tuned on a single sequence of batches, the other on new ones each
# time.

on_one_sequence = train_with(constant, iterations=ITERATIONS // 2)
result = train_with(constant, iterations=ITERATIONS, batches="new")
schedule = result.values["lr"]
print(f"one sequence of batches: {on_one_sequence}")
print(f"new batches every time: {result}")

# %%
# Other batches, other starts
# ---------------------------


def test_loss(rates, seed):
    with torch.no_grad():
        return F.cross_entropy(train_with(rates, seed).model(test[0]), test[1]).item()


rates = {"constant": constant, "one sequence": on_one_sequence.values["lr"], "new batches": schedule}
new_seeds = range(10, 12 if QUICK else 18)
scores = {name: np.array([test_loss(rate, seed) for seed in new_seeds]) for name, rate in rates.items()}
for name, found in scores.items():
    print(f"{name:13} test loss {found.mean():.4f} ± {found.std():.4f} over {len(new_seeds)} new seeds")
learned, best_constant = scores["new batches"].mean(), scores["constant"].mean()

# %%
# The schedules, and the validation loss while the second was tuned, which goes up and down with the batches. The rates
# rise again in the last steps: with a momentum of 0.9 a gradient acts for about ten steps, and those have fewer left.

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
steps = np.arange(1, STEPS + 1)
left.plot(steps, on_one_sequence.values["lr"], color="C2", linewidth=0.8, label="one sequence")
left.plot(steps, schedule, color="C0", label="new batches")
left.axhline(constant, color="C1", linestyle="--", label="best constant")
left.set(xlabel="step", ylabel="learning rate", yscale="log", title="One learning rate per step")
left.legend()
right.plot(result.history["value"], color="C0", label="new batches")
right.axhline(constant_value, color="C1", linestyle="--", label="best constant, mean")
right.set(xlabel="hyperiteration", ylabel="validation loss", title="Tuning")
right.legend()
plt.show()
