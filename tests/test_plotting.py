"""The shared look of pictures, and how they are saved."""

import sys

import matplotlib
import numpy as np
import pytest

from bilevel import plotting
from bilevel.files import NotWritten


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_equal_figures_give_equal_bytes(tmp_path, suffix):
    for name in ("a", "b"):
        with plotting.picture(tmp_path / f"{name}.{suffix}", 3, 2) as figure:
            plotting.titled(figure.subplots(), "Title", "x", "y").plot([1, 2], color=plotting.BLUE)
    first, second = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("a", "b"))
    assert first == second
    assert first.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


def test_a_figure_that_fails_leaves_the_old_picture(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), plotting.picture(path):
        raise ZeroDivisionError
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["a.png"]


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(NotWritten, match="missing"), plotting.picture(tmp_path / "missing" / "a.png"):
        pass


def test_the_style_ends_with_the_block_and_no_figure_stays_open(tmp_path):
    before = dict(matplotlib.rcParams)
    with plotting.picture(tmp_path / "a.png", 2, 2):
        assert matplotlib.rcParams["axes.spines.top"] is False
    assert dict(matplotlib.rcParams) == before
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


def test_an_image_with_one_channel_is_grey_and_has_no_ticks():
    figure = plotting.new_figure(2, 2)
    axes = figure.subplots()
    plotting.show_image(axes, np.zeros((3, 3, 1), np.uint8))
    assert axes.images[0].get_array().shape == (3, 3)
    assert not len(axes.get_xticks()) and not len(axes.get_yticks())
