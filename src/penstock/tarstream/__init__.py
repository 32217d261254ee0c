"""Copy, select, sort and process samples as they are stored, through files and pipes: the work behind the tar tools."""
