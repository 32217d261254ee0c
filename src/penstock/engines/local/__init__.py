"""The local engine: runs segments in pools of threads and processes."""
