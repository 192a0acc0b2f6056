"""An engine that only waits, for tests of the orchestrator. Each row takes `ms` milliseconds."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from protocol import UnsupportedError


class Engine:
    """An engine whose passes only wait.

    `options`: ms (per row), batch (false: unsupported), backwards (a batch takes negative time), fail ("load" or
    "rows": raises there).
    """

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
    """A writer that only waits, and writes the reversed prompt.

    `options`: ms (per text), fail ("load" or "write": raises there), text (tokens to write instead), helper (seconds
    for which a child process runs).
    """

    def load(  # type: ignore[override]
        self, model: Path, threads: int, max_len: int, draft: Path | None, options: dict[str, Any]
    ) -> dict[str, object]:
        if options.get("helper"):  # like an engine that runs a separate server
            subprocess.Popen(["sleep", options["helper"]])
        return super().load(model, threads, max_len, 1, options)

    def write(self, prompt: Seq[int], count: int) -> list[int]:
        self._fail("write")
        self._wait(1)
        return list(self.options.get("text", prompt[::-1]))[:count]
