"""Bytes on their way: ranges fetched ahead, compression, file stamps, drafts that become visible whole."""
