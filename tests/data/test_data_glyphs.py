"""Glyphs: how many there are, that they differ, and that they come out the same everywhere."""

import itertools

import numpy as np
import pytest

from bilevel import BilevelError
from bilevel.data import _outlines, _pens, _scripts, _skeletons
from bilevel.data.glyphs import Glyphs


@pytest.fixture(scope="module")
def characters():
    return _scripts.characters()


@pytest.fixture(scope="module")
def some(characters):
    """Every 25th character, drawn."""
    drawers = _pens.drawers(0, 20)
    chosen = characters[::25]
    return chosen, np.stack([_pens.draw(c.shapes, drawers, _pens.RandomNumbers(0, 1 + c.code)) for c in chosen])


def test_enough_scripts_and_classes(characters):
    scripts = {character.script for character in characters}
    assert len(characters) >= 800
    # The three alphabets of Georgian are one script to Unicode, and Fraktur is a form of Latin.
    assert len({script.split()[0] for script in scripts} - {"fraktur"}) >= 15
    assert min(sum(c.script == script for c in characters) for script in scripts) >= 10
    assert len({character.code for character in characters}) == len(characters)


def test_no_two_look_alike(characters):
    rasters = [_scripts._raster(character.shapes[0]) for character in characters]
    alike = _scripts._alike(rasters, rasters)
    assert alike.diagonal().all() and alike.sum() == len(characters)
    names = {character.title.partition(" ")[2] for character in characters}
    assert not {"LATIN CAPITAL LETTER A", "CYRILLIC CAPITAL LETTER A"} & names  # Greek has it


def test_a_missing_character_is_not_a_box(characters):
    for character in characters:
        assert any(character.code in _outlines.font(face)[1] for face in _scripts.FACES)
    assert 0x4E00 not in _outlines.font("DejaVuSans")[1]


def test_an_outline_is_filled_by_its_windings():
    ring = _outlines.bitmap("DejaVuSans", ord("O"))
    middle = _outlines.GRID // 2
    assert not ring[middle, middle] and ring[middle].any() and not ring[0].any()
    assert _outlines.bitmap("DejaVuSans", ord(" ")) is None


def test_a_skeleton_is_thin_and_keeps_its_holes():
    bar = np.zeros((1, 20, 40), bool)
    bar[0, 7:12, 5:35] = True
    thinned = _skeletons.thin(bar)[0]
    assert thinned.sum(axis=0).max() == 1 and thinned.sum() > 20
    ring = _skeletons.thin(_outlines.bitmap("DejaVuSans", ord("O"))[None])[0]
    points, pairs = _skeletons.links(ring)
    assert len(points) == len(pairs)  # a closed curve has as many links as points


def test_spurs_are_pruned_and_ends_stay():
    cross = np.zeros((40, 40), bool)
    cross[20, 5:35] = True
    cross[17:20, 20] = True
    points, pairs = _skeletons.links(cross)
    keep = _skeletons.prune(len(points), pairs, 8)
    assert (points[~keep][:, 0] < 20).all() and (~keep).sum() == 3
    smoothed = _skeletons.smooth(points.astype(float), pairs, 20)
    assert np.allclose(smoothed[points.tolist().index([20, 5])], [20, 5])


def test_every_drawing_has_ink_and_stays_on_the_paper(some):
    _, images = some
    ink = (images > 127).sum(axis=(2, 3))
    assert images.shape[1:] == (20, 28, 28) and ink.min() >= 8 and ink.max() < 450
    edges = np.concatenate([images[:, :, [0, -1], :].ravel(), images[:, :, :, [0, -1]].ravel()])
    assert (edges > 127).mean() < 0.01


def test_drawers_differ_and_yet_draw_the_same_character(some):
    _, images = some
    flat = images.reshape(len(images), 20, -1) / 255
    assert all(len(np.unique(rows, axis=0)) == 20 for rows in images.reshape(len(images), 20, -1))
    # A drawing is nearer to the mean drawing of its own class than to others', far more often than by chance (2 %).
    means = flat[:, 10:].mean(1)
    nearest = ((flat[:, :10, None] - means) ** 2).sum(-1).argmin(-1)
    assert (nearest == np.arange(len(images))[:, None]).mean() > 0.4


def test_drawings_are_a_function_of_the_seed_and_the_character(characters, some):
    chosen, images = some
    again = _pens.draw(chosen[3].shapes, _pens.drawers(0, 20), _pens.RandomNumbers(0, 1 + chosen[3].code))
    other = _pens.draw(chosen[3].shapes, _pens.drawers(1, 20), _pens.RandomNumbers(1, 1 + chosen[3].code))
    assert np.array_equal(again, images[3]) and not np.array_equal(other, images[3])
    # Random numbers do not depend on versions of numpy: these were written down once.
    assert [round(float(x), 12) for x in _pens.RandomNumbers(0, 7).uniform(0, 1, 3)] == RANDOM
    # Rounding may differ by a level in a pixel from machine to machine; the drawings may not.
    for code, ink in INK.items():
        (character,) = [character for character in characters if character.code == code]
        drawn = _pens.draw(character.shapes, _pens.drawers(0, 20), _pens.RandomNumbers(0, 1 + code))
        assert drawn[:4].sum(axis=(1, 2)).tolist() == pytest.approx(ink, rel=0.01)


RANDOM = [0.584496195151, 0.890958330371, 0.318919073772]
INK = {0x3A3: [15956, 24372, 11815, 17263], 0x5D0: [15832, 23424, 12807, 13765]}


@pytest.fixture(scope="module")
def meta(characters):
    parts = {script: part for script, (part, _) in _scripts.SCRIPTS.items()}
    return {"classes": [c.title for c in characters], "parts": [parts[c.script] for c in characters]}


def test_split_by_script_shares_no_script(meta):
    splits = Glyphs().splits(meta)
    scripts = {part: {meta["classes"][k].partition("/")[0] for k in chosen} for part, chosen in splits.items()}
    assert not scripts["train"] & scripts["val"] and not scripts["train"] & scripts["test"]
    assert not scripts["val"] & scripts["test"] and min(map(len, scripts.values())) >= 3
    by_character = Glyphs(split="character", seed=3).splits(meta)
    assert sorted(itertools.chain(*by_character.values())) == list(range(len(meta["classes"])))
    assert Glyphs(split="character", seed=4).splits(meta) != by_character


def test_wrong_settings(tmp_path):
    with pytest.raises(BilevelError, match=r"split='letter'.*'script' or 'character'"):
        Glyphs(split="letter").load()
    with pytest.raises(BilevelError, match="drawing_seed=-1"):
        Glyphs(drawing_seed=-1).load()


def test_the_whole_way_through_the_cache(monkeypatch, some):
    chosen, images = some
    monkeypatch.setattr(_scripts, "characters", lambda: chosen[:6])
    data = Glyphs().load()
    assert np.array_equal(data.images[..., 0].reshape(6, 20, 28, 28), images[:6])
    monkeypatch.setattr(_scripts, "characters", lambda: pytest.fail("drawn twice"))
    assert Glyphs(split="character").load().fingerprint == data.fingerprint
