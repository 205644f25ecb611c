"""Tables for tests, written as real files."""

import numpy as np
import pandas as pd
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine


def diabetes(path, **changes):
    """442 rows, 10 numbers and a numeric target, in the units of measurement."""
    frame = load_diabetes(as_frame=True, scaled=False).frame
    return written(path, frame.assign(**changes))


def cancer(path, rows=569):
    """569 rows, 30 numbers, and the classes malignant and benign as text."""
    data = load_breast_cancer(as_frame=True)
    frame = data.frame.assign(target=data.target_names[data.target])
    return written(path, frame.iloc[:rows])


def wine(path):
    """178 rows, 13 numbers, three classes as numbers."""
    return written(path, load_wine(as_frame=True).frame)


def flats(path, rows=80, seed=0, **changes):
    """Every kind of column: numbers, text, booleans, and weights."""
    draw = np.random.default_rng(seed)
    town, size = draw.choice(["Oslo", "Rome", "Lima"], rows), draw.uniform(20, 120, rows).round(1)
    lift = draw.random(rows) < 0.5
    price = 3 * size + 40 * (town == "Oslo") + 10 * lift + draw.normal(0, 3, rows)
    weight = draw.integers(1, 4, rows)
    frame = pd.DataFrame({"size": size, "town": town, "lift": lift, "price": price.round(2), "weight": weight})
    return written(path, frame.assign(**changes))


def written(path, frame):
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False)
    return path
