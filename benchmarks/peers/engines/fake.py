"""An engine that only waits: for the tests of the orchestrator. A row costs `ms` milliseconds."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from protocol import UnsupportedError


class Engine:
    """`options`: ms (a row), batch (false: not offered), backwards (of a batch), fail ("load" or "rows": raises)."""

    def load(self, model: Path, threads: int, max_len: int, batch: int, options: dict[str, Any]) -> dict[str, object]:
        self.options = options
        print("libraries print what they like")
        self._fail("load")
        return {"versions": {"fake": "1"}, "settings": {"threads": threads}}

    def _fail(self, where: str) -> None:
        if self.options.get("fail") == where:
            raise RuntimeError(f"told to fail at {where}")

    def _wait(self, rows: int) -> float:
        start = time.perf_counter()
        time.sleep(rows * self.options.get("ms", 0.1) / 1e3)
        return time.perf_counter() - start

    def rows(self, tokens: Seq[int], context: int) -> float:
        self._fail("rows")
        return self._wait(len(tokens))

    def prefill(self, tokens: Seq[int]) -> float:
        return self._wait(1)

    def batch(self, prompts: Seq[Seq[int]], steps: int) -> float:
        if self.options.get("batch") is False:
            raise UnsupportedError("one sequence only")
        return -1.0 if self.options.get("backwards") else self._wait(steps)

    def probe(self, tokens: Seq[int], count: int) -> list[float]:
        return [float((7 * t + tokens[0]) % 5) for t in range(count)]


class Writer(Engine):
    """`options`: ms (a text), fail ("load" or "write": raises), text (what it writes; else the prompt backwards),

    helper (seconds that a process of its own goes on for).
    """

    def load(  # type: ignore[override]
        self, model: Path, threads: int, max_len: int, draft: Path | None, options: dict[str, Any]
    ) -> dict[str, object]:
        if options.get("helper"):  # as an engine that is a server of its own
            subprocess.Popen(["sleep", options["helper"]])
        return super().load(model, threads, max_len, 1, options)

    def write(self, prompt: Seq[int], count: int) -> list[int]:
        self._fail("write")
        self._wait(1)
        return list(self.options.get("text", prompt[::-1]))[:count]
