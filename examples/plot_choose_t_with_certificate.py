r"""
How many inner steps are enough?
================================

Every gradient of a bilevel problem that is solved by T steps is a gradient of :math:`f_T`, not of :math:`f`. More steps
bring the two together, if the theory applies (the paper's Theorem 3.2), but they cost time, and the theorem does not
say how many are needed here. ``bilevel.certify`` does, from what it can compute: it finds the curvature
:math:`[\mu, \nu]` of the inner objective and a point close to the minimiser :math:`w_\lambda`, and returns an upper
bound on :math:`|f_T(\lambda) - f(\lambda)|`.
"""

import math
import os
import warnings

import matplotlib.pyplot as plt
import torch

import bilevel as bl

QUICK = bool(os.environ.get("BILEVEL_QUICK"))
TIMES = [5, 20, 80, 320] if QUICK else [2, 5, 10, 20, 40, 80, 160, 320, 640]
torch.set_default_dtype(torch.float64)
plt.style.use("tableau-colorblind10")

# %%
# A problem with a known answer
# -----------------------------
# Ridge regression with thirty correlated features. The minimiser has a closed form, which the certificate does not use.

generator = torch.Generator().manual_seed(0)
mix = torch.randn(30, 30, generator=generator) / 30**0.5 + 0.5 * torch.eye(30)
x = torch.randn(120, 30, generator=generator) @ mix
y = x @ torch.randn(30, generator=generator) + 0.3 * torch.randn(120, generator=generator)
task = bl.Task(train=(x[:60], y[:60]), val=(x[60:], y[60:]))
lam = torch.tensor(-3.0)  # the logarithm of the penalty


def mse(w, data):
    return ((data[0] @ w - data[1]) ** 2).mean()


ridge = bl.Problem(
    inner=lambda w, lam, data: mse(w, data) + lam.exp() * (w**2).sum(),
    outer=lambda w, lam, data: mse(w, data),
    init=lambda lam: torch.zeros(30),
)
gram = task.train[0].T @ task.train[0] / 60 + lam.exp() * torch.eye(30)
minimiser = torch.linalg.solve(gram, task.train[0].T @ task.train[1] / 60)
truth = float(mse(minimiser, task.val))

# %%
# One certificate, printed in full
# --------------------------------

dynamics = bl.GradientDescent(lr=0.1)
print(bl.certify(ridge, lam, task, dynamics=dynamics, steps=80))

# %%
# The band around :math:`f_T`
# ---------------------------
# For each T the limit :math:`f` must lie within ``value_gap`` of :math:`f_T`, and it does.

certificates = [bl.certify(ridge, lam, task, dynamics=dynamics, steps=T) for T in TIMES]
values = torch.tensor([certificate.value for certificate in certificates])
bounds = torch.tensor([certificate.value_gap for certificate in certificates])
gaps = (values - truth).abs()
covered = bool((gaps <= bounds).all())
for T, value, gap, bound in zip(TIMES, values, gaps, bounds, strict=True):
    print(f"T = {T:3}  f_T = {value:.5f}  |f_T − f| = {gap:.2e}, certified ≤ {bound:.2e}")
print(f"f = {truth:.5f} lies in every band: {covered}")

# %%
# T for a given gap
# -----------------
# Heavy ball needs far fewer steps than plain gradient descent, and the certificate takes this into account.

WANTED = 1e-2
ball = bl.HeavyBall(lr=0.1, momentum=0.9)
smallest = certificates[-1].smallest_steps(gap=WANTED)
smallest_ball = bl.certify(ridge, lam, task, dynamics=ball, steps=20).smallest_steps(gap=WANTED)
with torch.no_grad():
    reached = float(bl.objective(ridge, lam, task, dynamics=dynamics, steps=smallest))
print(f"A gap of {WANTED} needs T = {smallest} by gradient descent (true gap {abs(reached - truth):.2e}),")
print(f"and T = {smallest_ball} with momentum.")

# %%
# Where the inner problem is convex but not quadratic
# ---------------------------------------------------
# Here the measured μ is the curvature at :math:`w_T` only, and the certificate says that it assumes the same between
# there and the minimiser. If you know a μ that holds everywhere, such as the strength of the L2 term, pass it; then
# nothing is assumed. Two thousand steps show the true limit.

labels = (y > 0).double()
classes = bl.Task(train=(x[:60], labels[:60]), val=(x[60:], labels[60:]))


def cross_entropy(w, data):
    return torch.nn.functional.binary_cross_entropy_with_logits(data[0] @ w, data[1])


logistic = bl.Problem(
    inner=lambda w, lam, data: cross_entropy(w, data) + lam.exp() / 2 * (w**2).sum(),
    outer=lambda w, lam, data: cross_entropy(w, data),
    init=lambda lam: torch.zeros(30),
)
known = bl.certify(logistic, lam, classes, dynamics=bl.GradientDescent(0.5), steps=80, mu=math.exp(lam))
found = bl.certify(logistic, lam, classes, dynamics=bl.GradientDescent(0.5), steps=80)
with torch.no_grad():
    limit = float(bl.objective(logistic, lam, classes, dynamics=bl.GradientDescent(0.5), steps=2000))
logistic_gap = abs(known.value - limit)
print(f"|f_T − f| = {logistic_gap:.3e}; certified ≤ {known.value_gap:.3e} with the known μ = {known.mu:.6f},")
print(f"{'':23}certified ≤ {found.value_gap:.3e} with the measured μ = {found.mu:.6f}")

# %%
# Where it does not apply
# -----------------------
# A network's inner objective has directions of negative curvature. There is no unique minimiser, so nothing can be
# certified: the bounds are infinite, the outcome says why, and asking for a T is an error. With a step size above
# :math:`2/\nu` the steps do not converge, and ``certify`` warns.


def layer(w, data):
    return torch.tanh(data[0] @ w["in"]), data[1]


hidden = bl.Problem(
    inner=lambda w, lam, data: mse(w["out"], layer(w, data)) + lam.exp() * (w["out"] ** 2).sum(),
    outer=lambda w, lam, data: mse(w["out"], layer(w, data)),
    init=lambda lam: {"in": 0.1 * mix[:, :5], "out": torch.ones(5)},
)
network = bl.certify(hidden, lam, task, dynamics=bl.GradientDescent(0.05), steps=80)
refused = not network.applies
print(network.outcome)
try:
    network.smallest_steps(gap=WANTED)
except bl.BilevelError as error:
    print("BilevelError:", str(error)[:90], "…")

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    bl.certify(ridge, lam, task, dynamics=bl.GradientDescent(lr=0.3), steps=20)
print("BilevelWarning:", caught[0].message)

# %%
# The bounds are almost exact, because the certificate computes the minimiser by Newton's method: the band ends at
# :math:`f`. A bound from the contraction rate alone, which is known before the run, is much wider (right).

figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4), layout="constrained")
left.fill_between(TIMES, values - bounds, values + bounds, color="C4", alpha=0.3, label="certified band")
left.semilogx(TIMES, values, "o-", color="C0", label="f_T(λ)")
left.axhline(truth, color="C5", ls="--", label="f(λ), in closed form")
left.axvline(smallest, ymax=0.6, color="grey", lw=0.8)
left.annotate(f" T = {smallest}: certified\n to {WANTED}", (smallest, 2 * truth + 1.5))
left.set(xlabel="T", ylim=(-0.5, values[1] + 1), title="$f_T$ with its certified band")
start = float(minimiser.norm())
with torch.no_grad():
    runs = [bl.hypergradient(ridge, lam, task, dynamics=dynamics, steps=T, method=bl.Spectral()).inner for T in TIMES]
right.loglog(TIMES, [start * c.rate**c.steps for c in certificates], color="C2", label="what the rate alone promises")
right.loglog(TIMES, [c.inner_distance for c in certificates], color="C4", lw=6, alpha=0.5, label="certified")
right.loglog(TIMES, [float((w - minimiser).norm()) for w in runs], "o", color="C0", label="true")
right.set(xlabel="T", title="Distance of $w_T$ from the minimiser")
for panel in (left, right):
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
plt.show()
