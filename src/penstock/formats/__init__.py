"""Shards and tables to samples, and back."""
