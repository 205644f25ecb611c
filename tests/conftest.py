import pytest
import torch

# Mathematics is asserted in double precision; tests that are about float32 switch, and the fixture switches back.
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def double_precision():
    yield
    torch.set_default_dtype(torch.float64)
