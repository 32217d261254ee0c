"""Tables: Parquet files and Arrow tables as samples, and samples as Parquet files."""
