"""Take the pictures of docs/page.md: python tests/tools/page_screenshots.py URL FOLDER, with a server of the demo model at URL."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from pelton_browser import browsing, find_browser

SAYS = ("What is the capital of France?", "Write a Python function that adds two numbers.")


def main(url: str, folder: Path) -> None:
    browser = find_browser()
    assert browser is not None, "no Chromium here"
    with browsing(browser) as page:
        page.set_media(width=1180, height=760)
        page.open(url + "/")
        page.wait("document.querySelector('#model').options.length > 0")
        page.run("document.querySelector('#temperature').value = '0'")
        page.run("document.querySelector('#max_completion_tokens').value = '120'")
        for number, text in enumerate(SAYS, 1):
            page.run("document.querySelector('#prompt').focus()")
            page.type(text)
            page.press("Enter")
            page.wait(
                f"document.querySelectorAll('.facts').length === {number} && !document.querySelector('.busy')", 120
            )
        time.sleep(4)  # two more samples of the figures
        page.screenshot(folder / "page-light.png")
        page.set_media(width=1180, height=760, prefers_color_scheme="dark")
        page.screenshot(folder / "page-dark.png")
        assert page.errors == [], page.errors


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
