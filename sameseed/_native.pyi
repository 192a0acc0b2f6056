"""
Native CPU kernels (csrc/). Memory is an address, strides count elements, formats are numbers of enum Format.
"""

from collections.abc import Callable, Sequence


class Weight:
    """
    A weight [O, K] by address: dense (rows of `stride` elements) or packed.
    """

    def __init__(self, *, format: int, integer_rows: bool, bf16_rows: bool, outputs: int, depth: int, group: int, stride: int, codes: int, scales: int, scale_format: int, zeros: int, low: int, high: int, steps: int, minima: int, least: int) -> None: ...

class RowSource:
    """
    Where the rows of a product come from; kind 0: plain, 1: normed, 2: gated.
    """

    def __init__(self, *, kind: int, x: int, stride: int, norm_weight: int, eps: float, index: int, index_limit: int, limit: float) -> None: ...

class ExpertSet:
    """Weights of a layer's experts."""

    def __init__(self, *, gate_up: Sequence[Weight], down: Sequence[Weight]) -> None: ...

class Experts:
    """A mixture of experts, plus residual."""

    def __init__(self, *, source: RowSource, router: Weight, router_bias: int, logits: int, factors: int, set: ExpertSet, gate_up_bias: int, down_bias: int, top_k: int, normalize: bool, chosen_by: int, factor: float, gate: int, limit: float, residual: int, out: int, rows: int) -> None: ...

class Product:
    """Rows times a weight transposed, plus bias and residual."""

    def __init__(self, *, source: RowSource, weight: Weight, bias: int, residual: int, out: int, rows: int) -> None: ...

class Embedding:
    """Rows token_ids of an embedding."""

    def __init__(self, *, token_ids: int, weight: Weight, scale: float, out: int, rows: int) -> None: ...

class Cache:
    """A layer of the cache."""

    def __init__(self, *, k: int, v: int, k_scale: int, v_scale: int, num_slots: int, kv_heads: int, dim: int, format: int) -> None: ...

class RopeStore:
    """Norm and rotate q and k, store k and v."""

    def __init__(self, *, qkv: int, stride: int, heads: int, q_norm: int, k_norm: int, v_norm: int, stores: bool, eps: float, positions: int, table: int, table_rows: int, slots: int, cache: Cache, q_out: int, rows: int) -> None: ...

class Sequences:
    """Rows and blocks of the sequences of a pass."""

    def __init__(self, *, row_offsets: int, kv_lens: int, block_tables: int, count: int, table_stride: int, rows: int) -> None: ...

class Attention:
    """Queries over the paged cache."""

    def __init__(self, *, q: int, stride: int, heads: int, cache: Cache, block_size: int, positions: int, tree_mask: int, sequences: Sequences, scale: float, window: int, out: int, sinks: int) -> None: ...

class Columns:
    """
    Columns of `out` [rows, total] from x; out 0: of the hidden states of the pass.
    """

    def __init__(self, *, x: int, stride: int, width: int, column: int, total: int, out: int) -> None: ...

class DeltaRule:
    """Gated DeltaNet: rows of x through the states of their sequences."""

    def __init__(self, *, x: int, stride: int, conv: int, decay: int, bias: int, norm: int, eps: float, taps: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, tiled: bool, state: int, log: int, slots: int, log_rows: int, states: int, row_offsets: int, positions: int, num_seqs: int, rows: int, out: int) -> None: ...

class ShortConv:
    """A short gated convolution over the rows of each sequence."""

    def __init__(self, *, x: int, stride: int, weight: int, taps: int, width: int, log: int, slots: int, log_rows: int, states: int, row_offsets: int, positions: int, num_seqs: int, rows: int, out: int) -> None: ...

class SigmoidGate:
    """Rows of x times the sigmoid of a gate."""

    def __init__(self, *, x: int, gate: int, stride: int, heads: int, dim: int, apart: int, out: int, rows: int) -> None: ...

class Take:
    """Some columns of x, in the order of `index`."""

    def __init__(self, *, x: int, stride: int, index: int, width: int, out: int, rows: int) -> None: ...

class Norm:
    """Rows of x [T, C] normed."""

    def __init__(self, *, x: int, stride: int, width: int, weight: int, eps: float, residual: int, residual_stride: int, factor: float, out: int) -> None: ...

class Cap:
    """The cap of a pass's logits."""

    def __init__(self, *, cap: float, width: int) -> None: ...

class Pass:
    """
    The rows of a pass, as sameseed/batch.py lays them out, and where its results go.
    """

    def __init__(self, *, rows: int, num_seqs: int, num_logit_rows: int, table_stride: int, token_ids: int, positions: int, key_positions: int, slots: int, row_offsets: int, kv_lens: int, block_tables: int, tree_mask: int, logit_rows: int, logits: int, hidden: int, states: int) -> None: ...

class PackArgs:
    """Codes to blocks, or back."""

    def __init__(self, *, plain: int, packed: int, zeros: int, outputs: int, depth: int, groups: int, stride: int, nibbles: bool) -> None: ...

class EncodeArgs:
    """A dense weight to packed codes."""

    def __init__(self, *, weight: int, source: int, stride: int, outputs: int, depth: int, group: int, nibbles: bool, asymmetric: bool, wide_scales: bool, packed: int, scales: int, zeros: int, low: int) -> None: ...

class BlockRows:
    """
    Rows of a matrix in ggml's blocks in an open file, and where they are packed.
    """

    def __init__(self, *, file: int, begin: int, kind: int, outputs: int, depth: int, order: int, codes: int, high: int, steps: int, minima: int, scales: int, least: int) -> None: ...

class Plan:
    """Recorded ops; what a pass brings is ignored as they are recorded."""

    def __init__(self) -> None: ...

    def embedding(self, arg: Embedding, /) -> None: ...

    def product(self, arg: Product, /) -> None: ...

    def experts(self, arg: Experts, /) -> None: ...

    def rope_store(self, arg: RopeStore, /) -> None: ...

    def attention(self, arg: Attention, /) -> None: ...

    def columns(self, arg: Columns, /) -> None: ...

    def norm(self, arg: Norm, /) -> None: ...

    def cap(self, arg: Cap, /) -> None: ...

    def delta(self, arg: DeltaRule, /) -> None: ...

    def conv(self, arg: ShortConv, /) -> None: ...

    def gate(self, arg: SigmoidGate, /) -> None: ...

    def take(self, arg: Take, /) -> None: ...

    def run(self, arg: Pass, /) -> None: ...

    def set_timed(self, arg: bool, /) -> None: ...

    def seconds(self) -> list[tuple[str, float]]: ...

    def __len__(self) -> int: ...

class GrowingTree:
    """One sequence's draft tree."""

    def __init__(self, *, size: int, depth: int, width: int, count: int, exact: bool, limit: int, least: float, greedy: bool, temperature: float, floor: float, top_k: int, top_p: float, keys: Sequence[int], ids: int, ending: Sequence[int], num_cached: int, blocks: Sequence[int]) -> None: ...

class TreePasses:
    """The passes of a model that grows trees."""

    def __init__(self, *, vocab: int, width: int, block_size: int, logits: int, features: int, input: int, level_logits: int, level_features: int) -> None: ...

def grow_trees(plan: Plan, passes: TreePasses, trees: Sequence[GrowingTree], ends: Callable[[Sequence[Sequence[float]]], bool] | None) -> list[tuple[list[int], list[int], list[float]]]:
    """
    Tokens, parents and path probabilities of draft trees, grown level by level.
    """

def choose(arg0: int, arg1: bool, arg2: int, arg3: bool, arg4: float, arg5: float, arg6: int, arg7: float, arg8: int, /) -> int:
    """The token chosen from a row of logits, or -1."""

def choices(arg0: int, arg1: bool, arg2: int, arg3: bool, arg4: float, arg5: float, arg6: int, arg7: float, arg8: int, arg9: int, /) -> list[tuple[int, float]]:
    """The tokens that come first in a row of logits, with their shares."""

def likely(arg0: int, arg1: bool, arg2: int, arg3: bool, arg4: float, arg5: float, arg6: int, arg7: float, arg8: int, arg9: int, arg10: int, arg11: int, arg12: int, arg13: int, /) -> None:
    """What comes first in rows of logits for a tree, with shares."""

def probability(arg0: int, arg1: bool, arg2: int, arg3: float, arg4: int, /) -> float:
    """Probability of a token at a temperature."""

def embedding(arg: Embedding, /) -> None: ...

def product(arg: Product, /) -> None: ...

def experts(arg: Experts, /) -> None: ...

def rope_store(arg: RopeStore, /) -> None: ...

def attention(arg: Attention, /) -> None: ...

def delta(arg: DeltaRule, /) -> None: ...

def conv(arg: ShortConv, /) -> None: ...

def gate(arg: SigmoidGate, /) -> None: ...

def take(arg: Take, /) -> None: ...

def rms_norm(arg0: int, arg1: int, arg2: int, arg3: float, arg4: int, arg5: int, arg6: int, /) -> None: ...

def rope(arg0: int, arg1: int, arg2: int, arg3: int, arg4: int, arg5: int, arg6: int, arg7: int, arg8: int, /) -> None: ...

def silu_mul(arg0: int, arg1: int, arg2: int, arg3: int, arg4: int, /) -> None: ...

def gelu_mul(arg0: int, arg1: int, arg2: int, arg3: int, arg4: int, /) -> None: ...

def softcap(arg0: int, arg1: float, arg2: int, arg3: int, /) -> None: ...

def clamped_mul(arg0: int, arg1: int, arg2: float, arg3: int, arg4: int, arg5: int, /) -> None: ...

def store_kv(arg0: int, arg1: int, arg2: int, arg3: int, arg4: Cache, arg5: int, arg6: int, /) -> None: ...

def move_kv(arg0: Cache, arg1: int, arg2: int, arg3: int, /) -> None: ...

def pack_codes(arg: PackArgs, /) -> None: ...

def unpack_codes(arg0: int, arg1: int, arg2: int, arg3: int, arg4: bool, /) -> None: ...

def pack_high(arg0: int, arg1: int, arg2: int, arg3: int, arg4: int, /) -> None: ...

def unpack_high(arg0: int, arg1: int, arg2: int, arg3: int, arg4: int, /) -> None: ...

def encode_packed(arg: EncodeArgs, /) -> None: ...

def read_block_rows(arg: BlockRows, /) -> None: ...

def pack_pairs(arg0: int, arg1: int, arg2: int, arg3: int, arg4: int, arg5: int, /) -> None: ...

def unpack_pairs(arg0: int, arg1: int, arg2: int, arg3: int, arg4: int, /) -> None: ...

def kv_row_bytes(arg0: int, arg1: int, /) -> int:
    """Bytes of one head's row of the cache."""

def isa() -> str:
    """The instruction set in use."""

def set_isa(arg: str, /) -> None:
    """Use this instruction set: auto, or one of build_info."""

def num_threads() -> int:
    """Threads that a call may use."""

def set_num_threads(arg: int, /) -> None:
    """Let a call use this many threads."""

def limit_threads(arg: int, /) -> None:
    """Let a call of this thread use at most this many threads; 0: no limit."""

def num_launches() -> int:
    """Sections of kernels that this process has run."""

def available_cores() -> int:
    """Physical cores that this process may use."""

def read_rates(arg0: int, arg1: int, /) -> list[float]:
    """Bytes a second of passes over this much memory, by all threads."""

def peak_rates(arg0: str, arg1: float, arg2: int, /) -> tuple[str, list[float]]:
    """
    The CPU's best instruction for int8, fp32 or bf16, and its operations a second.
    """

def build_info() -> str:
    """The compiler and the instruction sets that this module was built for."""
