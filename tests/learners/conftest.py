import numpy as np
import pytest

from bilevel.data import ImageDataset


@pytest.fixture(scope="module")
def data():
    """18 classes of noise, each with a pattern of its own."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(18), 6)
    styles = rng.integers(0, 256, (18, 16, 16, 1))
    images = np.clip(styles[labels] + rng.integers(-60, 60, (len(labels), 16, 16, 1)), 0, 255).astype(np.uint8)
    splits = {"train": range(8), "val": range(8, 13), "test": range(13, 18)}
    return ImageDataset("noise", images, labels, tuple(f"class {k}" for k in range(18)), splits, fingerprint="noise")
