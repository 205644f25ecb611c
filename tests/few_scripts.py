"""A part of Glyphs: drawing all of it takes half a minute, these scripts take seconds."""

import os
from contextlib import contextmanager

import pytest

from bilevel.data import _scripts, load

FEW = {
    "greek": ("train", ((0x391, 0x3C9),)),
    "hebrew": ("test", ((0x5D0, 0x5EA),)),
    "lao": ("val", ((0xE81, 0xE9A),)),
    "latin": ("train", ((0x61, 0x7A),)),
    "cyrillic": ("train", ((0x410, 0x42F),)),
}


@contextmanager
def unchecked_derivatives():
    """Inside the block derivatives are not compared with differences.

    That takes longer than a training of a few hyperiterations. The battery of learners compares those of all learners.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bilevel.engine.checks._check_derivatives", lambda *arguments: None)
        yield


@contextmanager
def drawn(tmp_path_factory):
    """Inside the block `load("glyphs")` has these scripts only, drawn once for all files and processes of the tests."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "few-scripts"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_scripts, "SCRIPTS", FEW)
        patch.setenv("BILEVEL_CACHE", str(folder))
        yield load("glyphs", progress=False)
