"""Makes the modules of benchmarks/ importable: they run as programs and import each other by name."""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS / "peers"), str(BENCHMARKS)]
