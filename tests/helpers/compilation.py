"""Quick compilation by XLA."""

import jax

# XLA's older way to generate code takes half the time. An unknown flag would end the process.
QUICK_FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__[:2] != (0, 10):
    QUICK_FLAGS = ""
