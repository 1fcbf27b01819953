"""Benchmark results and the page that shows them."""
