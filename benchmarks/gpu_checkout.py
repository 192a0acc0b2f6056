"""Lets these scripts run from a plain checkout: if sameseed is not installed, the checkout's package is imported."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("sameseed") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
