"""The page in a real browser: what is drawn, what can be chosen, with the keyboard too, and that nothing is fetched."""

import shutil
import time

import pytest
import torch
from report_fixtures import BITE, SCRIPT, run

from bilevel.report.page import write

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium here; Debian's is `apt install chromium`"
)
TABS = ["results", "training", "episodes", "filters", "certificates", "configuration"]


@pytest.fixture(scope="module")
def session(site):
    """One page for all tests, and everything it said or asked for meanwhile."""
    api = pytest.importorskip("playwright.sync_api")
    heard = []
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": 1200, "height": 900}, color_scheme="light", offline=True)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: heard.append(f"console {message.type}: {message.text}"))
        page.on("pageerror", lambda error: heard.append(f"error: {error}"))
        page.on("requestfailed", lambda request: heard.append(f"failed: {request.url[:80]}"))
        page.on("dialog", lambda dialog: (heard.append("dialog"), dialog.dismiss()))

        def asked(request):
            if not request.url.startswith(("data:", "blob:")) and request.url != site.path.as_uri():
                heard.append(f"asked for {request.url[:80]}")

        page.on("request", asked)
        page.goto(site.path.as_uri())
        assert heard == []
        yield page, heard
        browser.close()


@pytest.fixture
def page(session):
    """The page as it is first seen, without the seconds of loading it again."""
    page, heard = session
    heard.clear()
    page.set_viewport_size({"width": 1200, "height": 900})
    page.emulate_media(color_scheme="light")
    page.evaluate("document.querySelectorAll('form').forEach(form => form.reset())")
    page.locator("#tab-results").click()
    yield page
    assert heard == []
    assert page.evaluate("window.hacked") is None


def at(page, tab):
    page.locator(f"#tab-{tab}").click()
    if tab == "training":
        until(page, "document.querySelectorAll('.chart .main-svg').length >= 3")


def until(page, condition):
    """Wait for it. Playwright's own way evaluates text in the page, which the page's policy forbids."""
    end = time.monotonic() + 60
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(50)


def settles(page, read, right):
    """Assert that what is read from the page becomes right."""
    end = time.monotonic() + 60
    while not right(found := read()):
        assert time.monotonic() < end, found
        page.wait_for_timeout(50)


def shown(page, query):
    return page.locator(f"{query}:visible").count()


def test_the_curves_are_drawn_of_every_run(page):
    at(page, "training")
    for kind, each in (("loss", 1), ("speed", 1), ("accuracy", 2)):  # the accuracy has a band
        chart = page.locator(f"#chart-{kind}")
        assert chart.evaluate("chart => chart.data.length") == 3 * each
        paths = chart.locator(".scatterlayer .js-line")
        assert paths.count() == 3 * each
        assert all("L" in (paths.nth(i).get_attribute("d") or "") for i in range(3 * each))
    assert page.locator("#chart-accuracy .js-fill").count() == 3
    page.get_by_role("checkbox", name="95 % intervals").uncheck()
    assert page.locator("#chart-accuracy .js-fill").count() == 0
    assert page.locator("#chart-accuracy .scatterlayer .js-line").count() == 3
    page.get_by_role("checkbox", name="95 % intervals").check()
    assert page.locator("#chart-accuracy").evaluate("chart => chart.data[1].y.at(-1)") == pytest.approx(80)
    assert page.locator("#training tbody tr").count() == 3
    assert "80.00 % ± 2.00 %" in page.locator("#training tbody").inner_text().replace("\N{NO-BREAK SPACE}", " ")


def test_runs_are_chosen(page):
    at(page, "training")
    box = page.get_by_role("checkbox", name="plain")
    box.uncheck()
    visible = "chart => chart.data.map(trace => [trace.meta.run, trace.visible])"
    states = page.locator("#chart-loss").evaluate(visible)
    assert [on for _, on in states].count(False) == 1
    assert page.locator("#chart-loss .scatterlayer .js-line").count() == 2 and shown(page, "#training tbody tr") == 2
    box.check()
    assert page.locator("#chart-loss .scatterlayer .js-line").count() == 3 and shown(page, "#training tbody tr") == 3
    page.locator("#no-runs").click()
    assert page.locator("#chart-loss .scatterlayer .js-line").count() == 0
    page.locator("#all-runs").click()


def test_the_axis_is_hyperiterations_or_minutes_and_zooming_moves_all_three(page):
    at(page, "training")
    last = "chart => Math.max(...chart.data.find(trace => trace.name === 'plain').x)"
    assert page.locator("#chart-loss").evaluate(last) == 600
    page.get_by_role("radio", name="minutes").check()
    assert page.locator("#chart-loss").evaluate(last) == pytest.approx(6.5)
    assert "minutes" in page.locator("#chart-loss .xtitle").text_content()
    page.get_by_role("radio", name="hyperiterations").check()
    page.get_by_role("checkbox", name="logarithmic").check()
    assert page.locator("#chart-loss").evaluate("chart => chart.layout.yaxis.type") == "log"
    page.get_by_role("checkbox", name="logarithmic").uncheck()
    span = "chart => chart._fullLayout.xaxis.range[1] - chart._fullLayout.xaxis.range[0]"
    kinds = ("accuracy", "loss", "speed")
    before = page.locator("#chart-accuracy").evaluate(span)

    def spans():
        return [page.locator(f"#chart-{kind}").evaluate(span) for kind in kinds]

    page.locator("#zoom-in").press("Enter")
    settles(page, spans, lambda found: found == pytest.approx([before / 2] * 3))
    page.locator("#zoom-reset").click()
    settles(page, spans, lambda found: found[0] == pytest.approx(before))
    # Dragging over one chart zooms all of them.
    box = page.locator("#chart-loss .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 52, steps=4)
    page.mouse.up()
    settles(page, spans, lambda found: found[1] < 0.5 * before and found == pytest.approx([found[1]] * 3))
    page.locator("#zoom-reset").click()


def test_a_point_tells_its_number(page):
    at(page, "training")
    box = page.locator("#chart-accuracy .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=3)
    page.wait_for_selector("#chart-accuracy .hoverlayer text")
    said = page.locator("#chart-accuracy .hoverlayer").text_content()
    assert "±" in said and "plain" in said and BITE in said


def test_tabs_by_mouse_by_keys_and_by_address(page):
    for tab in TABS:
        at(page, tab)
        assert [name for name in TABS if page.locator(f"#{name}").is_visible()] == [tab]
        assert page.locator(f"#tab-{tab}").get_attribute("aria-selected") == "true"
        assert page.url.endswith(f"#{tab}")
    page.locator("#tab-results").click()
    for key, tab in (("ArrowRight", "training"), ("ArrowLeft", "results"), ("ArrowLeft", "configuration")):
        page.keyboard.press(key)
        assert page.locator(f"#{tab}").is_visible() and page.evaluate("document.activeElement.id") == f"tab-{tab}"
    page.keyboard.press("Home")
    assert page.locator("#results").is_visible()
    assert page.locator("[role=tab][tabindex='0']").count() == 1
    page.evaluate("location.hash = 'filters'")
    page.wait_for_selector("#filters", state="visible")
    page.go_back()
    page.wait_for_selector("#filters", state="hidden")
    page.evaluate("location.hash = 'result-certificates'")
    page.wait_for_selector("#result-certificates", state="visible")
    page.evaluate("location.hash = '%E0%A4%A'")  # no address at all
    page.wait_for_selector("#results", state="visible")


def test_results_are_found_by_their_words(page):
    assert shown(page, ".result") == 2
    page.get_by_role("searchbox", name="Find a result").fill("RIDGE table")
    assert shown(page, ".result") == 1 and shown(page, ".toc li") == 1
    assert page.locator("#find-count").inner_text() == "1 of 2 shown"
    page.get_by_role("searchbox", name="Find a result").fill("nothing of the kind")
    assert shown(page, ".result") == 0 and page.locator("#find-none").is_visible()
    page.get_by_role("searchbox", name="Find a result").fill("")
    assert shown(page, ".result") == 2


def test_a_picture_is_enlarged_with_enter_and_closed_with_escape(page):
    button = page.locator("#result-ridge .picture")
    button.focus()
    page.keyboard.press("Enter")
    assert page.locator("#large img").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#large").is_visible()
    assert page.evaluate("document.activeElement.className") == "picture"


def test_the_command_is_copied(page, session):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    button = page.locator("#result-ridge [data-copy]")
    button.click()
    until(page, "document.querySelector('#result-ridge [data-copy]').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == "bilevel run ridge --seed 3"


def test_queries_are_filtered(page):
    at(page, "episodes")
    total = 3 * 2 * 3 * 4  # models, episodes, ways, queries
    wrong = page.locator(".query.wrong").count()
    assert shown(page, ".query") == total and 0 < wrong < total
    page.get_by_role("combobox", name="Answers").select_option("wrong")
    assert shown(page, ".query") == shown(page, ".query.wrong") == wrong
    page.get_by_role("combobox", name="Answers").select_option("right")
    assert shown(page, ".query") == shown(page, ".query.right") == total - wrong
    page.get_by_role("combobox", name="Answers").select_option("")
    page.get_by_role("combobox", name="Model").select_option(index=1)
    assert shown(page, ".query") == total // 3 and shown(page, ".model") == 1
    page.get_by_role("combobox", name="Model").select_option("")
    page.get_by_role("combobox", name="Class").select_option(index=1)
    name = page.get_by_role("combobox", name="Class").input_value()
    rows = page.locator(".class:visible")
    assert 0 < rows.count() < 18 and {rows.nth(i).get_attribute("data-class") for i in range(rows.count())} == {name}
    page.get_by_role("button", name="Clear").click()
    until(page, "document.getElementById('episodes-count').textContent.startsWith('72 ')")
    certain = [float(text.split()[1]) for text in page.locator(".query .said").all_inner_texts()]
    limit = sorted(certain)[len(certain) // 2]
    page.get_by_role("slider", name="Probability at least").fill(str(int(limit)))
    assert sum(p > limit for p in certain) <= shown(page, ".query") <= sum(p >= limit - 1 for p in certain)
    page.get_by_role("slider", name="Probability at least").fill("100")
    page.get_by_role("slider", name="Probability at most").fill("0")
    assert shown(page, ".query") == 0 and page.locator("#episodes-none").is_visible()
    page.get_by_role("button", name="Clear").click()
    until(page, "document.getElementById('episodes-count').textContent.startsWith('72 ')")


def test_a_query_shows_all_its_probabilities(page):
    at(page, "episodes")
    query = page.locator(".query.wrong").first
    query.focus()
    page.keyboard.press("Enter")
    rows = page.locator("#large tr")
    assert rows.count() == 3 and page.locator("#large").get_by_text("(its class)").count() == 1
    shares = [float(text.split()[0]) for text in page.locator("#large td:last-child").all_inner_texts()]
    assert sum(shares) == pytest.approx(100, abs=0.2)
    assert max(shares) == pytest.approx(float(query.locator(".said").inner_text().split()[1]), abs=0.6)
    assert "✗" in page.locator("#large-title").inner_text() and BITE in page.locator("#large-title").inner_text()
    page.get_by_role("button", name="Close").click()


def test_light_and_dark_follow_the_system_and_the_button_and_the_charts_follow_them(page):
    def look():
        text = "getComputedStyle(document.body)"
        return page.evaluate(f"[{text}.backgroundColor, document.getElementById('chart-loss').layout.font.color]")

    at(page, "training")
    light = look()
    page.emulate_media(color_scheme="dark")
    until(page, "document.documentElement.dataset.theme === 'dark'")
    dark = look()
    assert light[0] != dark[0] and light[1] != dark[1]
    page.emulate_media(color_scheme="light")
    until(page, "document.documentElement.dataset.theme === 'light'")
    page.get_by_role("button", name="Switch to dark colours").click()
    assert look() == dark
    page.get_by_role("button", name="Switch to light colours").click()
    assert look() == light
    # Back at the system's own, the page follows the system again.
    assert page.evaluate("localStorage.length") == 0


CONTRAST = """() => {
  const parse = (text) => { const p = text.match(/[\\d.]+/g).map(Number); return [p[0], p[1], p[2], p[3] ?? 1]; };
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (c) => {
    const [r, g, b] = c.slice(0, 3).map(v => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const text = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    const exempt = element.closest(".away, svg, .chart, .plotly-notifier, script, style");
    if (!text || !element.checkVisibility() || exempt) continue;
    let ground = [255, 255, 255, 0];
    for (let up = element; up && ground[3] < 1; up = up.parentElement) {
      const colour = parse(getComputedStyle(up).backgroundColor);
      if (colour[3] === 1) ground = colour;
    }
    const [a, b] = [light(parse(getComputedStyle(element).color)), light(ground)].sort((x, y) => y - x);
    const name = element.tagName + "." + element.className + ": " + element.textContent.slice(0, 30);
    found.push([(a + 0.05) / (b + 0.05), name]);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_can_be_read(page, scheme):
    page.emulate_media(color_scheme=scheme)
    until(page, f"document.documentElement.dataset.theme === '{scheme}'")
    for tab in TABS:
        at(page, tab)
        found = page.evaluate(CONTRAST)
        assert len(found) > 10 and [line for line in found if line[0] < 4.5] == []


WIDE = """() => [...document.querySelectorAll("body *")]
  .filter(e => e.checkVisibility() && e.getBoundingClientRect().right > 360 && !e.closest(".scroll, .tabs, .away, svg"))
  .map(e => e.outerHTML.slice(0, 120))"""


CUT = """() => [...document.querySelectorAll(".tabs a, .settings td, .settings th")]
  .filter(e => e.checkVisibility() && (e.getBoundingClientRect().right > 360 || e.scrollWidth > e.clientWidth + 1))
  .map(e => e.outerHTML.slice(0, 120))"""


def test_a_phone_shows_it_without_scrolling_sideways(page):
    page.set_viewport_size({"width": 360, "height": 740})
    for tab in TABS:
        at(page, tab)
        page.evaluate("document.querySelectorAll('details').forEach(details => { details.open = true; })")
        settles(page, lambda: page.evaluate(WIDE), lambda found: found == [])
        settles(page, lambda: page.evaluate("document.documentElement.scrollWidth"), lambda found: found == 360)
        # No tab is out of sight, and settings are read without scrolling.
        settles(page, lambda: page.evaluate(CUT), lambda found: found == [])
    at(page, "training")
    until(page, "document.querySelector('#chart-loss .main-svg').getBoundingClientRect().width <= 360")


def test_a_page_about_trainings_opens_with_them(world, page, session, tmp_path):
    torch.set_default_dtype(torch.float32)
    run(tmp_path / "run", world.settings, world.data)
    for spec, tab in ((tmp_path / "run", "training"), ("zoo:omniglot-5way-5shot", "filters")):
        written = write([spec], tmp_path / "page.html", episodes=0, progress=False)
        alone = page.context.new_page()
        alone.goto(written.path.as_uri())
        assert [name for name in TABS if alone.locator(f"#{name}").is_visible()] == [tab]
        assert alone.locator("#overview").is_visible() and "0 results" not in alone.locator("#overview").inner_text()
        alone.locator("#tab-results").click()
        assert alone.get_by_text("No results were given").is_visible() and not alone.locator("#overview").is_visible()
        alone.close()


def test_everything_has_a_name_and_the_page_its_landmarks(page):
    unnamed = """() => [...document.querySelectorAll(
        "input, select, button, dialog, [role=region], [role=tab], [role=tabpanel]")]
      .filter(e => !(e.labels?.length || e.ariaLabel || e.getAttribute("aria-labelledby") || e.textContent.trim()))
      .map(e => e.outerHTML.slice(0, 80))"""
    assert page.evaluate(unnamed) == []
    assert page.evaluate("[...document.images].filter(image => !image.hasAttribute('alt')).length") == 0
    assert page.evaluate("document.documentElement.lang") == "en"
    for landmark in ("header", "nav", "main", "footer", "h1", "title"):
        assert page.locator(landmark).count() >= 1
    twice = "[...document.querySelectorAll('[id]')].map(e => e.id).filter((id, i, ids) => ids.indexOf(id) !== i)"
    assert page.evaluate(twice) == []
    missing = """[...document.querySelectorAll("[aria-labelledby], [aria-controls], a[href^='#']")]
      .map(e => e.getAttribute("aria-labelledby") || e.getAttribute("aria-controls") || e.getAttribute("href").slice(1))
      .filter(id => !document.getElementById(id))"""
    assert page.evaluate(missing) == []


def test_the_focus_can_be_seen(page):
    page.locator("#find").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_filters_and_certificates_are_shown(page):
    at(page, "filters")
    assert shown(page, ".filters img") == 3 * 64
    size = page.locator(".filters img").first.evaluate("image => [image.naturalWidth, image.naturalHeight]")
    assert size == [3, 3]
    at(page, "certificates")
    text = page.locator("#certificates").inner_text()
    assert "no L2 term" in text and "strongly convex with μ = 0.05" in text
    assert page.locator("#certificates tbody tr").count() == 6
    assert page.locator("#certificates a[href='#result-certificates']").count() >= 1


def test_hostile_words_stay_words(page):
    # The fixture looks for what they would have done; here, that they can be read.
    assert SCRIPT in page.locator("h1").inner_text()
    assert BITE in page.locator("#result-certificates").inner_text()
    at(page, "configuration")
    assert BITE in page.locator("#configuration").inner_text()
    assert page.locator("img[src='x']").count() == 0
