"""Attacks on what users bring: pictures, archives, tables, recipes."""

import gzip
import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pandas
from PIL import Image

from bilevel.cli import _user_pictures
from bilevel.data.cache import Workspace
from bilevel.data.drawings import is_drawing
from bilevel.data.files import ArchiveLimits, gunzip, open_tree, read_file
from bilevel.data.folder import Folder
from bilevel.data.pictures import formats, open_picture
from bilevel.data.preparation import Preparation, prepared
from bilevel.files import write_json
from bilevel.learners.configuration import read_configuration
from bilevel.learners.features import CachedFeatures
from bilevel.learners.recipes import Recipe
from bilevel.learners.settings import TrainingSettings
from bilevel.tabular.reading import read_table
from faults import healthy
from faults.judging import Attack

DRAWING, PHOTO = Preparation("drawing", 1, 28, 28), Preparation("photograph", 3, 42, 42)
# Formats whose files have a checksum: a right load is the same picture.
SEALED = {"PNG"}
KINDS = {
    "PNG": {},
    "JPEG": {},
    "GIF": {},
    "BMP": {},
    "TIFF": {"compression": "tiff_lzw"},
    "WEBP": {},
    "PPM": {},
    "AVIF": {},
    "HEIF": {},
}
TOML = b"""dataset = "miniimagenet"
network = "c4l"
normalise = true

[[stage]]
name = "all-classes"
learner = "multiclass"
images = 256
augment = "flip,crop,colour"
optimizer = "sgd"
lr = 0.1
iterations = 6000

[[stage]]
name = "episodes"
inner_lr = 1.0
step_bound = 0.0
iterations = 2000
"""


def use_picture(file: Path):
    """As a model of drawings and one of photographs sees it, and what kind of picture it seems to be."""
    picture = open_picture(read_file(file), file.name)
    seen = [prepared(picture, file.name, how).image for how in (DRAWING, PHOTO)]
    return is_drawing(picture), [image.tolist() for image in seen]


def looks_like_one(found, wanted) -> bool:
    return [np.shape(image) for image in found[1]] == [(28, 28, 1), (42, 42, 3)]


def use_tree(file: Path):
    with open_tree(file) as tree:
        return {name: tree.read(name) for name in tree.names}


def use_folder(file: Path):
    """A data set with one damaged picture among others: it is left out and named, or read."""
    made = Folder(file.parent.parent, size=28, mode="L", prepare="drawing", strict=False).decode(Path(), Workspace())
    return len(made.labels), made.meta["notes"]


def use_queries(file: Path):
    """The same among the pictures of `bilevel classify`."""
    found = _user_pictures.find(file.parent.parent, file.parent)
    kept, _, asked, notes = _user_pictures.read(found, DRAWING, strict=False)
    return len(kept.queries), len(asked.images), notes


def use_table(file: Path):
    found = read_table(file)
    return found.frame.shape, list(found.frame.columns)


def _zip(folder: Path) -> Path:
    file = folder / "data.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for kind in range(3):
            archive.writestr(f"data/{kind}/a.png", healthy.encoded(healthy.drawing(kind, 0), "PNG"))
        archive.writestr("data/readme.txt", "three drawings\n" * 50)
    return file


def _gz(folder: Path) -> Path:
    file = folder / "data.gz"
    file.write_bytes(gzip.compress(bytes(range(256)) * 20, mtime=0))
    return file


def _classes(folder: Path) -> Path:
    for kind in range(3):
        (folder / "pictures" / str(kind)).mkdir(parents=True)
        for seed in range(2):
            healthy.drawing(kind, seed).save(folder / "pictures" / str(kind) / f"{seed}.png")
    return folder / "pictures" / "1" / "1.png"


def _frame():
    draw = np.random.default_rng(0)
    columns = {"size": draw.normal(size=12).round(3), "town": ["Oslo", "Rome"] * 6, "lift": draw.random(12) < 0.5}
    return pandas.DataFrame({**columns, "day": pandas.date_range("2020-01-01", periods=12).astype(str)})


def _table(folder: Path, kind: str) -> Path:
    file, frame = folder / f"table.{kind}", _frame()
    if kind == "csv":
        file.write_text(frame.to_csv(index=False))
    elif kind == "csv.gz":
        file.write_bytes(gzip.compress(frame.to_csv(index=False).encode(), mtime=0))
    else:
        buffer = io.BytesIO()
        (frame.to_parquet if kind == "parquet" else frame.to_excel)(buffer, index=False)
        file.write_bytes(buffer.getvalue())
    return file


def _toml(folder: Path) -> Path:
    (folder / "recipe.toml").write_bytes(TOML)
    return folder / "recipe.toml"


def use_configuration(file: Path):
    """As `bilevel train --config` reads it."""
    return TrainingSettings(**read_configuration(file).settings).plain()


def _configuration(folder: Path, end: str) -> Path:
    settings = {"ways": 5, "shots": 1, "lr": 0.001, "dataset": "glyphs", "batch_norm": "support", "normalise": True}
    if end == "json":
        write_json(folder / "config.json", {"settings": settings, "threads": 2}, sealed=True)
    else:
        sign = {"toml": " = ", "yaml": ": "}[end]
        lines = [f"{name}{sign}{json.dumps(value)}" for name, value in settings.items()]
        (folder / f"config.{end}").write_text("\n".join(lines) + "\n")
    return folder / f"config.{end}"


def use_features(file: Path):
    found = CachedFeatures.load(file)
    return found.features.tolist(), found.labels


def _features(folder: Path) -> Path:
    table = np.random.default_rng(0).normal(size=(8, 5))
    CachedFeatures.of(table, list("aabbccdd")).save(folder / "features.npz")
    return folder / "features.npz"


def _picture(folder: Path, kind: str, options: dict, colour: bool) -> Path:
    picture: Image.Image = healthy.drawing(1, 0, 40)
    if colour:
        picture = Image.merge("RGB", [picture, picture.rotate(30), picture.transpose(Image.Transpose.TRANSPOSE)])
    file = folder / f"x.{kind.lower()}"
    file.write_bytes(healthy.encoded(picture, kind, **options))
    return file


def anything(found, wanted) -> bool:
    return True


def attacks() -> list[Attack]:
    kinds = {kind: options for kind, options in KINDS.items() if kind in formats()}
    found = [
        Attack(
            f"{kind} picture",
            lambda folder, kind=kind, options=options: _picture(folder, kind, options, kind in ("JPEG", "PNG", "WEBP")),
            use_picture,
            *(() if kind in SEALED else (looks_like_one,)),
            weight=1.5,
        )
        for kind, options in kinds.items()
    ]
    found += [
        Attack(f"table, {kind}", lambda folder, kind=kind: _table(folder, kind), use_table, anything, weight=weight)
        for kind, weight in (("csv", 3), ("csv.gz", 0.5), ("parquet", 0.5), ("xlsx", 0.5))
    ]
    return [
        *found,
        Attack("zip archive", _zip, use_tree, weight=3),
        Attack("gzip file", _gz, lambda file: gunzip(file, ArchiveLimits().member)),
        Attack("picture in a folder", _classes, use_folder, lambda found, wanted: found[0] == 6 or bool(found[1])),
        Attack("picture among queries", _classes, use_queries, lambda found, wanted: found[0] == 2 or bool(found[2])),
        *(
            Attack(
                f"configuration, {end}",
                lambda folder, end=end: _configuration(folder, end),
                use_configuration,
                *(() if end == "json" else (anything,)),
            )
            for end in ("toml", "yaml", "json")
        ),
        Attack("features, npz", _features, use_features, lambda found, wanted: found == wanted),
        Attack("recipe in TOML", _toml, lambda file: Recipe.load(file).plain(), anything, weight=2),
    ]
