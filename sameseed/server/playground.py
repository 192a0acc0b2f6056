"""The playground: one page for people, its bytes the same for every server and everybody; data it asks for with a key.

It runs nothing but its own one script and reaches nothing but this server: the browser is told so (Content Security
Policy, by the hashes of what is in the page), so that a text of a model, whatever it holds, stays text.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).with_name("playground.html")


@dataclass(frozen=True)
class Playground:
    """The page's bytes, and the headers that go with them."""

    body: bytes
    headers: Mapping[str, str]

    @classmethod
    def read(cls) -> Playground:
        """The page as it lies in the package: the only file that the server gives out."""
        page = PAGE.read_bytes()
        headers = {
            "content-security-policy": policy(page),
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
            "x-frame-options": "DENY",
            "cross-origin-opener-policy": "same-origin",
            "cross-origin-resource-policy": "same-origin",
        }
        return cls(page, headers)


def policy(page: bytes) -> str:
    """What a browser may do with the page: its inline scripts and styles as they are, calls to its own server.

    No handler or style in an attribute, no frame around it, and no text becomes markup ("trusted types").
    """
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes(page, b'script')}",
            f"style-src {_hashes(page, b'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _hashes(page: bytes, tag: bytes) -> str:
    found = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in found)
