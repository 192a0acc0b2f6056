"""A twin and its head in memory, without files: weights are computed, and only their quantized form is kept."""

from __future__ import annotations

from dataclasses import replace

from sameseed import ops
from sameseed.config import EngineConfig
from sameseed.engine.build import Loaded
from sameseed.engine.levels import resolve
from sameseed.engine.memory import demand_of, plan_blocks
from sameseed.models.block import BlockHead
from sameseed.models.config import ModelConfig
from sameseed.models.eagle import EagleHead
from sameseed.models.eagle_loader import read_block, read_head
from sameseed.models.head_config import BlockConfig
from sameseed.models.llama import Llama
from sameseed.models.loader import load_tokenizer, resolve_model
from sameseed.models.weights import Progress, WeightReader, read_weights
from sameseed.scheme import QuantScheme
from sameseed_lab.twin import open_head_twin, open_twin
from sameseed_lab.twin.head import NAMES, HeadLayout


def load_twins(
    shape: ModelConfig,
    of: str,
    head: str,
    config: EngineConfig,
    *,
    name: str = "the shape",
    progress: Progress | None = None,
) -> Loaded:
    """Twins in `shape` (called `name`) of the model `of` and its head `head`, both in `config.format`, for `assemble`.

    Raises ConfigError if memory is short, with the bytes needed and free, and what `make_twin` raises.
    """
    backend, quant = ops.resolve(config.backend, config.device), QuantScheme.parse(config.format)
    with open_twin(shape, of, name) as target, open_head_twin(shape, head, of, name) as drafts:
        big, layer = target.layout.config, drafts.layout.config
        max_len = config.max_model_len or big.max_model_len
        demands = [demand_of(big, target, quant, config), demand_of(layer, drafts, quant, config, drafts.shapes)]
        num_blocks = plan_blocks(config, max_len, demands)
        model = Llama(big, read_weights(big, target, quant, backend, config.device, progress), backend, max_len)
        reader = WeightReader(layer, drafts, quant, backend, config.device, progress, drafts.shapes)
        made = _head(drafts.head, reader, model, backend)
    spec = resolve(config.spec).spec
    return Loaded(replace(config, spec=spec), load_tokenizer(resolve_model(of)), num_blocks, model, (made,))


def _head(head: HeadLayout, reader: WeightReader, target: Llama, backend: ops.Ops) -> EagleHead | BlockHead:
    ids = head.target_ids.int()
    if isinstance(head.config, BlockConfig):
        return read_block(head.config, reader, None if head.whole else ids, target, backend)
    return read_head(head.config, reader, NAMES, ids, target, backend)
