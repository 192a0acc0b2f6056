"""Each promise against a made-up server: one that keeps all promises, and others that each break one."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fixtures_promises import PromiseServer

from sameseed_verify import VerifyError
from sameseed_verify.ask import ScoredToken, is_near, open_client
from sameseed_verify.inquiry import Evidence, VerifyServerArgs
from sameseed_verify.numbers import likeliest
from sameseed_verify.page import render
from sameseed_verify.verify import EXIT_CODES, LEAST_REQUESTS, PROMISES, base_url, check, verify

SETTINGS = VerifyServerArgs("http://fake", seconds=1e6)
ASKED = [name for name in PROMISES if name != "again"]


async def inquire(
    server: Any, settings: VerifyServerArgs = SETTINGS, chat: bool = False, earlier: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The report on a made-up server; checks that it is plain data and has a page."""
    async with httpx.AsyncClient(transport=httpx.MockTransport(server)) as client:
        made = await verify(client, replace(settings, chat=chat), earlier=earlier)
    assert json.loads(json.dumps(made)) == made
    page = render(made)
    assert "<script" not in page and all(p["name"] in page for p in made["promises"])
    return made


def statuses(made: dict[str, Any]) -> dict[str, str]:
    return {p["id"]: p["status"] for p in made["promises"]}


def entry(made: dict[str, Any], name: str) -> dict[str, Any]:
    return next(p for p in made["promises"] if p["id"] == name)


@pytest.mark.parametrize(
    ("chat", "server"),
    [
        (False, PromiseServer()), (False, PromiseServer("penalty unless told otherwise")),
        (True, PromiseServer()), (True, PromiseServer(says="reasoning")),
    ],
)  # fmt: skip
async def test_a_server_that_keeps_its_promises(chat: bool, server: PromiseServer) -> None:
    made = await inquire(server, chat=chat)
    assert statuses(made) == dict.fromkeys(ASKED, "holds"), [p["why"] for p in made["promises"]]
    assert made["verdict"] == "holds" and EXIT_CODES[made["verdict"]] == 0 and not made["failures"]
    assert made["requests"] == len(server.seen) <= SETTINGS.requests and not made["ended"]
    assert made["config"]["engine"] == "vllm" and made["config"]["model"] == "org/letters"
    assert made["not_asked"] == ["again"]
    assert entry(made, "load")["numbers"]["written_at_once"] >= 2
    assert entry(made, "speculation")["numbers"]["rejected"] > 0
    assert entry(made, "prefix")["numbers"]["cache_hits"] == 8
    assert entry(made, "ties")["numbers"]["made_equal"] == (0 if chat else 4)
    assert chat or entry(made, "logprobs")["numbers"]["texts_scored"] == 4


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("repeat", "repeat"), ("load", "load"), ("stream", "stream"), ("prefix", "prefix"),
        ("speculation", "speculation"), ("seed ignored", "seeds"), ("seed under load", "seeds"), ("ties", "ties"),
        ("equal tokens", "ties"), ("text with log-probabilities", "logprobs"), ("not the likeliest", "logprobs"),
        ("sums above 1", "logprobs"), ("tokens of another text", "logprobs"), ("scored otherwise", "logprobs"),
        ("zeros for drafted tokens", "logprobs"),
    ],
)  # fmt: skip
async def test_each_broken_promise_is_found(fault: str, name: str) -> None:
    made = await inquire(PromiseServer(fault))
    found = entry(made, name)
    assert found["status"] == "broken" and found["differing"] > 0 and found["differences"]
    assert made["verdict"] == "broken" and EXIT_CODES[made["verdict"]] == 1
    first = found["differences"][0]
    assert first["expected"] != first["found"] and first["at"] >= 0
    if fault in (
        "prefix",
        "speculation",
        "seed ignored",
        "seed under load",
        "scored otherwise",
        "sums above 1",
        "equal tokens",
    ):
        assert [n for n, status in statuses(made).items() if status == "broken"] == [name], "and no other"
    if fault in ("load", "stream", "prefix", "speculation"):
        assert first["at"] == 5 and first["found"][5] == "z"
    if fault == "seed ignored":
        assert "not to read it" in " ".join(found["notes"])


@pytest.mark.parametrize(
    ("field", "status"), [("reasoning_content", "broken"), ("reasoning", "broken"), ("unheard-of", "not shown")]
)
async def test_thoughts_are_texts_and_empty_answers_show_nothing(field: str, status: str) -> None:
    server = PromiseServer("repeat", says=field)
    made = await inquire(server, replace(SETTINGS, only=("repeat",)), chat=True)
    assert statuses(made) == {"repeat": status}


async def test_idle_connections_that_the_server_closed_are_no_failure() -> None:
    """llama-server closes idle connections without notice; a request that got no answer is sent again."""
    made = await inquire(PromiseServer("idle connections closed"))
    assert statuses(made) == dict.fromkeys(ASKED, "holds") and not made["failures"]


async def test_answers_of_unequal_lengths_are_compared_with_their_own() -> None:
    """The seeds promise is checked with the longest answers first, whatever their order."""
    made = await inquire(PromiseServer(lengths=(20, 48, 33)))
    found = entry(made, "seeds")
    assert found["status"] == "holds" and found["compared"] == 12 and found["numbers"]["other_seeds_with_another_text"]


async def test_a_server_that_changes_with_time() -> None:
    quiet = PromiseServer()
    await inquire(quiet)
    made = await inquire(PromiseServer("later", changes_after=len(quiet.seen) - 10))
    assert [n for n, status in statuses(made).items() if status == "broken"] == ["later"]


@pytest.mark.parametrize(("name", "differing"), [("", 0), ("\ufffd", 0), ("b", 2)])
def test_tokens_that_share_a_name_are_not_compared_by_it(name: str, differing: int) -> None:
    """As parts of characters do on llama-server."""
    likeliest(evidence := Evidence(), "", 0, ScoredToken(name, -0.3, (("c", -0.2), ("a", -1.9))))
    assert evidence.differing == differing


async def test_what_a_server_lacks_is_said() -> None:
    made = await inquire(PromiseServer(lacks=("seeds", "logprobs", "speculation", "hits")))
    for name, says in (
        ("seeds", "refuses seeds (seed is not supported)"),
        ("logprobs", "no log-probabilities (log-probabilities are off)"),
        ("ties", "without log-probabilities"),
        ("speculation", "no request could switch"),
        ("prefix", "does not tell"),
    ):
        found = entry(made, name)
        assert found["status"] == "not shown" and says in found["why"], found["why"]
    assert all(entry(made, name)["status"] == "holds" for name in ("repeat", "load", "stream", "later"))
    unread = entry(await inquire(PromiseServer("drafts though off")), "speculation")
    assert unread["status"] == "not shown" and "though requests switched" in unread["why"], "as on llama-server"
    assert made["verdict"] == "not shown" and EXIT_CODES[made["verdict"]] == 3
    assert "--enable-prompt-tokens-details" in entry(made, "prefix")["advice"] and "--enable-prompt" in render(made)
    some = await inquire(PromiseServer(lacks=("seeds",)), replace(SETTINGS, only=("repeat", "load")))
    assert some["verdict"] == "holds" and "seeds" in some["not_asked"]


async def test_a_server_of_openais_fields_alone_and_one_of_conversations() -> None:
    strict = PromiseServer(lacks=("extras",))
    made = await inquire(strict)
    assert not made["config"]["extra_fields"] and all("cache_salt" not in body for body in strict.seen[1:])
    assert "fields beyond OpenAI's" in entry(made, "speculation")["why"]
    assert entry(made, "repeat")["status"] == entry(made, "ties")["status"] == "holds"
    for lack in ("completions", "completions of this model"):
        made = await inquire(PromiseServer(lacks=(lack,)))
        assert made["config"]["chat"] and made["verdict"] == "holds"


@pytest.mark.parametrize("models", [httpx.Response(200, json=[{"id": "a"}]), httpx.Response(403)])
async def test_who_names_the_model_needs_no_list_of_models(models: httpx.Response) -> None:
    settings = replace(SETTINGS, name="org/letters", only=("repeat",))
    assert statuses(await inquire(PromiseServer(models=models), settings)) == {"repeat": "holds"}


@pytest.mark.parametrize(
    ("given", "begins"),
    [
        ("http://h:8000", "http://h:8000/v1"), ("https://h/v3/", "https://h/v3"), ("https://v1/x", "https://v1/x/v1"),
        ("https://h/v1beta/openai/", "https://h/v1beta/openai"), ("http://h/v1/models", "http://h/v1"),
        ("https://h/openai/v1?api-version=preview", "https://h/openai/v1"),
        ("https://h/v1/chat/completions", "https://h/v1"), ("https://h/completions", "https://h"),
    ],
)  # fmt: skip
def test_a_server_is_named_by_any_of_its_addresses(given: str, begins: str) -> None:
    assert base_url(given) == begins


@pytest.mark.parametrize("far", [False, True])
async def test_proxies_are_for_servers_that_are_not_near(far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        own = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        monkeypatch.setenv("http_proxy", own if far else "http://127.0.0.1:9")
        monkeypatch.setenv("no_proxy", "")
        url = "http://far.example" if far else own
        async with open_client(url, None, 1, 20.0) as client:
            assert (await client.get(url)).status_code == 200
    assert (b"far.example" in seen[0]) == far


@pytest.mark.parametrize(
    ("url", "near"),
    [
        ("http://localhost:8000", True), ("http://10.0.0.4", True), ("http://[::1]:8000/v1", True),
        ("http://gpu:8000", True), ("https://api.example.com/v1", False), ("https://8.8.8.8", False),
    ],
)  # fmt: skip
def test_what_is_near(url: str, near: bool) -> None:
    assert is_near(url) == near


def test_a_proxy_that_cannot_be_used_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "unknown://x")
    with pytest.raises(VerifyError, match="unset HTTPS_PROXY"):
        open_client("https://far.example", None, 1, 20.0)


@pytest.mark.parametrize("dies_after", [3, 40, 70, 100])
async def test_a_server_that_dies_leaves_what_was_found(dies_after: int) -> None:
    made = await inquire(PromiseServer(dies_after=dies_after))
    assert made["died"] and made["verdict"] == "not shown" and "is gone" in made["ended"]
    assert made["failures"] and "died on the way" in render(made)
    found = statuses(made)
    assert list(found) == ASKED and "broken" not in found.values()
    assert ("holds" in found.values()) == (dies_after >= 40)
    assert found["later"] == "not shown" and entry(made, "later")["why"]


async def test_what_was_broken_before_a_server_died_stays_so() -> None:
    made = await inquire(PromiseServer("load", dies_after=100))
    assert made["verdict"] == "broken" and made["died"]


async def test_requests_and_seconds_are_bounds() -> None:
    server = PromiseServer()
    made = await inquire(server, replace(SETTINGS, requests=LEAST_REQUESTS, max_tokens=32))
    assert len(server.seen) == made["requests"] <= LEAST_REQUESTS and made["config"]["num_prompts"] == 4
    assert made["verdict"] == "holds", "the fewest requests are enough"
    server = PromiseServer()
    with pytest.raises(VerifyError, match="were over before"):
        await inquire(server, replace(SETTINGS, seconds=1e-9))
    assert not server.seen


async def test_a_server_that_stalls_takes_no_more_than_the_seconds() -> None:
    start = time.monotonic()
    made = await inquire(PromiseServer("stalls"), replace(SETTINGS, seconds=3.0))
    assert time.monotonic() - start < 20.0
    assert "seconds were over" in made["ended"] and not made["died"] and not made["failures"]
    assert made["verdict"] == "not shown"


async def test_what_is_sent_again_to_a_busy_server_counts_too() -> None:
    server = PromiseServer("busy")
    made = await inquire(server, replace(SETTINGS, requests=LEAST_REQUESTS))
    assert len(server.seen) == made["requests"] <= LEAST_REQUESTS
    assert "were sent" in made["ended"]


async def test_too_little_shows_nothing(tmp_path: Path) -> None:
    one = tmp_path / "one.txt"
    one.write_text("only one prompt\n")
    made = await inquire(PromiseServer(), replace(SETTINGS, prompts=one, only=("repeat",)))
    assert "1 texts of 48 tokens were compared" in entry(made, "repeat")["why"] and made["verdict"] == "not shown"
    made = await inquire(PromiseServer("no sampling"), replace(SETTINGS, only=("seeds",)))
    assert "no other seed gave another text" in entry(made, "seeds")["why"]
    assert made["config"]["prompts"] == "built-in"


async def test_an_earlier_report_is_compared() -> None:
    before = await inquire(PromiseServer())
    made = await inquire(PromiseServer(), earlier=before)
    assert statuses(made) == dict.fromkeys([*ASKED, "again"], "holds")
    before["texts"][2]["text"] = "another"
    made = await inquire(PromiseServer(), earlier=before)
    assert entry(made, "again")["differing"] == 1 and made["verdict"] == "broken"
    for text in before["texts"]:
        text["asked"] = "something else"
    made = await inquire(PromiseServer(), earlier=before)
    assert "none of these prompts" in entry(made, "again")["why"]
    before["config"]["model"] = "other"
    with pytest.raises(VerifyError, match="model 'other'"):
        await inquire(PromiseServer(), earlier=before)


async def test_what_is_no_such_server_is_said() -> None:
    def nobody(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    def page(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text="<html>")

    def half(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"data": [{"id": "m"}]} if request.method == "GET" else {"hello": 1})

    for server, says in (
        (nobody, "is it running"),
        (page, "no list of OpenAI's API"),
        (half, "does not answer as a server with OpenAI's API"),
        (lambda r: httpx.Response(404), "name the model with --name"),
        (lambda r: httpx.Response(401), "API key"),
        (lambda r: httpx.Response(308, headers={"location": "/v2/models"}), "moved; give http://fake/v2/models"),
        (PromiseServer("max_tokens"), "Only models that take max_tokens"),
    ):
        with pytest.raises(VerifyError, match=says):
            await inquire(server)


def test_bad_settings_are_refused() -> None:
    for bad, says in (
        ({"requests": 20}, "--requests must be at least 117"),
        ({"max_tokens": 2}, "--max-tokens"),
        ({"concurrency": 1}, "--concurrency"),
        ({"seconds": 0.0}, "--seconds"),
        ({"num_prompts": 0}, "--num-prompts"),
        ({"only": ("lode",)}, "no promise 'lode'"),
    ):
        with pytest.raises(VerifyError, match=says):
            check(replace(SETTINGS, **bad))  # type: ignore[arg-type]
