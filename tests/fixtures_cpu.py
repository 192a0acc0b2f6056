"""The native backend's instruction sets on this CPU, and checks of its attention with each of them."""

from contextlib import contextmanager

import pytest

from sameseed.ops import cpu

if cpu.unavailable() is not None:
    pytest.skip(f"the native backend: {cpu.unavailable()}", allow_module_level=True)

from sameseed import _native


@contextmanager
def instructions(name):
    """Compute with one instruction set in this context; the previous one is restored afterwards."""
    before = _native.isa()
    _native.set_isa(name)
    print(name)  # what a failing test printed last is the set that failed
    try:
        yield
    finally:
        _native.set_isa(before)


def here(name):
    """Whether this CPU has the instruction set."""
    try:
        with instructions(name):
            return True
    except ValueError:
        return False


ISAS = [name for name in ("portable", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx") if here(name)]
