"""Importing this makes ``flatshard`` importable from the checkout of this file, also where it is not installed.

Every file of ``benchmarks`` that imports flatshard imports this before it.
"""

import sys
from pathlib import Path

_ROOT = str(Path(__file__).parents[1])
if _ROOT not in sys.path:
    sys.path.append(_ROOT)
