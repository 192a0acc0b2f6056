"""Measuring processes: one that fails, dies, hangs or runs late costs only its own part, and no record is lost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path

import gpu_crew
import gpu_worker
import pytest
from gpu_plan import DRY

# It reads a job, writes one record, and does what the job's "then" says.
SCRIPT = """
import json, os, signal, sys, time
job = json.loads(sys.stdin.readline())
print(json.dumps({"n": job["n"]}), flush=True)
then = job["then"]
if then == "fault":
    print("CUDA error: an illegal memory access was encountered", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
if then == "hang":
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        time.sleep(60)
    time.sleep(60)
if then == "exit":
    sys.exit("torch.OutOfMemoryError: CUDA out of memory")
if then == "quiet":
    sys.exit(0)
print(json.dumps({"done": True}), flush=True)
"""


@pytest.fixture
def crew(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_crew, "GRACE", 0.5)
    with gpu_crew.Crew([sys.executable, "-S", "-c", SCRIPT], tmp_path / "gpu.log") as made:
        yield made


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("end", None),
        ("fault", r"SIGSEGV\): CUDA error: an illegal memory access"),
        ("exit", r"exit code 1\): torch.OutOfMemoryError"),
        ("quiet", r"ended early \(exit code 0\): it said nothing"),
        ("hang", r"did not answer after its 1 s and was killed"),
    ],
)
def test_what_a_part_told_is_kept_whatever_becomes_of_it(then, said, crew):
    told = []
    started = time.monotonic()
    why = crew.run({"n": 1, "then": then}, 1.0, told.append, more=False)
    assert told == [{"n": 1}] and time.monotonic() - started < 10
    assert why is None if said is None else re.search(said, why)
    assert crew.run({"n": 2, "then": "end"}, 5.0, told.append, more=False) is None and told[-1] == {"n": 2}


def test_jobs_side_by_side(crew):
    told = []
    jobs = [{"n": i, "then": "fault" if i == 1 else "end"} for i in range(4)]
    failed = crew.run_all(jobs, 20.0, told.append, 2)
    assert sorted(x["n"] for x in told) == [0, 1, 2, 3]
    assert [job["n"] for job, _ in failed] == [1] and "illegal memory access" in failed[0][1]


def test_no_process_is_left_behind(tmp_path):
    with gpu_crew.Crew([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "gpu.log") as made:
        made.prepare()
        running = made._spare.process
        assert running.poll() is None
    assert running.poll() is not None


def test_a_damaged_line_is_a_line_of_the_log(tmp_path):
    program = """
import sys
sys.stdin.readline()
print('{"n": 1}\\n{"n": 2, "tor\\n17\\n{"n": 3}\\n{"done": true}', flush=True)
"""
    told = []
    with gpu_crew.Crew([sys.executable, "-S", "-c", program], tmp_path / "gpu.log") as made:
        assert made.run({}, 10.0, told.append, more=False) is None
    assert told == [{"n": 1}, {"n": 3}]
    assert (tmp_path / "gpu.log").read_text() == 'no record: {"n": 2, "tor\nno record: 17\n'


def test_an_interruption_leaves_no_job_and_no_process(tmp_path, monkeypatch):
    """An interruption ends the jobs that run, and the jobs that wait do not start."""
    started = tmp_path / "started"
    program = f"import sys, time; sys.stdin.readline(); open({str(started)!r}, 'a').write('x'); time.sleep(60)"

    def interrupted(self, *rest):
        while not started.exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(Future, "result", interrupted)
    with (
        pytest.raises(KeyboardInterrupt),
        gpu_crew.Crew([sys.executable, "-S", "-c", program], tmp_path / "log") as made,
    ):
        made.run_all([{"n": i} for i in range(5)], 60.0, lambda found: None, 1)
    monkeypatch.undo()
    for thread in threading.enumerate():
        if thread.name.startswith("ThreadPool"):
            thread.join(20)
    assert started.read_text() == "x"
    assert all(w.process.poll() is not None for w in made._all)
    with pytest.raises(RuntimeError, match="no more are started"):
        made.prepare()


def worker(job, tmp_path, **settings):
    """Runs the real worker with one job; returns the records that it wrote."""
    command = [sys.executable, gpu_worker.__file__]
    given = {"kind": "costs", "sizes": asdict(DRY), "device": "cpu", "backend": "auto", "seconds": 9.0} | job
    given["until"] = time.monotonic() + given["seconds"] + settings.get("later", 30.0)
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_worker_says_what_went_wrong_or_that_its_time_is_over(tmp_path):
    *_, wrong, done = worker({"kind": "costs", "format": "bf17"}, tmp_path)
    assert wrong["omit"] == "the rest" and "bf17" in wrong["why"] and done == {"done": True}
    *_, late, done = worker({"kind": "costs", "format": "bf16"}, tmp_path, later=-9.0)
    assert "its 9 s were over" in late["why"] and done == {"done": True}


def test_the_scripts_run_from_a_plain_checkout(tmp_path):
    """The scripts run without an installed package, from any folder."""
    here = Path(gpu_worker.__file__).parent
    program = f"import sys; sys.path.insert(0, {str(here)!r}); import gpu_checkout; "
    program += "import importlib.util as u; print(u.find_spec('sameseed').origin)"
    clean = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, cwd=tmp_path, env=clean
    )
    assert done.stdout.strip() == str(here.parent / "sameseed" / "__init__.py"), done.stderr
