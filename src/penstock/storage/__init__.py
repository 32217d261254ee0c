"""WHERE bytes live: this machine's files, and the ways to name them."""

from penstock.storage.urls import STDIN, braces, expand, local_path, relative, spell

__all__ = ["STDIN", "braces", "expand", "local_path", "relative", "spell"]
