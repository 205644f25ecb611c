r"""
Step sizes and momenta learned for a family of problems
=======================================================

A deep network of sigmoid units is hard to train: the gradient shrinks from layer to layer, so a step size that
is right for the last layer is far too small for the first. A single number tuned by hand is a compromise. Here the
weights and the biases of each layer :math:`\ell` get a step size :math:`\eta_\ell` and a momentum :math:`\beta_\ell` of
their own. Their logarithms and logits are λ, which is found by descending the validation loss after T steps of

.. math:: v_\ell \leftarrow \beta_\ell v_\ell - \eta_\ell \nabla_\ell L, \qquad w_\ell \leftarrow w_\ell + v_\ell,

through these steps. One λ serves a whole family of problems, telling two handwritten digits apart, and is then used on
new pairs of digits, beside constants that were tuned by hand on the same pairs as λ.
"""

import itertools
import math
import os

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits

import bilevel as bl

QUICK = bool(os.environ.get("BILEVEL_QUICK"))
STEPS, ITERATIONS, JUDGED, STRIDE = (16, 16, 1, 8) if QUICK else (20, 150, 4, 2)
BATCH, EXAMPLES = 12, 60
SIZES = [64, 16, 16, 16, 1]
plt.style.use("tableau-colorblind10")

# %%
# The family
# ----------
# Of the 45 pairs of digits, 25 are used to learn λ and 20 to test it. A task is a batch of twelve pairs, each with
# new examples and with a network of its own. The start of a network is part of the task's data and w is what the
# steps add to it, so that λ cannot overfit one particular start.

pixels, digits = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
pixels = pixels.float() / 16
pairs = list(itertools.combinations(range(10), 2))
order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
SEEN, UNSEEN = [pairs[i] for i in order[:25]], [pairs[i] for i in order[25:]]


def draw(pairs, seed):
    generator = torch.Generator().manual_seed(seed)
    chosen = [pairs[i] for i in torch.randint(len(pairs), (BATCH,), generator=generator).tolist()]
    images = []
    for digit in itertools.chain(*chosen):
        rows = (digits == digit).nonzero()[:, 0]
        images.append(pixels[rows[torch.randperm(len(rows), generator=generator)[: 2 * EXAMPLES]]])
    # From (network, first or second digit, example, pixel) to alternating digits.
    x = torch.stack(images).unflatten(0, (BATCH, 2)).transpose(1, 2).flatten(1, 2)
    y = torch.tensor([[0.0], [1.0]]).repeat(2 * EXAMPLES, 1).expand(BATCH, -1, -1)
    begin = {}
    for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(SIZES)):
        begin[f"weight {layer + 1}"] = torch.randn(BATCH, fan_in, fan_out, generator=generator) / fan_in**0.5
        begin[f"bias {layer + 1}"] = torch.zeros(BATCH, 1, fan_out)
    half = 2 * EXAMPLES
    return bl.Task(train=(x[:, :half], y[:, :half], begin), val=(x[:, half:], y[:, half:], begin))


def losses(w, data):
    """The cross-entropy of each network of the batch."""
    x, y, begin = data
    for layer in range(1, len(SIZES)):
        x = x if layer == 1 else x.sigmoid()
        x = x @ (begin[f"weight {layer}"] + w[f"weight {layer}"]) + begin[f"bias {layer}"] + w[f"bias {layer}"]
    return torch.nn.functional.binary_cross_entropy_with_logits(x, y, reduction="none").mean((1, 2))


zero = {name: torch.zeros_like(value) for name, value in draw(SEEN, 0).train[2].items()}
problem = bl.Problem(
    inner=lambda w, lam, data: losses(w, data).sum(),
    outer=lambda w, lam, data: losses(w, data).mean(),
    init=lambda lam: zero,
)
seen = [draw(SEEN, seed=10**6 + i) for i in range(JUDGED)]
unseen = [draw(UNSEEN, seed=2 * 10**6 + i) for i in range(JUDGED)]


def loss_after(steps, tasks, dynamics, lam=None):
    lam = torch.zeros(()) if lam is None else lam
    with torch.no_grad():
        return float(bl.objective(problem, lam, tasks, dynamics=dynamics, steps=steps))


# %%
# Tuned by hand
# -------------
# One step size and one momentum for all layers, the best on a grid; and the best step size for Adam, which scales its
# steps itself.

rates = [0.5, 2, 8] if QUICK else [0.35, 0.5, 0.7, 1, 1.4, 2, 2.8, 4, 5.6, 8]
momenta = [0.5, 0.9] if QUICK else [0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95]
by_hand = min(
    (bl.HeavyBall(lr, momentum) for lr in rates for momentum in momenta),
    key=lambda dynamics: loss_after(STEPS, seen, dynamics),
)
adam = min(
    (bl.Adam(lr) for lr in ([0.03, 0.1] if QUICK else [0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.2])),
    key=lambda dynamics: loss_after(STEPS, seen, dynamics),
)
print(f"By hand: {by_hand} and {adam}")

# %%
# Learned
# -------
# A setting of a dynamics may be a tree like w. λ begins at the constants found by hand.


def learned(lam):
    return bl.HeavyBall(
        lr={name: value.exp() for name, value in lam["lr"].items()},
        momentum={name: value.sigmoid() for name, value in lam["momentum"].items()},
    )


first = math.log(by_hand.lr), torch.tensor(max(by_hand.momentum, 0.1)).logit().item()
solution = bl.solve(
    problem,
    {key: {name: torch.tensor(value) for name in zero} for key, value in zip(("lr", "momentum"), first, strict=True)},
    lambda k: draw(SEEN, seed=k),
    dynamics=learned,
    steps=STEPS,
    method=bl.Reverse(),
    optimizer=lambda params: torch.optim.Adam(params, lr=0.2 if QUICK else 0.06),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ITERATIONS),
    iterations=ITERATIONS,
    progress=False,
)
lam = solution.outer
print(solution.outcome)

# %%
# On new pairs of digits
# ----------------------
# The loss on test images after every step, up to twice as many steps as λ was learned for.

times = range(0, 2 * STEPS + 1, STRIDE)
curves = {
    "momentum, tuned by hand": [loss_after(t, unseen, by_hand) for t in times],
    "Adam, tuned by hand": [loss_after(t, unseen, adam) for t in times],
    "learned, per layer": [loss_after(t, unseen, learned, lam) for t in times],
}
for name, curve in curves.items():
    print(f"  {name:24} {curve[STEPS // STRIDE]:.3f} after {STEPS} steps, {curve[-1]:.3f} after {2 * STEPS}")
hand_loss, adam_loss, learned_loss = (curve[STEPS // STRIDE] for curve in curves.values())

# %%
# The learned steps are large where the gradient is small, in the first layers, and the momentum there is close to one.
# No constant for all layers can do that: what the first layer needs makes the last one diverge. Adam, which gives every
# weight a scale of its own, comes much closer, and is as good with twice the steps that λ was learned for. The start
# of λ matters: from four times the step size found by hand nothing is learned in as many hyperiterations, the loss
# stays at 0.694, and the constants are better.
# If Adam is good enough for you, it is the simpler choice; if a family of problems has to be solved over and over
# within a budget of steps, learning the constants for exactly that budget pays.

figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 4), layout="constrained", width_ratios=[1.3, 1, 1])
for (name, curve), colour in zip(curves.items(), ("C3", "C1", "C0"), strict=True):
    left.semilogy(times, curve, color=colour, marker="o", markersize=4, label=name)
left.axvline(STEPS, color="grey", lw=0.8)
left.set(xlabel="step", ylabel="test loss", title="Unseen pairs of digits")
left.legend(frameon=False, loc="lower left")
layers = torch.arange(1, len(SIZES))
values = {"lr": lambda leaf: leaf.exp(), "momentum": lambda leaf: leaf.sigmoid()}
for panel, key, title in ((middle, "lr", "Learned step sizes"), (right, "momentum", "Learned momenta")):
    for kind, shift, colour in (("weight", -0.2, "C0"), ("bias", 0.2, "C4")):
        heights = [values[key](lam[key][f"{kind} {layer}"]) for layer in layers.tolist()]
        panel.bar(layers + shift, heights, width=0.38, color=colour, label=kind)
    panel.axhline(getattr(by_hand, key), color="C3", ls="--", label="by hand")
    panel.set(xlabel="layer", title=title, xticks=layers)
middle.legend(frameon=False)
for panel in (left, middle, right):
    panel.spines[["top", "right"]].set_visible(False)
plt.show()
