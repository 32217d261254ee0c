"""Files of rows, which are found by byte offset: text, CSV, JSON lines and TFRecord."""
