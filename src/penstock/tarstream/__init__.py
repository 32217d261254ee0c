"""Samples copied between archives as they are stored: the work of the tar tools, for files and pipes."""
