"""The tables of promises that servers kept, for the markers `servers:promises` and `servers:families`.

They come from promises.jsonl and promises_families.jsonl.
"""

from __future__ import annotations

from recorded import Record, lines, markdown

ENGINES = {"sameseed": "sameseed", "vllm": "vLLM", "llama.cpp": "llama.cpp"}
LAWS = {  # by law: the promises of `verify-server` that test it, and their names in the table
    "1, same seed, same text": {
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
    "2, the target's law": {"logprobs": "log-probabilities are the text's"},
}


def name_of(record: Record) -> str:
    """The name of a report's server. A server that drafted, or was compared with an earlier report, gets ", draft"."""
    asked = {p["id"]: p for p in record["promises"]}
    drafts = "again" in asked or asked["speculation"]["numbers"].get("draft_tokens")
    return ENGINES[record["config"]["engine"]] + (", draft" if drafts else "")


COLUMNS = {  # of the table by families: the promises of `verify-server` that a column sums up
    "same request again": ("repeat", "stream", "later"),
    "alone = under load": ("load", "ties"),
    "from the prefix cache": ("prefix",),
    "with drafts = without": ("again", "speculation"),
    "its seed again": ("seeds",),
    "log-probabilities": ("logprobs",),
}


def families() -> str:
    """Table with one row per server, model and draft, and one column per kind of promise."""
    rows = []
    for record in lines("promises_families"):
        asked, cells = {p["id"]: p for p in record["promises"]}, []
        for names in COLUMNS.values():
            parts = [asked[n] for n in names if n in asked and asked[n]["status"] != "not shown"]
            differing, compared = (sum(p[name] for p in parts) for name in ("differing", "compared"))
            status = "broken" if differing else "holds"
            cells.append(f"{status}, {differing} of {compared}" if parts else "not shown")
        if record["started"]["draft"] == "none":
            cells[list(COLUMNS).index("with drafts = without")] = ""
        told = record["started"]
        drafted = f"{told['draft_tokens']:,}, {told['accepted']:,}" if told["draft"] != "none" else ""
        rows.append([told["model"], told["server"], told["draft"], drafted, *cells])
    return f"{markdown(['model', 'server', 'draft', 'drafted, accepted', *COLUMNS], rows)}\n"


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
                texts = "" if p is None else f", {p['differing']} of {p['compared']}"
                cells.append("" if p is None else f"not shown{'' if not p['compared'] else texts}")
                if p is not None and p["status"] != "not shown":
                    cells[-1] = f"{p['status']}{texts}"
            rows.append([law, says, *cells])
    c = found[-1]["config"]
    about = (
        f"{c['num_prompts']} prompts ({c['prompts']}), at most {c['max_tokens']} tokens, {c['concurrency']} at once; "
        f"{sum(r['requests'] for r in found)} requests; {found[-1]['time'][:10]}."
    )
    return f"{markdown(['law', 'asked', *map(name_of, found)], rows)}\n\n{about}\n"
