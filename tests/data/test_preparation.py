"""The preparation of pictures: training's and a user's are one, and cleaning finds the drawing on the page."""

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

from bilevel.cli import _user_pictures
from bilevel.data import drawings, load
from bilevel.data.folder import split_folders
from bilevel.data.pictures import open_picture
from bilevel.data.preparation import KINDS, Preparation, prepare
from bilevel.errors import BilevelError, BilevelWarning

needs_omniglot = pytest.mark.skipif(
    not (Path(os.environ.get("BILEVEL_DATA", "")) / "omniglot").is_dir(), reason="BILEVEL_DATA has no omniglot"
)


def figure(seed=0, side=105, width=5):
    """A zigzag of a pen, black on white."""
    from PIL import ImageDraw

    random = np.random.default_rng(seed)
    points = random.uniform(0.22, 0.78, (5, 2)) * side
    picture = Image.new("L", (side, side), 255)
    ImageDraw.Draw(picture).line([tuple(point) for point in points], fill=0, width=width)
    return picture


def overlap(one, other):
    """Ink of both over ink of either, with one pixel of tolerance."""
    grown = [np.asarray(Image.fromarray(x[:, :, 0]).filter(ImageFilter.MaxFilter(3))) > 127 for x in (one, other)]
    ink = [x[:, :, 0] > 127 for x in (one, other)]
    return min((ink[0] & grown[1]).sum() / ink[0].sum(), (ink[1] & grown[0]).sum() / ink[1].sum())


def png(picture):
    contents = io.BytesIO()
    picture.save(contents, "PNG")
    return contents.getvalue()


@needs_omniglot
def test_original_omniglot_files_become_what_the_models_were_trained_on(shared_cache):
    data = load("omniglot")
    archive = zipfile.ZipFile(Path(os.environ["BILEVEL_DATA"]) / "omniglot" / "images_evaluation.zip")
    names = sorted(name for name in archive.namelist() if name.endswith(".png"))[::33]
    changed = 0
    for name in names:
        *_, alphabet, character, file = name.split("/")
        first = data.classes.index(f"{alphabet}/{character}") * 20
        made = prepare(archive.read(name), name, data.preparation)
        plain = prepare(archive.read(name), name, Preparation("drawing", 1, 28, 28, clean=False))
        drawn = data.images[first + int(file.removesuffix(".png").split("_")[1]) - 1]
        assert np.array_equal(plain.image, drawn) and made.inverted
        # Cleaning leaves a clean drawing as it is.
        assert np.array_equal(made.image, drawn) or made.moved or made.redrawn
        changed += made.moved or made.redrawn
    assert len(names) == 400 and changed <= 16


@pytest.mark.filterwarnings("ignore:folder")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_training_on_a_folder_and_classifying_prepare_alike(tmp_path, kind, mode):
    tmp_path = tmp_path / "own"
    for name, size in (("a", 40), ("b", 90)):
        for k in range(3):
            (tmp_path / name).mkdir(parents=True, exist_ok=True)
            figure(k, size).resize((size + 10 * k, size)).save(tmp_path / name / f"{k}.png")
    data = load(tmp_path, size=28, mode=mode, prepare=kind)
    recorded = Preparation.of(data.preparation.plain())
    found = _user_pictures.find(tmp_path, tmp_path / "a")
    _, support, query, _ = _user_pictures.read(found, recorded, strict=True)
    assert data.images.shape == (6, 28, 28, 1 if mode == "L" else 3)
    assert np.array_equal(support.images, data.images) and np.array_equal(query.images, data.images[:3])


def test_nearest_takes_the_pixel_at_the_centre():
    grid = np.arange(105 * 105).reshape(105, 105) % 251
    small = drawings.nearest(grid.astype(np.uint8), 28)
    assert all(
        small[i, j] == grid[int((i + 0.5) * 105 / 28), int((j + 0.5) * 105 / 28)] for i in (0, 13, 27) for j in (5, 27)
    )
    assert np.array_equal(drawings.nearest(small, 28), small)


def on_page(picture, corner, scale=3):
    page = Image.new("L", (scale * picture.width, scale * picture.height), 255)
    page.paste(picture, corner)
    return page


def shadowed(picture):
    pixels = np.asarray(picture, dtype=float)
    down, across = np.mgrid[: pixels.shape[0], : pixels.shape[1]] / max(pixels.shape)
    light = 0.35 + 0.6 / (1 + np.exp(-(across + down / 2 - 0.7) / 0.08))
    noise = np.random.default_rng(0).normal(0, 2, pixels.shape)
    return Image.fromarray(np.clip((40 + pixels * 0.84) * light + noise, 0, 255).astype(np.uint8))


@pytest.mark.parametrize("seed", range(3))
def test_cleaning_finds_the_drawing(seed):
    how = Preparation("drawing", 1, 28, 28)
    clean = how(figure(seed))
    assert not (clean.evened or clean.moved or clean.redrawn or clean.blank) and clean.inverted
    negative = how(Image.fromarray(255 - np.asarray(figure(seed))))
    assert np.array_equal(clean.image, negative.image) and not negative.inverted
    shaded = how(shadowed(figure(seed)))
    assert shaded.evened and shaded.inverted and overlap(clean.image, shaded.image) > 0.9
    large = [how(on_page(figure(seed), corner)) for corner in ((4, 8), (200, 190), (10, 180))]
    assert all(one.moved and one.inverted for one in large)
    assert overlap(large[0].image, large[1].image) > 0.9 and overlap(large[0].image, large[2].image) > 0.9
    heavy = how(figure(seed, width=13))
    assert heavy.redrawn and overlap(clean.image, heavy.image) > 0.85
    assert abs(int((heavy.image > 0).sum()) / int((clean.image > 0).sum()) - 1) < 0.35
    plain = Preparation("drawing", 1, 28, 28, clean=False)
    assert (plain(figure(seed, width=13)).image > 0).sum() > 1.6 * (clean.image > 0).sum()


def test_blank_paper_has_no_ink_and_filled_shapes_stay():
    how = Preparation("drawing", 1, 28, 28)
    noise = Image.fromarray(np.random.default_rng(0).integers(200, 206, (60, 60)).astype(np.uint8))
    assert how(noise).blank and not how(noise).image.any()
    assert how(Image.new("L", (1, 1), 7)).blank
    disc = Image.new("L", (105, 105), 255)
    disc.paste(0, (30, 30, 70, 70))
    assert not how(disc).redrawn and 80 < (how(disc).image > 0).sum() < 140


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 20, 30), (1, 64, 16)])
@pytest.mark.parametrize("kind", KINDS)
def test_any_shape(shape, kind):
    channels, height, width = shape
    image = Preparation(kind, *shape)(figure(0).resize((70, 33))).image
    assert image.shape == (height, width, channels) and image.dtype == np.uint8 and image.max() > 100


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "sketch"}, "write one of drawing, gray-drawing, photograph"),
        ({"channels": 2}, "gray .1. and colour .3. can be read"),
        ({"height": -28}, "is not a picture size"),
        ({"width": True}, "is not a picture size"),
        ({"colour": 1}, "that this version does not know: colour"),
    ],
)
def test_a_card_that_makes_no_sense(values, message):
    with pytest.raises(BilevelError, match=message):
        Preparation.of(values)


def folders(root, *classes, count=2):
    for name in classes:
        (root / name).mkdir(parents=True)
        for k in range(count):
            figure(k, 30).save(root / name / f"{k}.png")
    return root


def test_folders_of_splits(tmp_path):
    folders(tmp_path / "own", "train/a", "train/b", "val/c", "test/d", "test/e")
    data = load(tmp_path / "own", size=28, mode="L")
    named = {part: [data.classes[k] for k in chosen] for part, chosen in data.splits.items()}
    assert named == {"train": ["a", "b"], "val": ["c"], "test": ["d", "e"]} and len(data) == 10
    assert split_folders(folders(tmp_path / "plain", "x", "train")) == []  # a class may be called train
    folders(tmp_path / "own", "val/a")
    with pytest.raises(BilevelError, match="The class a is in more than one of"):
        load(tmp_path / "own", size=28)
    folders(tmp_path / "own", "stray")
    with pytest.raises(BilevelError, match="Put all classes into train/, val/ and test/"):
        load(tmp_path / "own", size=28)


def test_unreadable_pictures_are_left_out_and_listed_unless_strict(tmp_path):
    folders(tmp_path / "own", "a", "b", count=3)
    (tmp_path / "own" / "a" / "1.png").write_bytes(b"no picture")
    with pytest.raises(BilevelError, match=r"1\.png cannot be read: it is not a picture of a known format"):
        load(tmp_path / "own", size=28)
    for _ in range(2):  # decoded, and from the cache
        if _ == 0:
            with pytest.warns(BilevelWarning, match="1 unreadable pictures were left out"):
                data = load(tmp_path / "own", size=28, strict=False)
        else:
            data = load(tmp_path / "own", size=28, strict=False)
        assert data.labels.tolist() == [0, 0, 1, 1, 1] and data.images.shape == (5, 28, 28, 3)
        assert "1.png cannot be read" in data.notes[-1]
        assert np.array_equal(data.images[1], data.images[4])
    (tmp_path / "own" / "a" / "1.png").unlink()
    os.mkfifo(tmp_path / "own" / "a" / "1.png")
    (tmp_path / "own" / "b" / "3.png").symlink_to("nowhere")
    with pytest.warns(BilevelWarning, match=r"1\.png cannot be read: it is not a regular file.*3\.png cannot be read"):
        assert load(tmp_path / "own", size=28, strict=False).labels.tolist() == [0, 0, 1, 1, 1]
    for k in (0, 2):
        (tmp_path / "own" / "a" / f"{k}.png").write_bytes(b"")
    with pytest.raises(BilevelError, match="No picture of the class a can be read"):
        load(tmp_path / "own", size=28, strict=False)


def test_avif_is_read_where_pillow_can_and_heic_names_its_package():
    features = pytest.importorskip("PIL.features")
    if features.check("avif"):
        contents = io.BytesIO()
        figure(0).convert("RGB").save(contents, "AVIF", quality=90)
        assert open_picture(contents.getvalue(), "a.avif").size == (105, 105)
    heic = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64)
    with pytest.raises(BilevelError, match=r"a\.heic cannot be read"):
        open_picture(heic, "a.heic")


def test_heic_is_read_with_its_package(tmp_path):
    pytest.importorskip("pillow_heif").register_heif_opener()
    drawn = Image.fromarray(np.where(np.indices((64, 64))[1] < 32, 20, 230).astype(np.uint8)).convert("RGB")
    drawn.save(tmp_path / "a.heic", "HEIF")
    found = np.asarray(open_picture((tmp_path / "a.heic").read_bytes(), "a.heic").convert("L"), dtype=float)
    assert found.shape == (64, 64) and abs(found[:, :28] - 20).max() < 20 and abs(found[:, 36:] - 230).max() < 20
