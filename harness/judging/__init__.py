"""Whether two measurements differ: runs compared, benchmarks of commits gated."""
