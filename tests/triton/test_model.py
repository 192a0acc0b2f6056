"""A whole model on the GPU's kernels in Triton's interpreter: loading in chunks, drafts, one text."""

from __future__ import annotations

import pytest
import torch
from fixtures_models import write_checkpoint

from foretoken import LLM, SamplingParams, ops
from foretoken.formats.scheme import QuantScheme
from foretoken.models import weights
from foretoken.models.loader import load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"))
