"""Bytes between storage and formats: prefetching, compression, checksums, file stamps, drafts, background threads."""
