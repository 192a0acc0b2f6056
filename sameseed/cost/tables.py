"""Files with costs of passes, of our own profile or of another engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sameseed.errors import ConfigError

ENGINE_SCHEMA = "sameseed.engine-costs/1"
P10_TO_P90 = 2 * 1.2816  # standard deviations of a normal distribution between its p10 and p90


def read_table(path: Path) -> dict[str, Any]:
    """The JSON object in a file of costs. Raises ConfigError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read costs from {path} ({error}); write them: sameseed profile --json FILE"
        ) from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no JSON object; write it with sameseed profile --json FILE")
    return data
