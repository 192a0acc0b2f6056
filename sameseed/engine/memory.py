"""Memory planning: computes what weights and caches will take, and checks that it is available, before allocating."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sameseed import devices, scheme
from sameseed.batch import MAX_NODES
from sameseed.config import EngineConfig
from sameseed.errors import ConfigError
from sameseed.kvcache.state import state_bytes
from sameseed.memory import available_memory
from sameseed.models.config import ModelConfig
from sameseed.models.eagle_loader import head_bytes
from sameseed.models.head_config import check_rotation, is_head
from sameseed.models.loader import open_checkpoint, read_config
from sameseed.models.mtp import mtp_bytes
from sameseed.models.weights import dense_format, expected_shapes, weight_bytes
from sameseed.scheme import QuantScheme

GIB = 2**30
CACHE_SHARE = 0.3  # on the CPU: largest share of the memory left by the weights for a cache without a given size
PARTS = 512 << 20  # bytes on a GPU for partial results of products and attention, and for allocator overhead
GRAPHS = 300 << 20  # bytes on a GPU for the memory pool shared by all CUDA graphs
GRAPH_ROWS = 256  # most rows of a CUDA graph; each model keeps logits for so many rows


@dataclass(frozen=True)
class Demand:
    """Bytes that one model will take."""

    quant: QuantScheme
    weights: int  # as `quant` stores them
    block: int  # of its cache
    passing: int = 0  # a pass
    logits: int = 0  # of its CUDA graphs, on a GPU
    states: int = 0  # recurrent states of all sequences


def demand(folder: Path, quant: QuantScheme, config: EngineConfig) -> Demand:
    """Check a checkpoint by its headers, and compute what it will take. Raises ModelLoadError or ConfigError."""
    shape = read_config(folder)
    with open_checkpoint(folder) as checkpoint:
        checkpoint.check(shape)
        dense = dense_format(checkpoint, quant, expected_shapes(shape))
        weights = weight_bytes(shape, checkpoint, quant, device=config.device)
    block = block_bytes(shape, scheme.cache_format(config.cache.format, dense), config.cache.block_size)
    # On a GPU all rows of a pass may have logits in one of its graphs.
    wanted = config.max_num_seqs + MAX_NODES if config.device == "cpu" else config.max_num_rows
    states = state_bytes(shape.state_shapes, config.max_num_seqs, config.cache.prefix_cache)
    return Demand(quant, weights, block, pass_bytes(shape, config.max_num_rows, wanted), logit_bytes(shape), states)


def head_demand(folder: Path, quant: QuantScheme, config: EngineConfig, target: Path) -> Demand:
    """Like `demand`, for a draft head for the model in `target`. Also raises if the two do not fit together."""
    if is_head(folder):
        check_rotation(folder, target)
        layer, weights, dense = head_bytes(folder, quant, read_config(target))
    else:  # an MTP block
        layer, weights, dense = mtp_bytes(folder, quant, target)
    block = block_bytes(layer, scheme.cache_format(config.cache.format, dense), config.cache.block_size)
    return Demand(quant, weights, block, logits=logit_bytes(layer))


def block_bytes(shape: ModelConfig, name: str, block_size: int) -> int:
    """Bytes of one block of keys and values of all layers, scales included."""
    return block_size * sum(heads * scheme.kv_row_bytes(name, dim) for heads, dim in shape.kv_shapes)


def pass_bytes(shape: ModelConfig, num_rows: int, num_logits: int) -> int:
    """Approximate peak bytes of a pass over `num_rows` rows: float32 rows of a layer and logits of some, twice."""
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    rows = num_rows * (2 * shape.hidden_size + heads + shape.mlp_width)
    return 4 * 2 * (rows + min(num_logits, num_rows) * shape.vocab_size)


def logit_bytes(shape: ModelConfig) -> int:
    """Bytes of the float32 logits that a model's CUDA graphs share."""
    return 4 * GRAPH_ROWS * shape.vocab_size


def plan_blocks(config: EngineConfig, max_len: int, demands: list[Demand]) -> int:
    """Blocks of each model's cache: as configured, else for `max_num_seqs` longest requests, within a memory share.

    Raises ConfigError if a longest request and the weights do not fit into memory together.
    """
    size, count, seqs = config.cache.block_size, config.cache.num_blocks, config.max_num_seqs
    longest = -(-max_len // size)
    if count is not None and count < longest:
        raise ConfigError(
            f"num_blocks {count} of {size} tokens cannot hold one request of {max_len} tokens: "
            f"raise it to {longest}, or lower max_model_len to {count * size}"
        )
    weights, block = sum(d.weights + d.states for d in demands), sum(d.block for d in demands)
    passing = max(d.passing for d in demands)
    if config.device == "cpu":
        room, of_what = available_memory(), ""
    else:
        share = config.gpu_memory_utilization
        room, free, total = devices.memory_room(config.device, share)
        of_what = f" ({share:g} of the {total / GIB:.1f} GiB of {config.device}, by --gpu-memory-utilization; "
        of_what += f"{free / GIB:.1f} of them are free)"
        passing += PARTS + GRAPHS + sum(d.logits for d in demands)
    least = count or longest
    most = (room - weights - passing) // block if block else longest * seqs
    if most < least:
        formats = " and ".join(dict.fromkeys(str(d.quant) for d in demands))
        formats += " and recurrent states" if any(d.states for d in demands) else ""
        cache = f"the cache of one request of {max_len} tokens" if count is None else f"{count} blocks of cache"
        remedies = ", or ".join(_remedies(config, demands, weights > least * block, most))
        raise ConfigError(
            f"weights in {formats} take {weights / GIB:.1f} GiB, {cache} {least * block / GIB:.1f} GiB, a pass "
            f"{passing / GIB:.1f} GiB, and {room / GIB:.1f} GiB may be taken{of_what}: {remedies}"
        )
    if count is not None:
        return count
    if config.device != "cpu":
        return min(most, longest * seqs)
    return min(most, max(longest, min(longest * seqs, int((room - weights) * CACHE_SHARE / block))))


def _remedies(config: EngineConfig, demands: list[Demand], heavy: bool, most: int) -> list[str]:
    """What to set, if at most `most` blocks fit. `heavy`: the weights take more than the cache."""
    made, size, seqs = [], config.cache.block_size, config.max_num_seqs
    if heavy and not all(str(d.quant).startswith("w4") for d in demands):
        made.append("take a smaller --format (w8a8 takes half of bf16; w4a8 a quarter, at a loss)")
    if most > 0 and config.cache.num_blocks is not None:
        made.append(f"lower num_blocks to {most}, the most that fits")
    elif most > 0:
        several = f" ({most // seqs * size} for {seqs} requests at once)" if most >= seqs > 1 else ""
        made.append(f"lower max_model_len to {most * size}, the most that fits{several}")
    if any(d.states for d in demands):
        made.append(f"lower max_num_seqs, {seqs} now")
    return made or ["take a smaller model"]
