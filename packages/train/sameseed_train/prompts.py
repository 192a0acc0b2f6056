"""Seeds of training texts: conversations made from the sources of a recipe, or prompts of a file.

A question is asked as it is, a dialogue up to one of the user's turns. A passage of a text, its title, or a function of
the standard library is put into a request ("Summarize", "Explain", "Continue", "Write tests for"). The first n seeds
are the same however many are asked for, so that a run may add texts.
"""

from __future__ import annotations

import ast
import itertools
import random
import textwrap
import zlib
from collections.abc import Iterator, Sequence as Seq
from pathlib import Path

from sameseed.errors import ConfigError
from sameseed.lines import KINDS, Line, read_lines
from sameseed.tokenizer import Tokenizer
from sameseed_train.data import HELD_OUT_PER_MILLE, Document, source_documents
from sameseed_train.recipe import MADE, SourceSettings, TextSettings
from sameseed_train.states import Seed

Message = dict[str, str]

Prompt = tuple[tuple[int, ...], str]  # its tokens, its domain
MISSES = 10000  # prompts in a row that may be too long
LEAST = 4  # tokens of a given text that is learned from: two drafts
PASSAGE = 1400  # most characters of a passage or of a function
ABOUT_PASSAGE = (
    "Summarize the following text.\n\n{0}",
    "Explain this passage in simple words.\n\n{0}",
    "Continue this text:\n\n{0}",
    "{0}\n\nWhat are the main points of this text?",
    "{0}\n\nAsk three questions about this text, and answer them.",
    "Rewrite the following text so that a child understands it:\n\n{0}",
    "{0}\n\nWho or what is this about, and why does it matter?",
    "Please correct and improve this text:\n\n{0}",
)
ABOUT_TITLE = (
    "Explain: {0}",
    "What should I know about {0}?",
    "Write a short essay about {0}.",
    'Write a blog post titled "{0}".',
    "I have to give a talk on {0}. Give me an outline.",
    "Tell me something interesting about {0}.",
    "Write an email to a friend about {0}.",
    "Give me five facts about {0}.",
)
ABOUT_STORY = (
    "Write a short story that begins with: {0}",
    "Write a poem about this: {0}",
    "{0}\n\nWhat happens next?",
    "Who could say this, and to whom? {0}",
)
ABOUT_CODE = (
    "Explain what this Python function does.\n\n```python\n{0}\n```",
    "Write a docstring for this function.\n\n```python\n{0}\n```",
    "Write unit tests for this function:\n\n```python\n{0}\n```",
    "Add type hints to this code, and change nothing else:\n\n```python\n{0}\n```",
    "Can this be written more simply?\n\n```python\n{0}\n```",
    "```python\n{0}\n```\n\nAre there mistakes in this code?",
)
ABOUT_DOCSTRING = (
    "Write a Python function `{1}`. {0}",
    "How do I do this in Python? {0}",
    'Write a Python function named {1} with this docstring:\n\n"""{0}"""',
)


def paragraphs(text: str, rng: random.Random) -> str:
    """A passage of whole paragraphs from a random place of a text, at most about PASSAGE characters."""
    parts = [p.strip() for p in text.split("\n\n") if len(p) > 80]
    if not parts:
        return text.strip()[:PASSAGE]
    start, longest = rng.randrange(len(parts)), rng.choice((300, 700, PASSAGE))
    chosen = parts[start][:longest]
    for part in parts[start + 1 :]:
        if len(chosen) + len(part) > longest:
            break
        chosen += "\n\n" + part
    return chosen


def about_text(document: Document, rng: random.Random) -> str:
    """A request about a passage of a text, about its title (a short first line), or about one of its sentences."""
    title, passage = document.text.split("\n", 1)[0].strip(), paragraphs(document.text, rng)
    kind = rng.random()
    if kind < 0.35 and " " in title and len(title) < 80:
        return rng.choice(ABOUT_TITLE).format(title.rstrip("."))
    if kind < 0.5:
        return rng.choice(ABOUT_STORY).format(passage.split(". ")[0][:200].strip())
    return rng.choice(ABOUT_PASSAGE).format(passage)


def about_code(document: Document, rng: random.Random) -> str | None:
    """A request about a function of a Python file, or for a function with its docstring; None if it has none."""
    try:
        nodes = list(ast.walk(ast.parse(document.text)))
    except (SyntaxError, ValueError):
        return None
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef) and n.end_lineno and n.end_lineno - n.lineno > 2]
    if not functions:
        return None
    function = rng.choice(functions)
    said = ast.get_docstring(function)
    if said and rng.random() < 0.4:
        return rng.choice(ABOUT_DOCSTRING).format(said[:PASSAGE], function.name)
    code = textwrap.dedent(ast.get_source_segment(document.text, function, padded=True) or "")
    return rng.choice(ABOUT_CODE).format(code) if 0 < len(code) <= PASSAGE else None


# A conversation that ends with the user (empty where its document does not suit), the document and its source, and how
# often the document came before.
Asked = tuple[list[Message], Document, SourceSettings, int]


def messages_of(turns: Seq[tuple[str, str]]) -> list[Message]:
    """Turns as messages of a chat."""
    return [{"role": role, "content": content} for role, content in turns]


def conversation(document: Document, source: SourceSettings, rng: random.Random) -> list[Message]:
    """What a target is asked, from a document of a source; empty if the document does not suit."""
    if document.turns:
        asked = [i for i, (role, _) in enumerate(document.turns) if role == "user"]
        return messages_of(document.turns[: rng.choice(asked) + 1]) if asked else []
    request = about_code(document, rng) if source.kind == "stdlib" else about_text(document, rng)
    return messages_of([("user", request)]) if request else []


def is_held_out(document: Document) -> bool:
    """Whether no prompt for training comes from this document: decided by a hash of its question, or of its text."""
    asked = document.turns[0][1] if document.turns else document.text
    return zlib.crc32(asked.encode()) % 1000 < HELD_OUT_PER_MILLE


def conversations(sources: Seq[SourceSettings], data: Path, seed: int, *, held_out: bool) -> Iterator[Asked]:
    """An endless stream of conversations from training documents, or from held-out ones.

    Sources are drawn by their `share`; the documents of one come in their order, again and again. The messages are
    empty where a document does not suit. Raises ConfigError for a source without documents.
    """
    rng = random.Random(f"{seed}/prompts/{held_out}")
    found = [
        [d for d in source_documents(s, data, seed, held_out) if s.kind in MADE or is_held_out(d) == held_out]
        for s in sources
    ]
    filled = [(source, own, itertools.count()) for source, own in zip(sources, found, strict=True) if own]
    shares = [source.share for source, _, _ in filled]
    while filled:
        ((source, own, taken),) = rng.choices(filled, shares)
        times, place = divmod(next(taken), len(own))
        yield conversation(own[place], source, rng), own[place], source, times


def recipe_seeds(
    sources: Seq[SourceSettings], data: Path, tokenizer: Tokenizer, settings: TextSettings, seed: int
) -> Iterator[Seed]:
    """Endless seeds from the sources of a recipe, by their shares. Raises ConfigError."""
    if not data.is_dir():
        raise ConfigError(f"no data folder at {data}; give the folder that holds the recipe's files with --data")
    rng, longest, missed = random.Random(f"{seed}/seeds"), settings.prompt_tokens, 0
    for messages, document, _, times in conversations(sources, data, seed, held_out=False):
        given, greedy = rng.random() < settings.corpus_share, rng.random() < settings.greedy and not times
        if given:
            turns = messages_of(document.turns)
            ids = tokenizer.chat(turns, False) if turns else tokenizer.encode(document.text)
            ids = ids[: longest + settings.new_tokens]
        else:
            ids = tokenizer.chat(messages, True) if messages else []
        fits = len(ids) >= LEAST if given else 0 < len(ids) <= longest
        missed = 0 if fits else missed + 1
        if missed > MISSES:
            raise ConfigError(f"prompts are longer than {longest} tokens; raise texts.prompt_tokens, or change sources")
        if fits:
            heat = 0.0 if greedy or given else settings.temperature
            yield Seed(tuple(ids), 0 if given else settings.new_tokens, heat)


def file_seeds(path: Path, tokenizer: Tokenizer, settings: TextSettings, seed: int) -> Iterator[Seed]:
    """Shuffled seeds of JSON lines: `text` once, `prompt`, `messages` endlessly, later sampled. Raises ConfigError."""
    lines = [(line.kind, _fitting(line, tokenizer, settings)) for line in read_lines(path, *KINDS)]
    if not lines:
        raise ConfigError(f"{path} holds no prompts; give JSON lines with 'prompt', 'messages' or 'text'")
    prompts = [ids for kind, ids in lines if ids and kind != "text"]
    texts = [ids for kind, ids in lines if ids and kind == "text"]
    rng = random.Random(seed)
    rng.shuffle(prompts)
    rng.shuffle(texts)
    asked = itertools.count()
    while texts or prompts:
        if texts and (not prompts or rng.random() < settings.corpus_share):
            yield Seed(texts.pop(), 0)
        elif prompts:
            times, place = divmod(next(asked), len(prompts))
            greedy = rng.random() < settings.greedy and not times
            yield Seed(prompts[place], settings.new_tokens, 0.0 if greedy else settings.temperature)


def _fitting(line: Line, tokenizer: Tokenizer, settings: TextSettings) -> tuple[int, ...]:
    """A line's ids, cut to the recipe's lengths; none if a conversation is too long to be cut, or a text too short."""
    ids = line.encode(tokenizer)
    if line.kind == "text":
        return ids[: settings.prompt_tokens + settings.new_tokens] if len(ids) >= LEAST else ()
    if line.kind == "messages" and len(ids) > settings.prompt_tokens:
        return ()  # its end asks for the answer
    return ids[: settings.prompt_tokens]


def recipe_held_out(
    sources: Seq[SourceSettings], data: Path, tokenizer: Tokenizer, settings: TextSettings, seed: int, count: int
) -> list[Prompt]:
    """The first `count` different prompts from held-out documents of a recipe's sources, with their domains."""
    found: dict[tuple[int, ...], str] = {}
    for messages, _, source, _ in itertools.islice(conversations(sources, data, seed, held_out=True), 20 * count):
        ids = tuple(tokenizer.chat(messages, True)) if messages else ()
        if 0 < len(ids) <= settings.prompt_tokens and len(found) < count:
            found[ids] = source.domain
    return list(found.items())


def held_out(path: Path, tokenizer: Tokenizer, context: int, new_tokens: int) -> list[Prompt]:
    """Prompts and domains of JSON lines (`prompt` or `messages`, `domain`). ConfigError, also for long prompts."""
    found = []
    for line in read_lines(path, "messages", "prompt"):
        ids = line.encode(tokenizer)
        if not 1 <= len(ids) <= context - new_tokens:
            raise ConfigError(f"{line.where} has {len(ids)} tokens; 1 to {context - new_tokens} fit into the context")
        found.append((ids, str(line.row.get("domain", "prompts"))))
    if not found:
        raise ConfigError(f"{path} holds no prompts to measure on; give JSON lines with 'prompt' or 'messages'")
    return found
