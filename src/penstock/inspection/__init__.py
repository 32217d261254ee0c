"""Shards and datasets looked at from outside: verify, info, bench."""
