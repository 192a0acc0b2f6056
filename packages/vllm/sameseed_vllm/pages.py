"""Joins the /metrics pages of several replicas: each sample gets a label, and samples of one metric stand together."""

from __future__ import annotations

import re
from collections.abc import Iterable

_HEAD = re.compile(rb"# (?:HELP|TYPE) (\S+)")
_SAMPLE = re.compile(rb"^([A-Za-z_:][\w:]*)(?:\{([^\n]*)\})?(?= )", re.MULTILINE)


def joined(pages: Iterable[tuple[int, bytes]]) -> bytes:
    """Join numbered pages in Prometheus's text format: `replica="NUMBER"` becomes the first label of each sample."""
    heads: dict[bytes, list[bytes]] = {}  # HELP and TYPE by metric, in the order of the first page
    samples: dict[bytes, list[bytes]] = {}
    for number, page in pages:
        name, label = b"", b'replica="%d"' % number
        for line in page.splitlines():
            head = _HEAD.match(line)
            if head is not None:
                name = head[1]
                if line not in heads.setdefault(name, []) and not samples.get(name):
                    heads[name].append(line)
            elif line and not line.startswith(b"#"):
                samples.setdefault(name, []).append(_labelled(line, label))
    names = dict.fromkeys([*heads, *samples])
    lines = [line for name in names for line in (*heads.get(name, ()), *samples.get(name, ()))]
    return b"".join(line + b"\n" for line in lines)


def _labelled(line: bytes, label: bytes) -> bytes:
    return _SAMPLE.sub(lambda m: m[1] + b"{" + label + (b"," + m[2] if m[2] else b"") + b"}", line, count=1)
