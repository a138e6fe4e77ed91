"""The version, declared once: for the face, for records, and for setuptools, which only reads."""

__version__ = "0.1.0"
