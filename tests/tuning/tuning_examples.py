"""Small models and data for the tests of `bilevel.tuning`."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


def classes(count=24, seed=0):
    """Inputs of three features and labels of three classes, float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator)
    noise = 0.5 * torch.randn(count, 3, generator=generator)
    return x, (x + noise).argmax(1)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def loader(count=24, size=8, shuffle=True, **settings):
    return DataLoader(TensorDataset(*classes(count)), batch_size=size, shuffle=shuffle, **settings)


class Pictures(Dataset):
    """Examples one by one, with a random transform that draws from all three global generators."""

    def __init__(self, count=10):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        import random

        import numpy as np

        noise = torch.rand(3) + random.random() + float(np.random.rand())
        return index + 0.1 * noise, index % 3
