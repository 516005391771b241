"""The training step of MaxText, compiled for a TPU slice without a TPU, as a text that benchmarks/predicted.py reads.

    python3.12 -m venv MAXTEXT && MAXTEXT/bin/pip install 'maxtext[tpu]==0.2.5'     # an environment of its own
    MAXTEXT/bin/python benchmarks/maxtext_step.py --rows llama3-8b-v6e-8 --texts TEXTS
    python benchmarks/predicted.py --program TEXTS/llama3-8b-v6e-8.txt --topology v6e-8 --measured 3.443

A compilation takes up to 12 minutes of CPU. --empty-kernels leaves out the code of attention kernels, of which the
predictor reads shapes alone.

Settings and flags are those of MaxText's own recipes for the generation of the slice (AI-Hypercomputer/tpu-recipes;
xla_flags_library.py, maxtext_trillium_model_configs.py and maxtext_v5e_model_configs.py in MaxText's benchmarks/), as
far as this libtpu accepts them; comments say what is changed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import jax.ad_checkpoint
from jax.experimental import pallas
from jax.experimental.layout import Layout, with_layout_constraint

COMMON = {
    "compile_topology_num_slices": 1,
    "ici_fsdp_parallelism": -1,
    "attention": "flash",
    "use_iota_embed": True,
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
    "log_config": False,
}
PROJECTIONS = ("query_proj", "key_proj", "value_proj", "out_proj")
OFFLOAD = {"remat_policy": "custom"} | dict.fromkeys(("decoder_layer_input", *PROJECTIONS), "offload")
STORE = {"remat_policy": "custom"} | dict.fromkeys((*PROJECTIONS, "context"), "device")
MLP_IN = {"mlpwi_0": "device"}
BLOCKS = dict.fromkeys(
    (
        *("sa_block_q", "sa_block_kv", "sa_block_kv_compute", "sa_block_q_dq", "sa_block_kv_dq"),
        *("sa_block_q_dkv", "sa_block_kv_dkv", "sa_block_kv_dkv_compute"),
    ),
    2048,
)
FUSED = {"sa_use_fused_bwd_kernel": True}
DENSE = {"attention": "dot_product"}  # on v3 its kernels do not take operands in bfloat16
EXPERTS = {"ici_expert_parallelism": 8, "capacity_factor": 1.25, "sparse_matmul": False, "megablox": False}
GPT3 = {"override_model_config": True, "opt_type": "adamw", "head_dim": 128, "trainable_position_size": 1024}
SIZE_1_1B = GPT3 | {
    "base_emb_dim": 1536,
    "base_mlp_dim": 6144,
    "base_num_query_heads": 12,
    "base_num_kv_heads": 12,
    "base_num_decoder_layers": 36,
    "vocab_size": 50304,
}
STORE_ATTENTION = {"remat_policy": "custom"} | dict.fromkeys(("qkv_proj", "context", "out_proj"), "device")
STORE_1_1B = STORE_ATTENTION | {"mlpwi": "device"}
# Adafactor is not among its optimizers: what AdamW keeps is made small instead.
SIZE_137B = GPT3 | {
    "base_emb_dim": 8192,
    "base_mlp_dim": 65536,
    "mlp_activations": ["gelu", "linear"],
    "base_num_query_heads": 128,
    "base_num_kv_heads": 128,
    "base_num_decoder_layers": 64,
    "vocab_size": 32000,
    "ici_tensor_parallelism": 8,
    "mu_dtype": "bfloat16",
    "grad_dtype": "bfloat16",
}

# Groups of flags, with the names of xla_flags_library.py.
LAYOUT_FOR_ALL_REDUCE_SCATTER = (
    "xla_tpu_use_minor_sharding_for_major_trivial_input=true",
    "xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1",
    "xla_tpu_assign_all_reduce_scatter_layout=true",
)
DATA_PARALLEL_OVERLAP = (
    "xla_tpu_enable_data_parallel_all_reduce_opt=true",
    "xla_tpu_data_parallel_opt_different_sized_ops=true",
)
ASYNC_ALL_GATHER = ("xla_tpu_overlap_compute_collective_tc=true", "xla_enable_async_all_gather=true")
CF_FOR_ALL_GATHER = (  # libtpu 0.0.52 refuses it except on v5e
    "xla_tpu_enable_async_collective_fusion=true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps=true",
    *ASYNC_ALL_GATHER,
)
SPARSECORE_ALL_REDUCE = (  # without xla_sc_disjoint_spmem, which libtpu 0.0.52 does not know
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce=true",
    "xla_tpu_enable_all_reduce_offload_tracing=true",
    "xla_tpu_use_tc_device_shape_on_sc=true",
    "xla_sc_enable_instruction_fusion=false",
    "xla_sc_disable_megacore_partitioning=true",
)
SPARSECORE_GATHER_AND_SCATTER = (
    "xla_tpu_enable_sparse_core_collective_offload_all_gather=true",
    "xla_tpu_enable_all_gather_offload_tracing=true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=true",
    "xla_tpu_enable_reduce_scatter_offload_tracing=true",
)
HOST_OFFLOAD_FLAGS = (
    "xla_tpu_enable_all_experimental_scheduler_features=true",
    "xla_tpu_enable_scheduler_memory_pressure_tracking=true",
    "xla_tpu_host_transfer_overlap_limit=24",
    "xla_tpu_aggressive_opt_barrier_removal=ENABLED",
    "xla_lhs_prioritize_async_depth_over_stall=ENABLED",
    "xla_tpu_enable_ag_backward_pipelining=true",
    "xla_should_allow_loop_variant_parameter_in_chain=ENABLED",
    "xla_should_add_loop_invariant_op_in_chain=ENABLED",
    "xla_max_concurrent_host_send_recv=100",
    "xla_tpu_scheduler_percent_shared_memory_limit=100",
    "xla_latency_hiding_scheduler_rerun=2",
)
DISABLE_COLLECTIVE_MATMUL = ("xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000",)
DENSE_VMEM_LIMIT_FLAG = ("xla_tpu_scoped_vmem_limit_kib=98304",)
COMMON_FLAGS = (
    *LAYOUT_FOR_ALL_REDUCE_SCATTER,
    *DATA_PARALLEL_OVERLAP,
    *HOST_OFFLOAD_FLAGS,
    *DISABLE_COLLECTIVE_MATMUL,
)
V3_FLAGS = (*COMMON_FLAGS, "xla_enable_async_all_gather=true")
V4_FLAGS = (*COMMON_FLAGS, *ASYNC_ALL_GATHER)
V5E_FLAGS = (*DENSE_VMEM_LIMIT_FLAG, *COMMON_FLAGS, *CF_FOR_ALL_GATHER)
RECIPE_FLAGS = (
    *(*DENSE_VMEM_LIMIT_FLAG, *COMMON_FLAGS, *ASYNC_ALL_GATHER, *SPARSECORE_ALL_REDUCE),
    "xla_tpu_enable_async_collective_fusion=false",
)
V6E_FLAGS = (*RECIPE_FLAGS, *SPARSECORE_GATHER_AND_SCATTER)


BEFORE_RECIPE_FLAGS = (*DENSE_VMEM_LIMIT_FLAG, *ASYNC_ALL_GATHER)
LAYOUTS_AND_OVERLAP = (*LAYOUT_FOR_ALL_REDUCE_SCATTER, *DATA_PARALLEL_OVERLAP)
OFFLOADED_70B_FLAGS = (*BEFORE_RECIPE_FLAGS, *LAYOUTS_AND_OVERLAP, *HOST_OFFLOAD_FLAGS)
OFFLOADED_8B_FLAGS = (*OFFLOADED_70B_FLAGS, *SPARSECORE_ALL_REDUCE, "xla_tpu_enable_async_collective_fusion=false")
MOE_FLAGS = ("xla_tpu_scoped_vmem_limit_kib=81920", *ASYNC_ALL_GATHER, *DATA_PARALLEL_OVERLAP)
GPT3_FLAGS = (
    *(*BEFORE_RECIPE_FLAGS, *DATA_PARALLEL_OVERLAP),
    "xla_tpu_use_bundle_aware_cost_model_for_fusions=false",
)
LLAMA2_FLAGS = (*BEFORE_RECIPE_FLAGS, *SPARSECORE_ALL_REDUCE, "xla_tpu_enable_async_collective_fusion=false")
TPU7X_FLAGS = (
    "xla_tpu_scoped_vmem_limit_kib=61440",
    "xla_tpu_bf16_emission_mode=NATIVE_EMISSION",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce=true",
    "xla_tpu_use_single_sparse_core_for_all_gather_offload=true",
)
# Settings of recipes, without those of profiles, checkpoints and metrics.
OFFLOAD_70B = {"remat_policy": "custom"} | dict.fromkeys(("decoder_layer_input", *PROJECTIONS[:3]), "offload")
LONG_ROWS = {"sa_block_q": 1024, "sa_block_q_dkv": 2048, "sa_block_q_dq": 2048}
LLAMA2 = LONG_ROWS | {
    "ici_fsdp_parallelism": 1,
    "ici_fsdp_transpose_parallelism": -1,
    "remat_policy": "qkv_proj_offloaded",
}
DROPPED = {"megablox": False, "sparse_matmul": False, "capacity_factor": 1.25}
MIXTRAL = OFFLOAD | DROPPED | LONG_ROWS | {"sa_block_q": 2048}
MIXTRAL_8X22B = MIXTRAL | {
    "ici_fsdp_parallelism": 64,
    "ici_expert_parallelism": 4,
    "weight_dtype": "bfloat16",
    "allow_split_physical_axes": True,
    "custom_mesh": "hybrid_ring_64x4",
}
GEMMA3 = {
    "num_vocab_tiling": 16,
    "remat_policy": "custom",
    "decoder_layer_input": "device",
    "sa_block_q": 1024,
    "sa_block_kv": 1024,
    "sa_block_kv_compute": 1024,
    "sa_block_q_dkv": 512,
    "sa_block_kv_dkv": 2048,
    "sa_block_kv_dkv_compute": 512,
    "sa_block_q_dq": 1024,
    "sa_block_kv_dq": 1024,
}
TPU7X_70B = (
    {"remat_policy": "custom", "mu_dtype": "bfloat16", "use_tokamax_splash": True}
    | dict.fromkeys(("decoder_layer_input", "context", "qkv_proj", *PROJECTIONS[:3]), "device")
    | {"sa_q_layout": "SEQ_MINOR", "sa_k_layout": "SEQ_MINOR", "sa_v_layout": "HEAD_DIM_MINOR"}
)


class Row(NamedTuple):
    """A step.

    Attributes:
      model: of MaxText.
      topology: the slice.
      rows: sequences per device.
      context: tokens per sequence.
      flags: of the compiler.
      settings: of MaxText, further ones.
    """

    model: str
    topology: str
    rows: float
    context: int
    flags: tuple[str, ...]
    settings: dict[str, Any]


# The recipes of tpu-recipes, by their names in benchmarks/published.py.
RECIPES = {
    "llama3-8b-v6e-8": Row("llama3.1-8b", "v6e-8", 3, 8192, RECIPE_FLAGS, OFFLOAD | BLOCKS | FUSED),
    "llama3-8b-v6e-16": Row("llama3.1-8b", "v6e-16", 3, 8192, RECIPE_FLAGS, OFFLOAD | BLOCKS | FUSED),
    "llama3-8b-v6e-32": Row("llama3.1-8b", "v6e-32", 3, 8192, RECIPE_FLAGS, OFFLOAD | BLOCKS | FUSED),
    "llama3-8b-v6e-64": Row("llama3.1-8b", "v6e-64", 5, 8192, OFFLOADED_8B_FLAGS, OFFLOAD | BLOCKS | FUSED),
    "llama3-8b-v6e-128": Row("llama3.1-8b", "v6e-128", 4, 8192, OFFLOADED_8B_FLAGS, OFFLOAD | BLOCKS | FUSED),
    "llama3-8b-v6e-256": Row("llama3.1-8b", "v6e-256", 4, 8192, OFFLOADED_8B_FLAGS, OFFLOAD | BLOCKS | FUSED),
    "mistral-7b-v6e-8": Row("mistral-7b", "v6e-8", 6, 8192, RECIPE_FLAGS, OFFLOAD | BLOCKS | FUSED),
    # The file of the recipe has 3 sequences, its published line 2 (2,097,152 tokens per step).
    "llama2-70b-v6e-256": Row("llama2-70b", "v6e-256", 2, 4096, LLAMA2_FLAGS, LLAMA2),
    "llama3-70b-v6e-32": Row(
        *("llama3.1-70b", "v6e-32", 2, 8192),
        (*OFFLOADED_70B_FLAGS, *DISABLE_COLLECTIVE_MATMUL),
        OFFLOAD_70B | BLOCKS | FUSED | {"weight_dtype": "bfloat16"},
    ),
    "llama3-70b-v6e-64": Row("llama3.1-70b", "v6e-64", 2, 8192, OFFLOADED_70B_FLAGS, OFFLOAD_70B | BLOCKS | FUSED),
    "llama3-70b-v6e-128": Row("llama3.1-70b", "v6e-128", 4, 8192, OFFLOADED_70B_FLAGS, OFFLOAD_70B | BLOCKS | FUSED),
    "llama3-70b-v6e-256": Row("llama3.1-70b", "v6e-256", 5, 8192, OFFLOADED_70B_FLAGS, OFFLOAD_70B | BLOCKS | FUSED),
    "gpt3-175b-v6e-256": Row(
        *("gpt3-175b", "v6e-256", 3, 2048, GPT3_FLAGS),
        LONG_ROWS | {"remat_policy": "full", "use_iota_embed": False, "override_model_config": True},
    ),
    "gemma3-12b-v6e-256": Row("gemma3-12b", "v6e-256", 1, 32768, ("xla_tpu_scoped_vmem_limit_kib=122880",), GEMMA3),
    "mixtral-8x7b-v6e-256": Row("mixtral-8x7b", "v6e-256", 12, 4096, MOE_FLAGS, MIXTRAL),
    "mixtral-8x22b-v6e-256": Row("mixtral-8x22b", "v6e-256", 8, 4096, MOE_FLAGS, MIXTRAL_8X22B),
    "llama3-70b-tpu7x-64": Row("llama3.1-70b", "tpu7x-128", 2, 8192, TPU7X_FLAGS, TPU7X_70B | BLOCKS | FUSED),
    "llama3-70b-tpu7x-256": Row("llama3.1-70b", "tpu7x-512", 2, 8192, TPU7X_FLAGS, TPU7X_70B | BLOCKS | FUSED),
}


ROWS = RECIPES | {
    # The table of docs/reference/performance.md. For 2,048 tokens blocks stay at 512: 2,048 computes masked scores too.
    "8b-v5e-16": Row("llama3.1-8b", "v5e-16", 2, 2048, V5E_FLAGS, OFFLOAD | MLP_IN | FUSED),
    "8b-v5e-16-int8": Row(
        "llama3.1-8b", "v5e-16", 2, 2048, V5E_FLAGS, OFFLOAD | MLP_IN | FUSED | {"quantization": "int8"}
    ),
    "8b-v6e-8": Row("llama3.1-8b", "v6e-8", 1, 8192, V6E_FLAGS, OFFLOAD | MLP_IN | BLOCKS | FUSED),
    "recipe-v6e-8-int8": Row(
        "llama3.1-8b", "v6e-8", 3, 8192, RECIPE_FLAGS, OFFLOAD | BLOCKS | FUSED | {"quantization": "int8"}
    ),
    "8b-v4-32": Row("llama3.1-8b", "v4-32", 2, 2048, V4_FLAGS, STORE | MLP_IN | {"mlpwi_1": "device"}),
    "mistral-v5e-16": Row("mistral-7b", "v5e-16", 2, 2048, V5E_FLAGS, OFFLOAD | MLP_IN | FUSED),
    "mixtral-v4-64": Row("mixtral-8x7b", "v4-64", 2, 2048, V4_FLAGS, EXPERTS),
    "mixtral-v4-64-1": Row("mixtral-8x7b", "v4-64", 1, 2048, V4_FLAGS, EXPERTS),
    # MaxText has no ALiBi: its GPT-3 has learned positions, and biases in every product.
    "1.1b-v3-32": Row("gpt3-6b", "v3-32", 4, 1024, V3_FLAGS, SIZE_1_1B | STORE_1_1B | DENSE),
    "1.1b-v3-32-16": Row("gpt3-6b", "v3-32", 16, 1024, V3_FLAGS, SIZE_1_1B | STORE_ATTENTION | DENSE),
    "1.1b-v4-32": Row("gpt3-6b", "v4-32", 4, 1024, V4_FLAGS, SIZE_1_1B | STORE_1_1B),
    "1.1b-v4-32-16": Row("gpt3-6b", "v4-32", 16, 1024, V4_FLAGS, SIZE_1_1B | STORE_1_1B),
    "1.1b-v5e-16": Row("gpt3-6b", "v5e-16", 4, 1024, V5E_FLAGS, SIZE_1_1B | STORE_1_1B),
    "1.1b-v5e-16-16": Row("gpt3-6b", "v5e-16", 16, 1024, V5E_FLAGS, SIZE_1_1B | STORE_ATTENTION),
    "137b-v3-128": Row("gpt3-6b", "v3-128", 0.125, 1024, V3_FLAGS, SIZE_137B | DENSE),
}


def pin_layouts() -> None:
    """Has layer inputs and outputs of attention stored row by row.

    Otherwise libtpu 0.0.52 transposes the stacks of them that the forward pass writes to the host's memory, for which
    it copies them to the device and back, and three sequences of the recipe do not fit.
    """
    name_values = jax.ad_checkpoint.checkpoint_name

    def name_pinned(x: Any, name: str) -> Any:
        if name in ("decoder_layer_input", "out_proj"):
            x = with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))
        return name_values(x, name)

    jax.ad_checkpoint.checkpoint_name = name_pinned


def empty_kernels() -> None:
    """Has kernels of Pallas compute nothing: they keep names, operands, results, blocks and scratch memory.

    The predictor reads no more than that of a kernel, and its code takes most of a compilation.
    """
    call = pallas.pallas_call

    def call_empty(kernel: Callable[..., None], *args: Any, **options: Any) -> Callable[..., Any]:
        options["name"] = options.get("name") or getattr(kernel, "__name__", None)
        return call(lambda *references: None, *args, **options)

    pallas.pallas_call = call_empty


def add_slices() -> None:
    """Adds slices of v3, which MaxText no longer lists."""
    from maxtext.utils.accelerator_to_spec_map import SystemCharacteristics, UserFacingNameToSystemCharacteristics

    for name, shape, devices in (("v3-32", "v3:4x4", 32), ("v3-128", "v3:8x8", 128)):
        slice_ = SystemCharacteristics("tpu", shape, "default", (2, 2, 1), devices, (False, False, False))
        UserFacingNameToSystemCharacteristics[name] = slice_


def compile_step(row: Row, file: Path) -> None:
    """Writes the text of a row's step, and prints its peak memory."""
    from maxtext.trainers.pre_train import train_compile

    own = train_compile.jit_and_compile

    def compile_and_write(*args: Any) -> Any:
        compiled = own(*args)
        file.write_text(compiled.as_text())
        print(f"{file}: peak {compiled.memory_analysis().peak_memory_in_bytes / 2**30:.2f} GiB", flush=True)
        return compiled

    settings = COMMON | {
        "model_name": row.model,
        "compile_topology": row.topology,
        "per_device_batch_size": row.rows,
        "max_target_length": row.context,
        "compile_xla_flags": " ".join(f"--{flag}" for flag in row.flags),
    }
    train_compile.jit_and_compile = compile_and_write
    try:
        base = Path(train_compile.__file__).parents[2] / "configs" / "base.yml"
        train_compile.main(["", str(base), *(f"{key}={value}" for key, value in (settings | row.settings).items())])
    finally:
        train_compile.jit_and_compile = own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--texts", type=Path, required=True, help="directory for the texts of compiled programs")
    parser.add_argument("--empty-kernels", action="store_true", help="compile no code of Pallas kernels")
    arguments = parser.parse_args()
    if arguments.empty_kernels:
        empty_kernels()
    arguments.texts.mkdir(parents=True, exist_ok=True)
    pin_layouts()
    add_slices()
    for name in arguments.rows:
        compile_step(ROWS[name], arguments.texts / f"{name}.txt")


if __name__ == "__main__":
    main()
