"""Fixtures that several folders of tests share."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
from fixtures_block import fit_block
from fixtures_eagle import fit_head
from fixtures_quantize import SMALL, write_text
from hypothesis import HealthCheck, settings
from lawkit import Pair, load_pair, write_model

from sameseed import ops, registry, store
from sameseed.errors import say_once
from sameseed.models.loader import load_model

if TYPE_CHECKING:
    from fixtures_server import Server

settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")

LONG_FILES = ("test_triton.py", "test_snippets.py", "test_study.py")  # minutes each
THREADS = int(os.environ.get("SAMESEED_TEST_THREADS", "1"))
DRAFT_NOISE = 0.04  # the tiny draft is the tiny target with this share of other weights mixed in


def pytest_configure() -> None:
    """Refuse to run without the native module: tests of its backends would silently not be collected.

    Let PyTorch's dozens of loggers pass their records on, else pytest visits each of them six times a test.
    """
    if (why := registry.load("ops", "cpu").unavailable()) is not None:
        raise pytest.UsageError(f"the native module does not run here ({why}); build it: make build")
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_collection_finish() -> None:
    """Leave what is there now, a million objects, out of all searches for garbage."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long files first, so that no test process waits at the end for the long file of another one."""
    items.sort(key=lambda item: [*LONG_FILES, item.path.name].index(item.path.name))


@pytest.fixture(autouse=True)
def _threads() -> None:
    """Use one thread: tiny models gain nothing, and on a busy machine threads wait for each other.

    A test before may have run a command that sets another number.
    """
    if ops.num_threads() != THREADS or torch.get_num_threads() != THREADS:
        ops.set_num_threads(THREADS)


@pytest.fixture(autouse=True)
def _say_again() -> None:
    """Say again what was said once in a test before."""
    say_once.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def _threads_of_others() -> Iterator[None]:
    """Let PyTorch use one thread in processes that tests start, too, unless they say otherwise."""
    ops.set_num_threads(THREADS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", str(THREADS))
        yield


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what is measured and learned in a folder of this test run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(store.VARIABLE, str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _no_drafter_fails(caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test whose log says that a drafter failed. Such a failure costs only speed, so texts do not show it."""
    yield
    said = [r.getMessage() for r in caplog.get_records("call") if r.levelname == "ERROR"]
    failed = [text for text in said if "drafter failed" in text or "choosing a token" in text]
    assert not failed or request.node.get_closest_marker("failing_drafter"), failed


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """`spied(owner, name, seen)`: calls owner.name as ever; the list holds seen(arguments) for each call so far.

    Without `seen` it holds what the calls returned.
    """

    def spy(owner: Any, name: str, seen: Callable[..., Any] | None = None) -> list[Any]:
        calls, right = [], getattr(owner, name)

        def noted(*args: Any, **named: Any) -> Any:
            if seen is not None:
                calls.append(seen(*args, **named))
            result = right(*args, **named)
            if seen is None:
                calls.append(result)
            return result

        monkeypatch.setattr(owner, name, noted)
        return calls

    return spy


@pytest.fixture(scope="session")
def pair_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Checkpoints of the tiny pair: (target, draft)."""
    root = tmp_path_factory.mktemp("pair")
    write_model(root / "target")
    write_model(root / "draft", noise=DRAFT_NOISE)
    target = load_model(root / "target", ops.resolve("reference"))
    fit_head(root / "head", target)
    fit_block(root / "block", load_model(root / "target", ops.resolve()))
    return root / "target", root / "draft"


@pytest.fixture(scope="session")
def pair(pair_folders: tuple[Path, Path]) -> Pair:
    """The tiny pair on the fastest backend that runs here."""
    return load_pair(*pair_folders)


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    """A client of the module's server."""
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint to quantize."""
    folder = tmp_path_factory.mktemp("source") / "model"
    write_model(folder, **SMALL)
    return folder


@pytest.fixture(scope="session")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of texts to calibrate a quantizer with."""
    return write_text(tmp_path_factory.mktemp("text") / "calibration.jsonl")


@pytest.fixture(scope="session")
def reference_pair(pair_folders: tuple[Path, Path]) -> Pair:
    """The tiny pair on the reference backend."""
    return load_pair(*pair_folders, backend="reference")
