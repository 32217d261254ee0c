"""Copy samples between archives as they are stored, through files and pipes: the work behind the tar tools."""
