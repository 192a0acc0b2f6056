"""The load of tests/e2e/test_serve_load.py, for the record: 5,000 requests, a fifth abandoned, a tenth malformed.

    .venv/bin/python benchmarks/soak.py [RECORDS.jsonl]

Nothing is timed. It ends with an error where a text differs from its solo run, memory grows, or something is left over.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "e2e")]

import lawkit  # noqa: E402 - the tests' folder is not a package
import test_serve_load  # noqa: E402
from fixtures_server import Server  # noqa: E402

from sameseed.study import record  # noqa: E402

OUT = Path(__file__).parent / "results" / "soak.jsonl"


def main() -> None:
    """Run, print, append."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    with tempfile.TemporaryDirectory() as folder:
        target, draft = Path(folder) / "target", Path(folder) / "draft"
        lawkit.write_model(target)
        lawkit.write_model(draft, noise=0.04)
        server = Server("--model", str(target), "--draft", str(draft), "--max-num-seqs", "8")
        server.wait_log("ready")
        found = test_serve_load.load(server, target)
        assert server.stop() == 0
    line = {"schema": "sameseed.soak/1", "time": record.now(), "commit": record.commit()}
    line |= {"machine": record.machine(), **found, "exit_code": 0}
    print(json.dumps({k: v for k, v in line.items() if k != "machine"}))
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
