"""The picture of `bilevel app` in the guide: `python docs/screenshots/app.py` draws on the page with the mouse."""

from __future__ import annotations

import io
import math
import shutil
import threading
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from bilevel.app.desk import Desk
from bilevel.app.server import PageServer, listen

FILE = Path(__file__).parent.parent / "images" / "app.png"
SIZE = {"width": 1280, "height": 850}


def fish() -> list[list[tuple[float, float]]]:
    """A fish, as a hand with a mouse draws it."""
    turns = [0.35 + 2 * math.pi * k / 36 for k in range(37)]
    body = [(0.4 + (0.255 + 0.012 * math.sin(3 * a)) * math.cos(a), 0.52 + 0.19 * math.sin(a)) for a in turns]
    tail = [(0.645, 0.55), (0.74, 0.44), (0.86, 0.36), (0.84, 0.5), (0.85, 0.7), (0.74, 0.63), (0.64, 0.53)]
    return [body, tail, [(0.27, 0.46), (0.28, 0.465)]]


def draw(page: Page, strokes: list[list[tuple[float, float]]]) -> None:
    box = page.locator("#pad").bounding_box()
    assert box is not None
    for stroke in strokes:
        places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in stroke]
        page.mouse.move(*places[0])
        page.mouse.down()
        for place in places[1:]:
            page.mouse.move(*place, steps=3)
        page.mouse.up()
    page.mouse.move(0, 0)


def main() -> None:
    ready = threading.Event()
    server = PageServer(Desk(), listen(0), lambda address: ready.set())
    thread = threading.Thread(target=server.run)
    thread.start()
    ready.wait()
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport=SIZE, color_scheme="light", device_scale_factor=1.25)
            page.goto(server.address)
            page.get_by_role("button", name="Start with five doodles").click()
            page.locator("#classes > li:nth-child(5) img").first.wait_for()
            draw(page, fish())
            page.locator("#bars .best").wait_for()
            page.wait_for_timeout(1000)  # until the bars have moved
            picture = Image.open(io.BytesIO(page.screenshot()))
            browser.close()
    finally:
        server.should_exit = True
        thread.join()
    picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(FILE, optimize=True)


if __name__ == "__main__":
    main()
