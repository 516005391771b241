"""Has Python keep what it compiles, also where PYTHONDONTWRITEBYTECODE is set; import it before what takes long.

Otherwise each worker, and each program that tests start, compiles every Python file that it imports: four CPU seconds
for jax. What such an environment asks for, no `__pycache__` beside the sources, is kept.
"""

import os
import sys
from pathlib import Path

if sys.dont_write_bytecode:
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(Path(__file__).parents[2] / ".pytest_cache" / "bytecode")
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
