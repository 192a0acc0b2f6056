"""The files of benchmarks run as programs, beside each other: so the tests find them too."""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS / "peers"), str(BENCHMARKS)]
