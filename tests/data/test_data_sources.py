"""MiniImagenet, MNIST, folders, arrays, and what `load` accepts."""

import gzip
import io
import itertools
import struct

import numpy as np
import pytest
import torch
from data_fixtures import png, write_zip
from PIL import Image

from bilevel import BilevelError, BilevelWarning
from bilevel.data import ImageDataset, find, load
from bilevel.data.arrays import from_arrays, from_torch
from bilevel.data.folder import Folder
from bilevel.data.pictures import to_shape
from bilevel.data.splits import shuffled, split_classes


def test_the_sources_are_found_by_walking_the_folder():
    assert {"omniglot", "miniimagenet", "glyphs", "folder", "mnist"} <= set(find())
    assert all(kind.name == name and kind.__doc__ for name, kind in find().items())


def test_load_says_what_it_knows(tmp_path):
    with pytest.raises(BilevelError, match=r"'omniglott' is neither a data set nor a folder.*glyphs.*omniglot"):
        load("omniglott")
    with pytest.raises(BilevelError, match="no setting 'sede'; its settings are seed"):
        load("omniglot", sede=3)


def test_the_shuffle_is_written_down():
    # Omniglot's split must be the same on every machine and with every numpy.
    assert shuffled(1623, seed=0)[:6] == [1051, 998, 162, 670, 664, 1492]


def test_splits_are_disjoint_and_complete():
    for count in (3, 7, 100):
        parts = split_classes(count, seed=count)
        assert sorted(itertools.chain(*parts.values())) == list(range(count)) and all(parts.values())
    with pytest.raises(BilevelError, match="2 classes cannot be split"):
        split_classes(2, seed=0)
    with pytest.raises(BilevelError, match="sum to 1"):
        split_classes(9, seed=0, fractions=(0.5, 0.5, 0.5))
    images, labels = np.zeros((2, 1, 1, 1), np.uint8), np.array([0, 1])
    with pytest.raises(BilevelError, match="disjoint"):
        ImageDataset("x", images, labels, ("a", "b"), {"train": [0, 1], "test": [1]})


# MiniImagenet


def mini(root, size=84):
    random = np.random.default_rng(0)
    members, lists = {}, {"train": ["n1", "n2"], "val": ["n3"], "test": ["n4"]}
    for part, classes in lists.items():
        lines = ["filename,label"]
        for name in classes:
            for k in range(3):
                members[f"{name}{k:08}.jpg"] = png(random.integers(0, 255, (size, size, 3), np.uint8))
                lines.append(f"{name}{k:08}.jpg,{name}")
        (root / "miniimagenet").mkdir(parents=True, exist_ok=True)
        (root / "miniimagenet" / f"{part}.csv").write_text("\n".join(lines) + "\n")
    return members


def test_miniimagenet_from_a_zip_and_from_a_folder(tmp_path):
    members = mini(tmp_path / "zip")
    write_zip(tmp_path / "zip" / "miniimagenet" / "images.zip", {f"images/{k}": v for k, v in members.items()})
    mini(tmp_path / "folder")
    (tmp_path / "folder" / "miniimagenet" / "images").mkdir()
    for name, contents in members.items():
        (tmp_path / "folder" / "miniimagenet" / "images" / name).write_bytes(contents)
    one, two = load("miniimagenet", tmp_path / "zip"), load("miniimagenet", tmp_path / "folder")
    assert np.array_equal(one.images, two.images) and one.images.shape == (12, 84, 84, 3)
    assert one.splits == {"train": (0, 1), "val": (2,), "test": (3,)} and one.classes == ("n1", "n2", "n3", "n4")
    assert np.array_equal(one.images[4], np.asarray(Image.open(io.BytesIO(members["n200000001.jpg"]))))


def test_miniimagenet_incomplete(tmp_path):
    with pytest.raises(BilevelError, match=r"no images\.zip .*train\.csv.*ImageNet.*BILEVEL_DATA"):
        load("miniimagenet", tmp_path)
    members = mini(tmp_path)
    del members["n300000002.jpg"]
    path = tmp_path / "miniimagenet" / "images.zip"
    write_zip(path, {f"images/{k}": v for k, v in members.items()})
    with pytest.raises(BilevelError, match=r"val\.csv names n300000002\.jpg, which is not in"):
        load("miniimagenet", tmp_path)
    write_zip(path, {f"images/{k}": v for k, v in (members | {"n300000002.jpg": b"no picture"}).items()})
    with pytest.raises(BilevelError, match=r"n300000002\.jpg in .*images\.zip cannot be read"):
        load("miniimagenet", tmp_path)
    (tmp_path / "miniimagenet" / "val.csv").write_text("a,b\n1,2\n")
    with pytest.raises(BilevelError, match="first line must be filename,label"):
        load("miniimagenet", tmp_path)


def test_the_real_miniimagenet_lists(real):
    from bilevel.data import miniimagenet
    from bilevel.data.files import open_tree
    from bilevel.data.preparation import Preparation, prepare

    root = real("miniimagenet/images.zip", "miniimagenet/train.csv")
    images, *lists = miniimagenet.MiniImagenet().files(root)
    rows = [miniimagenet._rows(path) for path in lists]
    assert [len({label for _, label in part}) for part in rows] == [64, 16, 20]
    assert [len(part) for part in rows] == [38400, 9600, 12000]
    with open_tree(images, miniimagenet.LIMITS) as tree:
        assert {name for part in rows for name, _ in part} <= set(tree.names)
        for name, _ in rows[0][::2000]:
            assert prepare(tree.read(name), tree.describe(name), Preparation()).image.shape == (84, 84, 3)


# MNIST


def idx(array):
    header = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


def test_mnist(tmp_path):
    random = np.random.default_rng(0)
    (tmp_path / "mnist").mkdir()
    truth = {}
    for part, count in (("train", 30), ("t10k", 20)):
        images = random.integers(0, 255, (count, 28, 28), dtype=np.uint8)
        truth[part] = images, (np.arange(count) % 10).astype(np.uint8)
        for kind, array in zip(("images-idx3", "labels-idx1"), truth[part], strict=True):
            (tmp_path / "mnist" / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(idx(array)))
    data = load("mnist", tmp_path)
    assert np.array_equal(data.images[data.parts["test"], :, :, 0], truth["t10k"][0])
    assert np.array_equal(data.labels[data.parts["train"]], truth["train"][1])
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(idx(truth["train"][0])[:-5]))
    with pytest.raises(BilevelError, match=r"train-images.*announces 30×28×28"):
        load("mnist", tmp_path)
    path.write_bytes(gzip.compress(b"hello"))
    with pytest.raises(BilevelError, match="not an IDX file"):
        load("mnist", tmp_path)
    path.unlink()
    with pytest.raises(BilevelError, match=r"no train-images-idx3-ubyte\.gz in .*Download"):
        load("mnist", tmp_path)


def test_the_real_mnist(real):
    data = load("mnist", real("mnist/train-images-idx3-ubyte.gz"))
    assert len(data.parts["train"]) == 60_000 and len(data.parts["test"]) == 10_000
    assert data.labels[:5].tolist() == [5, 0, 4, 1, 9]


# Folders


@pytest.fixture
def pictures(tmp_path):
    root = tmp_path / "pictures"
    for label, name in enumerate(["ant", "bee", "cat"]):
        (root / name).mkdir(parents=True)
        for k in range(3):
            (root / name / f"{k}.png").write_bytes(png(np.full((6, 8, 3), 10 * label + k, np.uint8)))
    (root / ".hidden").mkdir()
    (root / "ant" / "notes.txt").write_text("not a picture")
    return root


def test_a_folder_of_class_folders(pictures):
    data = load(pictures)
    assert data.classes == ("ant", "bee", "cat") and data.images.shape == (9, 6, 8, 3)
    assert data.images[:, 0, 0, 0].tolist() == [0, 1, 2, 10, 11, 12, 20, 21, 22] and data.notes == ()
    assert data.splits["train"] == (0, 1, 2)
    parts = load(str(pictures), fractions=(0.34, 0.33, 0.33), seed=2).splits
    assert sorted(sum(parts.values(), ())) == [0, 1, 2] and all(len(part) == 1 for part in parts.values())
    assert load(pictures, size=5, mode="L", invert=True).images.shape == (9, 5, 5, 1)
    assert load(pictures, mode="L", invert=True, size=5).images[0, 0, 0, 0] == 255


def test_other_kinds_of_images_are_converted_and_it_is_said_once(pictures):
    deep = np.full((6, 8), 65535, np.uint16)
    deep[0, 0] = 257 * 100
    (pictures / "ant" / "deep.png").write_bytes(png(deep))
    (pictures / "ant" / "gray.png").write_bytes(png(np.full((6, 8), 77, np.uint8)))
    clear = np.full((6, 8, 4), 50, np.uint8)
    clear[:, :, 3] = 0
    (pictures / "bee" / "clear.png").write_bytes(png(clear))
    (pictures / "bee" / "palette.png").write_bytes(png(np.full((6, 8, 3), 102, np.uint8), "P"))
    with pytest.warns(BilevelWarning, match="16-bit.*grayscale.*palette.*transparent") as said:
        data = load(pictures)
    assert len(said) == 1 and len(data.notes) == 4
    at = {
        name: number
        for number, name in enumerate(["0", "1", "2", "deep", "gray", "b0", "b1", "b2", "clear", "palette"])
    }
    assert data.images[at["deep"], 0, 0].tolist() == [100] * 3 and data.images[at["deep"], 1, 1].tolist() == [255] * 3
    assert data.images[at["gray"], 0, 0].tolist() == [77] * 3
    assert data.images[at["clear"], 0, 0].tolist() == [255] * 3
    assert data.images[at["palette"], 0, 0].tolist() == [102] * 3
    assert load(pictures).notes == data.notes  # and a second load does not warn again


def test_an_unreadable_image_is_named(pictures):
    whole = (pictures / "bee" / "1.png").read_bytes()
    for contents in (b"", b"no picture", whole[:-30]):
        (pictures / "bee" / "1.png").write_bytes(contents)
        with pytest.raises(BilevelError, match=r"bee.1\.png cannot be read"):
            load(pictures)


def test_a_huge_image_is_refused_before_it_is_decoded(pictures, monkeypatch):
    from bilevel.data import pictures as reader

    monkeypatch.setattr(reader, "MAX_PIXELS", 47)
    with pytest.raises(BilevelError, match="larger than 47 pixels"):
        load(pictures)


def test_photographs_are_turned_upright(pictures):
    upright = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(6, 8))
    tag = upright.getexif()
    tag[0x0112] = 3  # upside down
    upright.save(pictures / "ant" / "0.png", exif=tag)
    assert load(pictures, mode="L").images[0, 0, 0, 0] == 47


def test_folders_that_cannot_work(pictures, tmp_path):
    (pictures / "bee" / "wide.png").write_bytes(png(np.zeros((6, 9, 3), np.uint8)))
    with pytest.raises(BilevelError, match=r"wide\.png is 9×6 and .*0\.png is 8×6; pass size="):
        load(pictures)
    (pictures / "empty").mkdir()
    with pytest.raises(BilevelError, match=r"class folder .*empty holds no images"):
        load(pictures)
    with pytest.raises(BilevelError, match="holds no folders"):
        load(pictures / "empty")
    with pytest.raises(BilevelError, match="mode='CMYK'"):
        Folder(pictures, mode="CMYK").load()
    with pytest.raises(BilevelError, match="size=0"):
        Folder(pictures, size=0).load()
    with pytest.raises(BilevelError, match="There is no folder"):
        Folder(tmp_path / "nowhere").load()


# Arrays


def test_arrays_of_every_layout():
    images = np.random.default_rng(0).integers(0, 255, (4, 8, 6, 3), dtype=np.uint8)
    labels = ["b", "a", "b", "a"]
    plain = from_arrays(images, labels)
    assert plain.classes == ("a", "b") and plain.labels.tolist() == [1, 0, 1, 0]
    assert np.shares_memory(plain.images, images)
    for other in (images.transpose(0, 3, 1, 2), images / 255, torch.from_numpy(images).permute(0, 3, 1, 2) / 255):
        assert np.array_equal(from_arrays(other, labels).images, images)
    assert from_arrays(images[..., 0], labels).images.shape == (4, 8, 6, 1)
    for wrong, message in ((images.astype(int), "int64"), (images / 100, "within"), (images[..., :2], "C = 1 or 3")):
        with pytest.raises(BilevelError, match=message):
            from_arrays(wrong, labels)
    with pytest.raises(BilevelError, match="one label per image"):
        from_arrays(images, labels[:3])


def test_any_labelled_torch_dataset():
    images, labels = torch.rand(6, 1, 5, 5), torch.tensor([2, 0, 2, 0, 5, 5])
    data = from_torch(torch.utils.data.TensorDataset(images, labels))
    assert data.images.shape == (6, 5, 5, 1) and data.classes == ("0", "2", "5")
    assert np.array_equal(data.images[:, :, :, 0], np.rint(images[:, 0].numpy() * 255))
    with pytest.raises(BilevelError, match="items must be"):
        from_torch(torch.utils.data.TensorDataset(images))
    with pytest.raises(BilevelError, match="empty"):
        from_torch([])
    with pytest.raises(BilevelError, match=r"Item 1 .*\[1, 4, 5\] and item 0 \[1, 5, 5\]"):
        from_torch([(images[0], 0), (images[1, :, 1:], 1)])


@pytest.mark.parametrize(("whole", "dark"), [(True, 6), (False, 12)])
def test_a_wide_picture_is_filled_up_or_cut(whole, dark):
    picture = Image.new("L", (40, 20), 200)
    picture.paste(0, (14, 0, 26, 20))  # a dark bar in the middle
    image = to_shape(picture, 20, 20, whole)
    assert image.shape == (20, 20, 1) and int((image[10] < 100).sum()) == dark
