"""Small files in the layouts of the real ones."""

import io
import zipfile

import numpy as np
from PIL import Image


def png(array, mode=None):
    """The bytes of a PNG."""
    file = io.BytesIO()
    (Image.fromarray(array) if mode is None else Image.fromarray(array).convert(mode)).save(file, "PNG")
    return file.getvalue()


def write_zip(path, members, compression=zipfile.ZIP_STORED):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, contents in members.items():
            archive.writestr(name, contents)
    return path


def small_omniglot():
    """Members of two archives in Omniglot's layout: 3 and 2 characters, 20 drawings each, ink where it can be told."""
    sets = {}
    for name, characters in {"images_background": ["A/1", "A/2", "B/1"], "images_evaluation": ["C/1", "C/2"]}.items():
        members = {}
        for number, character in enumerate(characters):
            alphabet, index = character.split("/")
            for drawer in range(20):
                paper = np.full((105, 105), 255, np.uint8)
                paper[: 15 * (number + 1), : 3 * (drawer + 1)] = 0
                members[f"{name}/{alphabet}/character{int(index):02}/0{number + 1:03}_{drawer + 1:02}.png"] = png(
                    paper, "1"
                )
        sets[name] = members
    return sets
