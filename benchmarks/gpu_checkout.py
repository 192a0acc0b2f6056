"""Lets these scripts run from a plain checkout: packages that are not installed are imported from it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
for package, folder in (("sameseed", ROOT), ("sameseed_lab", ROOT / "packages" / "lab")):
    if importlib.util.find_spec(package) is None:
        sys.path.insert(0, str(folder))
