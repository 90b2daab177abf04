"""``PartialState`` again, for scripts that import it from ``accelerate.state``; nothing is defined here."""

from drivetrain import __dir__, __getattr__

__all__ = ["__dir__", "__getattr__"]
