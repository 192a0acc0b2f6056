"""Native CPU kernels (csrc/). Tensors are addresses (`data_ptr()`), strides count elements; 0 fp32, 1 bf16, 2 fp16."""

def linear(
    x: int,
    x_stride: int,
    weight: int,
    weight_stride: int,
    format: int,
    bias: int,
    out: int,
    rows: int,
    outputs: int,
    depth: int,
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
def embedding(
    token_ids: int,
    weight: int,
    weight_stride: int,
    format: int,
    out: int,
    rows: int,
    vocabulary: int,
    width: int,
    /,
) -> None: ...
def store_kv(
    k: int,
    k_stride: int,
    v: int,
    v_stride: int,
    k_cache: int,
    v_cache: int,
    num_slots: int,
    width: int,
    format: int,
    slots: int,
    rows: int,
    /,
) -> None: ...
def move_kv(
    k_cache: int,
    v_cache: int,
    num_slots: int,
    width: int,
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
    format: int,
    num_blocks: int,
    block_size: int,
    heads: int,
    kv_heads: int,
    dim: int,
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
def isa() -> str: ...
def set_isa(name: str, /) -> None: ...
def num_threads() -> int: ...
def set_num_threads(threads: int, /) -> None: ...
def available_cores() -> int: ...
def read_rates(bytes: int, repeats: int, /) -> list[float]: ...
def peak_rates(kind: str, seconds: float, repeats: int, /) -> tuple[str, list[float]]: ...
def build_info() -> str: ...
