"""Configuration files; packed into a wheel as harness.conf."""
