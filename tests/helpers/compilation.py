"""Quick compilation by XLA."""

from typing import Any

import jax

# XLA's older way to generate code takes half the time. An unknown flag would end the process.
_CODE_GENERATION = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
if jax.__version_info__[:2] != (0, 10):
    _CODE_GENERATION = {}
QUICK_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in _CODE_GENERATION.items())
# For a single program, also where all others are compiled as users do: with jax_disable_most_optimizations as well.
QUICK_OPTIONS: dict[str, Any] = {
    **_CODE_GENERATION,
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
