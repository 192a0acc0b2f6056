"""`python -m sameseed`: the same as the `sameseed` command."""

from __future__ import annotations

import sys

from sameseed.cli import main

sys.exit(main())
