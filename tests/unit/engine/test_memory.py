"""The memory of weights and caches, in their formats, is computed before anything is loaded."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fixtures_models import VARIANTS, write_checkpoint
from lawkit import write_model

from sameseed import memory as ahead
from sameseed.config import CacheConfig, EngineConfig, SpecConfig
from sameseed.engine import build, memory
from sameseed.engine.memory import Demand, block_bytes, demand, plan_blocks
from sameseed.errors import ConfigError, RegistryError
from sameseed.formats._memory import Arena
from sameseed.memory import available_memory
from sameseed.models.config import parse_config
from sameseed.scheme import QuantScheme

MIB = 2**20
SHAPE = parse_config(VARIANTS["llama3"].raw)


def free(monkeypatch: pytest.MonkeyPatch, count: float) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: int(count))


def test_weights_are_counted_in_the_chosen_format(tmp_path):
    folder = write_checkpoint(tmp_path / "m", VARIANTS["llama3"], dtype=torch.bfloat16)
    sizes = {n: demand(folder, QuantScheme.parse(n), EngineConfig()) for n in ("auto", "fp32", "w8a8", "w4a8")}
    matrices = SHAPE.num_parameters
    for name, per_weight in (("auto", 2), ("fp32", 4), ("w8a8", 1), ("w4a8", 0.5)):
        assert (
            matrices * per_weight <= sizes[name].weights <= 1.6 * matrices * per_weight + 4000
        )  # tiny shapes have much padding
    half = block_bytes(SHAPE, "bf16", 16)
    assert {n: s.block for n, s in sizes.items()} == {"auto": half, "fp32": 2 * half, "w8a8": half, "w4a8": half}
    asked = EngineConfig(cache=CacheConfig(format="int8", block_size=4))
    assert demand(folder, QuantScheme(), asked).block == block_bytes(SHAPE, "int8", 4)


def test_the_cache_takes_a_share_of_what_the_weights_leave(monkeypatch):
    config = EngineConfig(max_num_seqs=8)
    model = Demand(QuantScheme(), 400 * MIB, MIB)
    free(monkeypatch, 1000 * MIB)
    assert plan_blocks(config, 160, [model]) == 80  # room for all: 8 requests of 10 blocks
    assert plan_blocks(config, 1600, [model]) == 180  # 0.3 of 600 MiB
    assert plan_blocks(config, 1600, [model, Demand(QuantScheme(), 200 * MIB, MIB)]) == 100  # one request, at least
    assert plan_blocks(config, 480, [model, Demand(QuantScheme(), 200 * MIB, MIB)]) == 60  # 0.3 of 400, for two caches


def test_what_does_not_fit_is_refused_with_the_sizes(monkeypatch):
    free(monkeypatch, 3 * 2**30)
    model = Demand(QuantScheme.parse("bf16"), 4 * 2**30, MIB)
    with pytest.raises(ConfigError) as caught:
        plan_blocks(EngineConfig(), 1600, [model])
    for word in ("weights in bf16 take 4.0 GiB", "one request of 1600 tokens 0.1", "3.0 GiB may be taken", "w4a8"):
        assert word in str(caught.value)
    small = Demand(QuantScheme.parse("w4a8"), 2**30, MIB)
    with pytest.raises(
        ConfigError, match=r"cache of one request of 65536 tokens 4\.0 GiB.*: lower max_model_len to 32768"
    ):
        plan_blocks(EngineConfig(), 65536, [small])
    with pytest.raises(ConfigError, match=r"5000 blocks of cache 4\.9 GiB.*: lower num_blocks to 2048"):
        plan_blocks(EngineConfig(cache=CacheConfig(num_blocks=5000)), 160, [small])
    with pytest.raises(ConfigError, match=r"weights in w4a8 and bf16 take 5\.0 GiB"):
        plan_blocks(EngineConfig(), 160, [small, model])
    with pytest.raises(ConfigError, match=r"num_blocks 9 .* cannot hold one request of 160 tokens: raise it to 10"):
        plan_blocks(EngineConfig(cache=CacheConfig(num_blocks=9)), 160, [small])


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, str]:
    write_model(tmp_path / "target")
    write_model(tmp_path / "draft")
    return str(tmp_path / "target"), str(tmp_path / "draft")


def no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "load_model", lambda *a: pytest.fail("weights were loaded"))


def test_too_little_memory_is_said_before_the_load(folders, monkeypatch):
    """The draft's weights count: without a draft there is room."""
    target, draft = folders
    config = EngineConfig(max_model_len=32, max_num_seqs=1, format="fp32")
    need = demand(Path(target), QuantScheme.parse("fp32"), config)
    free(monkeypatch, need.weights + 2 * need.block + need.passing)
    build.build_engine(target, config)
    no_load(monkeypatch)
    both = EngineConfig(
        max_model_len=32, max_num_seqs=1, format="fp32", spec=SpecConfig("draft_model", draft, format="w4a8")
    )
    with pytest.raises(ConfigError, match=r"weights in fp32 and w4a8 take"):
        build.build_engine(target, both)


def test_groups_and_names_are_checked_before_the_load(folders, monkeypatch):
    target, draft = folders
    no_load(monkeypatch)
    with pytest.raises(ConfigError, match=r"tensor model.layers.0.mlp.down_proj.weight \[32, 48\] .* w8a8-g32"):
        build.build_engine(target, EngineConfig(format="w8a8-g32"))
    spec = SpecConfig("draft_model", draft, format="w4a16-g64")
    with pytest.raises(ConfigError, match=r"tensor model.embed_tokens.weight .* w4a16-g64"):
        build.build_engine(target, EngineConfig(spec=spec))
    with pytest.raises(RegistryError, match="did you mean 'w4a8'"):
        build.build_engine(target, EngineConfig(format="w4a88"))


V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
STAT_1 = {
    "inactive_file": 1,
    "total_inactive_file": 200 * MIB,
    "total_active_file": 60 * MIB,
    "total_mapped_file": 10 * MIB,
}
STAT_2 = {"inactive_file": 200 * MIB, "active_file": 60 * MIB, "file_mapped": 10 * MIB}


def group(root: Path, folder: str, version: int, usage: int, **limits: object) -> None:
    """A memory control group under `root`; `limits`: in MiB, or "max"."""
    path = root / folder
    path.mkdir(parents=True, exist_ok=True)
    for name, limit in limits.items():
        path.joinpath(f"memory.{name}").write_text(f"{limit * MIB if isinstance(limit, int) else limit}\n")
    path.joinpath("memory.current" if version == 2 else "memory.usage_in_bytes").write_text(f"{usage * MIB}\n")
    stat = STAT_2 if version == 2 else STAT_1
    path.joinpath("memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))


@pytest.mark.parametrize(
    ("line", "groups", "room"),
    [
        ("0::/", [(V2, 2, 600, {"max": 1024, "high": "max"})], 1024 - 600 + 250),
        ("0::/", [(V2, 2, 600, {"max": 1024, "high": 900})], 900 - 600 + 250),
        ("0::/a/b", [(f"{V2}/a", 2, 700, {"max": 1024, "high": "max"}), (f"{V2}/a/b", 2, 1, {"max": 2048})], 574),
        ("0::/a/b", [(f"{V2}/a/b", 2, 2000, {"max": 1024})], 0),
        ("0::/../x", [(V2, 2, 300, {"max": 500})], 450),
        ("4:memory:/docker/1f", [(V1, 1, 600, {"limit_in_bytes": 1024})], 674),
        ("5:cpu,memory:/a", [(f"{V1}/a", 1, 1, {}), (V1, 1, 600, {"limit_in_bytes": 1024})], 674),
        ("3:cpu:/a", [(f"{V1}/a", 1, 600, {"limit_in_bytes": 1024})], 4096),
        ("0::/a", [], 4096),
    ],
)  # fmt: skip
def test_memory_that_control_groups_leave(line, groups, room, tmp_path):
    """What may be dropped (250 MiB of unmapped file pages in each group) does not count as taken."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{line}\n")
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {2**23} kB\nMemAvailable:  {2**22} kB\n")
    for folder, version, usage, limits in groups:
        group(tmp_path, folder, version, usage, **limits)
    assert available_memory(tmp_path) == min(room * MIB, available_memory())


@pytest.mark.skipif(sys.platform != "linux", reason="limits of processes as Linux counts them")
@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_memory_that_a_limit_of_the_process_leaves(kind):
    script = (
        "import resource, sameseed.memory as d; limit = d.available_memory() // 2 + 2**32;"
        f"resource.setrlimit(resource.{kind}, (limit, limit)); print(0 < d.available_memory() < limit)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "True\n"


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="memory is brought in on Linux alone")
@pytest.mark.parametrize("limited", ["_group_rooms", "_rlimit_rooms"])
def test_memory_that_was_brought_in_serves_the_weights_first(limited, tmp_path, monkeypatch):
    """It counts as free, zeros are never written over weights, and what is not used is given back."""
    monkeypatch.setattr(ahead, "LEAST", 1)
    (tmp_path / "m.gguf").write_bytes(bytes(5 << 20))
    ahead.bring_in(str(tmp_path / "missing.gguf"))
    assert ahead.brought_in() is None
    ahead.bring_in(str(tmp_path / "m.gguf"))
    (begun,) = ahead._begun
    begun._thread.join()
    monkeypatch.setattr(ahead, limited, lambda *_: [1 << 20])
    assert begun.done == begun.size and available_memory() == (1 << 20) + begun.size
    last = begun.start + begun.size - 1
    begun.memory[last] = 7
    arena = Arena()
    tensors = [arena.take((n,), torch.uint8, torch.device("cpu")).fill_(i) for i, n in enumerate((4 << 20, 3))]
    arena.close()
    assert [t.unique().tolist() for t in tensors] == [[0], [1]] and begun.memory[last] == 0
    assert ahead.brought_in() is None
