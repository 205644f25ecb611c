r"""
A penalty for every feature of a wide table
===========================================

A table has more columns than rows, and most columns are noise. Ridge regression has one penalty for all of them: if it
is large enough to suppress the noise, it suppresses the signal too. :class:`bilevel.estimators.BilevelRidge` minimises

.. math:: f(\lambda) = \sum_k E_k(w^k_\lambda), \qquad
          w^k_\lambda = \arg\min_w \sum_i (y_i - x_i w)^2 + \sum_j e^{\lambda_j} w_j^2,

over one :math:`\lambda_j` per column, by hypergradients of the cross-validation. Here are 400 of them, and what they
gain; and a table in which every column matters, where they gain nothing.
"""

import os

import matplotlib.pyplot as plt
import numpy as np
from sklearn.linear_model import LassoCV, RidgeCV

from bilevel.estimators import BilevelRidge

QUICK = bool(os.environ.get("BILEVEL_QUICK"))
ROWS, COLUMNS, INFORMATIVE, SEEDS = (60, 120, 5, 2) if QUICK else (120, 400, 8, 8)
plt.style.use("tableau-colorblind10")

# %%
# One table
# ---------
# The first few columns are informative, the rest are noise.


def table(seed, informative):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(ROWS + 2000, COLUMNS))
    signal = X[:, :informative] @ (rng.choice([-1, 1], informative) * rng.uniform(0.5, 1.5, informative))
    y = signal + 0.5 * signal.std() * rng.normal(size=len(X))
    return X[:ROWS], y[:ROWS], X[ROWS:], y[ROWS:]


X, y, X_test, y_test = table(0, INFORMATIVE)
ridge = RidgeCV(alphas=np.logspace(-2, 5, 50)).fit(X, y)
model = BilevelRidge().fit(X, y)
print(model.method_)
print(f"{model.n_iter_} hypergradients in {model.history_['seconds'][-1]:.1f} s. {model.outcome_}")
print(f"R² on new rows: RidgeCV {ridge.score(X_test, y_test):.3f}, ours {model.score(X_test, y_test):.3f}")

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
noise = slice(INFORMATIVE, None)
places = np.arange(COLUMNS)
left.semilogy(places[noise], model.alpha_[noise], ".", color="C2", markersize=3, label="noise")
left.semilogy(places[:INFORMATIVE], model.alpha_[:INFORMATIVE], "o", color="C1", label="informative columns")
left.axhline(ridge.alpha_, color="C0", linestyle="--", label="RidgeCV's one penalty")
left.set(xlabel="column", ylabel="penalty", title="Tuned penalties")
left.legend(fontsize=8)
right.plot(places, ridge.coef_, ".", color="C0", markersize=3, label="RidgeCV")
right.plot(places, model.coef_, ".", color="C1", markersize=3, label="a penalty for each")
right.set(xlabel="column", ylabel="coefficient", title="Coefficients")
right.legend(fontsize=8)
plt.show()

# %%
# How the criterion fell: first with one penalty for all, then with one for each column. The *tether* pulls these
# towards a common value. Its strength is chosen by an estimate of the criterion in which every row is left out of the
# tuning too. Without the tether the criterion would fall further, and the error on new rows would rise: 400 penalties
# can overfit the folds.

free = BilevelRidge(tether=0).fit(X, y)
for name, tuned in (("tether chosen", model), ("no tether", free)):
    promised = 1 - 2 * tuned.history_["value"][-1] / y.var()
    print(f"{name:13}  R² promised by the folds {promised:.3f}, on new rows {tuned.score(X_test, y_test):.3f}")

figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
for name, tuned, colour in (("tether chosen", model, "C1"), ("no tether", free, "C3")):
    best = np.minimum.accumulate(2 * tuned.history_["value"] / y.var())
    axes.plot(best, color=colour, label=f"{name}: criterion, best so far")
    axes.axhline(1 - tuned.score(X_test, y_test), color=colour, linestyle=":", label=f"{name}: new rows")
axes.set(xlabel="hypergradient", ylabel="1 − R²", title="What the folds say, and what is true")
axes.legend(fontsize=8)
plt.show()

# %%
# Many tables, and where it does not help
# ---------------------------------------
# The same for several tables, compared with the lasso, which is made for this case and is the better tool for it; and
# for tables in which every column matters. There the lasso fails, and the tuned tether should be infinite: one penalty
# for all.

rivals = {
    "RidgeCV": lambda: RidgeCV(alphas=np.logspace(-2, 5, 50)),
    "LassoCV": lambda: LassoCV(cv=5, max_iter=20_000),
    "BilevelRidge": BilevelRidge,
}
errors = {}
for kind, informative in (("a few informative", INFORMATIVE), ("all informative", COLUMNS)):
    for name, build in rivals.items():
        scores = []
        for seed in range(SEEDS):
            X, y, X_test, y_test = table(seed, informative)
            scores.append(1 - build().fit(X, y).score(X_test, y_test))
        errors[kind, name] = np.array(scores)
        spread = errors[kind, name].std(ddof=1) / np.sqrt(SEEDS)
        print(f"{kind:18}  {name:12}  1 − R² = {errors[kind, name].mean():.3f} ± {spread:.3f}")

figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for place, kind in enumerate(dict.fromkeys(kind for kind, _ in errors)):
    for shift, (name, colour) in enumerate(zip(rivals, ("C0", "C2", "C1"), strict=True)):
        found = errors[kind, name]
        axes.plot(found, np.full(SEEDS, place + 0.2 * (shift - 1)), "o", color=colour, alpha=0.4)
        axes.plot(
            found.mean(), place + 0.2 * (shift - 1), "D", color=colour, markersize=8, label=None if place else name
        )
axes.set_yticks(range(2), ["a few informative", "all informative"])
axes.set(xlabel="1 − R² on new rows (each dot a table, diamonds the mean)", xlim=(0, None))
axes.legend(fontsize=8)
plt.show()

ridge_error = errors["a few informative", "RidgeCV"].mean()
own_error = errors["a few informative", "BilevelRidge"].mean()
loss_where_useless = errors["all informative", "BilevelRidge"].mean() / errors["all informative", "RidgeCV"].mean()
