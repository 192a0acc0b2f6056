"""The HTML page that certificates and studies share: one self-contained file with a verdict at its top."""

from __future__ import annotations

from collections.abc import Mapping

from jinja2 import DictLoader, Environment

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5b6472; --line: #d9dee7; --ground: #fbfcfe; --card: #fff;
  --passed: #12733f; --failed: #b3261e; --warning: #8a5a00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf1; --soft: #9aa5b5; --line: #323b49; --ground: #12161d;
  --card: #1a2029; --passed: #5fd08f; --failed: #ff8a80; --warning: #f2c14e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 4rem; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { margin: .4rem 0; } .soft, small { color: var(--soft); }
.verdict { border: 1px solid var(--line); border-left: .5rem solid var(--tone); background: var(--card);
  border-radius: .4rem; padding: 1rem 1.2rem; margin: 1rem 0; } .verdict h1 { color: var(--tone); }
.passed { --tone: var(--passed); } .failed { --tone: var(--failed); } .warning, .not-shown { --tone: var(--warning); }
.mark { color: var(--tone); font-weight: 600; white-space: nowrap; }
table { border-collapse: collapse; width: 100%; background: var(--card); font-size: .93rem; }
th, td { text-align: left; vertical-align: top; padding: .5rem .6rem; border-bottom: 1px solid var(--line);
  overflow-wrap: break-word; }
table.checks td:last-child { white-space: nowrap; overflow-wrap: normal; }
th { color: var(--soft); font-weight: 600; overflow-wrap: normal; } td.n { font-variant-numeric: tabular-nums; }
details { border-bottom: 1px solid var(--line); padding: .5rem 0; } summary { cursor: pointer; }
dl { margin: .6rem 0; } dt { color: var(--soft); margin-top: .5rem; } dd { margin: 0 0 0 1rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .2rem 0; padding: .5rem; font-size: .85rem;
  background: var(--ground); border: 1px solid var(--line); border-radius: .3rem; }
@media (max-width: 40rem) {
  table.checks thead { display: none; } table.checks tr { display: block; padding: .5rem 0;
    border-bottom: 1px solid var(--line); }
  table.checks td { display: block; border: 0; padding: .1rem .6rem; }
  table.checks td[data-head]::before { content: attr(data-head) ": "; color: var(--soft); } }
"""
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>{{ style | safe }}</style>
</head>
<body>
<div class="verdict {{ tone }}"><h1>{{ head }}</h1>{% block about %}{% endblock %}</div>
{% block body %}{% endblock %}
</body>
</html>
"""


def templates(bodies: Mapping[str, str], **names: object) -> Environment:
    """Templates by name that extend "page" (blocks about and body; values title, head, tone); `names`: for all."""
    loader = DictLoader({"page": PAGE, **bodies})
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, keep_trailing_newline=True)
    environment.globals.update(style=STYLE, **names)
    return environment
