"""Serving: model folders that are loaded and run without the code that trained them."""
