"""A replacement for the package of this name, for a machine without internet access: generated rows in ijcnn1's sizes.

Features are correlated, and a third of them matter. The standard deviation of each is 1/4, because the features of
ijcnn1 lie between −1 and 1, and the referee published its solvers' settings for these. Each seed (`REFEREE_SEED`) gives
other rows.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

ROWS = {"ijcnn1": 50_000, "ijcnn1_test": 91_701}
FEATURES = 22


def fetch_libsvm(name: str) -> tuple[Any, Any]:
    seed = int(os.environ.get("REFEREE_SEED", "0"))
    common = np.random.default_rng(seed)
    mixing = np.eye(FEATURES) + 0.3 * common.normal(size=(FEATURES, FEATURES)) / np.sqrt(FEATURES)
    true = np.where(common.random(FEATURES) < 1 / 3, common.normal(size=FEATURES), 0.0)
    own = np.random.default_rng([seed, list(ROWS).index(name)])
    x = own.normal(size=(ROWS[name], FEATURES)) @ mixing
    score = x @ true + own.logistic(size=len(x))
    return x / (4 * np.linalg.norm(mixing, axis=0)), np.where(score > 0, 1.0, -1.0)
