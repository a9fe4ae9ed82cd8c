"""Write docs/images/server.png: the chat page with a real conversation. Needs what `make test-browser` needs.

`scripts/page_picture.py FOLDER` writes the page at 1280 and 390 pixels, light and dark, with and without origins.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from helpers.browsing import FLAGS, said

PROMPTS = (
    "Write a Python function that adds first_value and second_value.",
    "Turn this into a numbered list and keep the words: soak the beans overnight; rinse them well; simmer them slowly; "
    "soak the beans overnight; rinse them well; simmer them slowly.",
)


@contextmanager
def served() -> Iterator[str]:
    """The address of a server of the packaged model."""
    command = [sys.executable, "-m", "foresay", "serve", "smollm2-135m", "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        line = next(line for line in server.stderr if line.startswith("listening at "))
        yield line.removeprefix("listening at ").strip().removesuffix("v1")
    finally:
        server.terminate()
        server.wait()


def save(page: Page, path: Path) -> None:
    """Write a screenshot of 256 colours, in half the bytes."""
    page.wait_for_timeout(200)
    page.screenshot(path=str(path))
    Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)


def save_looks(page: Page, folder: Path) -> None:
    """Write the page in each width and colour scheme."""
    folder.mkdir(parents=True, exist_ok=True)
    for width, height in ((1280, 900), (390, 844)):
        for scheme in ("light", "dark"):
            for origins in (False, True):
                page.set_viewport_size({"width": width, "height": height})
                page.emulate_media(color_scheme=scheme)
                page.locator("#origins").set_checked(origins)
                page.locator("#talk").evaluate("e => { e.scrollTop = e.scrollHeight; }")
                save(page, folder / f"{width}-{scheme}{'-origins' if origins else ''}.png")


def main() -> None:
    """Talk with the model, and take the pictures."""
    found = os.environ.get("FORESAY_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with served() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        page = browser.new_page(viewport={"width": 1000, "height": 700})
        page.goto(address)
        page.locator("#compare").check()
        if len(sys.argv) > 1:
            said(page, PROMPTS[0], tokens=160)
            said(page, PROMPTS[1], tokens=96)
            save_looks(page, Path(sys.argv[1]))
        else:
            page.locator("#origins").check()
            said(page, PROMPTS[0], tokens=60)
            save(page, ROOT / "docs" / "images" / "server.png")
        browser.close()


if __name__ == "__main__":
    main()
