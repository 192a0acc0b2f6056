"""A server under 1 to 32 clients, speculation off and on: tokens/s, generation time, time to the first token.

After an article on vLLM's AsyncLLMEngine (2024): Llama-3.1-70B with an 8B draft, vLLM 0.5.4, four A100.
"""

from __future__ import annotations

from sameseed_lab.studies._load import LoadCell, load_rows
from sameseed_lab.studies._setup import StudySetup
from sameseed_lab.studies._study import Records, Row, Study, matching

CLIENTS = (1, 2, 4, 8, 16, 32)


def cells(setup: StudySetup) -> list[LoadCell]:
    """A cell for each draft with the policy goodput, and one for the first draft with four tokens in every round."""
    form, names = ((("w4a8" if setup.size == "true" else "auto"), "auto"),), setup.names
    made = [LoadCell(f"{names[role]} goodput", role, CLIENTS, form) for role in ("1b", "3b", "head") if role in names]
    return [LoadCell(f"{names['1b']} k=4", "1b", CLIENTS, form, 4), *made]


def derive(records: Records) -> list[Row]:
    """Rows; `arm`: the cell's name, or "off" for all cells together, which are the same without drafts."""
    rows = load_rows(records)
    return [{**row, "arm": row["cell"] if row["on"] else "speculation off"} for row in rows]


def findings(rows: list[Row]) -> list[str]:
    """The gain of each cell at the fewest and the most clients."""
    said = []
    for name in dict.fromkeys(row["cell"] for row in rows):
        gains = {r["concurrency"]: r for r in matching(rows, {"cell": name, "on": True}) if r["on_off"]}
        if gains:
            few, many = gains[min(gains)], gains[max(gains)]
            said.append(
                f"{name}: {few['on_off']:.2f} times the tokens/s at {min(gains)} client, {many['on_off']:.2f} times "
                f"at {max(gains)}; time to the first token {few['ttft_ratio']:.2f} and {many['ttft_ratio']:.2f} times."
            )
    return said


STUDY = Study(__file__, cells, derive, findings)
