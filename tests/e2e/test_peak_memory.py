"""What `estimate` says of memory, held against processes: at the start, and with a long text in the cache."""

import subprocess
import sys

import pytest
from fixtures_models import others_model

from sameseed.plan.estimate import Question, estimate, given_limits
from sameseed.plan.memory import PROGRAM

MIB = 2**20
SLACK = 16 * MIB  # for what does not grow with the model: plans of passes, arenas of the allocator
CHILD = """
import sys
from sameseed.engine.llm import LLM

def peak():  # of this program alone; ru_maxrss also counts the process that started it
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
before = peak()
llm = LLM(sys.argv[1], draft="none")
llm.generate([[5 + i % 500 for i in range(int(sys.argv[2]))]], max_tokens=1)
print(before, peak())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory in kB, as Linux counts it")
@pytest.mark.parametrize("tokens", [1, 800])
@pytest.mark.parametrize("name", ["embedded", "SmolLM2-135M", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def test_a_process_takes_what_was_estimated(name, tokens):
    """To 5 % and `SLACK`. The interpreter with PyTorch counts as it is: its size depends on PyTorch's build."""
    path = name if name == "embedded" else str(others_model(name))
    ran = subprocess.run([sys.executable, "-c", CHILD, path, str(tokens)], capture_output=True, text=True, check=True)
    program, took = (int(kib) * 1024 for kib in ran.stdout.split())
    limits = given_limits(50.0, 1.0, 2)
    memory = estimate(Question(path, ("auto",), context=tokens, prompt_tokens=tokens, batches=(1,)), limits)[0].memory
    wanted = memory.peak.value - PROGRAM + program
    assert took == pytest.approx(wanted, abs=0.05 * wanted + SLACK)
    assert took <= memory.peak.high - PROGRAM + program
