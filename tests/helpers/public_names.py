"""The names of `import zero`: `FUNCTIONS` (and two classes), `TYPES` of their results, `MODULES`."""

import zero

MODULES = ("groups", "quantized")
TYPES = ("Layout", "Plan", "ShardedOptimizer", "ShardedState")
FUNCTIONS = [name for name in dir(zero) if name not in (*MODULES, *TYPES, "__version__")]
