r"""
Plots of every feature's effect
===============================

:class:`bilevel.estimators.BilevelAdditiveRegressor` fits

.. math:: y \approx b + \sum_j f_j(x_j) + \sum_{(j,k)} f_{jk}(x_j, x_k)

with a penalised spline for every column of numbers, a block for every column of categories and an effect for missing
values. All penalties are tuned together by hypergradients of the leave-one-out error.
"""

import os

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from bilevel.estimators import BilevelAdditiveRegressor

QUICK = bool(os.environ.get("BILEVEL_QUICK"))

# %%
# A table
# -------
# Rents by area, year, district and floor. The effect of the year is curved, that of the area saturates, and the floor
# is missing in some rows.

rng = np.random.default_rng(0)
rows = 200 if QUICK else 400
frame = pd.DataFrame(
    {
        "area": rng.uniform(20, 140, rows),
        "year": rng.integers(1900, 2020, rows),
        "district": rng.choice(["north", "old town", "harbour", "south"], rows),
        "floor": rng.integers(0, 6, rows).astype(float),
    }
)
place = frame["district"].map({"north": -1.0, "old town": 2.0, "harbour": 0.5, "south": 0.0})
rent = 9 * np.log(frame["area"]) + 3 * ((frame["year"] - 1960) / 60) ** 2 + place + 0.3 * frame["floor"]
rent = rent + 0.02 * frame["area"] * (frame["district"] == "old town") + rng.normal(size=rows)
frame.loc[rng.random(rows) < 0.15, "floor"] = np.nan

# %%
# The fit
# -------
# The area may only raise the rent.

model = BilevelAdditiveRegressor(monotone={"area": 1}).fit(frame, rent)
error = np.sqrt(2 * model.criterion_)
print(f"leave-one-out error {error:.2f}, noise 1")
for term in ("area", "year", "district", "floor"):
    penalties = ", ".join(f"{kind} {value:.2g}" for kind, value in model.penalties_[term].items())
    print(f"{term:9} deviation {model.importance_[term]:.2f}; penalties: {penalties}")

# %%
# The effects
# -----------
# Bands are 1.96 standard deviations; grey points are the partial residuals of the rows.

figure = model.plot(figure=plt.figure(figsize=(9.3, 5.4), layout="constrained"))
plt.show()

# %%
# One prediction
# --------------
# The effects add up to the prediction. A prediction interval says how far the rent may be from it.

row = frame.iloc[[7]]
for term, share in list(model.explain(row).items())[:5]:
    print(f"{term:12} {share:+.2f}")
low, high = model.predict_interval(row, coverage=0.9)[0]
true = rent[7]
print(f"prediction {model.predict(row)[0]:.2f}, 90 % interval {low:.2f} to {high:.2f}, rent {true:.2f}")
