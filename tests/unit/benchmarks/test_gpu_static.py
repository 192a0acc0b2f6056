"""The GPU's products, compiled and read: what was looked for in their machine code is there, and stays there."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed: nothing is compiled")
import gpu_static

from sameseed.ops.triton import guard

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(guard.interpreted(), reason="the interpreter compiles nothing"),
]

LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;
        /*0020*/                   LDGSTS.E.BYPASS.128 [R3], [R4.64] ;
        /*0030*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
        /*0040*/             @!P0  BRA 0x20 ;
        /*0050*/               @P1 BRA 0x10 ;
        /*0060*/                   EXIT ;
        /*0070*/                   BRA 0x70;
"""


def test_the_loop_is_found_in_a_listing():
    code = gpu_static.instructions(LISTING)
    assert [at for at, _ in code] == list(range(0, 0x80, 0x10)) and code[4][1] == "BRA 0x20"
    assert [text.split()[0] for text in gpu_static.inner_loop(code)] == ["LDGSTS.E.BYPASS.128", "HMMA.16816.F32", "BRA"]
    with pytest.raises(ValueError, match="no loop of products"):
        gpu_static.inner_loop(code[:3])


@pytest.mark.parametrize(
    ("name", "num_rows", "tensor", "least"),
    [("w4a16", 1, "HMMA", 0.16), ("w4a16", 64, "HMMA", 0.3), ("w4a8", 1, "IMMA", 0.17), ("fp8", 32, "HMMA", 0.12)],
)
def test_products_spill_nothing_and_wait_for_no_conversion(name, num_rows, tensor, least, tmp_path, monkeypatch):
    """`least`: instructions a byte of the weight; without the lines of PTX they were 0.35 to 0.6."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    w = gpu_static.weight(name, 28672, 4096)
    launch = gpu_static.product(w, num_rows)
    code = gpu_static.examine(launch)
    about = gpu_static.estimate(launch, code, gpu_static.CHIPS[90], w.nbytes)
    assert code.spilled == 0 and code.shared <= 99 << 10  # an L40's programs have no more
    assert (
        code.loop["LDGSTS"] and not code.loop["I2F"] and not code.loop["STS"]
    )  # copies run ahead; nothing is shuffled
    assert about.tensor_instruction == tensor and about.in_flight >= about.needed
    assert about.instructions_per_byte <= least


def test_a_record_says_that_it_is_no_measurement(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(gpu_static, "SHAPES", {"small": (128, 512)})
    out = tmp_path / "records.jsonl"
    monkeypatch.setattr(
        "sys.argv", ["gpu_static.py", "--formats", "bf16", "--products", "small", "--rows", "1", "--out", str(out)]
    )
    gpu_static.main()
    assert capsys.readouterr().out.startswith("static estimates, not measurements")
    text = out.read_text()
    assert text.count("\n") == 1 and '"sameseed.gpu_static/1"' in text and "not a measurement" in text
