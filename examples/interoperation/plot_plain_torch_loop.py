"""
A training loop of your own
===========================

``bl.objective(...)`` returns :math:`f_T(\\lambda)` as a scalar tensor, and ``.backward()`` fills the ``.grad`` of every
hyperparameter. From there on it is ordinary PyTorch: hyperparameters are ``nn.Parameter``\\ s of a module, any
``torch.optim`` class updates them, gradients can be clipped, a scheduler lowers the step size, TensorBoard logs it.

Here a small network learns digits from 150 pictures. Its learning rate, its momentum and a weight decay for each layer
are learned on 600 others. At the end they are given to ``torch.optim.SGD``, which arrives at the same network.
"""

import os
import tempfile

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import bilevel as bl

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:  # it is optional: pip install tensorboard
    SummaryWriter = None

QUICK = bool(os.environ.get("BILEVEL_QUICK"))
STEPS, HYPERITERATIONS = (30, 20) if QUICK else (100, 120)

# %%
# Data and a network, as always
# -----------------------------
# ``bl.functional`` turns a module into a pure function of its parameters.

torch.manual_seed(0)
pictures, digits = load_digits(return_X_y=True)
order = torch.randperm(len(digits))
X, y = torch.tensor(pictures / 16, dtype=torch.get_default_dtype())[order], torch.tensor(digits)[order]
task = bl.Task(train=(X[:150], y[:150]), val=(X[150:750], y[150:750]))
test = X[750:], y[750:]

network = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
w0, apply = bl.functional(network)

# %%
# Hyperparameters are a module
# ----------------------------
# Logarithms keep the rate and the decays positive, a sigmoid keeps the momentum between 0 and 1.


class Hyperparameters(nn.Module):
    """What is learned from the validation set."""

    def __init__(self) -> None:
        super().__init__()
        self.log_lr = nn.Parameter(torch.tensor(0.02).log())
        self.momentum = nn.Parameter(torch.tensor(0.5).logit())
        self.log_decay = nn.Parameter(torch.tensor([1e-3, 1e-3]).log())  # one for each layer


def inner(w, lam, batch):
    decay = lam["log_decay"].exp()
    penalty = decay[0] * w["0.weight"].square().sum() + decay[1] * w["2.weight"].square().sum()
    return F.cross_entropy(apply(w, batch[0]), batch[1]) + penalty / 2


def outer(w, lam, batch):
    return F.cross_entropy(apply(w, batch[0]), batch[1])


def dynamics(lam):
    return bl.HeavyBall(lr=lam["log_lr"].exp(), momentum=lam["momentum"].sigmoid())


problem = bl.Problem(inner, outer, init=lambda lam: w0)

# %%
# The loop
# --------
# Its first line is ours; the others are those of every PyTorch loop.

hyper = Hyperparameters()
optimizer = torch.optim.Adam(hyper.parameters(), lr=0.2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, HYPERITERATIONS)
# For your own runs use a folder that you keep, and view it with ``tensorboard --logdir FOLDER``.
writer = SummaryWriter(tempfile.mkdtemp()) if SummaryWriter else None
history = []
for k in range(HYPERITERATIONS):
    f = bl.objective(problem, dict(hyper.named_parameters()), task, dynamics=dynamics, steps=STEPS)
    optimizer.zero_grad()
    f.backward()
    norm = nn.utils.clip_grad_norm_(hyper.parameters(), max_norm=1.0)
    rate, momentum, decay = hyper.log_lr.exp(), hyper.momentum.sigmoid(), hyper.log_decay.exp()
    history.append([f.item(), rate.item(), momentum.item(), *decay.tolist()])
    optimizer.step()
    scheduler.step()
    if writer:
        writer.add_scalar("f_T", f.item(), k)
        writer.add_scalar("gradient norm", norm.item(), k)
if writer:
    writer.close()

lam = {name: value.detach() for name, value in hyper.named_parameters()}
with torch.no_grad():  # without gradients only the value is computed
    f = bl.objective(problem, lam, task, dynamics=dynamics, steps=STEPS)
before, after = history[0][0], f.item()
print(f"validation loss {before:.4f} before, {after:.4f} after {HYPERITERATIONS} hyperiterations")
rate, momentum, decay = lam["log_lr"].exp(), lam["momentum"].sigmoid(), lam["log_decay"].exp()
print(f"rate {rate:.3f}, momentum {momentum:.3f}, weight decay {decay[0]:.2e} and {decay[1]:.2e}")

# %%
# Use them in torch.optim
# -----------------------
# They are settings of ``torch.optim.SGD``. The same steps from the same start lead to the same validation loss.

sgd = torch.optim.SGD(
    [
        {"params": network[0].weight, "weight_decay": decay[0].item()},
        {"params": network[2].weight, "weight_decay": decay[1].item()},
        {"params": [network[0].bias, network[2].bias]},
    ],
    lr=rate.item(),
    momentum=momentum.item(),
)
for _ in range(STEPS):
    sgd.zero_grad()
    F.cross_entropy(network(task.train[0]), task.train[1]).backward()
    sgd.step()
with torch.no_grad():
    by_sgd = F.cross_entropy(network(task.val[0]), task.val[1]).item()
    accuracy = (network(test[0]).argmax(1) == test[1]).double().mean().item()
print(f"validation loss by torch.optim.SGD {by_sgd:.4f}; accuracy on {len(test[1])} test pictures {accuracy:.1%}")

# %%
# How they moved
# --------------

values, rates, momenta, first, second = zip(*history, strict=True)
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
left.plot(values, color="#0072B2")
left.set(title="Validation loss after T inner steps", xlabel="hyperiteration", ylabel="$f_T(\\lambda)$")
curves = {"learning rate": rates, "momentum": momenta, "decay, layer 1": first, "decay, layer 2": second}
for (name, curve), color in zip(curves.items(), ["#D55E00", "#009E73", "#0072B2", "#56B4E9"], strict=True):
    right.semilogy(curve, label=name, color=color)
right.set(title="The hyperparameters", xlabel="hyperiteration")
right.legend(frameon=False, ncols=2, loc="center right")
plt.show()
