"""The page of `bilevel app` in a real browser: drawn on with the mouse and by keys, dropped on, and looked at."""

import math
import shutil
import time

import numpy as np
import pytest
from app_fixtures import circle, cross, lattice, png, saved, taught, zigzag
from PIL import Image

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium here; Debian's is `apt install chromium`"
)


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, page_of_desk):
    """The page of an empty desk; it must ask no other server, and say nothing on the console."""
    heard = []
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light", accept_downloads=True)
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.on("console", lambda message: heard.append(f"console {message.type}: {message.text}"))
    page.on("pageerror", lambda error: heard.append(f"error: {error}"))

    def asked(request):
        if not request.url.startswith((page_of_desk.address, "data:", "blob:")):
            heard.append(f"asked for {request.url}")

    page.on("request", asked)
    page.goto(page_of_desk.address)
    page.wait_for_selector("#settings:visible")
    page.heard = heard
    yield page
    assert heard == []
    context.close()


def until(page, condition):
    """Wait for it. Playwright's own way evaluates text in the page, which the page's policy forbids."""
    end = time.monotonic() + 60
    while not page.evaluate(condition):
        assert time.monotonic() < end, (condition, page.locator("main").inner_text(), page.heard)
        page.wait_for_timeout(40)


def draw(page, *strokes):
    """With the mouse, on the pad; points are in units of its side."""
    page.locator("#pad").scroll_into_view_if_needed()
    box = page.locator("#pad").bounding_box()
    for stroke in strokes:
        places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in stroke]
        page.mouse.move(*places[0])
        page.mouse.down()
        for place in places[1:]:
            page.mouse.move(*place, steps=2)
        page.mouse.up()


def teach(page, name, *strokes):
    draw(page, *strokes)
    page.get_by_placeholder("a new class…").fill(name)
    page.get_by_role("button", name="Add", exact=True).click()
    until(page, f"[...document.querySelectorAll('#classes input')].some(one => one.value === {name!r})")


def says(page, name):
    until(page, f"document.getElementById('said').textContent === {name!r}")


def drop(page, onto, *files):
    """Files (name, type, content) as if from a file manager."""
    given = [[name, kind, list(content)] for name, kind, content in files]
    transfer = page.evaluate_handle(
        """files => {
            const carried = new DataTransfer();
            const file = ([name, type, bytes]) => new File([new Uint8Array(bytes)], name, { type });
            for (const one of files) carried.items.add(file(one));
            return carried;
        }""",
        given,
    )
    for kind in ("dragenter", "dragover", "drop"):
        page.dispatch_event(onto, kind, {"dataTransfer": transfer})


def test_what_is_drawn_with_the_mouse_is_learned_and_recognised(page, page_of_desk):
    assert page.locator("#answer-empty li.now").inner_text() == "Draw something, and give it a name."
    assert page.get_by_role("button", name="Add", exact=True).is_disabled()
    teach(page, "ring", circle())
    until(page, "document.querySelector('#answer-empty li.now')?.textContent.startsWith('Draw something else')")
    teach(page, "wave", zigzag())
    teach(page, "cross", [(0.2, 0.2), (0.8, 0.8)], [(0.8, 0.2), (0.2, 0.8)])
    draw(page, circle(0.06))
    says(page, "ring")
    # In one call: a prediction of the last stroke may replace this one between two.
    rows = page.evaluate(
        "[...document.querySelectorAll('#bars li')].map("
        "one => [one.querySelector('.name').textContent, one.classList.contains('best'),"
        " parseFloat(one.querySelector('i').style.width)])"
    )
    assert [(name, best) for name, best, _ in rows] == [("ring", True), ("wave", False), ("cross", False)]
    shares = [share for _, _, share in rows]
    assert sum(shares) == pytest.approx(100, abs=0.1) and max(shares) == shares[0] > 50
    assert page.locator("#nearest li span").first.inner_text() == "ring"
    assert page.locator("#seen img").evaluate("image => [image.naturalWidth, image.naturalHeight]") == [28, 28]
    page.get_by_role("button", name="Clear the pad").click()
    until(page, "!document.getElementById('answer-empty').hidden")
    draw(page, [(0.25, 0.2), (0.8, 0.75)], [(0.8, 0.25), (0.25, 0.75)])
    says(page, "cross")
    # Taught by its key; the pad is clean again, and the server holds what was drawn.
    page.keyboard.press("3")
    until(page, "document.querySelectorAll('#classes > li:nth-child(3) .examples li').length === 2")
    assert page.get_by_role("button", name="Undo the last stroke").is_disabled()
    kept = page_of_desk.desk.state()["classes"]
    assert [len(one["pictures"]) for one in kept] == [1, 1, 2]
    page.get_by_role("button", name="Undo the last change").click()
    until(page, "document.querySelectorAll('#classes > li:nth-child(3) .examples li').length === 1")


def test_it_is_recognised_while_the_pen_is_down(page, page_of_desk):
    taught(page_of_desk.desk)
    page.reload()
    box = page.locator("#pad").bounding_box()
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in zigzag()]
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place, steps=3)
    says(page, "zigzag")
    page.mouse.up()


def test_the_keyboard_is_enough(page, page_of_desk):
    page.keyboard.press("Tab")  # the link that skips to the pad
    page.keyboard.press("Enter")
    page.locator("#pad").focus()

    def line(key, times):
        for _ in range(times):
            page.keyboard.press(f"Shift+{key}")

    def square():
        page.keyboard.press(" ")
        for key in ("ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp"):
            line(key, 5)
        page.keyboard.press(" ")

    def bar():
        page.keyboard.press(" ")
        line("ArrowDown", 7)
        page.keyboard.press(" ")

    square()
    page.keyboard.press("n")
    page.keyboard.type("square")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('#classes > li').length === 1")
    assert page.evaluate("document.activeElement.id") == "pad"
    bar()
    page.keyboard.press("n")
    page.keyboard.type("bar")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('#classes > li').length === 2")
    line("ArrowUp", 7)
    square()
    says(page, "square")
    until(page, "document.getElementById('said-aloud').textContent.startsWith('square, ')")
    page.keyboard.press("Control+z")
    until(page, "!document.getElementById('answer-empty').hidden")
    assert page_of_desk.desk.state()["undo"] >= 2


def test_pictures_are_dropped_to_ask_and_onto_a_class_to_teach(page, page_of_desk):
    taught(page_of_desk.desk)
    page.reload()
    until(page, "document.querySelectorAll('#classes > li').length === 2")
    drop(page, "#pad", ("a.png", "image/png", png(circle(0.08))), ("b.png", "image/png", png(zigzag(0.08))))
    until(page, "document.querySelectorAll('#pictures b').length === 2")
    until(page, "[...document.querySelectorAll('#pictures b')].map(one => one.textContent).join() === 'circle,zigzag'")
    says(page, "circle")  # the first is in hand, and lies on the pad
    assert page.locator("#pad-picture").is_visible()
    page.locator("#pictures button").nth(1).click()
    says(page, "zigzag")
    page.locator("#chips .chip", has_text="zigzag").click()
    until(page, "document.querySelectorAll('#classes > li:nth-child(2) .examples li').length === 2")
    assert page.locator("#pictures li").count() == 1
    page.get_by_role("button", name="Put away").click()
    assert page.locator("#asked").is_hidden() and page.locator("#pad-picture").is_hidden()
    drop(page, "#classes > li:nth-child(1) .row", ("c.png", "image/png", png(circle(0.02))))
    until(page, "document.querySelectorAll('#classes > li:nth-child(1) .examples li').length === 2")
    drop(page, "#pad", ("text.txt", "text/plain", b"no picture"))
    assert "No picture was dropped" in page.get_by_role("alert").inner_text()


def test_photographs_are_dropped_too_and_the_model_follows(page, page_of_desk):
    pixels = np.random.default_rng(0).integers(0, 256, (2, 48, 64, 3), np.uint8)
    for name, one in zip(("red", "blue"), pixels, strict=True):
        page_of_desk.desk.add_class(name, saved(Image.fromarray(one), "JPEG"))
    page.reload()
    until(page, "document.getElementById('used').textContent.includes('miniimagenet')")
    drop(page, "#pad", ("x.jpg", "image/jpeg", saved(Image.fromarray(pixels[1]), "JPEG")))
    says(page, "blue")


def test_a_stranger_is_none_of_these(page, page_of_desk):
    taught(page_of_desk.desk)
    page.reload()
    page.wait_for_selector("#settings:visible")
    drop(page, "#pad", ("lattice.png", "image/png", lattice()))
    says(page, "None of these")
    assert "nearest: " in page.locator("#sure").inner_text() and page.locator("#bars li.best").count() == 0
    page.locator("#rate").select_option("0")
    until(page, "document.getElementById('said').textContent !== 'None of these'")


def test_classes_are_renamed_and_removed_and_names_are_text(page, page_of_desk):
    taught(page_of_desk.desk)
    page.reload()
    until(page, "document.querySelectorAll('#classes > li').length === 2")
    name = page.get_by_role("textbox", name="Name of the class").first
    name.fill("<img src=x onerror=alert(1)>")
    name.press("Enter")
    until(page, "document.querySelector('#chips .chip span').textContent.startsWith('<img')")
    assert page.locator("#chips img").count() == 0
    name.fill("zigzag")  # the other one's
    name.press("Enter")
    until(page, "!document.getElementById('error').hidden")
    assert "already" in page.get_by_role("alert").inner_text() and name.input_value().startswith("<img")
    page.get_by_role("button", name="Close this message").click()
    page.get_by_role("button", name="Remove the class zigzag").click()
    until(page, "document.querySelectorAll('#classes > li').length === 1")
    page.get_by_role("button", name="Remove the picture from <img").click()
    until(page, "document.querySelectorAll('#classes > li').length === 0")
    assert page.locator("#known-empty").is_visible()
    assert page_of_desk.desk.state()["classes"] == []
    page.heard[:] = [line for line in page.heard if "400" not in line]  # the refused name


def test_the_doodles_are_an_example_and_the_classifier_can_be_saved(page, page_of_desk, tmp_path):
    page.get_by_role("button", name="Start with five doodles").click()
    until(page, "document.querySelectorAll('#classes > li').length === 5")
    star = [(0.5 + 0.33 * math.sin(k * 1.2566), 0.5 - 0.33 * math.cos(k * 1.2566)) for k in (0, 2, 4, 1, 3, 0)]
    draw(page, star)
    says(page, "star")
    with page.expect_download() as download:
        page.get_by_role("link", name="Save the classifier").click()
    assert download.value.suggested_filename == "my.safetensors"
    download.value.save_as(tmp_path / "my.safetensors")
    assert (tmp_path / "my.safetensors").read_bytes() == page_of_desk.desk.saved()


@pytest.mark.parametrize("width", [360, 820, 1280, 1900])
def test_it_fits_phones_and_wide_screens_in_light_and_dark(page, page_of_desk, width):
    taught(page_of_desk.desk)
    page_of_desk.desk.add_class("a name of forty characters, which is muc", png(cross()))
    page.set_viewport_size({"width": width, "height": 800})
    page.reload()
    until(page, "document.querySelectorAll('#classes > li').length === 3")
    page.locator("#rate").select_option("0")  # layout is tested here: a false alarm, "None of these", would be no error
    draw(page, circle())
    says(page, "circle")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # The verdict above the pad changes while the user draws: it must not move the pad, however long a name is.
    top = "document.getElementById('pad').getBoundingClientRect().top"
    before = page.evaluate(top)
    page.evaluate("document.getElementById('verdict').textContent = 'a name of forty characters, which is muc 99 %'")
    assert page.evaluate(top) == before
    for role in ("button", "link", "textbox", "combobox"):
        for i, control in enumerate(page.get_by_role(role).all()):
            box = control.bounding_box()
            inside = box and (box["x"] < 0 or box["x"] + box["width"] <= width + 0.5)  # the skip link waits outside
            assert inside, (role, i)
    assert page.locator("#verdict").is_visible() == (width < 800)
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_role("button", name="Switch to dark colours").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    page.get_by_role("button", name="Switch to light colours").click()


def test_text_can_be_read_in_both_schemes(page, page_of_desk):
    """WCAG's contrast of 4.5 for every text, on the ground that it stands on."""
    taught(page_of_desk.desk)
    page.reload()
    until(page, "document.querySelectorAll('#classes > li').length === 2")
    page.locator("#rate").select_option("0")
    draw(page, circle())
    says(page, "circle")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        # Colours change gradually: within ten seconds all text must be readable.
        end = time.monotonic() + 10
        while (unreadable := page.evaluate(CONTRASTS)) and time.monotonic() < end:
            page.wait_for_timeout(100)
        assert unreadable == []


# Texts with less contrast than 4.5 (3 where they are large), with it; what is disabled is exempt.
CONTRASTS = """() => {
    const numbers = text => (text.match(/[\\d.]+/g) || []).map(Number);
    const ground = element => {
        for (let one = element; one; one = one.parentElement) {
            const colour = numbers(getComputedStyle(one).backgroundColor);
            if (colour.length === 3 || colour[3] > 0.99) return colour;
        }
        return [255, 255, 255];
    };
    const light = colour => colour.slice(0, 3)
        .map(value => value / 255)
        .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
        .reduce((sum, value, i) => sum + [0.2126, 0.7152, 0.0722][i] * value, 0);
    const wrong = [];
    for (const element of document.querySelectorAll('body *')) {
        const own = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
        const exempt = element.closest(':disabled, .away, script, noscript, option');
        if (!own || exempt || !element.checkVisibility()) continue;
        const style = getComputedStyle(element);
        const [a, b] = [light(numbers(style.color)), light(ground(element))].sort((x, y) => y - x);
        const contrast = (a + 0.05) / (b + 0.05);
        const least = parseFloat(style.fontSize) >= 24 ? 3 : 4.5;
        if (contrast < least) wrong.push([element.textContent.trim().slice(0, 30), contrast]);
    }
    return wrong;
}"""
