"""Lets the scripts here run from a plain checkout: where sameseed is not installed, the one beside them is taken."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("sameseed") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
