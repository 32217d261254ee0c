"""The Ray engine: segments worked on by actors of a cluster, the rest of a plan where it is consumed."""
