"""Inspect shards and datasets from outside: verify, info, bench."""
