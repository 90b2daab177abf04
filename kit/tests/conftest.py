"""The toy and the wrong backends are importable here, and in the ranks that ``spawn`` makes, by their file names."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
