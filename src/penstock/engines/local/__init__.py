"""The local engine: pools of threads and processes."""
