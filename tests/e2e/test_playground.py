"""The playground as a user sees it, in a headless browser: chat, race, stop, key, Markdown, errors."""

import json

import httpx
import pytest
from fixtures_browser import chromium
from fixtures_models import embedded
from fixtures_server import serving, wait_until

KEY = "a-key-for-the-test"
ENTER, ESCAPE = "\ue007", "\ue00c"
PROMPT = "John buys 4 pounds of beef. He uses all but 1 pound in soup. How many pounds are in the soup?"

# Records what the page sends from now on.
WATCH = """
const fetched = fetch;
window.bodies = [];
window.fetch = (path, options) => { bodies.push(JSON.parse(options.body)); return fetched(path, options); };
"""


@pytest.fixture(scope="module")
def browser():
    with chromium() as made:
        yield made


@pytest.fixture(scope="module")
def server(browser):
    """The embedded pair, drafting with n-grams first, behind a key."""
    embedded()
    with serving("--draft", "ngram + embedded-draft", "--policy", "fixed", env={"SAMESEED_API_KEY": KEY}) as made:
        yield made


@pytest.fixture
def page(browser, server):
    """The page with its key: greedy, short answers. At the end the console must hold no errors."""
    browser.driver.get(server.url)
    if browser.run("localStorage.clear(); return sessionStorage.getItem('sameseed-key')") != KEY:
        browser.run("sessionStorage.setItem('sameseed-key', arguments[0])", KEY)
        browser.driver.refresh()
    browser.until(lambda: "embedded" in browser["facts"].text)
    browser.complaints()
    settings(browser, temperature=0, seed=7, **{"max-tokens": 48})
    browser.run("document.getElementById('markdown').checked = false")
    yield browser
    assert browser.complaints() == []


def settings(page, **values):
    for name, value in values.items():
        page.run("document.getElementById(arguments[0]).value = arguments[1]", name, str(value))


def asked(page, text):
    """Send a message with the keyboard; returns the answer's element when the answer is complete."""
    before = page.all(".answer")[-1:]
    page["text"].send_keys(text, ENTER)
    page.until(lambda: page.all(".answer")[-1:] != before and page["send"].is_displayed())
    return page.all(".answer")[-1]


def api(server, **fields):
    """Ask the same question without a browser."""
    body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "seed": 7, "max_tokens": 48, **fields}
    headers = {"authorization": f"Bearer {KEY}"}
    made = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60).json()
    return made


def test_a_key_is_asked_for_kept_in_the_tab_and_forgotten(browser, server):
    browser.driver.get(server.url)
    browser.run("sessionStorage.clear()")
    browser.driver.refresh()
    browser.until(lambda: browser["key-dialog"].is_displayed())
    assert browser.focused == "key-field"
    browser.press("a-wrong-key", ENTER)
    browser.until(lambda: browser["key-fault"].is_displayed())
    assert "does not know the key" in browser["key-fault"].text
    browser.press(KEY, ENTER)
    browser.until(lambda: "embedded" in browser["facts"].text)
    assert not browser["key-dialog"].is_displayed()
    kept = browser.run("return [localStorage.getItem('sameseed-key'), document.cookie, location.search]")
    assert kept == [None, "", ""]
    browser.driver.refresh()
    browser.until(lambda: "embedded" in browser["facts"].text)
    browser["key"].click()
    browser["key-forget"].click()
    browser.until(lambda: "wants an API key" in browser["facts"].text)
    assert browser.run("return sessionStorage.length") == 0
    assert KEY not in browser.driver.page_source


def test_chat_shows_who_guessed_each_token(page, server):
    answer = asked(page, PROMPT)
    made = api(server, return_token_ids=True)["choices"][0]
    assert answer.find_element("css selector", ".said").get_property("textContent") == made["message"]["content"]
    shown = page.run(
        "return [...document.querySelectorAll('.answer .said span')].map((s) => [s.textContent, s.className])"
    )
    classes = {None: "own", "ngram": "guess g1", "draft_model": "guess g2"}
    levels = made["levels"][:-1] if made["finish_reason"] == "stop" else made["levels"]  # an end token has no text
    assert [c for _, c in shown] == [classes[level] for level in levels]
    assert {"own", "guess g1", "guess g2"} == {c for _, c in shown}
    starts = made["text_offset"][: len(levels)]
    assert [text for text, _ in shown] == [
        made["message"]["content"][a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)
    ]
    counts = [item.text for item in page.all("#legend li")]
    assert counts == [
        f"{name} {made['levels'].count(level)}"
        for name, level in (("n-gram lookup", "ngram"), ("draft model", "draft_model"), ("the model itself", None))
    ]


def test_the_race_ends_in_the_same_text(page):
    settings(page, temperature=0.8)
    page.run(WATCH)
    page["tab-race"].click()
    page["race-text"].clear()
    page["race-text"].send_keys(PROMPT, ENTER)
    page.until(lambda: page["verdict"].is_displayed())
    assert page["same"].text == "Same text"
    off, on = (page.run(f"return document.querySelector('#lane-{w} .said').textContent") for w in ("off", "on"))
    assert off == on and len(on) > 20
    assert f"{len(on.encode())} bytes, all equal" in page["bytes"].text
    assert not page.all("#lane-off .guess") and page.all("#lane-on .guess")
    clocks = [float(c.text.split()[0]) for c in page.all('[data-part="clock"]')]
    assert float(page["factor"].text[:-1]) == pytest.approx(clocks[0] / clocks[1], rel=0.05)
    warm, off_body, on_body = page.run("return bodies")
    assert len({b.pop("cache_salt") for b in (warm, off_body, on_body)}) == 3, "neither run leaves the other anything"
    assert off_body.pop("speculation") == warm["speculation"] == "off" and on_body == off_body
    page["replay"].click()
    page.until(lambda: page["race-go"].is_displayed())
    assert page.run("return document.querySelector('#lane-on .said').textContent") == on


@pytest.mark.parametrize("by", ["escape", "button"])
def test_stop_cancels_in_the_engine(page, server, by):
    for seed in range(8):  # with some seeds, the text ends before a slow browser stops it
        settings(page, temperature=2, seed=seed, **{"max-tokens": 1800})
        at = len(server.log)
        page["text"].send_keys("Tell me everything.", ENTER)
        page.until(lambda n=seed: page.run("return document.querySelectorAll('.answer:has(.said span)').length") > n)
        if by == "escape":
            page.press(ESCAPE)
        else:
            page.run("document.getElementById('stop').click()")
        page.until(lambda: page["send"].is_displayed())
        wait_until(lambda n=at: any(e["message"] == "answered" for e in server.log[n:]))
        last = [e for e in server.log[at:] if e["message"] == "answered"][-1]
        if "stopped" in page.all(".answer .took")[-1].text and last["status"] != 200:
            break
    kept = page.run("return [...document.querySelectorAll('.answer .said')].at(-1).textContent")
    assert kept and last["status"] == 499 and last["output_tokens"] < 1800
    assert page.run("return [...document.querySelectorAll('.answer .said')].at(-1).textContent") == kept


def test_what_a_model_writes_stays_text(page):
    evil = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script><b>x</b>&amp;\u202e'
    chunk = {
        "token_ids": [1], "levels": [evil], "text_offset": [0], "finish_reason": "stop", "delta": {"content": evil},
    }  # fmt: skip
    stream = f"data: {json.dumps({'choices': [chunk]})}\n\ndata: [DONE]\n\n"
    page.run("window.fetch = async () => new Response(arguments_[0])".replace("arguments_[0]", json.dumps(stream)))
    answer = asked(page, evil)
    assert answer.find_element("css selector", ".said").get_property("textContent") == evil
    assert not page.all("main img, main script, main b") and page.run("return window.pwned") is None
    assert evil in page["legend"].get_property("textContent")


def streams(page, *texts, error=None):
    """Replace every answer from now on: one token per text, and `error` at the end."""
    events = []
    at = 0
    for text in texts:
        tokens = {"token_ids": [1], "levels": [None], "text_offset": [at]}
        events.append({"choices": [tokens | {"finish_reason": None, "delta": {"content": text}}]})
        at += len(text)
    events += [{"error": {"message": error}}] if error else []
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.run("const stream = arguments[0]; window.fetch = async () => new Response(stream)", stream)


MARKDOWN = """# Title
Some **bold *and* soft** `co<b>de` [link](https://example.org/a_b_c) snake_case_name 2 * 3 * 4

1. one
2. two
   - deep **unclosed

```python
def f(x):
    return "<script>" * **x
```
| a | b |
|---|---|
| 1 | `2` |
> quoted
[evil](javascript:alert(1)) <img src=x onerror=alert(1)>"""


def test_markdown_and_code_are_shown_as_such(page):
    page.run("document.getElementById('markdown').checked = true")
    streams(page, *(MARKDOWN[i : i + 3] for i in range(0, len(MARKDOWN), 3)))
    said = asked(page, "x").find_element("css selector", ".said")

    def found(selector):
        return [e.get_property("textContent") for e in said.find_elements("css selector", selector)]

    assert found("h3") == ["Title"] and found("strong") == ["bold and soft"] and found("em") == ["and"]
    assert found("p code") == ["co<b>de"] and found("ol > li > ul > li") == ["deep **unclosed"]
    assert found("ol > li")[0] == "one" and len(found("ol > li")) == 2
    assert found(".code code") == ['def f(x):\n    return "<script>" * **x'] and "python" in found("figcaption")[0]
    assert found("th") == ["a", "b"] and found("td") == ["1", "2"] and found("blockquote") == ["quoted"]
    assert "snake_case_name 2 * 3 * 4" in found("p")[0]
    links = [a.get_attribute("href") for a in said.find_elements("css selector", "a")]
    assert links == ["https://example.org/a_b_c"] and found("p")[-1].startswith("[evil](javascript:")
    assert not said.find_elements("css selector", "img, script, b")
    streams(page, "<think>\nwhy", "</think>\n\nso")
    said = asked(page, "y").find_element("css selector", ".said")
    assert found("details p") == ["why"] and found(":scope > p") == ["so"]


def test_what_was_written_stays_when_the_engine_dies(page):
    streams(page, "half ", "an answer", error="the engine has stopped")
    answer = asked(page, "my words")
    assert answer.find_element("css selector", ".said").text == "half an answer"
    assert "engine has stopped" in answer.find_element("css selector", ".fault").text
    streams(page, "a whole one")
    answer.find_element("css selector", ".again").click()
    page.until(lambda: page.all(".answer .said")[-1:] and page.all(".answer .said")[-1].text == "a whole one")
    assert len(page.all(".turn")) == 2 and not page.all(".fault")
    page.run("window.fetch = async () => { throw new TypeError('x'); }")
    page.all(".again")[-1].click()
    page.until(lambda: page.all(".fault"))
    assert page.all(".answer .said")[0].text == "a whole one", "nothing took its place"


def test_errors_say_what_to_do(page):
    settings(page, **{"max-tokens": 99999})
    page["text"].send_keys("x", ENTER)
    assert "2048" in page.until(lambda: page.all(".fault"))[0].text
    settings(page, **{"max-tokens": 48})
    page.run("document.getElementById('text').value = 'many words '.repeat(4000)")
    assert "begin a new conversation" in asked(page, "x").text
    page.complaints()  # the browser logs status 400 itself
    replies = {
        "window.fetch = async () => { throw new TypeError('x'); }": "whether it still runs",
        'window.fetch = async () => new Response(\'{"error":{"message":"the queue is full; try again later"}}\','
        " {status: 429, headers: {'retry-after': '7'}})": "The queue is full. Try again in 7 s.",
        'window.fetch = async () => new Response(\'data: {"error":{"message":"lost it"}}\\n\\n\')': "lost it",
        "window.fetch = async () => new Response('data: {\"choices\":[]}\\n\\n')": "broke off",
        "window.fetch = async () => new Response('<p>bad gateway', {status: 502})": "status 502",
    }
    for answer, remedy in replies.items():
        page.run(answer)
        page["text"].clear()
        asked(page, "my words")
        assert remedy in page.all(".fault")[-1].text
        assert page["text"].get_property("value") == "my words", "nothing is lost"
        assert remedy in page["status"].get_property("textContent")
        assert len(page.all(".turn")) == 2, "what failed before is gone"
