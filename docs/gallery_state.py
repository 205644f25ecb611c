"""What an example of the gallery may have changed for the next one: all of them run in one process."""

from __future__ import annotations

from typing import Any

import torch


def reset(gallery_conf: dict[str, Any], fname: str) -> None:
    """Every example begins as `python plot_NAME.py` would."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
