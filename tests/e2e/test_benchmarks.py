"""The benchmark that no command runs: goodput in cells of draft, temperature, batch and texts."""

import json
import subprocess
import sys
from pathlib import Path


def test_policies_are_compared_with_plain_decoding(tmp_path):
    script, out = Path(__file__).parents[2] / "benchmarks" / "policies.py", tmp_path / "cells.jsonl"
    flags = "--drafts ngram --texts code --temperatures 0 --batches 2 --ks 2 --seconds 0 --max-tokens 8 --num-prompts 6"
    done = subprocess.run(
        [sys.executable, str(script), *flags.split(), "--out", str(out)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (cell,) = map(json.loads, out.read_text().splitlines())
    assert cell["equals_plain"] and cell["num_pairs"] >= 1 and cell["num_tokens"] > 0
    assert set(cell["fixed"]) == {"2"} and all(x > 0 for x in cell["goodput"])
