"""Samples as they lie in archives, for pipes: what the tar tools work with."""
