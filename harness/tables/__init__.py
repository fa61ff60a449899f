"""What is stored: the catalogue of columns, Parquet files, how they are read and printed."""
