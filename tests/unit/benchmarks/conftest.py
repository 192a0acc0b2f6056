"""The files of benchmarks/peers run as programs, beside each other: so the tests find them too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "peers"))
