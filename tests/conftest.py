import pytest
import torch

# Mathematics is asserted in double precision; tests that are about float32 say so.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def double_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
