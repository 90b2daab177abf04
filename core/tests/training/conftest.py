"""Small models and data that every test here trains; importable in ranks too."""

from __future__ import annotations
