"""The toy and the wrong backends are importable here, and in the ranks that ``spawn`` makes, by their file names."""

from __future__ import annotations


