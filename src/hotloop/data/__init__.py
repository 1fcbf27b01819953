"""Data sets: readers, stand-ins, and what is on this machine."""
