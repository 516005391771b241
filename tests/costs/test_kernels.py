"""The time of Pallas kernels, from what a program says of them."""

import pytest

from zero.costs.hlo import Instruction
from zero.costs.kernels import kernel_seconds, product_seconds
from zero.hosts.speeds import SPEEDS

V5E = SPEEDS["TPU v5 lite"]
V6E = SPEEDS["TPU v6 lite"]
TPU7X = SPEEDS["TPU7x"]


def test_shares_of_attention_kernels() -> None:
    """On a v6e each kernel has a share of its own, and the fused one is known by its gradients per block of keys."""
    assert V6E.splash is not None
    shapes = "s8[1,4,4], s8[1,4,4], bf16[32,8192,128], bf16[8,8192,128], bf16[8,8192,128]"
    rest = f"%q), operand_layout_constraints={{{shapes}}}, x"
    scratch = "f32[2048,128], f32[2048,128]"  # MaxText's own kernel has sums of a block among its results
    of_keys = "bf16[8,8192,128], bf16[8,8192,128]"
    flops = 2 * 32 * 10 * 2048**2 * 128
    for name, result, products, share in (
        ("splash_mha_fwd_residuals.1", "bf16[32,8192,128]", 2, V6E.splash.fwd),
        ("splash_mha_dq.1", "bf16[32,8192,128]", 3, V6E.splash.dq),
        ("splash_mha_dkv.1", f"({scratch}, {of_keys})", 4, V6E.splash.dkv),
        ("splash_mha_dkv.1", f"({scratch}, bf16[4,32,8192,128], {of_keys})", 5, V6E.splash.fused),
    ):
        found = kernel_seconds(Instruction(name, result, "custom-call", rest), V6E)
        assert found == pytest.approx(products * flops / (share * V6E.flops))


def test_wide_heads_fill_a_unit() -> None:
    """Heads of 256 have twice the products of heads of 128, and take 1.2 times as long."""
    shapes = "s8[1,4,4], s8[1,4,4], bf16[32,8192,128], bf16[8,8192,128], bf16[8,8192,128]"
    rest = f"%q), operand_layout_constraints={{{shapes}}}, x"
    narrow = Instruction("splash_mha_fwd_residuals.1", "bf16[32,8192,128]", "custom-call", rest)
    wide = narrow._replace(result="bf16[32,8192,256]", rest=rest.replace(",128]", ",256]"))
    for speed, times in ((V6E, 1.2), (V5E, 2)):
        assert kernel_seconds(wide, speed) == pytest.approx(times * kernel_seconds(narrow, speed), rel=0.02)


def test_time_of_attention_kernels() -> None:
    """An attention kernel takes the time of the products of the blocks that it computes."""
    shapes = "s8[1,{0}], s8[1,{0}], bf16[2,32,2048,128], bf16[2,8,2048,128], bf16[2,8,2048,128]"
    for name, products in (("splash_mha_fwd_residuals.1", 2), ("splash_mqa_dq.2", 3), ("splash_mha_dkv.3", 4)):
        for widest, blocks in ((4, 10), (2, 7)):  # causal; in a window
            mask = f"{widest},4" if "dkv" in name else f"4,{widest}"  # its grid goes over keys first
            rest = f"%q), operand_layout_constraints={{{shapes.format(mask)}}}, x"
            found = kernel_seconds(Instruction(name, "bf16[2,32,2048,128]", "custom-call", rest), V5E)
            flops = products * 2 * 2 * 32 * blocks * 512**2 * 128
            assert V5E.splash is not None
            assert found == pytest.approx(flops / (V5E.splash.fwd * V5E.flops))
    rest = f"%q), operand_layout_constraints={{{shapes.format('4,4')}}}, x"
    one, both = "bf16[2,8,2048,128]", "bf16[2,4,32,2048,128], bf16[2,8,2048,128], bf16[2,8,2048,128]"
    parts, fused = (kernel_seconds(Instruction("splash_mha_dkv.4", f"({x})", "", rest), V5E) for x in (one, both))
    assert fused == pytest.approx(5 / 4 * parts)  # with the gradient of queries
    noted = (
        ', metadata={op_name="jvp(zero_attention_fwd_128)/pallas_call"}, backend_config={"cost_estimate":{"flops":"9"}}'
    )
    own = Instruction("zero_attention_fwd_128.1", "bf16[8]", "custom-call", noted.replace("9", str(10**12)))
    assert kernel_seconds(own, V5E) == pytest.approx(1e12 / (V5E.fused * V5E.flops))
    wide = own._replace(rest=own.rest.replace("fwd_128", "fwd_256"))
    assert kernel_seconds(wide, V6E) == pytest.approx(1e12 / (V6E.wide * V6E.flops))
    other = Instruction("gmm", "f32[8190000]", "custom-call", "%q), operand_layout_constraints={f32[8190000]}}")
    assert kernel_seconds(other, V5E) == pytest.approx(2 * 4 * 8.19e6 / 819e9)
    cycles = other._replace(rest=f'{other.rest}, backend_config={{"estimated_cycles":"{round(V5E.clock)}"}}')
    assert kernel_seconds(cycles, V5E) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "metadata", "listed", "blocks", "products"),
    [
        ("splash_mha_fwd_segmented_residuals.1", "block_q block_kv", "s8[10]", 10, 2),
        ("splash_mha_fwd_segmented_residuals.1", "block_q block_kv", "s8[7]", 7, 2),  # in a window
        ("splash_mha_dkv_segmented_no_residuals.1", "block_q_dkv block_kv_dkv", "s32[16]", 10, 5),
    ],
)
def test_kernels_of_tokamax(name: str, metadata: str, listed: str, blocks: int, products: int) -> None:
    """They list the blocks that they compute; of a list of all blocks the device takes those of a causal row."""
    assert TPU7X.splash is not None
    share = TPU7X.splash.fwd if products == 2 else TPU7X.splash.fused
    heads = "bf16[2,64,128,8192], bf16[2,8,128,8192], bf16[2,8,8192,128]"
    sizes = ", ".join(f'\\"{size}\\": 2048' for size in metadata.split())
    rest = (
        f"%q), operand_layout_constraints={{s32[], {listed}{{0}}, {heads}}}, "
        f'frontend_attributes={{kernel_metadata={{"xprof_metadata":"{{{sizes}, \\"q_layout\\": 2}}"}}}}'
    )
    result = "(bf16[2,64,8192,128])" if products == 2 else "(bf16[2,3,64,8192,128], f32[2,8,8192,128])"
    found = product_seconds(Instruction(name, result, "custom-call", rest), TPU7X)
    flops = products * 2 * 2 * 64 * blocks * 2048**2 * 128
    assert found == pytest.approx(flops / (share * TPU7X.flops))
    unknown = Instruction(name, result, "custom-call", rest.replace("kernel_metadata", "").replace("block", "size"))
    assert product_seconds(unknown, TPU7X) is None
    other = Instruction(name, result, "custom-call", "%q), operand_layout_constraints={bf16[8,128]{1,0}}")
    assert product_seconds(other, TPU7X) is None
