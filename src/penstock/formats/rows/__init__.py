"""Files of rows: text, CSV, JSON lines and TFRecord."""
