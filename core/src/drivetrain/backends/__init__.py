"""The reference backend and helpers for other backends, which are separate distributions."""
