"""The playground's page without a browser: who may load it, what it may do, and that it contains no server's data."""

import base64
import hashlib
import re
from html.parser import HTMLParser

import httpx
from fixtures_server import visiting

from sameseed.server.app import PAGE, create_app
from sameseed.server.client import EngineClient
from sameseed.server.config import Keys, ServerConfig

KEY = "a-key-for-the-test"


def visitor(config):
    app, _ = create_app(EngineClient("embedded", {}), config)
    return visiting(app)


class Elements(HTMLParser):
    """Collects tags with their attributes, and the text of scripts and styles."""

    def __init__(self):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inline: dict[str, list[str]] = {"script": [], "style": []}

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.lasttag in self.inline and data.strip():
            self.inline[self.lasttag].append(data)


def elements():
    made = Elements()
    made.feed(PAGE.read_text(encoding="utf-8"))
    return made


async def test_the_page_is_the_same_for_everybody():
    """The page needs no key, since a browser has none to send; so it must not say anything about this server."""
    secret = ServerConfig(host="0.0.0.0", keys=Keys((KEY,)), model_name="a-secret-name")
    pages = []
    for config in (ServerConfig(), secret):
        async with visitor(config) as client:
            response = await client.get("/")
            assert response.status_code == 200
            assert response.headers["content-type"] == "text/html; charset=utf-8"
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["x-frame-options"] == "DENY"
            assert response.headers["referrer-policy"] == "no-referrer"
            assert not [h for h in response.headers if h.startswith("access-control") or h == "set-cookie"]
            pages.append(response.content)
    assert pages[0] == pages[1] == PAGE.read_bytes()


async def test_nothing_but_the_page_is_open_or_read_from_disk():
    paths = ("//", "/index.html", "/playground.html", "/%2e%2e/", "/static/x", "/favicon.ico")
    async with visitor(ServerConfig(host="0.0.0.0", keys=Keys((KEY,)))) as client:
        for method in ("POST", "PUT", "OPTIONS", "DELETE"):
            assert (await client.request(method, "/")).status_code == 401
        for path in paths:
            url = httpx.URL("http://127.0.0.1").copy_with(raw_path=path.encode())
            assert (await client.get(url)).status_code == 401, path
    async with visitor(ServerConfig()) as client:
        for path in ("/index.html", "/playground.html", "/static/x", "/favicon.ico"):
            assert (await client.get(path)).status_code == 404
        assert (await client.get("/", headers={"host": "evil.example"})).status_code == 403
        assert "/" not in (await client.get("/openapi.json")).json()["paths"]


async def test_the_browser_is_told_what_the_page_may_do():
    async with visitor(ServerConfig()) as client:
        header = (await client.get("/")).headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in header.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert rules["connect-src"] == "'self'" and rules["img-src"] == "data:"
    assert rules["require-trusted-types-for"] == "'script'" and rules["trusted-types"] == "'none'"
    assert "unsafe" not in header and "*" not in header and "http" not in header
    for kind, texts in elements().inline.items():
        digests = [base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in texts]
        assert len(texts) == 1, "each is one block, which the rule names by its hash"
        assert rules[f"{kind}-src"].split() == [f"'sha256-{d}'" for d in digests]


async def test_the_page_has_no_handlers_no_styles_in_attributes_and_nothing_from_outside():
    made = elements()
    assert len(made.found) > 50
    for tag, attributes in made.found:
        assert tag not in ("iframe", "object", "embed", "base", "img", "video", "audio"), tag
        assert not [a for a in attributes if a.startswith("on") or a in ("style", "src", "action", "srcset")], tag
        if tag in ("script", "style"):
            assert not attributes
        href = attributes.get("href")
        assert href is None or href.startswith(("#", "data:image/svg+xml,")), href
    outside = re.findall(r"https?://\S+", PAGE.read_text(encoding="utf-8"))
    assert all("www.w3.org/2000/svg" in url for url in outside), "names of a namespace only"
