"""The Ray engine: actors of a cluster run the segments of a plan; everything else runs where it is consumed."""
