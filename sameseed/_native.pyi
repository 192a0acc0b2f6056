"""Native CPU kernels (csrc/). Tensors are addresses (`data_ptr()`), strides count elements; formats as enum Format."""

class Weight:
    """A weight [O, K] by address: dense (rows of `stride` elements) or packed, with scales and zero points."""

    def __init__(
        self,
        format: int,
        integer_rows: bool,
        outputs: int,
        depth: int,
        group: int,
        stride: int,
        codes: int,
        scales: int,
        scale_format: int,
        zeros: int,
        low: int,
        /,
    ) -> None: ...

def linear(
    kind: int,
    x: int,
    x_stride: int,
    norm_weight: int,
    eps: float,
    index: int,
    index_limit: int,
    weight: Weight,
    bias: int,
    residual: int,
    out: int,
    rows: int,
    /,
) -> None: ...
def pack_codes(
    plain: int, packed: int, zeros: int, outputs: int, depth: int, groups: int, stride: int, nibbles: bool, /
) -> None: ...
def encode_packed(
    weight: int,
    source: int,
    stride: int,
    outputs: int,
    depth: int,
    group: int,
    nibbles: bool,
    asymmetric: bool,
    wide_scales: bool,
    packed: int,
    scales: int,
    zeros: int,
    low: int,
    /,
) -> None: ...
def unpack_codes(packed: int, plain: int, outputs: int, depth: int, nibbles: bool, /) -> None: ...
def pack_pairs(plain: int, packed: int, outputs: int, depth: int, stride: int, element: int, /) -> None: ...
def unpack_pairs(packed: int, plain: int, outputs: int, depth: int, element: int, /) -> None: ...
def rope_store(
    qkv: int,
    stride: int,
    heads: int,
    q_norm: int,
    k_norm: int,
    eps: float,
    positions: int,
    table: int,
    table_rows: int,
    slots: int,
    k_cache: int,
    v_cache: int,
    k_scale: int,
    v_scale: int,
    num_slots: int,
    kv_heads: int,
    dim: int,
    format: int,
    q_out: int,
    rows: int,
    /,
) -> None: ...
def rms_norm(x: int, x_stride: int, weight: int, eps: float, out: int, rows: int, width: int, /) -> None: ...
def rope(
    x: int,
    x_stride: int,
    positions: int,
    table: int,
    table_rows: int,
    out: int,
    rows: int,
    heads: int,
    dim: int,
    /,
) -> None: ...
def silu_mul(gate_up: int, stride: int, out: int, rows: int, width: int, /) -> None: ...
def embedding(token_ids: int, weight: Weight, out: int, rows: int, /) -> None: ...
def store_kv(
    k: int,
    k_stride: int,
    v: int,
    v_stride: int,
    k_cache: int,
    v_cache: int,
    k_scale: int,
    v_scale: int,
    num_slots: int,
    kv_heads: int,
    dim: int,
    format: int,
    slots: int,
    rows: int,
    /,
) -> None: ...
def move_kv(
    k_cache: int,
    v_cache: int,
    k_scale: int,
    v_scale: int,
    num_slots: int,
    kv_heads: int,
    dim: int,
    format: int,
    source: int,
    target: int,
    count: int,
    /,
) -> None: ...
def attention(
    q: int,
    q_stride: int,
    k_cache: int,
    v_cache: int,
    k_scale: int,
    v_scale: int,
    num_slots: int,
    kv_heads: int,
    dim: int,
    format: int,
    block_size: int,
    heads: int,
    positions: int,
    tree_mask: int,
    row_offsets: int,
    kv_lens: int,
    block_tables: int,
    table_stride: int,
    num_seqs: int,
    rows: int,
    scale: float,
    window: int,
    out: int,
    /,
) -> None: ...
def choose(
    logits: int,
    wide: bool,
    vocab: int,
    greedy: bool,
    temperature: float,
    floor: float,
    top_k: int,
    top_p: float,
    key: int,
    /,
) -> int: ...
def probability(logits: int, wide: bool, vocab: int, temperature: float, token: int, /) -> float: ...
def kv_row_bytes(format: int, dim: int, /) -> int: ...
def isa() -> str: ...
def set_isa(name: str, /) -> None: ...
def num_threads() -> int: ...
def set_num_threads(threads: int, /) -> None: ...
def limit_threads(threads: int, /) -> None: ...
def available_cores() -> int: ...
def read_rates(bytes: int, repeats: int, /) -> list[float]: ...
def peak_rates(kind: str, seconds: float, repeats: int, /) -> tuple[str, list[float]]: ...
def build_info() -> str: ...

class Plan:
    """Op calls recorded by functions of the same names and arguments; what a pass brings is ignored in them."""

    def __init__(self) -> None: ...
    def embedding(self, token_ids: int, weight: Weight, out: int, rows: int, /) -> None: ...
    def linear(self, *args: int | float | Weight) -> None: ...
    def rope_store(self, *args: int | float) -> None: ...
    def attention(self, *args: int | float) -> None: ...
    def columns(self, x: int, x_stride: int, width: int, column: int, total: int, out: int, /) -> None: ...
    def run(
        self,
        rows: int,
        num_seqs: int,
        num_logit_rows: int,
        table_stride: int,
        token_ids: int,
        positions: int,
        key_positions: int,
        slots: int,
        row_offsets: int,
        kv_lens: int,
        block_tables: int,
        tree_mask: int,
        logit_rows: int,
        logits: int,
        hidden: int,
        /,
    ) -> None: ...
    def set_timed(self, timed: bool, /) -> None: ...
    def seconds(self) -> list[tuple[str, float]]: ...
    def __len__(self) -> int: ...
