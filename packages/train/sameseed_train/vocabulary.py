"""`sameseed vocabulary`: the most frequent tokens of a text, for drafts from these only."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from sameseed.cli.options import option, parse
from sameseed.errors import ConfigError, RequestError

OUT_ALIAS = arg(metavar="FILE", aliases=["-o"], help_behavior_hint="")


@dataclass(frozen=True)
class VocabularyArgs:
    """Count the tokens of a typical text and list the most frequent ones, for the option `vocabulary` of drafters, e.g.
    --draft-options '{"vocabulary": "ids.json"}'.
    """

    text: Annotated[Path | None, Positional, option("[TEXT]")] = None  # a large UTF-8 text (required)
    model: str = "embedded"  # whose tokenizer: a folder, a hub id or "embedded"
    size: int = 8192  # tokens in the list
    out: Annotated[Path | None, OUT_ALIAS] = None  # where the list goes; unset: to stdout


def run(argv: Seq[str], prog: str) -> int:
    """Count, write, and print which share of the text the list covers."""
    args = parse(VocabularyArgs, argv, prog).args
    if args.text is None:
        raise RequestError("a text is missing; e.g. sameseed vocabulary chats.txt --size 8192 -o ids.json")
    from sameseed.lines import read_text
    from sameseed.models.loader import load_tokenizer, read_config, resolve_model
    from sameseed.store import replacing

    lines = read_text(args.text, "text", "give a UTF-8 text file", RequestError).splitlines(keepends=True)
    folder = resolve_model(args.model)
    encode = load_tokenizer(folder).encode
    counts = Counter(token for line in lines for token in encode(line, add_special_tokens=False))
    if args.size < 1 or not counts:
        raise ConfigError("a vocabulary needs a size of at least 1, and texts to count tokens in")
    ids = list(dict.fromkeys(read_config(folder).eos_token_ids))
    ids += sorted(counts.keys() - set(ids), key=lambda t: (-counts[t], t))[: max(0, args.size - len(ids))]
    if args.out is None:
        print(json.dumps(ids))
        return 0
    try:
        with replacing(args.out) as file:
            file.write((json.dumps(ids) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"cannot write {args.out} ({error.strerror}); choose another with -o") from None
    share, total = sum(counts[t] for t in ids) / counts.total(), counts.total()
    print(f"{args.out}: {len(ids)} tokens, {share:.1%} of the {total} in {args.text}")
    return 0
