"""
Ray Tune around the gradients
=============================

Ray Tune runs trials side by side, on the cores of one machine or on many. As in the example with Optuna, it searches
over what has no gradient, here the width of a network and its activation. In every trial hypergradients learn the rest:
a learning rate for each of the inner steps and a weight decay for each layer.
"""

import os
import tempfile

import matplotlib.pyplot as plt
import ray
import torch
import torch.nn.functional as F
from ray import tune
from sklearn.datasets import load_digits
from torch import nn

import bilevel as bl

QUICK = bool(os.environ.get("BILEVEL_QUICK"))
STEPS, HYPERITERATIONS, WIDTHS = (10, 10, [8, 32]) if QUICK else (30, 60, [8, 32, 128])

# %%
# A trial
# -------
# It is an ordinary function. It reports the validation loss of every hyperiteration, so that one of Ray's schedulers
# could stop it, and the learned λ with it, so that nothing has to be computed again.


def data():
    pictures, digits = load_digits(return_X_y=True)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    X, y = torch.tensor(pictures / 16, dtype=torch.get_default_dtype())[order], torch.tensor(digits)[order]
    return bl.Task(train=(X[:200], y[:200]), val=(X[200:800], y[200:800])), (X[800:], y[800:])


def build(config):
    torch.manual_seed(0)
    activation = {"tanh": nn.Tanh, "relu": nn.ReLU}[config["activation"]]
    network = nn.Sequential(nn.Linear(64, config["width"]), activation(), nn.Linear(config["width"], 10))
    w0, apply = bl.functional(network)

    def outer(w, lam, batch):
        return F.cross_entropy(apply(w, batch[0]), batch[1])

    def inner(w, lam, batch):
        norms = torch.stack([w["0.weight"].square().sum(), w["2.weight"].square().sum()])
        return outer(w, lam, batch) + (lam["decay"].exp() * norms).sum()

    def dynamics(lam):
        return bl.HeavyBall(lr=lambda t: lam["rates"][t - 1].exp(), momentum=0.9)

    lam = {"rates": torch.full((STEPS,), -2.0), "decay": torch.full((2,), -7.0)}
    return bl.Problem(inner, outer, lambda lam: w0), lam, {"dynamics": dynamics, "steps": STEPS}, apply


def trial(config):
    task, _ = data()
    problem, lam, settings, _ = build(config)
    for leaf in lam.values():
        leaf.requires_grad_()
    optimizer = torch.optim.Adam(lam.values(), lr=0.1)
    for _ in range(HYPERITERATIONS):
        f = bl.objective(problem, lam, task, **settings)
        tune.report({"loss": f.item(), "lam": {name: leaf.tolist() for name, leaf in lam.items()}})
        optimizer.zero_grad()
        f.backward()
        optimizer.step()


# %%
# The search
# ----------
# ``ray.init()`` alone takes all cores; ``ray.init(address=...)`` joins a cluster. ``TuneConfig`` also takes a
# ``scheduler`` such as ``ASHAScheduler()``, which stops poor trials.

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
tuner = tune.Tuner(
    trial,
    param_space={"width": tune.grid_search(WIDTHS), "activation": tune.grid_search(["tanh", "relu"])},
    tune_config=tune.TuneConfig(metric="loss", mode="min", reuse_actors=True),
    run_config=tune.RunConfig(storage_path=tempfile.mkdtemp(), verbose=0),
)
results = tuner.fit()
ray.shutdown()

for one in sorted(results, key=lambda one: one.metrics["loss"]):
    print(f"{one.config}: validation loss {one.metrics['loss']:.4f}")

# %%
# The best trial
# --------------
# Its λ, reported as lists of numbers, gives its loss back here.

best = results.get_best_result()
(task, test), (problem, _, settings, apply) = data(), build(best.config)
lam = {name: torch.tensor(value) for name, value in best.metrics["lam"].items()}
again = bl.hypergradient(problem, lam, task, **settings)
accuracy = (apply(again.inner, test[0]).argmax(1) == test[1]).double().mean().item()
print(f"best {best.config}: loss {again.value:.4f} computed again, test accuracy {accuracy:.1%}")

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for one in results:
    color = {"tanh": "#0072B2", "relu": "#D55E00"}[one.config["activation"]]
    shade = (1 + WIDTHS.index(one.config["width"])) / len(WIDTHS)
    label = f"{one.config['activation']}, width {one.config['width']}"
    left.plot(one.metrics_dataframe["loss"], color=color, alpha=shade, label=label)
left.set(title="Every trial", xlabel="hyperiteration", ylabel="$f_T(\\lambda)$", yscale="log")
left.legend(frameon=False)
right.bar(range(1, STEPS + 1), lam["rates"].exp(), color="#009E73")
right.set(title="The best trial's learning rates", xlabel="inner step", ylabel="learning rate")
plt.show()
