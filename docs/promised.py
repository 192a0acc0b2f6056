"""The tables of promises that servers kept, for the markers `servers:promises` and `servers:families`.

They come from promises.jsonl and promises_families.jsonl.
"""

from __future__ import annotations

from collections import Counter

from recorded import Record, lines, markdown

ENGINES = {"sameseed": "sameseed", "vllm": "vLLM", "llama.cpp": "llama.cpp"}
LAWS = {  # by law: the promises of `verify-server` that test it, and their names in the table
    "1": {
        "repeat": "asked again",
        "stream": "streamed and whole",
        "later": "later",
        "load": "under load",
        "ties": "near ties, also under load",
        "prefix": "from the prefix cache",
        "speculation": "drafts off and on, by the request",
        "again": "drafts off and on, by a restart",
        "seeds": "its seed again, also under load",
    },
    "2": {"logprobs": "log-probabilities are the text's"},
}


def name_of(record: Record) -> str:
    """The name of a report's server. A server that drafted, or was compared with an earlier report, gets ", draft"."""
    asked = {p["id"]: p for p in record["promises"]}
    drafts = "again" in asked or asked["speculation"]["numbers"].get("draft_tokens")
    return ENGINES[record["config"]["engine"]] + (", draft" if drafts else "")


def counted(status: str, differing: int, compared: int) -> str:
    """A promise's cell: how many comparisons differed, and its status unless it holds."""
    texts = [f"{differing} of {compared}"] if compared else []
    return ", ".join(texts if status == "holds" else [status, *texts])


COLUMNS = {  # of the table by families: the promises of `verify-server` that a column sums up
    "same request again": ("repeat", "stream", "later"),
    "alone = under load": ("load", "ties"),
    "from the prefix cache": ("prefix",),
    "with drafts = without": ("again", "speculation"),
    "its seed again": ("seeds",),
    "log-probabilities": ("logprobs",),
}


def families() -> str:
    """Table: a row per server, model and draft, a column per kind of promise; servers without a draft are summed."""
    rows, alone = [], Counter[str]()
    for record in lines("promises_families"):
        asked, told, cells = {p["id"]: p for p in record["promises"]}, record["started"], []
        for names in COLUMNS.values():
            parts = [asked[n] for n in names if n in asked and asked[n]["status"] != "not shown"]
            differing, compared = (sum(p[name] for p in parts) for name in ("differing", "compared"))
            cells.append(counted("broken" if differing else "holds", differing, compared) if parts else "not shown")
            if told["draft"] == "none":
                alone.update({told["server"]: 0, "differing": differing, "compared": compared})
        if told["draft"] != "none":
            drafted = f"{told['draft_tokens']:,}, {told['accepted']:,}"
            rows.append([told["model"], told["server"], told["draft"], drafted, *cells])
    differing, compared = alone.pop("differing"), alone.pop("compared")
    said = f"{', '.join(alone)} without a draft: {differing} of {compared:,} comparisons differed."
    return f"{markdown(['model', 'server', 'draft', 'drafted, accepted', *COLUMNS], rows)}\n\n{said}\n"


def promises(name: str) -> str:
    """Table with one row per promise and one column per server: how many of the compared texts differed."""
    if name == "families":
        return families()
    found = lines("promises")
    if not found:
        return "*No record yet: `sameseed verify-server URL --out benchmarks/results/promises.jsonl` writes one.*\n"
    rows = []
    for law, asked in LAWS.items():
        for name, says in asked.items():
            cells = []
            for record in found:
                p = next((p for p in record["promises"] if p["id"] == name), None)
                cells.append("" if p is None else counted(p["status"], p["differing"], p["compared"]))
            rows.append([law, says, *cells])
    c = found[-1]["config"]
    about = (
        f"{c['num_prompts']} prompts ({c['prompts']}), at most {c['max_tokens']} tokens, {c['concurrency']} at once; "
        f"{sum(r['requests'] for r in found)} requests; {found[-1]['time'][:10]}."
    )
    return f"{markdown(['law', 'asked', *map(name_of, found)], rows)}\n\n{about}\n"
