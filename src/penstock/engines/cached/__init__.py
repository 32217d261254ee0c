"""Results of stages that are kept on disk as they stream by, and read from there the next time."""
