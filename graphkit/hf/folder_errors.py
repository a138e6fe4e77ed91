"""Errors of folders that transformers cannot load."""

from __future__ import annotations

from graphkit.errors import CheckpointError


def one_line(error: Exception) -> str:
    """Return the text of an error on one line, with its class."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(" :.")


def load_error(what: str, error: Exception, note: str = "") -> CheckpointError:
    """Return the error of a folder that transformers refuses.

    Args:
        what: What cannot be loaded, such as the folder.
        error: What transformers raised. It names its argument ``trust_remote_code`` if the folder
            has Python code that it needs.
        note: Further text for errors of other causes.
    """
    if "trust_remote_code" in str(error):
        return CheckpointError(
            f"{what} needs Python code from its folder, which runs on this machine. Read the code, "
            "then pass trust_remote_code=True, or --trust-remote-code to a command."
        )
    return CheckpointError(f"{what} cannot be loaded by transformers: {one_line(error)}{note}")
