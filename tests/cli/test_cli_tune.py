"""`bilevel tune`: what it prints, what it writes, how it fails, and its page in a real browser."""

import csv
import io
import json
import shutil
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from typer.testing import CliRunner

from bilevel.cli import build
from bilevel.progress import heartbeat

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
BITE = "<img src=x onerror=window.hacked=1>"
SCRIPT = "</script><script>window.hacked=1</script>"
FILES = {"model.safetensors", "table.csv", "result.json", "page.html", "picture.png"}
QUICK = ["--max-iter", "5", "--repeats", "1", "--cv", "2", "--model", "ridge"]
CLASSES = [*QUICK[:-1], "logistic"]


def call(*arguments):
    return CliRunner().invoke(build(), [str(argument) for argument in arguments])


def features(folder):
    return list(csv.DictReader(io.StringIO((folder / "table.csv").read_text(encoding="utf-8"))))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Tables as a user has them, and a result for each kind of model."""
    root = tmp_path_factory.mktemp("tune")
    load_diabetes(as_frame=True, scaled=False).frame.to_csv(root / "diabetes.csv", index=False)
    cancer = load_breast_cancer(as_frame=True)
    frame = cancer.frame.assign(target=cancer.target_names[cancer.target])
    frame.iloc[:250].rename(columns={"target": SCRIPT, "mean radius": BITE}).to_csv(root / "cancer.csv", index=False)
    load_wine(as_frame=True).frame.to_parquet(root / "wine.parquet")
    return root


@pytest.fixture(scope="module")
def diabetes(place):
    return call("tune", place / "diabetes.csv", "--target", "target", "--out", place / "number", *QUICK)


def test_errors_side_by_side_and_everything_written(place, diabetes):
    assert diabetes.exit_code == 0, diabetes.output
    for words in (
        "'target' of diabetes.csv: 442 rows, 10 features.",
        "RMSE",
        "BilevelRidge (ours)",
        "RidgeCV",
        "LassoCV",
        "ElasticNetCV",
        "RandomForestRegressor",
        "HistGradientBoostingRegressor",
        "p against best",
        "The saved model is tuned and fitted on all 442 rows.",
        "bilevel.tabular.load(",
        f"page:     {place / 'number' / 'page.html'}",
    ):
        assert words in diabetes.stdout, (words, diabetes.stdout)
    assert {file.name for file in (place / "number").iterdir()} == FILES
    found = json.loads((place / "number" / "result.json").read_text(encoding="utf-8"))
    rows = features(place / "number")
    assert [float(row["penalty"]) for row in rows] == [one["penalty"] for one in found["features"]]
    assert found["comparison"][0]["rmse"] < found["comparison"][-1]["rmse"] and found["comparison"][0]["p"] is None
    assert f"{found['comparison'][0]['rmse']:#.4g}" in diabetes.stdout and found["verdict"] in diabetes.stdout
    with Image.open(place / "number" / "picture.png") as picture:
        assert picture.width > 1000 and len(set(np.asarray(picture.convert("L")).ravel().tolist())) > 20


def test_the_input_is_only_read(place, tmp_path):
    file = tmp_path / "table.csv"
    shutil.copy(place / "diabetes.csv", file)
    before = file.read_bytes(), file.stat().st_mtime_ns
    assert call("tune", file, "--target", "target", "--out", tmp_path / "out", *QUICK).exit_code == 0
    assert before == (file.read_bytes(), file.stat().st_mtime_ns)
    refused = call("tune", file, "--target", "target", "--out", tmp_path, *QUICK)
    assert refused.exit_code == 2 and "would be overwritten" in refused.stderr
    assert before == (file.read_bytes(), file.stat().st_mtime_ns)


def test_a_finished_result_is_replaced_only_with_force(place, tmp_path):
    result = tmp_path / "out" / "result.json"
    again = ["tune", place / "diabetes.csv", "--target", "target", "--penalty", "shared", "--out", tmp_path / "out"]
    again += QUICK
    assert call(*again).exit_code == 0
    before = result.read_bytes()
    refused = call(*again)
    assert refused.exit_code == 2 and "holds a finished result" in refused.stderr and "--force" in refused.stderr
    assert result.read_bytes() == before
    assert call(*again, "--force", "--seed", 1).exit_code == 0
    assert json.loads(result.read_text(encoding="utf-8"))["settings"]["seed"] == 1


def test_json_is_the_result_and_nothing_else(place, tmp_path):
    done = call(
        "tune", place / "wine.parquet", "--target", "target", "--penalty", "shared", "--json",
        "--out", tmp_path / "out", "--threads", 1, *CLASSES,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    assert found["classes"] == ["0", "1", "2"] and found["data"]["columns"][0] == "alcohol"
    assert len({one["penalty"] for one in found["features"]}) == 1
    assert found["comparison"][0].keys() >= {"auc", "balanced_accuracy", "accuracy", "log_loss", "seconds", "p"}
    assert done.stderr == ""


def test_without_out_the_result_is_in_results(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("tune", place / "diabetes.csv", "--target", "target", "--penalty", "shared", *QUICK).exit_code == 0
    assert {file.name for file in (tmp_path / "results" / "tune-diabetes").iterdir()} == FILES


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--target", "progress"], ["--target 'progress' is not a column", "'bmi'"]),
        (["--target", "target", "--drop", "bmy"], ["--drop 'bmy'", "Did you mean 'bmi'?"]),
        (["--target", "target", "--model", "svm"], ["--model svm", "ridge, elastic-net, logistic"]),
        (["--target", "target", "--group", "no.json"], ["--group no.json is not a file"]),
        (["--target", "target", "--group", "z*=nothing"], ["--group z*=nothing matches no feature", "'bmi'"]),
        (["--target", "target", "--groups", "no.json"], ["--groups 'no.json' is not a column", "--group no.json"]),
        (["--target", "target", "--penalty", "groups"], ["--penalty groups needs --group"]),
        (["--target", "target", "--cv", "400"], ["442 usable rows, too few", "--cv 400"]),
        (["--target", "target", "--minutes", "0"], ["--minutes 0"]),
    ],
)
def test_what_the_user_can_mend_is_one_message(place, tmp_path, options, words):
    failed = call("tune", place / "diabetes.csv", *options, "--out", tmp_path / "out")
    assert failed.exit_code == 2 and failed.stderr.startswith("Error: ") and failed.stdout == ""
    for word in words:
        assert word in failed.stderr
    assert not (tmp_path / "out").exists()


def test_a_table_of_another_kind(tmp_path):
    (tmp_path / "table.csv").write_text("a;b\n1;x\n2;y\n")
    failed = call("tune", tmp_path / "table.csv", "--target", "a", "--out", tmp_path / "out")
    assert failed.exit_code == 2 and "'b'" in failed.stderr
    failed = call("tune", tmp_path / "none.csv", "--target", "a")
    assert failed.exit_code == 2 and "There is no file" in failed.stderr


@pytest.mark.parametrize("groups", ["json", "csv", "prefix", "pattern"])
def test_groups(place, tmp_path, groups):
    frame = load_diabetes(as_frame=True).frame.rename(columns=lambda name: f"blood_{name}" if name[0] == "s" else name)
    frame.to_csv(tmp_path / "table.csv", index=False)
    of = {name: "blood" if name.startswith("blood") else "body" for name in frame.columns if name != "target"}
    if groups == "json":
        (tmp_path / "groups.json").write_text(json.dumps(of))
    if groups == "csv":
        pd.DataFrame({"column": of.keys(), "group": of.values()}).to_csv(tmp_path / "groups.csv", index=False)
    rules = {"prefix": ["prefix"], "pattern": ["blood_*=blood", "*=body"]}.get(groups, [tmp_path / f"groups.{groups}"])
    options = [word for rule in rules for word in ("--group", rule)]
    done = call("tune", tmp_path / "table.csv", "--target", "target", *options, "--out", tmp_path / "o", *QUICK)
    assert done.exit_code == 0, done.output
    assert "Share of the target's variance on held-out rows, by group" in done.stdout
    rows = features(tmp_path / "o")
    together = {}
    for row in rows:
        together.setdefault(row["group"], set()).add(row["penalty"])
    assert all(len(penalties) == 1 for penalties in together.values())
    assert set(together) == ({"blood", "age", "bmi", "bp"} if groups == "prefix" else {"blood", "body"})
    assert sum(row["group"] == "blood" for row in rows) == 7


def test_ctrl_c_leaves_nothing(place, tmp_path, monkeypatch):
    from bilevel.estimators import BilevelRidge

    def interrupted(*arguments, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(BilevelRidge, "fit", interrupted)
    stopped = call("tune", place / "diabetes.csv", "--target", "target", "--out", tmp_path / "out")
    assert stopped.exit_code == 130 and "Interrupted" in stopped.stderr and list(tmp_path.iterdir()) == []


def test_a_long_fit_is_not_silent_in_a_pipe(capsys):
    with heartbeat(first=0.01, between=0.01) as doing:
        doing("fold 3 of 20: BilevelRidge")
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 2 and lines[0].endswith("s, fold 3 of 20: BilevelRidge")
    with heartbeat() as doing:
        doing("short work")
    with heartbeat(quiet=True, first=0.0) as doing:
        doing("work of --json")
    assert capsys.readouterr().err == ""


def test_other_scripts_are_drawn_without_warnings(tmp_path):
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"größe": draw.normal(size=60), "город": ["東京", "दिल्ली", "القاهرة"] * 20})
    frame.assign(価格=frame["größe"] + draw.normal(size=60)).to_csv(
        tmp_path / "t.csv", index=False, encoding="utf-8-sig"
    )
    done = call("tune", tmp_path / "t.csv", "--target", "価格", "--one-hot", "--out", tmp_path / "out", *QUICK)
    assert done.exit_code == 0, done.output
    assert "Glyph" not in done.output and "'価格' of t.csv" in done.stdout


@pytest.mark.parametrize("arguments", [["tune", "--help"], ["predict", "--help"]])
def test_help_needs_no_heavy_package(arguments):
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "bilevel", *arguments], capture_output=True, text=True
    )
    imported = {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines() if "import time:" in line}
    assert "bilevel.cli.tune" in imported and not imported & {"torch", "numpy", "pandas", "sklearn", "matplotlib"}


# ---------------------------------------------------------------- the page, where there is a browser


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here; Debian's is `apt install chromium`")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser):
    """Open a page; at the end, it must have said nothing and asked for nothing."""
    heard = []
    context = browser.new_context(viewport={"width": 1200, "height": 900}, color_scheme="light", offline=True)
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.on("console", lambda message: heard.append(f"console {message.type}: {message.text}"))
    page.on("pageerror", lambda error: heard.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (heard.append("dialog"), dialog.dismiss()))

    def go(path):
        def asked(request):
            if not request.url.startswith(("data:", "blob:")) and request.url != path.as_uri():
                heard.append(f"asked for {request.url[:80]}")

        page.on("request", asked)
        page.goto(path.as_uri())
        until(page, "document.querySelectorAll('.drawn .main-svg').length >= 5")
        return page

    yield go
    assert heard == [] and page.evaluate("window.hacked") is None
    context.close()


def until(page, condition):
    end = time.monotonic() + 60
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(50)


def traces(page, chart):
    return page.locator(f"#{chart}").evaluate("chart => chart.data.map(trace => ({x: trace.x, y: trace.y}))")


def test_the_page_shows_the_numbers_of_the_result(place, diabetes, opened):
    found = json.loads((place / "number" / "result.json").read_text(encoding="utf-8"))
    page = opened(place / "number" / "page.html")
    assert found["verdict"] in page.locator("main").inner_text()
    assert traces(page, "errors")[0]["x"] == [one["rmse"] for one in found["comparison"]]
    best = page.locator("tr.best")
    assert best.count() == 1 and best.inner_text().startswith(found["comparison"][0]["name"])
    assert page.locator(".modebar").count() == 0  # a toolbar would lie over the bars
    sizes = sorted((abs(one["coefficients"][0]) for one in found["features"]), reverse=True)
    assert [abs(x) for x in traces(page, "coefficients")[0]["x"]] == sizes
    page.locator("#order").select_option("penalty")
    penalties = sorted(one["penalty"] for one in found["features"])
    assert traces(page, "penalties")[0]["x"] == penalties
    page.locator("#order").select_option("table")
    assert traces(page, "penalties")[0]["x"] == [one["penalty"] for one in found["features"]]
    assert len(traces(page, "points")[1]["x"]) == 442
    assert traces(page, "history")[1]["y"] == found["history"]["value"]
    assert page.locator("#all tbody tr").count() == 10
    page.get_by_role("searchbox", name="Find a feature").fill("bm")
    assert page.locator("#all tbody tr:visible").count() == 1
    assert page.locator("#find-count").inner_text() == "1 of 10 shown"
    page.get_by_role("searchbox", name="Find a feature").fill("nothing")
    assert page.locator("#find-none").is_visible()


def test_light_dark_and_a_telephone(place, diabetes, opened):
    page = opened(place / "number" / "page.html")
    ground = "getComputedStyle(document.body).backgroundColor"
    bar = "document.getElementById('errors').data[0].marker.color[0]"
    light = page.evaluate(ground), page.evaluate(bar)
    page.locator("#theme").click()
    dark = page.evaluate(ground), page.evaluate(bar)
    assert light[0] != dark[0] and light[1] != dark[1]
    page.locator("#theme").click()
    page.emulate_media(color_scheme="dark")
    until(page, "document.documentElement.dataset.theme === 'dark'")
    assert (page.evaluate(ground), page.evaluate(bar)) == dark
    page.set_viewport_size({"width": 360, "height": 700})
    until(page, "document.documentElement.scrollWidth <= 360")
    unnamed = """() => [...document.querySelectorAll("input, select, button, [role=region]")]
      .filter(e => !(e.labels?.length || e.ariaLabel || e.textContent.trim())).map(e => e.outerHTML.slice(0, 80))"""
    assert page.evaluate(unnamed) == []


def test_classes_and_names_that_bite(place, tmp_path, opened):
    done = call("tune", place / "cancer.csv", "--target", SCRIPT, "--out", tmp_path / "out", *CLASSES)
    assert done.exit_code == 0, done.output
    for word in ("LogisticRegressionCV", "log loss", "balanced accuracy", "AUC", "class frequencies"):
        assert word in done.stdout
    found = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    page = opened(tmp_path / "out" / "page.html")
    assert SCRIPT in page.locator("h1").inner_text() and BITE in page.locator("#all").inner_text()
    assert comparison_fits(page)
    drawn = traces(page, "points")
    assert len(drawn) == 2 and sum(len(trace["x"]) for trace in drawn) == found["data"]["rows_used"]
    page.locator("#many").select_option("50")
    assert len(traces(page, "coefficients")[0]["x"]) == 30
    page.locator("#order").select_option("table")
    page.locator("#coefficients").evaluate("chart => chart.scrollIntoView({ block: 'center' })")
    box = page.locator("#coefficients .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=5)
    page.wait_for_selector("#coefficients .hoverlayer text")
    assert ": " in page.locator("#coefficients .hoverlayer").text_content()


def test_three_classes_on_the_page(place, tmp_path, opened):
    options = ["--target", "target", "--penalty", "shared", "--out", tmp_path / "out", *CLASSES]
    done = call("tune", place / "wine.parquet", *options)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    page = opened(tmp_path / "out" / "page.html")
    confusion = page.locator("#points").evaluate("chart => chart.data[0].z")
    ours = next(one for one in found["comparison"] if one["ours"])
    assert np.sum(confusion) == 178 and np.trace(confusion) == round(178 * ours["accuracy"])
    page.locator("#order").select_option("table")
    page.locator("#class").select_option("2")
    assert traces(page, "coefficients")[0]["x"] == [one["coefficients"][2] for one in found["features"]]


def comparison_fits(page):
    """Whether all columns of the comparison are seen without scrolling."""
    box = page.get_by_role("region", name="Errors on held-out rows")
    return box.evaluate("box => box.scrollWidth <= box.clientWidth")


def test_effects_of_a_pair_have_the_colours_of_the_picture(tmp_path, opened):
    draw = np.random.default_rng(0)
    a, b = draw.uniform(-1, 1, size=(2, 120))
    pd.DataFrame({"a": a, "b": b, "y": 3 * a * b + 0.1 * draw.normal(size=120)}).to_csv(tmp_path / "t.csv", index=False)
    additive = [*QUICK[:-1], "additive"]
    assert call("tune", tmp_path / "t.csv", "--target", "y", "--out", tmp_path / "out", *additive).exit_code == 0
    page = opened(tmp_path / "out" / "page.html")
    pair = page.get_by_role("group", name="The effect of a × b").evaluate(
        "chart => ({...chart.data[0], across: chart.layout.xaxis.title.text, up: chart.layout.yaxis.title.text})"
    )
    assert (pair["across"], pair["up"]) == ("a", "b") and pair["z"][-1][-1] > 0 > pair["z"][-1][0]
    # As in the picture, red is above 0, and blue is below.
    blue, red = ([int(pair["colorscale"][end][1][i : i + 2], 16) for i in (1, 5)] for end in (0, -1))
    assert blue[0] < blue[1] and red[0] > red[1] and not pair.get("reversescale")
    assert comparison_fits(page)
