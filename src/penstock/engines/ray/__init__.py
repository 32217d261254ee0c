"""The Ray engine: actors of a cluster run the segments of a plan; everything else runs in the consumer's process."""
