"""Layers as plain functions over dicts of arrays, with the fast paths for each device."""
