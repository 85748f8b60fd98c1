"""The page at /: its files parse and ask nobody else; in a browser it chats, stops, folds, calls tools and shows figures."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from pelton_browser import Page, browsing, find_browser
from pelton_fake_server import FakeAsyncLLM, Running

from pelton.metrics.snapshot import Counter, Gauge, Histogram, Metric
from pelton_plugins.server.config import ServerConfig
from pelton_plugins.web.routes import FOLDER

SCRIPTS = sorted(FOLDER.glob("*.js"))
VOID = {"meta", "link", "img", "input", "br"}
NODE = shutil.which("node")
BROWSER = find_browser()
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian: apt-get install chromium)")
needs_node = pytest.mark.skipif(NODE is None, reason="no node here")


# The files


class Html(HTMLParser):
    """Every element that is opened is closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, (tag, self.getpos())


@pytest.fixture(scope="module")
def html() -> Html:
    return Html((FOLDER / "index.html").read_text())


def test_html_is_whole_and_labelled(html):
    ids = [values["id"] for _, values in html.elements if "id" in values]
    assert len(ids) == len(set(ids))
    labels = {values["for"] for tag, values in html.elements if tag == "label"}
    fields = {values["id"] for tag, values in html.elements if tag in ("input", "select", "textarea")}
    assert fields == labels
    refers = [
        values[name]
        for _, values in html.elements
        for name in ("aria-labelledby", "aria-describedby")
        if name in values
    ]
    assert {one for value in refers for one in value.split()} <= set(ids)
    assert [values["lang"] for tag, values in html.elements if tag == "html"] == ["en"]
    assert all("alt" in values for tag, values in html.elements if tag == "img")
    assert all(values.get("type") in ("button", "submit") for tag, values in html.elements if tag == "button")


def test_nothing_is_inline_and_nothing_comes_from_elsewhere(html):
    assert not [
        values for _, values in html.elements if "style" in values or any(name.startswith("on") for name in values)
    ]
    assert [values.get("src") for tag, values in html.elements if tag == "script"] == ["ui/page.js"]
    assert not [tag for tag, _ in html.elements if tag in ("style", "iframe", "object", "embed")]
    for path in FOLDER.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]+\.[a-z]|@import|url\(", text), path


def test_scripts_find_what_they_look_for_and_make_no_html(html):
    ids = {values["id"] for _, values in html.elements if "id" in values}
    for path in SCRIPTS:
        text = path.read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|Storage|cookie", text
        ), path
        wanted = set(re.findall(r'(?:getElementById|\bat)\("([\w-]+)"\)', text))
        assert wanted <= ids | {"generation_tokens"}, path
        for imported in re.findall(r'from "\./([\w.]+)"', text):
            assert (FOLDER / imported).is_file(), (path, imported)


def test_styles_have_their_braces_and_known_colours():
    css = re.sub(r"/\*.*?\*/", "", (FOLDER / "page.css").read_text(), flags=re.S)
    assert css.count("{") == css.count("}")
    assert set(re.findall(r"var\((--[\w-]+)", css)) <= set(re.findall(r"(--[\w-]+):", css))
    assert "prefers-color-scheme: dark" in css and "prefers-reduced-motion: reduce" in css


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_contrast_of_text_is_enough(scheme):
    found = re.findall(r":root \{(.*?)\}", (FOLDER / "page.css").read_text(), flags=re.S)
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", found[scheme]))
    pairs = [
        ("text", "back"), ("text", "card"), ("text", "user"), ("text", "field"), ("text", "code"), ("soft", "card"),
        ("soft", "user"), ("soft", "field"), ("strong", "card"), ("on-strong", "strong"), ("bad", "bad-back"),
    ]  # fmt: skip
    for front, back in pairs:
        bright, dark = sorted((_luminance(colours[front]), _luminance(colours[back])), reverse=True)
        assert (bright + 0.05) / (dark + 0.05) >= 4.5, (front, back)


@needs_node
def test_scripts_parse_and_their_functions_are_right(tmp_path):
    for path in SCRIPTS:
        (tmp_path / f"{path.stem}.mjs").write_text(path.read_text().replace('.js"', '.mjs"'))
    for path in tmp_path.iterdir():
        subprocess.run([NODE, "--check", str(path)], check=True)
    units = Path(__file__).parent / "units.mjs"
    done = subprocess.run([NODE, str(units), tmp_path.as_uri()], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stderr


# Over HTTP


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    with contextlib.ExitStack() as stack:
        yield lambda llm=None, **settings: stack.enter_context(
            Running(ServerConfig(access_log=False, **settings), llm or FakeAsyncLLM())
        )


def test_files_come_with_a_strict_policy_and_without_a_key(start):
    server = start(api_key=["secret"])
    for path, kind in [
        ("/", "text/html"),
        *((f"/ui/{path.name}", None) for path in FOLDER.iterdir() if path.name != "index.html"),
    ]:
        reply = server.client.get(path)
        assert reply.status_code == 200, path
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert kind is None or reply.headers["content-type"] == f"{kind}; charset=utf-8"
        again = server.client.get(path, headers={"if-none-match": reply.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert server.client.get("/ui/../config.py").status_code in (401, 404)
    assert server.client.get("/ui/index.html").status_code == 401
    assert server.post("/").status_code in (401, 405)
    assert "/ui/page.js" not in server.client.get("/openapi.json", headers={"authorization": "Bearer secret"}).text


def test_no_ui_leaves_nothing_behind(start):
    server = start(ui=False)
    assert {server.client.get(path).status_code for path in ("/", "/ui/page.js", "/ui/page.css")} == {404}


def test_the_flag_is_no_ui():
    from pelton_plugins.flags import parse_flags

    parsed = parse_flags(["m", "--no-ui"], [ServerConfig], positional="model", program="p", doc="", environ={})
    assert parsed.structs["ServerConfig"].ui is False


# In a browser


class Engine(FakeAsyncLLM):
    """With figures that grow."""

    def __init__(self, answer: str = "Hello, world.") -> None:
        super().__init__(answer)
        self.num_scrapes = 0

    def get_metrics(self) -> list[Metric]:
        self.num_scrapes += 1
        n = self.num_scrapes
        told = {
            "prefix_cache_queries": 100 * n,
            "prefix_cache_hits": 25 * n,
            "generation_tokens": 50 * n,
            "num_preemptions": 3,
        }
        return [
            Gauge(name="pelton_num_requests_running", value=7, documentation="-"),
            Gauge(name="pelton_num_requests_waiting", value=2, documentation="-"),
            Gauge(name="pelton_kv_cache_usage_perc", value=0.25, documentation="-"),
            Gauge(name="pelton_cache_config_info", value=1, documentation="-", labels={"num_gpu_blocks": "400"}),
            *(Counter(name=f"pelton_{name}", value=value, documentation="-") for name, value in told.items()),
            Histogram(
                name="pelton_time_to_first_token_seconds", buckets={"0.1": 0, "0.2": 10 * n, "+Inf": 10 * n}, count=10 * n,
                sum=1.5 * n, documentation="-",
            ),
        ]  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    assert BROWSER is not None
    with browsing(BROWSER) as page:
        yield page


@pytest.fixture
def page(browser: Page, start: Callable[..., Running]) -> Iterator[Page]:
    """Ended before the server that it shows: a page that asks one which is gone says so."""
    browser.open("about:blank")
    browser.errors.clear()
    browser.set_media()
    yield browser
    assert browser.errors == []
    browser.open("about:blank")


def ready(page: Page, server: Running) -> None:
    page.open(server.url + "/")
    page.wait("document.querySelector('#model').options.length > 0")


def say(page: Page, text: str) -> None:
    page.run("document.querySelector('#prompt').focus()")
    page.type(text)
    page.press("Enter")


def whole(page: Page) -> str:
    page.wait("document.querySelector('#progress').textContent === 'Answer complete'")
    return page.text(".message.assistant:last-of-type .text")


EVIL = "<img src=x onerror=\"document.title='hit'\"> <script>document.title='hit'</script> **bold**\n```\n<b>x</b>\n```"


@needs_browser
def test_chat_streams_and_never_reads_html(page, start):
    server = start(Engine(EVIL))
    ready(page, server)
    assert page.run("document.activeElement.id") == "prompt"
    say(page, "<i>hi</i>")
    assert "<img src=x" in whole(page) and "<b>x</b>" in page.text(".message.assistant pre")
    assert page.text(".message.user .text") == "<i>hi</i>"
    assert page.run("document.querySelectorAll('#log img, #log script, #log i, #log b').length") == 0
    assert page.run("document.title") == "Pelton"
    assert "tokens" in page.text(".facts") and "first after" in page.text(".facts")
    assert page.run("document.querySelector('#log').getAttribute('aria-busy')") == "false"
    say(page, "and again")
    page.wait("document.querySelectorAll('.message.assistant').length === 2")
    whole(page)
    assert [m["role"] for m in server.llm.rendered["messages"]] == ["user", "assistant", "user"]


@needs_browser
def test_settings_reach_the_request_and_bad_ones_stay_here(page, start):
    server = start(Engine())
    ready(page, server)
    given = {"temperature": "0.5", "top_k": "7", "seed": "3", "max_completion_tokens": "4", "system": "Be brief."}
    for name, value in given.items():
        page.run(f"document.querySelector('#sampling').elements['{name}'].value = '{value}'")
    say(page, "hi")
    assert whole(page) == "Hell"
    assert "cut at the most tokens" in page.text(".facts")
    _, params, _ = server.llm.requests[-1]
    assert (params.temperature, params.top_k, params.seed, params.max_tokens) == (0.5, 7, 3, 4)
    assert server.llm.rendered["messages"][0] == {"role": "system", "content": "Be brief."}
    page.run("document.querySelector('#temperature').value = '9'")
    say(page, "hi")
    page.wait("!document.querySelector('#problem').hidden")
    assert len(server.llm.requests) == 1
    page.run("document.querySelector('#temperature').value = ''; document.querySelector('#tools').value = '{'")
    page.click("#again")
    page.wait("document.querySelector('#problem').textContent.startsWith('Tools are not JSON')")


@needs_browser
@pytest.mark.parametrize("how", ["button", "escape"])
def test_an_answer_is_stopped(page, start, how):
    server = start(Engine("na " * 60))
    server.llm.step_s = 0.03
    ready(page, server)
    say(page, "sing")
    page.wait("document.querySelector('.assistant .text')?.textContent.length > 5")
    assert page.run("document.querySelector('#send').hidden && !document.querySelector('#stop').hidden")
    if how == "button":
        page.click("#stop")
    else:
        page.press("Escape")
    page.wait("document.querySelector('#progress').textContent === 'Stopped'")
    assert server.wait_for(lambda: not server.llm.running) and server.llm.aborted
    assert page.text(".assistant .text").startswith("na na") and "stopped" in page.text(".facts")
    page.click("#clear")
    assert page.run("document.querySelectorAll('.message').length") == 0


@needs_browser
def test_reasoning_is_folded_and_tools_take_results(page, start):
    answer = (
        '<think>Let me see.</think>I look.<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
    )
    server = start(Engine(answer), tool_call_parser="hermes", reasoning_parser="think")
    ready(page, server)
    page.run("""document.querySelector('#tools').value = '[{"name": "weather", "parameters": {"type": "object"}}]'""")
    say(page, "Weather in Paris?")
    whole(page)
    page.wait("document.activeElement.tagName === 'TEXTAREA' && document.activeElement.id.startsWith('result-')")
    assert page.run("document.querySelector('.fold').open") is False
    page.click(".fold summary")
    assert "Let me see." in page.text(".fold")
    assert page.text(".call h4") == "Calls weather" and '"city": "Paris"' in page.text(".call pre")
    page.click(".results textarea")
    page.type("Sunny")
    server.llm.answer = "It is sunny."
    page.click(".results button")
    page.wait("document.querySelectorAll('.message.assistant').length === 2")
    whole(page)
    said = server.llm.rendered["messages"]
    assert [m["role"] for m in said] == ["user", "assistant", "tool"]
    names = page.run("[...document.querySelectorAll('article')].map((one) => one.getAttribute('aria-label')).join()")
    assert names == "You,fake,Result of weather,fake"
    assert said[2]["content"] == "Sunny" and said[2]["tool_call_id"] == said[1]["tool_calls"][0]["id"]


@needs_browser
def test_figures_are_shown_and_can_be_paused(page, start):
    server = start(Engine())
    ready(page, server)
    page.wait("document.querySelector('#tiles').innerText.includes('25 %')")
    page.wait(
        "document.querySelectorAll('.value')[2].textContent !== '0' && document.querySelectorAll('.value')[2].textContent !== '–'"
    )
    text = page.text("#tiles")
    for part in ("7", "2 wait", "100 of 400", "150 ms", "3 preempted"):
        assert part in text, text
    page.click("#pause")
    before = server.llm.num_scrapes
    assert page.run("new Promise((done) => setTimeout(() => done(1), 2300))") == 1
    assert server.llm.num_scrapes == before
    assert page.run("document.querySelector('#pause').getAttribute('aria-pressed')") == "true"


@needs_browser
def test_the_key_is_asked_for_and_kept_in_memory_alone(browser, start):
    server = start(Engine(), api_key=["secret"])
    page = browser
    page.set_media()
    page.open(server.url + "/")
    page.wait("document.querySelector('#key-dialog').open")
    assert page.run("document.activeElement.id") == "key"
    page.type("wrong")
    page.press("Enter")
    page.wait(
        "document.querySelector('#key-dialog').open && document.querySelector('#key-text').textContent.includes('not take')"
    )
    page.type("secret")
    page.press("Enter")
    page.wait("document.querySelector('#model').options.length > 0")
    say(page, "hi")
    assert whole(page) == "Hello, world."
    assert page.run("[localStorage.length, sessionStorage.length, document.cookie].join()") == "0,0,"
    assert "secret" not in page.run("document.documentElement.outerHTML")
    page.errors.clear()  # the browser logs each 401


@needs_browser
def test_errors_of_the_server_are_said(page, start):
    server = start(Engine())
    ready(page, server)
    server.llm.fail_after = (3, RuntimeError("broken"))
    say(page, "hi")
    page.wait("!document.querySelector('#problem').hidden")
    assert page.run("document.querySelector('#problem').getAttribute('role')") == "alert"
    assert page.text("#problem") and page.text(".assistant .text") == "Hel"
    server.llm.fail_after = None
    page.click("#again")
    page.wait("document.querySelector('.assistant .text')?.textContent === 'Hello, world.'")


@needs_browser
def test_everything_can_be_reached_by_keyboard_and_fits_a_narrow_window(page, start):
    server = start(Engine())
    page.set_media(width=360, height=740, prefers_reduced_motion="reduce")
    ready(page, server)
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    seen: list[Any] = []
    for _ in range(30):
        page.press("Tab")
        seen.append(page.run("document.activeElement.id || document.activeElement.tagName"))
    for wanted in ("send", "pause", "temperature", "tools", "model", "open-key"):
        assert wanted in seen, seen
    assert page.run("[...document.querySelectorAll('button, input, select, textarea')].every((e) => e.closest('dialog') || e.hidden || "
                    "e.labels?.length || e.textContent)")  # fmt: skip
