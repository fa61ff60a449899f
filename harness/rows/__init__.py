"""Rows of the tables, made of one point's records."""
