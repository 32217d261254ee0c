"""Formats: read samples from shards, tables and files, and write them."""
