"""Ranks find the modules beside these tests by name, and the models of Transformers imported."""

from __future__ import annotations

from planner_preload import preload_models

preload_models()
