"""Each example runs as it is, and stays short."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from sameseed.models.loader import resolve_model

FOLDER = Path(__file__).resolve().parents[2] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("embedded", "embedded-draft"):
        if not (resolve_model(name) / "model.safetensors").exists():
            pytest.skip(f"{name}: the embedded weights are not in this checkout; `sameseed train` makes them")
    runpy.run_path(str(example), run_name="__main__")
    out, _ = capsys.readouterr()
    assert out.strip(), "an example shows something"
