"""`bilevel data`."""

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from bilevel.cli import build


@pytest.fixture
def call(tmp_path, monkeypatch):
    monkeypatch.setenv("BILEVEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("BILEVEL_DATA", str(tmp_path / "root"))
    return lambda *arguments: CliRunner().invoke(build(), ["data", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path):
    for name in ("ant", "bee"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for k in range(3):
            Image.fromarray(np.full((5, 5, 3), k, np.uint8)).save(tmp_path / "pictures" / name / f"{k}.png")
    return tmp_path / "pictures"


def test_list_says_what_is_there(call, tmp_path):
    shown = call("list")
    assert shown.exit_code == 0
    lines = {line.split()[0]: line for line in shown.stdout.splitlines() if line}
    assert "missing" in lines["omniglot"] and "built in" in lines["glyphs"] and "1,623" in lines["omniglot"]
    assert str(tmp_path / "root") in shown.stdout and str(tmp_path / "cache") in shown.stdout
    assert str(tmp_path / "elsewhere") in call("list", "--data-root", tmp_path / "elsewhere").stdout


def test_prepare_and_verify_a_folder(call, folder, tmp_path):
    done = call("prepare", folder)
    assert done.exit_code == 0 and "6 images 5×5×3, 2 classes" in done.stdout
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert "6 images of 2 classes, every one readable" in call("verify", folder).stdout
    (folder / "bee" / "1.png").write_bytes(b"no picture")
    failed = call("verify", folder)
    assert failed.exit_code == 2 and "1.png cannot be read" in failed.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fetch", "omniglot"], "bilevel data list | verify | prepare | download"),
        (["prepare"], "needs the name of a data set (glyphs, miniimagenet, mnist, omniglot)"),
        (["prepare", "omniglot"], "bilevel data download omniglot"),
        (["download", "mnist"], "Download the four IDX files"),
        (["download", "glyphs"], "drawn, not downloaded"),
        (["verify", "nowhere"], "neither a data set nor a folder"),
    ],
)
def test_what_cannot_work_is_one_message(call, arguments, message):
    failed = call(*arguments)
    assert failed.exit_code == 2 and failed.stderr.startswith("Error: ") and message in failed.stderr
    assert "Traceback" not in failed.output
