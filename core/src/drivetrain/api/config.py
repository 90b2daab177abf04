"""Public names for a plugin's section of the configuration: field types beside pydantic's own.

Importing this module imports pydantic; the one that names the section (``BackendInfo.config``) is imported with it.
"""

from drivetrain.config.fields import Integer, Names, Number, Section

__all__ = ["Integer", "Names", "Number", "Section"]
